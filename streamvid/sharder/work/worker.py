"""What a worker process of the sharder does: one task at a time, until its pool or its pool's process is gone."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from streamvid.errors import StreamvidError


def main(handler: str, tasks_fd: int, alive_fd: int, timeout_seconds: float, memory_bytes: int) -> None:
    """Hand tasks from a socket to `handler`, a "module:function". A limit of 0 is none.

    A task over its time ends the whole process (nothing else stops C code that is stuck), as the end of the pool's
    process does; the pool sees both as the worker's death.
    """
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    threading.Thread(target=_end_with_pool, args=(alive_fd,), daemon=True).start()
    module, _, function = handler.partition(":")
    handle = getattr(importlib.import_module(module), function)
    # The pool may be gone at any time, before this worker is ready even: that is its end, and no error.
    with Connection(tasks_fd) as connection, contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        connection.send_bytes(b'{"ready": true}')
        while True:
            task = json.loads(connection.recv_bytes())
            signal.setitimer(signal.ITIMER_REAL, timeout_seconds)
            answer = _answer(handle, task)
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.send_bytes(json.dumps(answer).encode())


@contextlib.contextmanager
def clock_paused() -> Iterator[None]:
    """Inside, the task's time does not run: for waits that have a deadline of their own and are no file's fault."""
    left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left)


def _end_with_pool(alive_fd: int) -> None:
    os.read(alive_fd, 1)  # nobody writes: this returns when the last holder of the other end is gone
    os._exit(1)


def _answer(handle: Callable[[Any], Any], task: Any) -> dict[str, Any]:
    try:
        return {"result": handle(task)}
    except StreamvidError as error:
        return {"error": type(error).__name__, "message": str(error)}
    except Exception:  # noqa: BLE001 — a fault of ours must reach the caller whole, and must not look like a dead worker
        return {"error": "RuntimeError", "message": traceback.format_exc()}
