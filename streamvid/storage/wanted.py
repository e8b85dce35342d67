"""Whether anybody still waits for what a thread reads: a loader that is closed lets go of a store that is not there."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from streamvid.errors import StorageError
from streamvid.storage.transport import RequestError

LOOK_SECONDS = 0.2
"""Between two looks, while something is waited for."""

_NOBODY = "nobody waits for it any more"
_is_wanted: ContextVar[Callable[[], bool] | None] = ContextVar("streamvid_is_wanted", default=None)


@contextlib.contextmanager
def while_wanted(is_wanted: Callable[[], bool]) -> Iterator[None]:
    """Reads of this thread within end with a StorageError soon after `is_wanted` has said no."""
    token = _is_wanted.set(is_wanted)
    try:
        yield
    finally:
        _is_wanted.reset(token)


def is_wanted() -> bool:
    """Whether anybody waits for this thread's reads, as far as is known."""
    ask = _is_wanted.get()
    return ask is None or ask()


def check_wanted() -> None:
    """Raise RequestError if nobody waits for this thread's read any more."""
    if not is_wanted():
        raise RequestError(_NOBODY)


def wait_while_wanted(event: threading.Event) -> None:
    """Wait for what another thread is to bring. Raises StorageError once nobody waits for this thread."""
    while not event.wait(LOOK_SECONDS):
        if not is_wanted():
            raise StorageError(_NOBODY)


def pause(seconds: float) -> None:
    """Sleep, with a look now and then."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        check_wanted()
        time.sleep(min(LOOK_SECONDS, left))
