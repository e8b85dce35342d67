"""Operations on one store: requests that are retried on failure and, for reads, hedged when slow.

Requests run in the threads of a pool. The calling thread only waits, so no socket blocks it beyond its deadline. Each
try buffers its bytes until all have arrived. The first try that finishes copies its bytes to the caller's buffers.
After the read has succeeded or failed, no request writes to a buffer.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, cast

from streamvid.storage.ranges import RangeRequest
from streamvid.storage.request_pool import RequestPool
from streamvid.storage.request_stats import RequestStats
from streamvid.storage.transport import Failure, RequestError, Transport
from streamvid.storage.wanted import LOOK_SECONDS, check_wanted

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 5.0
_SLOW_DOWN_PAUSE_SECONDS = 0.5
MAX_RENEWALS = 5  # per request, after keys have expired
_NEVER = float("inf")
_START_SECONDS = 300.0
_HINT = "Check the network and the server"
_Answer = TypeVar("_Answer")


def pause_seconds(num_failures: int, failure: Failure) -> float:
    """Return how long to wait before a retry, in seconds.

    The time grows with the number of failures, and is randomized to spread retries.
    """
    first = _SLOW_DOWN_PAUSE_SECONDS if failure == "slow down" else _FIRST_PAUSE_SECONDS
    return random.uniform(0.1, 1.0) * min(_LONGEST_PAUSE_SECONDS, first * 2.0 ** min(num_failures, 16))


@dataclass(frozen=True)
class Engine:
    """State shared by all requests that one process sends to a store."""

    transport: Transport
    pool: RequestPool
    stats: RequestStats
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _started: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Wait until a pool thread has tried to start the transport. The wait does not count against any deadline.

        Raises RequestError if this thread's reads are cancelled, or if the start takes too long.
        """
        if self._started.is_set():
            return
        if self._lock.acquire(blocking=False):  # never released, so that only the first caller starts the transport
            try:
                self.pool.submit(0, self._start)
            except BaseException:
                self._lock.release()
                raise
        until = time.monotonic() + _START_SECONDS
        while not self._started.wait(LOOK_SECONDS):
            check_wanted()
            if time.monotonic() > until:
                raise RequestError(
                    f"the store's client did not start within {_START_SECONDS:g} s",
                    hint="Check the disk that contains the Python packages, and the service that provides the keys",
                )

    def _start(self) -> None:
        with contextlib.suppress(Exception):  # the first request then raises the same error
            self.transport.start()
        self._started.set()


@dataclass(eq=False, slots=True)
class Request:
    """State of one request in an operation: its attempts so far and its next step.

    num_bytes: size of the request or response body.
    attempt: function that sends the request once, in a pool thread.
    is_answered: True if part of a response has arrived.
    lock: lock that guards `is_done` and the buffers of a read.
    """

    num_bytes: int
    attempt: Callable[[Request], object]
    may_hedge: bool = False
    is_hedged: bool = False
    num_active: int = 0
    num_failures: int = 0
    num_renewals: int = 0
    sent_at: float = _NEVER
    failed_at: float | None = None
    retry_at: float = _NEVER
    is_answered: bool = False
    is_done: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def end(self) -> None:
        with self.lock:
            self.is_done = True


@dataclass(frozen=True, slots=True)
class _Event:
    request: Request
    error: RequestError | None = None
    answer: Any = None


