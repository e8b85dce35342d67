"""Cancellation of reads, so that closing a loader does not wait for an unresponsive store."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from streamvid.errors import StorageError
from streamvid.storage.transport import RequestError

LOOK_SECONDS = 0.2
"""Seconds between two checks for cancellation during a wait."""

CANCELLED = "read cancelled"
_is_wanted: ContextVar[Callable[[], bool] | None] = ContextVar("streamvid_is_wanted", default=None)


@contextlib.contextmanager
def while_wanted(is_wanted: Callable[[], bool]) -> Iterator[None]:
    """Make this thread's reads raise StorageError soon after `is_wanted` returns False."""
    token = _is_wanted.set(is_wanted)
    try:
        yield
    finally:
        _is_wanted.reset(token)


def is_wanted() -> bool:
    """Return True unless this thread's reads are cancelled."""
    ask = _is_wanted.get()
    return ask is None or ask()


def check_wanted() -> None:
    """Raise RequestError if this thread's reads are cancelled."""
    if not is_wanted():
        raise RequestError(CANCELLED)


def wait_while_wanted(event: threading.Event) -> None:
    """Wait for an event that another thread sets. Raises StorageError if this thread's reads are cancelled."""
    while not event.wait(LOOK_SECONDS):
        if not is_wanted():
            raise StorageError(CANCELLED)
