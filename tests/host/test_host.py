"""Tests of locks, journals and worker processes, which several rooms use."""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

import pytest

from streamvid.host.findings import Findings
from streamvid.host.journal import Journal
from streamvid.host.lock import FileLock, try_lock, wait_for_lock
from streamvid.host.processes import describe_exit, end_workers, start_worker


def test_a_lock_excludes_until_it_is_released(tmp_path: Path) -> None:
    path, waits = tmp_path / "lock", list[float]()
    with wait_for_lock(path):
        assert try_lock(path) is None
        with pytest.raises(TimeoutError, match="another process still holds the lock"):
            wait_for_lock(path, 0.1, on_wait=lambda: waits.append(time.monotonic()))
    assert len(waits) > 1
    lock = try_lock(path)
    assert lock is not None
    path.unlink()
    assert not lock.is_at(path)
    with wait_for_lock(path) as other:  # a lock on a removed file excludes no other process
        assert other.is_at(path)
    lock.release()


def test_a_lock_does_not_follow_links(tmp_path: Path) -> None:
    """SAFE-1"""
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="lock"):
        wait_for_lock(tmp_path / "lock")
    assert not (tmp_path / "elsewhere").exists()


def test_a_lock_ends_with_its_process_but_not_with_its_children(tmp_path: Path) -> None:
    """STOP-1: a forked child holds no lock of its killed parent."""
    code = """
import os, sys, time
from streamvid.host.lock import wait_for_lock
lock = wait_for_lock(sys.argv[1])
child = os.fork()
if child == 0:
    print(os.getpid(), lock.descriptor, flush=True)
time.sleep(1000)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child, descriptor = map(int, parent.stdout.readline().split())
        try:
            assert descriptor == -1 and try_lock(tmp_path / "lock") is None
            parent.kill()
            parent.wait()
            wait_for_lock(tmp_path / "lock", 10).release()
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_journal_keeps_complete_lines_with_the_same_rules(tmp_path: Path) -> None:
    path, key = tmp_path / "journal", ("a.mp4", 7, "v1")
    with Journal(path, {"rules": 1}) as journal:
        journal.add(key, {"width": 16})
        journal.add(("b", 1), [1, 2])
    data = path.read_bytes()
    path.write_bytes(data[:-3])
    assert Journal(path, {"rules": 1}).findings == {key: {"width": 16}}
    path.write_bytes(data.replace(b": 16}", b": 61}"))
    assert Journal(path, {"rules": 1}).findings == {("b", 1): [1, 2]}
    with Journal(path, {"rules": 1}) as journal:
        journal.add(key, {"width": 32})
    assert Journal(path, {"rules": 1}).findings == {key: {"width": 32}, ("b", 1): [1, 2]}
    with Journal(path, {"rules": 2}, writable=False) as journal:
        journal.add(key, {})
    assert len(Journal(path, {"rules": 1}).findings) == 2
    with Journal(path, {"rules": 1}) as journal:
        journal.clear()
    assert not Journal(path, {"rules": 1}).findings
    assert not Journal(path, {"rules": 2}).findings


def test_many_findings_are_found_by_their_keys() -> None:
    """The findings exceed the buffer of unsorted entries; the latest finding per key counts."""
    findings, num_keys = Findings(), 100_000
    for number in range(150_000):
        findings.put((f"{number % num_keys}.mp4", 1), b'["%d.mp4", 1, %d]' % (number % num_keys, number))
    assert len(findings) == num_keys and ("none.mp4", 1) not in findings and findings.get(("0.mp4", 2)) is None
    for number in (0, 7, 49_999, 50_000, 65_535, 65_536, 99_999):
        assert findings[f"{number}.mp4", 1] == (number + num_keys if number < 50_000 else number)
    findings.clear()
    assert not findings and ("7.mp4", 1) not in findings


def serve(socket_fd: str, other_fd: str, word: str) -> None:
    """Act as a worker: send the received word and the file's size, then hang."""
    socket.socket(fileno=int(socket_fd)).sendall(f"{word} {os.fstat(int(other_fd)).st_size}".encode())
    time.sleep(1000)


@pytest.mark.parametrize("how", ["socket", "kill", "signals"])
def test_a_worker_ends_with_its_socket_and_ignores_signals(how: str, tmp_path: Path) -> None:
    """STOP-1"""
    (tmp_path / "file").write_bytes(b"12345")
    ours, theirs = socket.socketpair()
    with (tmp_path / "file").open("rb") as file, ours:
        worker = start_worker(
            "tests.host.test_host:serve", (theirs.fileno(), file.fileno()), ("word",), opens_stores=False
        )
        theirs.close()
        assert ours.recv(100) == b"word 5"
        if how == "signals":
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
                worker.send_signal(number)
            assert not select.select([ours], [], [], 0.2)[0] and worker.poll() is None
        if how != "socket":
            end_workers([worker])
            assert describe_exit(worker.returncode) == "was killed by SIGKILL"
    end_workers([worker], grace_seconds=20.0)
    assert how != "socket" or describe_exit(worker.returncode) == "ended with exit code 1"


def test_an_interrupt_during_release_leaves_no_lock(tmp_path: Path) -> None:
    """STOP-1: Ctrl-C may come between any two lines; once the lock object is gone, the file is free."""
    path, num_interrupted = tmp_path / "lock", 0
    for place in range(1, 100):
        lock = wait_for_lock(path)
        lines_left = place

        def count(frame: FrameType, event: str, _: object) -> object:
            nonlocal lines_left
            if event == "line" and frame.f_code.co_filename == FileLock.release.__code__.co_filename:
                lines_left -= 1
                if not lines_left:
                    raise KeyboardInterrupt
            return count

        sys.settrace(count)  # type: ignore[arg-type]
        try:
            lock.release()
        except KeyboardInterrupt:
            num_interrupted += 1
        finally:
            sys.settrace(None)
        del lock
        gc.collect()
        free = try_lock(path)
        assert free is not None, f"interrupted at line {place} of the release"
        free.release()
        if lines_left:
            break
    assert num_interrupted > 3
