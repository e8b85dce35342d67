"""Signals between the caller and the threads of a pipeline, without a lock."""

from __future__ import annotations

import contextlib
from queue import Empty, SimpleQueue

from streamvid.errors import LoaderError, StreamvidError


class Signals:
    """The current run, the failure that ended everything, and a bell for waiting threads.

    run: number of the current run; work for other runs is skipped. is_closing: no further run will start.
    is_stuck: one of the loader's threads hangs in a read or a decoder, and must not be waited for.
    """

    def __init__(self, about: str) -> None:
        self._about = about
        self._news: SimpleQueue[None] = SimpleQueue()  # not empty whenever there is news
        self.run = 0
        self.failure: StreamvidError | None = None
        self.is_closing = self.is_stuck = False

    def tell(self) -> None:
        """Signal that there is news."""
        if self._news.empty():
            self._news.put(None)

    def wait(self, timeout_seconds: float) -> None:
        """Wait until there is news, or until the timeout."""
        with contextlib.suppress(Empty):
            self._news.get(timeout=timeout_seconds)

    def fail(self, error: StreamvidError) -> None:
        """Record a failure; the first one is what every later call raises."""
        self.failure = self.failure or error
        self.tell()

    def fail_unexpected(self, error: Exception) -> None:
        """Record an unexpected error, which the caller must receive in its own thread."""
        wrapped = LoaderError(f"{self._about}: the loader failed unexpectedly: {type(error).__name__}: {error}")
        wrapped.__cause__ = error
        self.fail(wrapped)
