"""How long requests have taken lately, and from when on one is slow."""

from __future__ import annotations

import threading
from collections import Counter, deque

_KEPT = 256
_LEAST = 32  # before that many are known, no percentile means much
_LOOK_EVERY = 16  # requests: to sort all that are known for each one would cost as much as the request
_UNKNOWN_SECONDS = 4.0
_MIN_SECONDS = 0.05
_SLOW_PERCENTILE, _SLOW_FACTOR = 0.95, 2.0
_SECOND_SHARE = 0.05  # of requests may be sent a second time for being slow, or a slow store would get twice the load


class Latency:
    """Seconds of the last successful requests, by size class, a factor of four each. Safe in several threads."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}
        self._slow: dict[int, tuple[int, float]] = {}  # by size class: found when so many were known, and what
        self._num_added: Counter[int] = Counter()
        self._all: deque[float] = deque(maxlen=_KEPT)
        self._lock = threading.Lock()
        self._allowance = 1.0

    def add(self, num_bytes: int, seconds: float) -> None:
        """A request for so many bytes has taken so long."""
        with self._lock:
            kind = _size_class(num_bytes)
            self._seconds.setdefault(kind, deque(maxlen=_KEPT)).append(seconds)
            self._num_added[kind] += 1
            self._all.append(seconds)
            self._allowance = min(8.0, self._allowance + _SECOND_SHARE)

    def slow_seconds(self, num_bytes: int) -> float:
        """After how long a request for so many bytes is worth a second one beside it."""
        kind = _size_class(num_bytes)
        num_added = self._num_added[kind]
        if num_added < _LEAST:
            return _UNKNOWN_SECONDS
        found_at, slow = self._slow.get(kind, (0, 0.0))
        if num_added - found_at >= _LOOK_EVERY:
            with self._lock:
                known = sorted(self._seconds[kind])
            slow = max(_MIN_SECONDS, _SLOW_FACTOR * _percentile(known, _SLOW_PERCENTILE))
            self._slow[kind] = num_added, slow
        return slow

    def take_second(self) -> bool:
        """Whether a second request may be sent now; it then counts as sent."""
        with self._lock:
            if self._allowance < 1.0:
                return False
            self._allowance -= 1.0
            return True

    def percentile(self, share: float) -> float:
        """Of all sizes together; 0.0 before the first."""
        with self._lock:
            known = sorted(self._all)
        return _percentile(known, share) if known else 0.0


def _size_class(num_bytes: int) -> int:
    return num_bytes.bit_length() // 2


def _percentile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
