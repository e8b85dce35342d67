"""Tests of STOP-1: however a loader ends, nothing of it remains, and a killed worker is an error, never a hang."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest

import streamvid
from streamvid.errors import LoaderError, WorkerError
from streamvid.loader.delivery.pipeline import Pipeline
from streamvid.loader.loader import VideoLoader
from streamvid.storage import LocalStore, Ranges
from tests.loader.conftest import open_loader
from tests.processes import run_command, run_python, streamvid_threads, wait_for_end, wait_for_threads

SCRIPT = """
import os, sys, time, streamvid
loader = streamvid.VideoLoader(sys.argv[1], batch_size=1, num_workers=2, num_epochs=None)
for number, batch in enumerate(loader):
    if number == 2:
        print(*loader.worker_pids, flush=True)
    if number == 3:
        exec(sys.argv[2])
"""


def start(dataset: Path, then: str) -> tuple[subprocess.Popen[str], list[int]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(dataset), then], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    workers = [int(pid) for pid in process.stdout.readline().split()]
    assert len(workers) == 2
    return process, workers


@pytest.mark.parametrize(
    ("then", "code", "says"),
    [
        ("raise SystemExit(3)", 3, ""),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("os._exit(4)", 4, ""),
        ("os.kill(os.getpid(), 9)", -9, ""),
        ("os.kill(os.getpid(), 15)", -15, ""),
        ("sys.exit(0)", 0, ""),
    ],
)
def test_no_worker_outlives_its_loader(dataset: Path, then: str, code: int, says: str) -> None:
    process, workers = start(dataset, then)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == code, errors
    assert says in errors and (says or not errors), errors
    assert wait_for_end(workers) == []


def test_ctrl_c_reaches_the_loop_and_leaves_nothing_behind(dataset: Path) -> None:
    process, workers = start(dataset, "time.sleep(60)")
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=200)
    assert "KeyboardInterrupt" in errors and process.returncode != 0
    assert wait_for_end(workers) == []


CTRL_C = """
import gc, os, random, signal, sys, threading, time
import psutil, streamvid

def left():
    me = psutil.Process()
    # Python lists a thread for ever whose start() an interrupt ended before the thread existed; it is not alive.
    return [t.name for t in threading.enumerate() if t.is_alive()][1:], me.children(), me.num_fds()

def read(loader, choose):
    got = []
    try:
        for batch in loader:
            got.append(batch.sample_keys[0])
            if choose.random() < 0.02:
                break
    except KeyboardInterrupt:
        pass
    return got

def make(prefetch_bytes):
    limits, output = {"prefetch_bytes": prefetch_bytes}, {"decode": sys.argv[3] == "True"}
    return streamvid.VideoLoader(sys.argv[1], batch_size=1, num_workers=int(sys.argv[2]), limits=limits, output=output)

choose = random.Random(1)
with make(1 << 22) as loader:
    expected = [batch.sample_keys[0] for batch in loader]
gc.collect()
before = left()
signal.signal(signal.SIGALRM, signal.default_int_handler)  # what Ctrl-C does, at a time of our choosing
for _ in range(int(sys.argv[4])):
    loader = make(choose.choice([0, 1 << 22]))
    try:
        signal.setitimer(signal.ITIMER_REAL, choose.choice([choose.uniform(0.0005, 0.02), choose.uniform(0.01, 0.4)]))
        for _ in range(3):
            got = read(loader, choose)
            assert got == expected[:len(got)], (got, expected)
            loader.set_epoch(0)
        loader.close()
    except KeyboardInterrupt:
        pass
    signal.setitimer(signal.ITIMER_REAL, 0)
    loader.close()
gc.collect()
until = time.monotonic() + 10
while left() != before and time.monotonic() < until:
    time.sleep(0.02)
