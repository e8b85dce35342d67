"""STOP-1: however a loader ends, nothing of it is left, and a killed worker is an error, never a hang."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

import streamvid
from streamvid.errors import LoaderError, WorkerError

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


def wait_for_end(pids: list[int], seconds: float = 15.0) -> list[int]:
    """Those of `pids` that still run after a while."""
    until = time.monotonic() + seconds
    while (alive := [p for p in pids if psutil.pid_exists(p) and psutil.Process(p).status() != "zombie"]) and (
        time.monotonic() < until
    ):
        time.sleep(0.05)
    return alive


@pytest.mark.parametrize(
    ("then", "code", "says"),
    [
        ("raise SystemExit(3)", 3, ""),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("os._exit(4)", 4, ""),
        ("os.kill(os.getpid(), 9)", -9, ""),
        ("os.kill(os.getpid(), 15)", -15, ""),
        ("break", 0, ""),
    ],
)
def test_no_worker_outlives_its_loader(dataset: Path, then: str, code: int, says: str) -> None:
    if then == "break":
        process, workers = start(dataset, "sys.exit(0)")
    else:
        process, workers = start(dataset, then)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert says in errors and (says or not errors), errors
    assert wait_for_end(workers) == []


def test_ctrl_c_reaches_the_loop_and_leaves_nothing(dataset: Path) -> None:
    process, workers = start(dataset, "time.sleep(60)")
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors and process.returncode != 0
    assert wait_for_end(workers) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_worker_is_an_error_within_seconds(dataset: Path, number: int) -> None:
    with streamvid.VideoLoader(dataset, batch_size=1, num_workers=2, num_epochs=None, prefetch_bytes=0) as loader:
        iterator = iter(loader)
        next(iterator)
        pids = loader.worker_pids
        os.kill(pids[0], number)
        before = time.monotonic()
        with pytest.raises(WorkerError, match=f"decode worker {pids[0]} was killed by {signal.Signals(number).name}"):
            for _ in range(10_000):
                next(iterator)
        assert time.monotonic() - before < 30
    assert wait_for_end(list(pids)) == []


def test_closing_leaves_no_thread_process_file_or_memory(dataset: Path) -> None:
    me = psutil.Process()
    # One loader first: libraries open their own threads and files once.
    with streamvid.VideoLoader(dataset, batch_size=1, num_workers=2) as loader:
        list(map(id, loader))
    gc.collect()
    threads, files, maps = set(threading.enumerate()), me.num_fds(), shared_maps()
    for then in ("break", "end", "error", "no iteration"):
        with streamvid.VideoLoader(dataset, batch_size=1, num_workers=2) as loader:
            if then == "no iteration":
                continue
            for batch in loader:
                assert batch.video is not None
                if then == "break":
                    break
            pids = loader.worker_pids
            if then == "error":
                with pytest.raises(LoaderError, match="another iteration"):
                    fail(loader)
        batch = None
        gc.collect()
        assert set(threading.enumerate()) == threads, then
        assert wait_for_end(list(pids)) == [] and me.children(recursive=True) == [], then
        assert me.num_fds() == files and shared_maps() == maps, then


def fail(loader: streamvid.VideoLoader) -> None:
    first = iter(loader)
    next(first)
    iter(loader)
    next(first)


def shared_maps() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:streamvid")


def test_a_loader_that_nobody_closes_is_closed_when_collected(dataset: Path) -> None:
    loader = streamvid.VideoLoader(dataset, batch_size=1, num_workers=2, num_epochs=None, prefetch_bytes=0)
    for _ in loader:
        break
    pids = list(loader.worker_pids)
    del loader
    gc.collect()
    assert wait_for_end(pids) == []


def test_two_loaders_at_once(dataset: Path) -> None:
    with (
        streamvid.VideoLoader(dataset, batch_size=1, num_workers=1) as one,
        streamvid.VideoLoader(dataset, batch_size=1, num_workers=1) as other,
    ):
        pairs = [(a.sample_keys, b.sample_keys) for a, b in zip(one, other, strict=True)]
    assert len(pairs) == 23 and all(a == b for a, b in pairs)


def test_after_a_fork_the_child_is_told_and_the_parent_goes_on(dataset: Path) -> None:
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
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(dataset)], capture_output=True, text=True, timeout=60
    )
    assert "made before a fork" in result.stdout, result.stderr
    assert result.stdout.splitlines()[-1] == "22"


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_works_in_a_child_of_any_start_method(dataset: Path, method: str, tmp_path: Path) -> None:
    """And workers never run the caller's main module, nor hold torch."""
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
    subprocess.run([sys.executable, str(script), str(dataset), str(out)], check=True, timeout=90)
    assert out.read_text() == "23"
