"""Tests of a store shared with forked, spawned, fork-server and DataLoader processes, and with threads."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import pickle
import signal
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import pytest

from streamvid.storage import StorageOptions, Store, open_store
from streamvid.storage.remote import RemoteStore
from tests.processes import run_python
from tests.servers import S3Env, S3Server

BODY = hashlib.shake_256(b"body").digest(300_000)


@pytest.fixture
def store(moto_server: S3Server, s3_env: S3Env) -> Store:
    s3_env(moto_server)
    store = open_store(f"s3://{moto_server.new_bucket()}/to", StorageOptions(deadline_seconds=40))
    store.put("x", BODY)
    return store


def use(store: Store, name: str) -> tuple[int, bool]:
    """Exercise both request paths: reads and all other calls."""
    is_right = store.read("x") == BODY and store.size("x") == len(BODY)
    store.put(name, name.encode())
    is_right &= store.read(name) == name.encode() and name in [state.path for state in store.files()]
    return os.getpid(), is_right and not store.create(name, b"")


FORKS = """
import os, sys
from streamvid.storage import open_store
from tests.storage.test_s3_processes import use
store = open_store(sys.argv[1])
if sys.argv[2] == "used":
    assert use(store, "before")[1]
children = []
for number in range(4):
    child = os.fork()
    if not child:
        os._exit(0 if use(store, f"child-{number}")[1] else 1)
    children.append(child)
    assert use(store, f"parent-{number}")[1]  # beside its children
assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
assert use(store, "after")[1]
assert store.stats().by_error.keys() <= {"the object was replaced by another version"}, store.stats()
"""


@pytest.mark.parametrize("before", ["used", "fresh"])
def test_a_store_created_before_a_fork_serves_parent_and_children(store: Store, before: str) -> None:
    """Forks in a separate process, because the test process has threads of its own."""
    run_python(FORKS, store.url, before)
    names = {state.path for state in store.files()}
    assert {f"{who}-{number}" for who in ("parent", "child") for number in range(4)} <= names


def take(environment: dict[str, str]) -> None:
    os.environ.update(environment)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_store_is_sent_to_other_processes(store: Store, method: str) -> None:
    assert use(store, "before")[1]
    # Another test may have started the fork server, without this test's environment.
    set_up = {"initializer": take, "initargs": (dict(os.environ),)}
    with ProcessPoolExecutor(2, multiprocessing.get_context(method), **set_up) as processes:
        found = list(processes.map(use, [store] * 3, [f"child-{number}" for number in range(3)]))
    assert all(is_right for _, is_right in found) and os.getpid() not in {pid for pid, _ in found}
    copy = pickle.loads(pickle.dumps(store))
    assert copy.url == store.url and copy.stats().num_requests == 0 and use(copy, "copy")[1]


def test_many_threads_share_a_store_from_the_first_request_on(store: Store) -> None:
    fresh, barrier = open_store(store.url), threading.Barrier(12)

    def run(number: int) -> bool:
        barrier.wait()
        return use(fresh, f"thread-{number}")[1]

    with ThreadPoolExecutor(12) as threads:
        assert all(threads.map(run, range(12)))
    assert fresh.stats().by_error == {"the object was replaced by another version": 12}  # the twelve `create` calls


LOADS = """
import sys
import torch
from streamvid.storage import open_store
from tests.storage.test_s3_processes import use

class Data(torch.utils.data.Dataset):
    def __init__(self, store):
        self.store = store
    def __len__(self):
        return 8
    def __getitem__(self, at):
        pid, is_right = use(self.store, f"sample-{at}")
        return pid * is_right

store = open_store(sys.argv[1])
assert use(store, "before")[1]
for method in sys.argv[2:]:
    loader = torch.utils.data.DataLoader(Data(store), 1, num_workers=2, multiprocessing_context=method)
    pids = {int(pid) for pid in loader}
    assert len(pids) == 2 and 0 not in pids, pids
    assert use(store, "after")[1]
"""


def test_workers_of_a_dataloader_use_a_store_that_was_used_before(store: Store) -> None:
    run_python(LOADS, store.url, "fork")


class _SlowToMake:
    """Factory that creates a transport as slowly as one that must import packages and look up credentials."""

    def __call__(self) -> Any:
        from streamvid.storage.generic import FsspecTransport

        time.sleep(0.5)
        return FsspecTransport("memory")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_fork_while_another_thread_opens_the_store_does_not_block() -> None:
    """The lock held by the other thread is not locked in the child."""
    store = RemoteStore("memory://a", "a/", StorageOptions(), _SlowToMake())
    first = threading.Thread(target=store.size, args=("nothing",))
    first.start()
    time.sleep(0.1)
    child = os.fork()
    if child == 0:
        os._exit(0 if store.size("nothing") is None else 1)
    first.join()
    until = time.monotonic() + 20
    while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < until:
        time.sleep(0.05)
    if not ended[0]:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended == (child, 0)
