"""Statistics on requests to a store: counts for reports, and latencies that identify slow requests."""

from __future__ import annotations

import threading
from collections import Counter, deque

from streamvid.storage.store import StoreStats
from streamvid.storage.transport import RequestError

_KEPT = 256
_LEAST = 32  # minimum number of latencies for a percentile to be meaningful
_LOOK_EVERY = 16  # requests per update: sorting the latencies each time would cost as much as a request
_UNKNOWN_SECONDS = 4.0
_MIN_SECONDS = 0.05
_SLOW_PERCENTILE, _SLOW_FACTOR = 0.95, 2.0
_HEDGED_SHARE = 0.05  # maximum share of hedged requests; hedging every request would double the load on a slow store
_MOST_ERRORS = 20


class RequestStats:
    """Counts and recent latencies of one process's requests to a store. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._seconds_lost = 0.0
        self._seconds: dict[int, deque[float]] = {}  # latencies of recent reads, by size class
        self._all_seconds: deque[float] = deque(maxlen=_KEPT)
        self._num_timed: Counter[int] = Counter()
        self._slow: dict[int, tuple[int, float]] = {}  # size class → (number timed at the last update, threshold)
        self._allowance = 1.0

    def count(self, seconds_lost: float = 0.0, **counts: int) -> None:
        """Add each argument to the StoreStats field with the same name."""
        with self._lock:
            self._counts.update(counts)
            self._seconds_lost += seconds_lost

    def count_error(self, error: RequestError) -> None:
        """Count a failed request under its cause."""
        with self._lock:
            self._errors["the object ends too early" if error.kind == "short" else error.cause] += 1

    def time(self, num_bytes: int, seconds: float) -> None:
        """Record the latency of a successful request for `num_bytes`."""
        with self._lock:
            size = _size_class(num_bytes)
            self._seconds.setdefault(size, deque(maxlen=_KEPT)).append(seconds)
            self._num_timed[size] += 1
            self._all_seconds.append(seconds)
            self._allowance = min(8.0, self._allowance + _HEDGED_SHARE)

    def slow_seconds(self, num_bytes: int) -> float:
        """Return the latency in seconds above which a request of this size should be hedged (sent a second time)."""
        size = _size_class(num_bytes)
        num_timed = self._num_timed[size]
        if num_timed < _LEAST:
            return _UNKNOWN_SECONDS
        found_at, slow = self._slow.get(size, (0, 0.0))
        if num_timed - found_at >= _LOOK_EVERY:
            with self._lock:
                known = sorted(self._seconds[size])
            slow = max(_MIN_SECONDS, _SLOW_FACTOR * _percentile(known, _SLOW_PERCENTILE))
            self._slow[size] = num_timed, slow
        return slow

    def may_hedge(self) -> bool:
        """Return True if a hedge (a second request) may be sent now, and count that hedge."""
        with self._lock:
            if self._allowance < 1.0:
                return False
            self._allowance -= 1.0
            self._counts["num_hedged"] += 1
            return True

    def report(self) -> StoreStats:
        """Return the statistics so far."""
        with self._lock:
            known = sorted(self._all_seconds)
            return StoreStats(
                **self._counts,
                seconds_lost=self._seconds_lost,
                p50_seconds=_percentile(known, 0.5),
                p99_seconds=_percentile(known, 0.99),
                by_error=dict(self._errors.most_common(_MOST_ERRORS)),
            )


def _size_class(num_bytes: int) -> int:
    """Return the size class of a request. The sizes in one class differ by a factor of at most four."""
    return num_bytes.bit_length() // 2


def _percentile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
