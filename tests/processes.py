"""Helpers that start processes, servers and threads, and wait for them to end."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import psutil


def run_command(command: Sequence[object], *, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; with `check`, a failure raises an AssertionError that shows its output."""
    words = list(map(str, command))
    done = subprocess.run(words, capture_output=True, text=True, check=False, **{"timeout": 280, **options})
    assert not check or done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def run_python(
    code: str, *arguments: object, prefix: Sequence[str] = (), **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a Python script with `run_command`, optionally through the command in `prefix`."""
    return run_command([*prefix, sys.executable, "-c", code, *arguments], **options)


def run_tool(name: str, *arguments: object, **options: Any) -> Any:
    """Run a benchmark of tools/ and return its JSON report."""
    return json.loads(run_command([sys.executable, "-m", f"tools.{name}", *arguments, "--json"], **options).stdout)


def on_terminal(command: Sequence[str]) -> str:
    """Run a program whose standard error is a terminal; return what it showed there without control sequences."""
    own, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "250"}
    with subprocess.Popen(command, stderr=theirs, stdin=subprocess.DEVNULL, env=environment) as process:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # Linux reports that the other end is closed
            while data := os.read(own, 65536):
                shown += data
    os.close(own)
    assert process.returncode == 0, shown
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for_end(pids: list[int]) -> list[int]:
    """Wait up to 20 s for processes to end; return those that still run."""
    until = time.monotonic() + 20
    while (alive := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < until:
        time.sleep(0.02)
    return alive


def streamvid_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("streamvid")}


def wait_for_threads(expected: set[threading.Thread]) -> None:
    """Wait until the running threads of streamvid are exactly these."""
    until = time.monotonic() + 20
    while streamvid_threads() != expected and time.monotonic() < until:
        time.sleep(0.02)
    assert streamvid_threads() == expected


@contextlib.contextmanager
def serving(server: socketserver.BaseServer) -> Iterator[str]:
    """Run a server of the standard library in a thread; yield its URL."""
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