class Operation:
    """Group of requests that succeed or fail together. The deadline is measured from the moment the transport is ready.

    `run` raises a permanent RequestError immediately. If no time remains for a retry, `run` raises the last transient
    error.

    extra_seconds: time after the deadline during which the operation still waits for responses, but starts no retry.
    on_retry: function that is called before each retry with the error and the seconds since the start.
    """

    def __init__(
        self,
        engine: Engine,
        deadline_seconds: float,
        extra_seconds: float = 0.0,
        on_retry: Callable[[RequestError, float], None] | None = None,
    ) -> None:
        self._engine, self._on_retry = engine, on_retry
        self._seconds = deadline_seconds, extra_seconds
        self._since = time.monotonic()
        self._events: SimpleQueue[_Event] = SimpleQueue()
        self._last_error: RequestError | None = None
        self.num_tries = 0

    @property
    def seconds(self) -> float:
        """Seconds since the operation started."""
        return time.monotonic() - self._since

    def run(self, requests: Sequence[Request]) -> None:
        """Send all requests, with retries, until each has succeeded."""
        self._engine.start()
        self._since = time.monotonic()
        self._last_retry = self._since + self._seconds[0]
        self._deadline = self._last_retry + self._seconds[1]
        try:
            waiting = set(requests)
            for one in requests:
                self._send(one)
            while waiting:
                event = self._next_event(waiting)
                if event is not None and event.request in waiting and self._hear(event):
                    waiting.remove(event.request)
                self._send_again(waiting)
        finally:
            for one in requests:
                one.end()

    def take(self, answer: Any) -> None:
        """Process the response to a request. May raise RequestError."""

    def _next_event(self, waiting: set[Request]) -> _Event | None:
        check_wanted()
        now = time.monotonic()
        if now >= self._deadline:
            raise self._overdue(waiting)
        wake = min(self._deadline, *(min(one.retry_at, self._slow_at(one)) for one in waiting))
        try:
            # The wait is bounded, because a queued request sets `sent_at` when a thread sends it, without an event.
            return self._events.get(timeout=min(LOOK_SECONDS, max(0.0, wake - now)))
        except Empty:
            return None

    def _slow_at(self, one: Request) -> float:
        if not one.may_hedge or one.is_hedged or one.num_active != 1 or one.sent_at == _NEVER:
            return _NEVER
        return one.sent_at + self._engine.stats.slow_seconds(one.num_bytes)

    def _send_again(self, waiting: set[Request]) -> None:
        now = time.monotonic()
        for one in waiting:
            if one.retry_at <= now:
                one.retry_at = _NEVER
                self._send(one)
            elif self._slow_at(one) <= now:
                one.is_hedged = True
                if self._engine.stats.may_hedge():
                    self._send(one)

    def _send(self, one: Request) -> None:
        if one.num_active == 0:
            one.sent_at = _NEVER  # the previous try's time does not apply to the new try
        one.num_active += 1
        self.num_tries += 1
        self._engine.pool.submit(one.num_bytes, lambda: self._request(one))

    def _hear(self, event: _Event) -> bool:
        """Process an event. Return True if the event's request has succeeded."""
        one, now = event.request, time.monotonic()
        one.num_active -= 1
        if event.error is not None:
            self._hear_failure(one, event.error, now)
            return False
        self._engine.pool.succeeded()
        self.take(event.answer)
        if one.failed_at is not None:
            self._engine.stats.count(seconds_lost=now - one.failed_at)
        return True

    def _hear_failure(self, one: Request, error: RequestError, now: float) -> None:
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
        if one.num_active == 0:  # otherwise, the other try of this request may still succeed
            one.retry_at = now + pause_seconds(one.num_failures, error.kind)
            if one.retry_at > self._last_retry:
                raise error
            self._engine.stats.count(num_retries=1)
            if self._on_retry is not None:
                self._on_retry(error, now - self._since)
        one.num_failures += 1
        one.is_hedged = False
        self._last_error = error

    def _overdue(self, waiting: set[Request]) -> RequestError:
        if self._last_error is not None:
            return self._last_error
        is_sent = any(one.sent_at != _NEVER for one in waiting)
        slow = [one for one in waiting if one.is_answered]
        if slow:
            cause = f"the response is too slow: {slow[0].num_bytes} bytes did not arrive within {self.seconds:.3g} s"
            return RequestError(cause, hint=_HINT)
        cause = "no response arrived" if is_sent else "no request could be sent, because earlier requests are pending"
        return RequestError(cause, hint=_HINT)

    # The following method runs in a pool thread.

    def _request(self, one: Request) -> None:
        if one.is_done:  # another try has succeeded, or the operation has ended
            return
        one.sent_at = time.monotonic()
        self._engine.stats.count(num_requests=1)
        try:
            event = _Event(one, answer=one.attempt(one))
        except RequestError as error:
            event = _Event(one, error)
        except Exception as error:  # noqa: BLE001 - the waiting thread raises it; the pool's thread continues
            event = _Event(one, RequestError(f"{type(error).__name__}: {error}"))
        self._events.put(event)


class Call(Operation):
    """Operation with a single request that is not hedged. After a timeout, the server may still process the request."""

    def ask(self, attempt: Callable[[Transport], _Answer], num_bytes: int) -> _Answer:
        """Run `attempt`, which sends a body of `num_bytes` bytes, repeatedly until it succeeds. Return its result."""
        self.run([Request(num_bytes, lambda _: attempt(self._engine.transport))])
        return cast("_Answer", self._answer)

    def take(self, answer: Any) -> None:
        self._answer = answer


class RangeRead(Operation):
    """Operation that reads ranges of one object. version: version of the object; "" until a response contains it."""

    version = ""

    def fill(self, key: str, ranges: Sequence[RangeRequest], version: str) -> None:
        """Fill the buffers of all `ranges` from the object `key`."""
        self._key, self.version = key, version
        self.run([Request(one.num_bytes, partial(self._fetch, one), may_hedge=True) for one in ranges])

    def take(self, answer: Any) -> None:
        if self.version and answer not in ("", self.version):  # the request was sent before the version was known
            changed = RequestError("the object was replaced by another version", "conflict")
            self._engine.stats.count_error(changed)
            raise changed
        self.version = self.version or answer

    def _fetch(self, request: RangeRequest, one: Request) -> str:
        """Read a range, and fill its buffers unless another attempt has done so. Return the version of the object."""
        stats, since = self._engine.stats, time.monotonic()

        def is_wanted() -> bool:
            one.is_answered = True
            return not one.is_done

        body = self._engine.transport.get(self._key, request.start, request.num_bytes, self.version, is_wanted)
        stats.time(request.num_bytes, time.monotonic() - since)
        stats.count(num_bytes_read=request.num_bytes)
        with one.lock:
            if not one.is_done:
                request.scatter(body.data)
                one.is_done = True
                stats.count(num_bytes_wanted=request.num_bytes_wanted)
        return body.version
