"""What the caller and the threads of a pipeline tell each other, without a lock."""

from __future__ import annotations

import contextlib
from queue import Empty, SimpleQueue

from streamvid.errors import LoaderError, StreamvidError


class Signals:
    """The run that is alive, what ended it all, and a bell for whoever waits.

    run: number of the run that is alive; what belongs to another is passed over. is_closing: no run comes any more.
    is_stuck: one of the loader's threads hangs in a read or a decoder, and nothing waits for it any more.
    """

    def __init__(self, about: str) -> None:
        self._about = about
        self._news: SimpleQueue[None] = SimpleQueue()  # holds something whenever there is something to look at
        self.run = 0
        self.failure: StreamvidError | None = None
        self.is_closing = self.is_stuck = False

    def tell(self) -> None:
        """There is something to look at."""
        if self._news.empty():
            self._news.put(None)

    def wait(self, timeout_seconds: float) -> None:
        """Until there is something to look at, or the time is over."""
        with contextlib.suppress(Empty):
            self._news.get(timeout=timeout_seconds)

    def fail(self, error: StreamvidError) -> None:
        """The first failure is the one that every later call raises."""
        self.failure = self.failure or error
        self.tell()

    def fail_unexpected(self, error: Exception) -> None:
        """What should not have happened: the caller must hear of it, in its own thread."""
        wrapped = LoaderError(f"{self._about}: the loader failed unexpectedly: {type(error).__name__}: {error}")
        wrapped.__cause__ = error
        self.fail(wrapped)
