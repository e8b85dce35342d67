"""What a loader spent its time and its bytes on: `loader.stats()`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from time import perf_counter
from typing import Any

from streamvid.storage import CacheStats, StoreStats


@dataclass(slots=True)
class BatchStats:
    """What one batch cost; seconds are summed over its samples, which are worked on at the same time."""

    fetch_seconds: float = 0.0
    decode_seconds: float = 0.0
    num_bytes_fetched: int = 0
    num_retries: int = 0
    num_substituted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderStats:
    """What the batches handed over so far cost, those of one rank; `last` is the same of the last one alone.

    seconds: on the clock since the first batch was asked for (of `last`: since the one before was handed over).
    wait_seconds: of those, how long the caller stood still for batches; batch_seconds: of those again, how long
    batches took to be made and sent on their way to the device.
    fetch_seconds, decode_seconds: summed over samples, which are worked on at the same time, while the caller works.
    num_bytes_fetched, num_retries, num_substituted: of samples' reads, and samples that took the place of bad ones.
    store, cache: of object stores and the local cache, by this process so far; None where there are none.
    queue_depth: complete batches that lay waiting when the last one was handed over.  queue_depth_sum: over all steps.
    """

    num_steps: int = 0
    num_samples: int = 0
    seconds: float = 0.0
    wait_seconds: float = 0.0
    batch_seconds: float = 0.0
    fetch_seconds: float = 0.0
    decode_seconds: float = 0.0
    num_bytes_fetched: int = 0
    num_retries: int = 0
    num_substituted: int = 0
    queue_depth: int = 0
    queue_depth_sum: int = 0
    last: LoaderStats | None = None
    store: StoreStats | None = None
    cache: CacheStats | None = None

    @property
    def wait_share(self) -> float:
        """The share of the time that the caller, and so its GPU, waited for data: 0..1."""
        return min(1.0, self.wait_seconds / self.seconds) if self.seconds > 0 else 0.0

    @property
    def mean_queue_depth(self) -> float:
        """Complete batches that lay waiting, on average over the steps."""
        return self.queue_depth_sum / self.num_steps if self.num_steps else 0.0

    def since(self, earlier: LoaderStats) -> LoaderStats:
        """What came after `earlier`, stats of the same loader: the sums of that interval."""
        return replace(self, **{name: getattr(self, name) - getattr(earlier, name) for name in _SUMS})

    def figures(self) -> dict[str, float]:
        """What a training log says of a loader, this rank's: fields named data_*.

        fetch and decode seconds are summed over samples, which are worked on at the same time while the model computes:
        they tell where to look once waiting is high, not how long a step took.
        """
        return {
            "data_batch_seconds": round(self.batch_seconds, 4),
            "data_fetch_seconds": round(self.fetch_seconds, 4),
            "data_decode_seconds": round(self.decode_seconds, 4),
            "data_bytes": self.num_bytes_fetched,
            "data_retries": self.num_retries,
            "data_substituted": self.num_substituted,
            "data_queue_depth": round(self.mean_queue_depth, 2),
        }

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON has it, seconds and shares rounded to microseconds; `last` as an object or null."""
        record: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        del record["queue_depth_sum"]
        record |= {"wait_share": self.wait_share, "mean_queue_depth": self.mean_queue_depth}
        record["last"] = self.last and self.last.to_json()
        record |= {name: value and asdict(value) for name, value in (("store", self.store), ("cache", self.cache))}
        return {name: round(value, 6) if isinstance(value, float) else value for name, value in record.items()}


_SUMS = tuple(
    field.name for field in fields(LoaderStats) if field.name not in {"queue_depth", "last", "store", "cache"}
)
_OF_BATCH = tuple(field.name for field in fields(BatchStats))


class StatsMeter:
    """Adds up what the batches handed over cost; for the thread that iterates."""

    def __init__(self) -> None:
        self._sums: dict[str, Any] = dict.fromkeys(_SUMS, 0)
        self._last: dict[str, Any] | None = None
        self._start = self._handed_over = 0.0

    def add(
        self, cost: BatchStats, num_samples: int, *, wait_seconds: float, batch_seconds: float, queue_depth: int
    ) -> None:
        """A batch is handed over now, for which the caller has waited `wait_seconds`; the rest as in LoaderStats."""
        now = perf_counter()
        if self._last is None:
            self._start = self._handed_over = now - wait_seconds
        last: dict[str, Any] = {name: getattr(cost, name) for name in _OF_BATCH}
        last |= {
            "num_steps": 1,
            "num_samples": num_samples,
            "seconds": now - self._handed_over,
            "wait_seconds": wait_seconds,
            "batch_seconds": batch_seconds,
            "queue_depth_sum": queue_depth,
        }
        for name in _SUMS:
            self._sums[name] += last[name]
        self._last, self._handed_over = last, now

    def stats(self) -> LoaderStats:
        """The sums until now."""
        if self._last is None:
            return LoaderStats()
        depth = self._last["queue_depth_sum"]
        last = LoaderStats(**self._last, queue_depth=depth)
        seconds = perf_counter() - self._start
        return LoaderStats(**self._sums | {"seconds": seconds}, queue_depth=depth, last=last)
