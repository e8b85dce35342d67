"""Lock-free signals between the caller and the threads of a pipeline."""

from __future__ import annotations

import contextlib
from queue import Empty, SimpleQueue

from streamvid.errors import LoaderError, StreamvidError


class Bell:
    """Wake-up signal for one waiting thread. A ring before the wait is not lost."""

    def __init__(self) -> None:
        self._rings: SimpleQueue[None] = SimpleQueue()

    def ring(self) -> None:
        """Wake a waiting thread."""
        if self._rings.empty():
            self._rings.put(None)

    def wait(self, timeout_seconds: float) -> None:
        """Wait until `ring` is called or the timeout has passed."""
        with contextlib.suppress(Empty):
            self._rings.get(timeout=timeout_seconds)


class Signals:
    """Shared state of a pipeline: the current run, the failure that ended the loader, and a wake-up signal.

    run: number of the current run; work for other runs is skipped.
    failure: error that ended the loader; None until the loader fails.
    is_closing: True if no further run will start.
    is_stuck: True if one of the loader's threads hangs in a read or a decoder and must not be waited for.
    """

    def __init__(self, about: str) -> None:
        self._about = about
        self._news = Bell()
        self.run = 0
        self.failure: StreamvidError | None = None
        self.is_closing = self.is_stuck = False

    def tell(self) -> None:
        """Wake a waiting thread."""
        self._news.ring()

    def wait(self, timeout_seconds: float) -> None:
        """Wait until `tell` is called or the timeout has passed."""
        self._news.wait(timeout_seconds)

    def fail(self, error: StreamvidError) -> None:
        """Record a failure. Every later call to the pipeline raises the first recorded failure."""
        self.failure = self.failure or error
        self.tell()

    def fail_unexpected(self, error: Exception) -> None:
        """Record an unexpected error as a LoaderError, to be raised in the caller's thread."""
        wrapped = LoaderError(
            f"{self._about}: the loader failed unexpectedly: {type(error).__name__}: {error}. Create "
            "a new loader and load the last state; if that fails too, report this error with its traceback"
        )
        wrapped.__cause__ = error
        self.fail(wrapped)
