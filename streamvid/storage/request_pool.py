"""Thread pool for requests, with limits on concurrent requests and bytes in flight.

Requests start in the order of submission. Threads end after a second without work, so pools need not be closed.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from streamvid.storage.options import StorageOptions

_FIRST_LIMIT = 16
_IDLE_SECONDS = 1.0
_LEAST_PAUSE_SECONDS = 1.0  # between two reductions of the limit, so that a burst of refusals counts once


def shared_pool(options: StorageOptions) -> RequestPool:
    """Return the request pool that all stores with the same options share in this process."""
    options = replace(options, cache_dir=None, cache_bytes=None)
    with _lock:
        return _pools.setdefault(options, RequestPool(options.max_requests, options.max_bytes_in_flight))


def _forget_parent() -> None:
    global _lock  # noqa: PLW0603 - a thread may have held the lock during the fork
    _lock = threading.Lock()
    _pools.clear()


_lock = threading.Lock()
_pools: dict[StorageOptions, RequestPool] = {}
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parent)


class RequestPool:
    """Thread pool for up to `max_requests` concurrent requests.

    A SlowDown response halves the limit, which then gradually recovers.
    """

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._max_requests, self._max_bytes = max_requests, max_bytes
        self._limit = float(min(max_requests, _FIRST_LIMIT))
        self._is_growing_fast = True
        self._cut_at = 0.0
        self._queue: deque[tuple[int, Callable[[], None]]] = deque()
        self._condition = threading.Condition()
        self._num_threads = self._num_idle = 0
        self._num_active = self._bytes_active = 0

    @property
    def limit(self) -> int:
        """Current limit on concurrent requests."""
        return int(self._limit)

    def submit(self, num_bytes: int, job: Callable[[], None]) -> None:
        """Run `job`, which transfers `num_bytes` bytes, in a pool thread as soon as the limits allow.

        `job` must not raise.
        """
        with self._condition:
            self._queue.append((num_bytes, job))
            if self._num_idle < len(self._queue) and self._num_threads < self._max_requests:
                self._num_threads += 1
                try:
                    threading.Thread(target=self._work, name="streamvid-request", daemon=True).start()
                except BaseException:
                    self._num_threads -= 1
                    self._queue.pop()
                    raise
            else:
                self._condition.notify()

    def succeeded(self) -> None:
        """Raise the limit after a success: by 1 until it is first halved, and by 1 / limit afterwards."""
        with self._condition:
            step = 1.0 if self._is_growing_fast else 1.0 / self._limit
            self._limit = min(float(self._max_requests), self._limit + step)
            self._condition.notify()

    def slow_down(self) -> None:
        """Halve the limit, because the store has requested a lower rate."""
        with self._condition:
            now = time.monotonic()
            if now - self._cut_at >= _LEAST_PAUSE_SECONDS:
                self._limit = max(1.0, self._limit / 2)
                self._is_growing_fast = False
                self._cut_at = now

    def _work(self) -> None:
        while True:
            with self._condition:
                self._num_idle += 1
                try:
                    is_ready = self._condition.wait_for(self._may_begin, _IDLE_SECONDS)
                    if not is_ready and not self._queue:
                        self._num_threads -= 1
                        return
                finally:
                    self._num_idle -= 1
                if not is_ready:
                    continue
                num_bytes, job = self._queue.popleft()
                self._num_active += 1
                self._bytes_active += num_bytes
                # A thread that starts a job wakes another thread only if the next job may begin as well. A thread that
                # ends a job looks for the next one itself.
                if self._may_begin():
                    self._condition.notify()
            try:
                job()
            finally:
                del job
                with self._condition:
                    self._num_active -= 1
                    self._bytes_active -= num_bytes

    def _may_begin(self) -> bool:
        if not self._queue or self._num_active >= int(self._limit):
            return False
        return self._num_active == 0 or self._bytes_active + self._queue[0][0] <= self._max_bytes
