"""Reading some ranges of one object: tried again when requests fail, raced by second ones when they are slow.

Requests run in the threads of a pool; the thread that reads only waits, so that no socket can hold it longer than its
deadline. A request keeps its bytes to itself until all have come; the first to have them puts them where they go, and
once the read is over, well or not, none does.
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

from streamvid.storage.latency import Latency
from streamvid.storage.ranges import RangeRequest
from streamvid.storage.request_pool import RequestPool
from streamvid.storage.tally import Tally
from streamvid.storage.transport import RequestError, Transport
from streamvid.storage.wanted import LOOK_SECONDS, check_wanted

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 5.0
_SLOW_DOWN_PAUSE_SECONDS = 0.5
MAX_RENEWALS = 5  # of keys that are said to be expired, for one request
_NEVER = float("inf")
_Answer = TypeVar("_Answer")


def pause_seconds(num_failures: int, is_slow_down: bool) -> float:
    """How long to wait before trying again: growing, and random, so that not all readers come back at once."""
    first = _SLOW_DOWN_PAUSE_SECONDS if is_slow_down else _FIRST_PAUSE_SECONDS
    return random.uniform(0.1, 1.0) * min(_LONGEST_PAUSE_SECONDS, first * 2.0 ** min(num_failures, 16))


@dataclass(frozen=True)
class Engine:
    """What all reads of a store share, in one process."""

    transport: Transport
    pool: RequestPool
    latency: Latency
    tally: Tally


def ask(engine: Engine, num_bytes: int, attempt: Callable[[Transport], _Answer], deadline: float) -> _Answer:
    """One request that is no read of ranges, with a body of so many bytes, tried once; RequestError at the deadline,
    however its server behaves. What is then under way may still be done by the server.
    """
    heard: SimpleQueue[tuple[_Answer, None] | tuple[None, BaseException]] = SimpleQueue()
    is_over = threading.Event()

    def job() -> None:
        if is_over.is_set():
            return
        engine.tally.add(num_requests=1)
        try:
            heard.put((attempt(engine.transport), None))
        except BaseException as error:  # noqa: BLE001 - it is the asker's
            heard.put((None, error))

    engine.pool.submit(num_bytes, job)
    try:
        while (left := deadline - time.monotonic()) > 0:
            check_wanted()
            with contextlib.suppress(Empty):
                answer, error = heard.get(timeout=min(LOOK_SECONDS, left))
                if error is not None:
                    raise error
                return cast("_Answer", answer)
    finally:
        is_over.set()
    raise RequestError("no answer came", hint="Look at the network and at the server")


@dataclass(eq=False)
class _Part:
    """One request of a read: how often it was sent, and what comes next. `lock`: over `is_done` and the buffers."""

    request: RangeRequest
    num_active: int = 0
    num_failures: int = 0
    num_renewals: int = 0
    sent_at: float = _NEVER
    failed_at: float | None = None
    retry_at: float = _NEVER
    is_raced: bool = False
    is_done: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def end(self) -> None:
        with self.lock:
            self.is_done = True


@dataclass(frozen=True)
class _Event:
    part: _Part
    error: RequestError | None = None
    version: str = ""


class Transfer:
    """One read of ranges of `key`. Raises RequestError: of what cannot pass, or of what did not until the deadline."""

    def __init__(
        self, engine: Engine, key: str, requests: Sequence[RangeRequest], version: str, deadline_seconds: float
    ) -> None:
        self._engine, self._key, self.version = engine, key, version
        self._parts = [_Part(request) for request in requests]
        self._events: SimpleQueue[_Event] = SimpleQueue()
        self._deadline = time.monotonic() + deadline_seconds
        self._last_error: RequestError | None = None
        self.num_tries = 0

    def run(self) -> None:
        """Fill all buffers; `version` is then the version that was read, if it was not known before."""
        try:
            waiting = set(self._parts)
            for part in self._parts:
                self._send(part)
            while waiting:
                event = self._next_event(waiting)
                if event is not None and event.part in waiting and self._hear(event):
                    waiting.remove(event.part)
                self._send_again(waiting)
        finally:
            for part in self._parts:
                part.end()

    def _next_event(self, waiting: set[_Part]) -> _Event | None:
        check_wanted()
        now = time.monotonic()
        if now >= self._deadline:
            raise self._overdue(waiting)
        wake = min(self._deadline, *(min(part.retry_at, self._slow_at(part)) for part in waiting))
        try:
            # Not for ever: a request that waits for its turn sets its times later, and says nothing of it.
            return self._events.get(timeout=min(LOOK_SECONDS, max(0.0, wake - now)))
        except Empty:
            return None

    def _slow_at(self, part: _Part) -> float:
        if part.is_raced or part.num_active != 1 or part.sent_at == _NEVER:
            return _NEVER
        return part.sent_at + self._engine.latency.slow_seconds(part.request.num_bytes)

    def _send_again(self, waiting: set[_Part]) -> None:
        now = time.monotonic()
        for part in waiting:
            if part.retry_at <= now:
                part.retry_at = _NEVER
                self._send(part)
            elif self._slow_at(part) <= now:
                part.is_raced = True
                if self._engine.latency.take_second():
                    self._engine.tally.add(num_hedged=1)
                    self._send(part)

    def _send(self, part: _Part) -> None:
        if part.num_active == 0:
            part.sent_at = _NEVER  # that of its last try says nothing of this one
        part.num_active += 1
        self.num_tries += 1
        self._engine.pool.submit(part.request.num_bytes, lambda: self._request(part))

    def _hear(self, event: _Event) -> bool:
        """Whether that part is there."""
        part, error = event.part, event.error
        part.num_active -= 1
        now = time.monotonic()
        if error is None:
            self._engine.pool.succeeded()
            if self.version and event.version not in ("", self.version):  # sent before the version was known
                changed = RequestError("it was replaced by another version", is_changed=True)
                self._engine.tally.fail(changed)
                raise changed
            self.version = self.version or event.version
            if part.failed_at is not None:
                self._engine.tally.add(seconds_lost=now - part.failed_at)
            return True
        self._engine.tally.fail(error)
        if error.is_slow_down:
            self._engine.pool.slow_down()
        if error.is_expired:
            part.num_renewals += 1
            self._engine.transport.renew()
        if not error.may_pass or part.num_renewals > MAX_RENEWALS:
            raise error
        if part.failed_at is None:
            part.failed_at = now
        if part.num_active == 0:  # else its second request may still come through
            part.retry_at = now + pause_seconds(part.num_failures, error.is_slow_down)
            self._engine.tally.add(num_retries=1)
        part.num_failures += 1
        part.is_raced = False
        self._last_error = error
        return False

    def _overdue(self, waiting: set[_Part]) -> RequestError:
        if self._last_error is not None:
            return self._last_error
        is_sent = any(part.sent_at != _NEVER for part in waiting)
        cause = "no answer came" if is_sent else "no request could be sent, as earlier ones are not answered"
        return RequestError(cause, hint="Look at the network and at the server")

    # In a thread of the pool.

    def _request(self, part: _Part) -> None:
        engine, request = self._engine, part.request
        if part.is_done:
            self._events.put(_Event(part))
            return
        since = time.monotonic()
        part.sent_at = since
        engine.tally.add(num_requests=1)
        try:
            body = engine.transport.get(
                self._key, request.start, request.num_bytes, self.version, lambda: not part.is_done
            )
            engine.latency.add(request.num_bytes, time.monotonic() - since)
            engine.tally.add(num_bytes_read=request.num_bytes)
            with part.lock:
                if not part.is_done:
                    request.scatter(body.data)
                    part.is_done = True
                    engine.tally.add(num_bytes_wanted=request.num_bytes_wanted)
        except RequestError as error:
            self._events.put(_Event(part, error))
            return
        except Exception as error:  # noqa: BLE001 - the reader must hear of it, and its thread must go on
            self._events.put(_Event(part, RequestError(f"{type(error).__name__}: {error}")))
            return
        self._events.put(_Event(part, None, body.version))
