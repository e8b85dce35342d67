"""Tests of leases: one holder at a time, even if processes die.

A lease that no process of this machine wrote represents another machine.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from streamvid.cluster.lease import Lease, acquire, find_leases
from streamvid.errors import DatasetError
from streamvid.storage import LocalStore, Store, open_store
from tests.servers import S3Env, S3Server

FOLDER = "leases"
HOLDER = """
import sys, time
from streamvid.cluster.lease import acquire
from streamvid.storage import open_store
acquire(open_store(sys.argv[1]), "leases", "run", lambda other: True)
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture(params=["folder", "moto_server", pytest.param("rgw", marks=pytest.mark.slow)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "folder":
        return LocalStore(tmp_path)
    server: S3Server = request.getfixturevalue(request.param)
    s3_env: S3Env = request.getfixturevalue("s3_env")
    s3_env(server)
    return open_store(f"s3://{server.new_bucket()}/ds")


def hold(store: Store, name: str = "run") -> Lease:
    return acquire(store, FOLDER, name, lambda other: True)


def note(renewed: float, **changes: Any) -> bytes:
    """Return the content of another machine's lease."""
    of = {"host": "elsewhere", "pid": 1, "process": "boot/pid/1-1", "renewed": renewed, "admits_tasks": False}
    return json.dumps(of | changes).encode()


@contextmanager
def elsewhere(store: Store) -> Iterator[None]:
    """Hold and renew the lease as another machine."""
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(0.5):
            store.put(f"{FOLDER}/run-000001.json", note(time.time()))

    store.put(f"{FOLDER}/run-000001.json", note(time.time()))
    thread = threading.Thread(target=renew)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_one_of_many_concurrent_processes_gets_the_lease(store: Store) -> None:
    def attempt(_: int) -> Lease | None:
        try:
            return hold(store)
        except DatasetError as error:
            assert "another run, process " in str(error) and "; wait until that process ends" in str(error)
            return None

    with ThreadPoolExecutor(8) as threads:
        found = [lease for lease in threads.map(attempt, range(8)) if lease is not None]
    assert len(found) == 1
    found[0].release()
    assert list(store.files(FOLDER)) == []
    hold(store).release()


def test_the_lease_of_a_killed_process_is_free_at_once(store: Store) -> None:
    """STOP-1: on the same machine, no process waits for the lease to expire."""
    words = [sys.executable, "-c", HOLDER, store.url]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        with pytest.raises(DatasetError, match=f"another run, process {process.pid} on .*, is working on"):
            hold(store)
        process.send_signal(signal.SIGKILL)
    lease = hold(store)
    assert [found.path for found in find_leases(store, FOLDER)] == [lease.path]
    assert len(list(store.files(FOLDER))) == 1
    lease.release()


def test_a_lease_that_this_process_could_not_remove_does_not_block_it_later(store: Store) -> None:
    """STOP-1: if the store is unreachable at the end, the lease stays; the next call in this process replaces it."""
    hold(store).stop()
    assert len(list(store.files(FOLDER))) == 1
    lease = hold(store)
    with pytest.raises(DatasetError, match="another run, process"):
        hold(store)
    lease.release()
    assert list(store.files(FOLDER)) == []


def test_conflicting_leases_are_refused_until_they_are_released(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    task = hold(store, "0-of-2")
    with pytest.raises(DatasetError, match="task 0/2, process .*, is working on"):
        hold(store)
    other = acquire(store, FOLDER, "1-of-2", lambda lease: lease.name == "run")
    for lease in (task, other):
        lease.release()
    assert list(store.files()) == [], "the refused run left its lease"


def test_the_process_that_lost_the_lease_stops(tmp_path: Path) -> None:
    """The process was suspended for a long time, and another machine took over."""
    store = LocalStore(tmp_path)
    lease = hold(store)
    store.put(f"{FOLDER}/run-000002.json", note(time.time()))
    with pytest.raises(
        DatasetError, match="attempts to renew the lease failed for 120 s and another process has taken over"
    ):
        lease.renew()
    with pytest.raises(DatasetError, match="has taken over"):
        lease.check()
    lease.release()
    assert store.size(f"{FOLDER}/run-000002.json")


@pytest.mark.slow
def test_the_lease_of_another_machine_is_respected_until_it_expires(store: Store) -> None:
    """Clocks do not matter: a renewed lease is alive, and a lease that is not renewed expires."""
    with elsewhere(store), pytest.raises(DatasetError, match="another run, process 1 on elsewhere, is working on"):
        hold(store)
    hold(store).release()  # two minutes later
    with elsewhere(store):
        threading.Timer(3.0, store.remove, [f"{FOLDER}/run-000001.json"])
    store.put(f"{FOLDER}/run-000001.json", note(0.0))
    lease = hold(store)
    assert lease.path == f"{FOLDER}/run-000002.json" and len(list(store.files(FOLDER))) == 1
    lease.release()


@pytest.mark.slow
@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{", note(0.0, pid="1"), note(0.0, more=1), note(float("nan")), b"x" * 10**6, b"[" * 5000],
    ids=range(8),
)  # fmt: skip
def test_an_invalid_lease_file_expires(tmp_path: Path, content: bytes) -> None:
    """SAFE-1: a planted file does not lock forever."""
    store = LocalStore(tmp_path)
    store.put(f"{FOLDER}/run-{'9' * 40}.json", content)
    store.put(f"{FOLDER}/run-1.json", b"not a lease")
    lease = hold(store)
    with pytest.raises(DatasetError, match="is working on"):
        hold(store)
    lease.release()
