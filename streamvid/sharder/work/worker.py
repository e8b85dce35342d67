"""Worker process of the sharder. It runs one unit at a time until its pool or the pool's process ends."""

from __future__ import annotations

import contextlib
import importlib
import json
import resource
import signal
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from streamvid.errors import StreamvidError
from streamvid.host.imports import skip_pandas


def main(units_fd: str, held_fd: str, handler: str, timeout_seconds: str, memory_bytes: str) -> None:
    """Run the function `handler`, given as "module:function", on each unit that is received from a socket.

    A limit of 0 means no limit. If a unit exceeds the time limit, the process ends, because C code that hangs cannot be
    stopped in any other way. The pool detects that the worker has ended. `held_fd` is kept open, but not used.
    """
    if limit := int(memory_bytes):
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    skip_pandas()
    module, _, function = handler.partition(":")
    handle = getattr(importlib.import_module(module), function)
    # The pool may end at any time, even before this worker is ready. This ends the worker, but is not an error.
    with Connection(int(units_fd)) as connection, contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        connection.send_bytes(b'{"ready": true}')
        while True:
            unit = connection.recv()
            signal.setitimer(signal.ITIMER_REAL, float(timeout_seconds))
            answer = _answer(handle, unit)
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.send_bytes(json.dumps(answer).encode())


@contextlib.contextmanager
def clock_paused() -> Iterator[None]:
    """Pause the unit's time limit inside the `with` block. Use this for waits that are not caused by the file."""
    left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left)


def _answer(handle: Callable[[Any], Any], unit: Any) -> dict[str, Any]:
    try:
        return {"result": handle(unit)}
    except StreamvidError as error:
        return {"error": type(error).__name__, "message": str(error)}
    except Exception:  # noqa: BLE001 - a bug must reach the caller, and must not look like a dead worker
        return {"error": "RuntimeError", "message": traceback.format_exc()}