assert left() == before, (left(), before)
print("clean")
"""


@pytest.mark.parametrize("count", [10, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_ctrl_c_at_any_moment_leaves_nothing_behind(dataset: Path, num_workers: int, decode: bool, count: int) -> None:
    """After an interrupt while creating, waiting, breaking, moving or closing, the next loop restarts the epoch."""
    assert run_python(CTRL_C, dataset, num_workers, decode, count).stdout == "clean\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, 40])
def test_a_killed_worker_is_an_error_within_seconds(dataset: Path, number: int) -> None:
    name = number.name if isinstance(number, signal.Signals) else f"signal {number}"
    with open_loader(dataset, num_workers=2, num_epochs=None, limits={"prefetch_bytes": 0}) as loader:
        iterator = iter(loader)
        next(iterator)
        pids = loader.worker_pids
        os.kill(pids[0], number)
        before = time.monotonic()
        with pytest.raises(WorkerError, match=f"decode worker {pids[0]} was killed by {name}"):
            for _ in range(10_000):
                next(iterator)
        assert time.monotonic() - before < 30
        with pytest.raises(WorkerError, match=f"{pids[0]} was killed by {name}.*create a new loader"):
            next(iter(loader))
    assert wait_for_end(list(pids)) == []


@pytest.mark.parametrize(
    ("when", "decode"), [("starting", True), ("starting", False), ("idle", True), ("decoding", True)]
)
def test_all_workers_killed_at_once(dataset: Path, when: str, decode: bool) -> None:
    """The error has passed through frames that hold the loader, but does not keep the loader from being collected."""
    before = streamvid_threads()
    options: dict[str, Any] = {"limits": {"prefetch_bytes": 0}, "output": {"decode": decode}}
    loader = open_loader(dataset, num_workers=2, num_epochs=None, **options)
    iterator = iter(loader)
    if when != "starting":
        next(iterator)
    if when == "idle":
        time.sleep(1)  # until the ring is full
    for pid in loader.worker_pids:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"was killed by SIGKILL"):
        for _ in range(10_000):
            next(iterator)
    del loader, iterator
    gc.collect()
    wait_for_threads(before)


def test_signals_to_a_whole_job_end_no_worker(dataset: Path) -> None:
    """Slurm's --signal=USR1 may reach each process of a step minutes before the end, for training to save its state."""
    with open_loader(dataset) as loader:
        expected = [batch.sample_keys for batch in loader]
    with open_loader(dataset, num_workers=2, limits={"prefetch_bytes": 0}) as loader:
        iterator = iter(loader)
        keys = [next(iterator).sample_keys for _ in range(3)]
        for pid in loader.worker_pids:
            for number in ("INT", "TERM", "HUP", "USR1", "USR2", "QUIT"):
                os.kill(pid, signal.Signals[f"SIG{number}"])
        assert keys + [batch.sample_keys for batch in iterator] == expected
        pids = list(loader.worker_pids)
    assert wait_for_end(pids) == []


def test_a_stopped_worker_does_not_stop_the_close(dataset: Path) -> None:
    loader = open_loader(dataset, num_workers=5, num_epochs=None)
    next(iter(loader))
    pids = list(loader.worker_pids)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    before = time.monotonic()
    loader.close()
    assert time.monotonic() - before < 20  # one wait for all workers, not one per worker
    assert wait_for_end(pids) == []


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("how", ["close", "load_state_dict", "set_epoch", "iter"])
def test_actions_in_another_thread_end_a_waiting_loop(dataset: Path, num_workers: int, how: str) -> None:
    with open_loader(dataset, num_workers=num_workers, num_epochs=None) as loader:
        state = loader.state_dict()
        actions = {
            "close": loader.close,
            "load_state_dict": lambda: loader.load_state_dict(state),
            "set_epoch": lambda: loader.set_epoch(1 << 20),
            "iter": lambda: iter(loader),
        }
        iterator = iter(loader)
        timer = threading.Timer(0.3, actions[how])
        timer.start()
        with pytest.raises(LoaderError, match="this loader is closed" if how == "close" else "another iteration"):
            for _ in iterator:
                pass
        timer.join()


@contextlib.contextmanager
def between_lines(functions: Sequence[Any], place: int, action: Callable[[], None]) -> Iterator[threading.Thread]:
    """Run `action` in a thread that starts at line `place` of these functions, and wait there for its end."""
    thread = threading.Thread(target=action)
    codes, lines = {function.__code__ for function in functions}, itertools.count(1)

    def trace(frame: FrameType, event: str, _: object) -> object:
        if event == "line" and frame.f_code in codes and next(lines) == place:
            thread.start()
            thread.join()
        return trace

    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        yield thread
    finally:
        sys.settrace(None)


@pytest.mark.timeout(60)
def test_set_epoch_in_another_thread_ends_or_moves_a_starting_loop(dataset: Path) -> None:
    """`set_epoch` runs between any two lines of `iter`.

    The loop then ends or delivers the new epoch, and never hangs.
    """
    functions = (VideoLoader.__iter__, Pipeline.stop, Pipeline.start)
    outcomes: list[int | None] = []
    with open_loader(dataset, num_workers=0, num_epochs=None) as loader:
        for place in range(1, 100):
            loader.set_epoch(0)
            try:
                with between_lines(functions, place, partial(loader.set_epoch, 1)) as thread:
                    iterator = iter(loader)
                if thread.ident is None:  # `iter` has fewer lines
                    break
                next(iterator)
                outcomes.append(loader.epoch)
            except LoaderError as error:
                assert "another iteration" in str(error)
                outcomes.append(None)
    assert set(outcomes) == {1, None} and len(outcomes) > 12


