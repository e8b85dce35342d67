"""Requests to one store: one at a time (`ask`), or all of a read, retried on failure and hedged when slow.

Requests run in the threads of a pool. The calling thread only waits, so that no socket holds it beyond its deadline.
A request keeps its bytes until all have arrived; the first one to finish copies them to their buffers. After the read
has ended, for whatever reason, no request writes to a buffer.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TypeVar, cast

from streamvid.storage.ranges import RangeRequest
from streamvid.storage.request_pool import RequestPool
from streamvid.storage.request_stats import RequestStats
from streamvid.storage.transport import Failure, RequestError, Transport
from streamvid.storage.wanted import LOOK_SECONDS, check_wanted

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 5.0
_SLOW_DOWN_PAUSE_SECONDS = 0.5
MAX_RENEWALS = 5  # of expired keys, for one request
_NEVER = float("inf")
_HINT = "Look at the network and at the server"
_Result = TypeVar("_Result")


def pause_seconds(num_failures: int, failure: Failure) -> float:
    """Return the time before a retry: growing, and random, so that readers do not come back all at once."""
    first = _SLOW_DOWN_PAUSE_SECONDS if failure == "slow down" else _FIRST_PAUSE_SECONDS
    return random.uniform(0.1, 1.0) * min(_LONGEST_PAUSE_SECONDS, first * 2.0 ** min(num_failures, 16))


@dataclass(frozen=True)
class Engine:
    """What all requests of one process to a store share."""

    transport: Transport
    pool: RequestPool
    stats: RequestStats


def ask(engine: Engine, num_bytes: int, attempt: Callable[[Transport], _Result], deadline: float) -> _Result:
    """Send one request with a body of `num_bytes`, once. Raises RequestError at the deadline.

    The server may still carry out a request that has timed out.
    """
    heard: SimpleQueue[tuple[_Result, None] | tuple[None, BaseException]] = SimpleQueue()
    is_over = threading.Event()

    def job() -> None:
        if is_over.is_set():
            return
        engine.stats.count(num_requests=1)
        try:
            heard.put((attempt(engine.transport), None))
        except BaseException as error:  # noqa: BLE001 - raised in the thread that asked
            heard.put((None, error))

    engine.pool.submit(num_bytes, job)
    try:
        while (left := deadline - time.monotonic()) > 0:
            check_wanted()
            with contextlib.suppress(Empty):
                result, error = heard.get(timeout=min(LOOK_SECONDS, left))
                if error is not None:
                    raise error
                return cast("_Result", result)
    finally:
        is_over.set()
    raise RequestError("no answer came", hint=_HINT)


@dataclass(eq=False)
class _Range:
    """One request of a read: its tries, and what comes next. `lock` guards `is_done` and the buffers."""

    request: RangeRequest
    num_active: int = 0
    num_failures: int = 0
    num_renewals: int = 0
    sent_at: float = _NEVER
    failed_at: float | None = None
    retry_at: float = _NEVER
    is_hedged: bool = False
    is_done: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def end(self) -> None:
        with self.lock:
            self.is_done = True


@dataclass(frozen=True)
class _Event:
    range: _Range
    error: RequestError | None = None
    version: str = ""


class RangeRead:
    """One read of ranges of `key`. Raises the RequestError that is final, or the last one before the deadline."""

    def __init__(
        self, engine: Engine, key: str, requests: Sequence[RangeRequest], version: str, deadline_seconds: float
    ) -> None:
        self._engine = engine
        self._key = key
        self.version = version
        self._ranges = [_Range(request) for request in requests]
        self._events: SimpleQueue[_Event] = SimpleQueue()
        self._deadline = time.monotonic() + deadline_seconds
        self._last_error: RequestError | None = None
        self.num_tries = 0

    def run(self) -> None:
        """Fill all buffers. Afterwards `version` is the version read, if the store has versions."""
        try:
            waiting = set(self._ranges)
            for one in self._ranges:
                self._send(one)
            while waiting:
                event = self._next_event(waiting)
                if event is not None and event.range in waiting and self._hear(event):
                    waiting.remove(event.range)
                self._send_again(waiting)
        finally:
            for one in self._ranges:
                one.end()

    def _next_event(self, waiting: set[_Range]) -> _Event | None:
        check_wanted()
        now = time.monotonic()
        if now >= self._deadline:
            raise self._overdue(waiting)
        wake = min(self._deadline, *(min(one.retry_at, self._slow_at(one)) for one in waiting))
        try:
            # Bounded, because a request that waits for its turn in the pool sets its times later, without an event.
            return self._events.get(timeout=min(LOOK_SECONDS, max(0.0, wake - now)))
        except Empty:
            return None

    def _slow_at(self, one: _Range) -> float:
        if one.is_hedged or one.num_active != 1 or one.sent_at == _NEVER:
            return _NEVER
        return one.sent_at + self._engine.stats.slow_seconds(one.request.num_bytes)

    def _send_again(self, waiting: set[_Range]) -> None:
        now = time.monotonic()
        for one in waiting:
            if one.retry_at <= now:
                one.retry_at = _NEVER
                self._send(one)
            elif self._slow_at(one) <= now:
                one.is_hedged = True
                if self._engine.stats.may_hedge():
                    self._send(one)

    def _send(self, one: _Range) -> None:
        if one.num_active == 0:
            one.sent_at = _NEVER  # the time of the last try says nothing about this one
        one.num_active += 1
        self.num_tries += 1
        self._engine.pool.submit(one.request.num_bytes, lambda: self._request(one))

    def _hear(self, event: _Event) -> bool:
        """Take notice of an event; return whether its range has arrived."""
        one, error = event.range, event.error
        stats = self._engine.stats
        one.num_active -= 1
        now = time.monotonic()
        if error is not None:
            self._hear_failure(one, error, now)
            return False
        self._engine.pool.succeeded()
        if self.version and event.version not in ("", self.version):  # sent before the version was known
            changed = RequestError("it was replaced by another version", "conflict")
            stats.count_error(changed)
            raise changed
        self.version = self.version or event.version
        if one.failed_at is not None:
            stats.count(seconds_lost=now - one.failed_at)
        return True

    def _hear_failure(self, one: _Range, error: RequestError, now: float) -> None:
        """Schedule a retry, or raise the error if a retry cannot help."""
        self._engine.stats.count_error(error)
        if error.kind == "slow down":
            self._engine.pool.slow_down()
        if error.kind == "expired":
            one.num_renewals += 1
            self._engine.transport.renew()
        if not error.is_transient or one.num_renewals > MAX_RENEWALS:
            raise error
        if one.failed_at is None:
            one.failed_at = now
        if one.num_active == 0:  # else the hedge may still succeed
            one.retry_at = now + pause_seconds(one.num_failures, error.kind)
            self._engine.stats.count(num_retries=1)
        one.num_failures += 1
        one.is_hedged = False
        self._last_error = error

    def _overdue(self, waiting: set[_Range]) -> RequestError:
        if self._last_error is not None:
            return self._last_error
        is_sent = any(one.sent_at != _NEVER for one in waiting)
        cause = "no answer came" if is_sent else "no request could be sent, as earlier ones are not answered"
        return RequestError(cause, hint=_HINT)

    # In a thread of the pool.

    def _request(self, one: _Range) -> None:
        try:
            version = self._fetch(one)
        except RequestError as error:
            self._events.put(_Event(one, error))
        except Exception as error:  # noqa: BLE001 - raised in the reading thread; the pool's thread continues
            self._events.put(_Event(one, RequestError(f"{type(error).__name__}: {error}")))
        else:
            self._events.put(_Event(one, None, version))

    def _fetch(self, one: _Range) -> str:
        """Read the range, unless a hedge has read it already, and return its version."""
        if one.is_done:
            return ""
        stats, request = self._engine.stats, one.request
        since = time.monotonic()
        one.sent_at = since
        stats.count(num_requests=1)
        body = self._engine.transport.get(
            self._key, request.start, request.num_bytes, self.version, lambda: not one.is_done
        )
        stats.time(request.num_bytes, time.monotonic() - since)
        stats.count(num_bytes_read=request.num_bytes)
        with one.lock:
            if not one.is_done:
                request.scatter(body.data)
                one.is_done = True
                stats.count(num_bytes_wanted=request.num_bytes_wanted)
        return body.version
