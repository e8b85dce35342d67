"""Ctrl-C, SIGTERM and SIGUSR1 as a question that training asks between two steps: a stop leaves a checkpoint."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class StopRequest:
    """The first signal that asked this process to stop, once one has."""

    signal_number: int | None = None


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Collect SIGINT, SIGTERM and SIGUSR1 while inside; a second Ctrl-C is a KeyboardInterrupt, as ever."""
    request = StopRequest()

    def note(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and request.signal_number == signal.SIGINT:
            raise KeyboardInterrupt
        request.signal_number = request.signal_number or number

    # Python lets only the main thread handle signals; elsewhere stopping is up to whoever runs the thread.
    is_main = threading.current_thread() is threading.main_thread()
    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1) if is_main else ()
    before = {number: signal.signal(number, note) for number in handled}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