@pytest.mark.parametrize("num_workers", [0, 2])
def test_close_at_every_stage(dataset: Path, num_workers: int) -> None:
    """`close` is called twice, in a loop, in another thread, with an abandoned iterator, and before the first batch."""
    before = streamvid_threads()
    for seconds in (0.0, 0.002, 0.01, 0.03, 0.1, 0.3):
        loader = open_loader(dataset, num_workers=num_workers, num_epochs=None)
        iterators = [iter(loader), iter(loader)]
        time.sleep(seconds)
        closers = [threading.Thread(target=loader.close) for _ in range(3)]
        for closer in closers:
            closer.start()
        loader.close()
        assert streamvid_threads() == before, seconds
        for closer in closers:
            closer.join()
        for iterator in iterators:
            with pytest.raises(LoaderError, match="closed"):
                next(iterator)
    with open_loader(dataset, num_workers=num_workers) as loader:
        with pytest.raises(LoaderError, match="this loader is closed"):
            for _ in loader:
                loader.close()
        loader.close()
    assert streamvid_threads() == before


@dataclass(frozen=True)
class CollectingStore(LocalStore):
    """Store whose reads run a garbage collection, because any reading thread may be the one that collects a loader."""

    def cached_path(self, path: str, ranges: Sequence[tuple[int, int]]) -> str | None:
        gc.collect()
        return None

    def read_ranges(self, path: str, ranges: Ranges, version: str = "") -> None:
        gc.collect()
        super().read_ranges(path, ranges, version)


@pytest.mark.parametrize(
    ("num_workers", "what"),
    [
        (0, "loader"),
        (1, "loader"),
        (0, "iterator"),
        (1, "iterator"),
        (0, "destructor"),  # waits for the read that it interrupts
        pytest.param(1, "destructor", marks=pytest.mark.slow),
    ],
)
def test_a_loader_collected_in_its_own_thread_is_closed(dataset: Path, num_workers: int, what: str) -> None:
    """The collection may also happen during a read that other threads of the loader wait for."""
    source = streamvid.Dataset(CollectingStore(dataset))
    before = streamvid_threads()

    class Holder:
        def __init__(self) -> None:
            self.me = self
            self.loader = open_loader(source, num_workers=num_workers, num_epochs=None)
            self.iterator = iter(self.loader)
            if what == "iterator":
                next(self.iterator)

        def __del__(self) -> None:
            if what == "destructor":
                self.loader.close()

    others = psutil.Process().children()  # servers of the test session
    gc.disable()
    try:
        for _ in range(1 if what == "destructor" else 3):
            Holder()
        wait_for_threads(before)
    finally:
        gc.enable()
    assert psutil.Process().children() == others


FORK = """
import os, signal, sys, time, streamvid
loader = streamvid.VideoLoader(sys.argv[1], batch_size=1, num_workers=2, num_epochs=None)
begun = iter(loader)
next(begun)
fresh = iter(loader)
print(*loader.worker_pids, flush=True)
child = os.fork()
if child == 0:
    print(os.getpid(), flush=True)
    for iterator in (begun, fresh):
        try:
            next(iterator)
        except streamvid.StreamvidError as error:
            print(error, flush=True)
    loader.close()
    iterator = begun = fresh = None
    if sys.argv[2] == "kill":
        os.kill(os.getppid(), signal.SIGKILL)
    os.close(1)
    os.close(2)
    time.sleep(30)
    os._exit(0)
if sys.argv[2] == "kill":
    time.sleep(30)
time.sleep(1)
next(fresh)
loader.close()
"""


@pytest.mark.parametrize("how", ["close", "kill"])
def test_a_forked_child_neither_uses_the_loader_nor_keeps_its_workers(dataset: Path, how: str) -> None:
    quiet = "import logging, warnings\nwarnings.simplefilter('ignore')\nlogging.disable(logging.WARNING)\n"
    code = quiet + FORK  # silences the warning about the restarted epoch
    done = run_python(code, dataset, how, check=False, timeout=25)  # returns when only the child is left
    assert done.returncode == (-9 if how == "kill" else 0) and not done.stderr, done.stderr
    lines = done.stdout.splitlines()
    child = next(int(line) for line in lines if line.isdecimal())
    assert done.stdout.count("created before a fork") == 2 and psutil.pid_exists(child), done.stdout
    assert wait_for_end([int(pid) for pid in lines[0].split()]) == []
    os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize(("num_workers", "decode"), [(2, True), (0, False), (2, False)])
