"""What a process has asked of a store: counters that many threads add to."""

from __future__ import annotations

import threading
from collections import Counter

from streamvid.storage.latency import Latency
from streamvid.storage.store import StoreStats
from streamvid.storage.transport import RequestError


class Tally:
    """Sums of StoreStats' fields."""

    def __init__(self) -> None:
        self._sums: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._seconds_lost = 0.0
        self._lock = threading.Lock()

    def add(self, seconds_lost: float = 0.0, **counts: int) -> None:
        """Add to the fields of these names."""
        with self._lock:
            self._sums.update(counts)
            self._seconds_lost += seconds_lost

    def fail(self, error: RequestError) -> None:
        """Count a failed request by its cause."""
        with self._lock:
            self._errors["it ends too early" if error.is_short else error.cause] += 1

    def stats(self, latency: Latency) -> StoreStats:
        """All of it until now."""
        with self._lock:
            return StoreStats(
                **self._sums,
                seconds_lost=self._seconds_lost,
                p50_seconds=latency.percentile(0.5),
                p99_seconds=latency.percentile(0.99),
                by_error=dict(self._errors.most_common(20)),
            )