def test_every_end_leaves_nothing_behind(dataset: Path, num_workers: int, decode: bool) -> None:
    """Threads, processes, files and memory are released after any end, and after most of them a new loop can begin."""
    me = psutil.Process()
    others = set(me.children(recursive=True))  # servers of the test session
    options: dict[str, Any] = {"batch_size": 2, "num_workers": num_workers, "output": {"decode": decode}}
    # Run one loader first, because libraries open their own threads and files once.
    with streamvid.VideoLoader(dataset, **options) as loader:
        expected = [batch.sample_keys for batch in loader]
    gc.collect()
    threads, files, maps = set(threading.enumerate()), me.num_fds(), shared_maps()
    for then in ("end", "break", ZeroDivisionError, KeyboardInterrupt, "iter", "close", "no iteration"):
        with streamvid.VideoLoader(dataset, **options) as loader:
            if then == "no iteration":
                continue
            run_until(loader, then, expected)
            pids = loader.worker_pids
        gc.collect()
        assert set(threading.enumerate()) == threads, then
        assert wait_for_end(list(pids)) == [] and set(me.children(recursive=True)) == others, then
        assert me.num_fds() == files and shared_maps() == maps, then


def run_until(loader: streamvid.VideoLoader, then: Any, expected: list[list[str]]) -> None:
    """Run a loop that ends in this way, and then a new loop if the loader still allows it."""
    try:
        for number, batch in enumerate(loader):
            assert batch.sample_keys == expected[number]
            if number < 2:
                continue
            if then == "break":
                break
            if isinstance(then, type):
                raise then
            if then in ("iter", "close"):
                iter(loader) if then == "iter" else loader.close()
    except (ZeroDivisionError, KeyboardInterrupt):
        assert isinstance(then, type)
    except LoaderError:
        assert then in ("iter", "close")
    if then not in ("end", "close"):
        assert [batch.sample_keys for batch in loader] == expected


def shared_maps() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:streamvid")


def test_an_unclosed_loader_is_closed_when_collected(dataset: Path) -> None:
    loader = open_loader(dataset, num_workers=2, num_epochs=None, limits={"prefetch_bytes": 0})
    for _ in loader:
        break
    pids = list(loader.worker_pids)
    del loader
    gc.collect()
    assert wait_for_end(pids) == []


def test_two_loaders_at_once(dataset: Path) -> None:
    with (
        open_loader(dataset, num_workers=1) as one,
        open_loader(dataset, num_workers=1) as other,
    ):
        pairs = [(a.sample_keys, b.sample_keys) for a, b in zip(one, other, strict=True)]
    assert len(pairs) == 23 and all(a == b for a, b in pairs)


def test_after_a_fork_the_child_raises_and_the_parent_continues(dataset: Path) -> None:
    code = """
import os, sys, streamvid
loader = streamvid.VideoLoader(sys.argv[1], batch_size=1, num_workers=1)
iterator = iter(loader)
next(iterator)
pid = os.fork()
if pid == 0:
    try:
        iter(loader)
    except streamvid.StreamvidError as error:
        print(error, flush=True)
    del iterator, loader
    os._exit(0)
os.waitpid(pid, 0)
print(len(list(map(id, iterator))), flush=True)
"""
    result = run_python(code, dataset, timeout=60)
    assert "created before a fork" in result.stdout and result.stdout.splitlines()[-1] == "22"


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_works_in_a_child_of_any_start_method(dataset: Path, method: str, tmp_path: Path) -> None:
    """Workers never run the caller's main module, and never load torch."""
    script = tmp_path / "main.py"
    script.write_text(f"""
import multiprocessing, sys
from pathlib import Path
import torch, streamvid
def work(root, out):
    with streamvid.VideoLoader(root, batch_size=1, num_workers=1) as loader:
        count = 0
        for batch in loader:
            maps = Path(f"/proc/{{loader.worker_pids[0]}}/maps").read_text()
            assert "libavcodec" in maps or count == 0
            assert "libtorch" not in maps
            count += 1
    Path(out).write_text(str(count))
if __name__ == "__main__":
    process = multiprocessing.get_context("{method}").Process(target=work, args=(sys.argv[1], sys.argv[2]))
    process.start(); process.join(); sys.exit(process.exitcode)
""")
    out = tmp_path / "count"
    run_command([sys.executable, str(script), str(dataset), str(out)])
    assert out.read_text() == "23"
