"""Statistics on a loader's time and bytes, as returned by `loader.stats()`."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import accumulate
from time import perf_counter
from typing import Any

from streamvid.loader.verdict import FEW_STEPS, Resources, Usage, Verdict, judge_loader
from streamvid.storage import CacheStats, StoreStats


@dataclass(slots=True)
class BatchStats:
    """Statistics on reading and decoding the samples in one or more batches.

    Seconds are summed over samples, which are read and decoded concurrently while the caller computes. The sums show
    why the caller waits, not how long a step takes. Reading a clip from the page cache counts as decoding, because a
    worker does it.

    store_wait_seconds, decode_wait_seconds, memory_wait_seconds, prepare_wait_seconds: parts of the caller's wait
    during which reading, decoding, a full ring or planning, respectively, held up the next batch.
    """

    fetch_seconds: float = 0.0
    decode_seconds: float = 0.0
    num_bytes_fetched: int = 0
    num_retries: int = 0
    num_substituted: int = 0
    store_wait_seconds: float = 0.0
    decode_wait_seconds: float = 0.0
    memory_wait_seconds: float = 0.0
    prepare_wait_seconds: float = 0.0

    def plus(self, other: BatchStats, sign: int = 1) -> BatchStats:
        """Return the sum of these statistics and `other` or, with sign=-1, the difference."""
        return BatchStats(*(getattr(self, name) + sign * getattr(other, name) for name in _BATCH_FIELDS))

    def add(self, other: BatchStats) -> None:
        """Add `other` to these statistics. This method is several times as fast as `plus`."""
        self.fetch_seconds += other.fetch_seconds
        self.decode_seconds += other.decode_seconds
        self.num_bytes_fetched += other.num_bytes_fetched
        self.num_retries += other.num_retries
        self.num_substituted += other.num_substituted
        self.store_wait_seconds += other.store_wait_seconds
        self.decode_wait_seconds += other.decode_wait_seconds
        self.memory_wait_seconds += other.memory_wait_seconds
        self.prepare_wait_seconds += other.prepare_wait_seconds


_BATCH_FIELDS = tuple(one.name for one in fields(BatchStats))


WAIT_BOUNDS = tuple(digit * 10.0**power for power in range(-4, 2) for digit in (1, 2, 5))
"""Upper bounds of the wait classes in seconds, from 0.1 ms to 50 s; longer waits form one more class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderStats:
    """Statistics on the batches that one rank has handed out so far. All times are in seconds.

    seconds: time since the first batch was requested.
    wait_seconds: part of `seconds` during which the caller waited for batches.
    batch_seconds: part of `seconds` spent building batches and starting their copies to the device.
    work: statistics on reading and decoding the samples.
    queue_depth: number of complete batches ready now.
    queue_depth_sum: sum of the queue depths at all handovers.
    ring_batches: number of batches that now have memory in the ring (being filled, ready, or held by the caller).
    last: statistics on the last batch alone, as of its handover; `seconds` counts from the previous handover.
    store, cache: this process's requests to object stores, and its use of the cache; each is None if unused.
    wait_counts: number of waits for a batch, in each of the classes that WAIT_BOUNDS defines.
    resources: the loader's decoders and threads; None in `last`.
    """

    num_steps: int = 0
    num_samples: int = 0
    seconds: float = 0.0
    wait_seconds: float = 0.0
    batch_seconds: float = 0.0
    work: BatchStats = field(default_factory=BatchStats)
    queue_depth: int = 0
    queue_depth_sum: int = 0
    ring_batches: int = 0
    last: LoaderStats | None = None
    store: StoreStats | None = None
    cache: CacheStats | None = None
    wait_counts: tuple[int, ...] = (0,) * (len(WAIT_BOUNDS) + 1)
    resources: Resources | None = None

    @property
    def verdict(self) -> Verdict | None:
        """Verdict on what limits the loader, with reasons and remedies; None for fewer than 10 batches.

        `loader.stats().since(earlier).verdict` is the verdict on the time since `earlier`.
        """
        if self.resources is None or self.num_steps < FEW_STEPS:
            return None
        return judge_loader(self._usage(self.resources), self.wait_share, self.resources.setting)

    def _usage(self, resources: Resources) -> Usage:
        work, seconds = self.work, max(self.seconds, 1e-9)
        return Usage(
            num_workers=resources.num_workers,
            decoders_busy=min(1.0, work.decode_seconds / (max(1, resources.num_workers) * seconds)),
            store_busy=min(1.0, work.fetch_seconds / (resources.num_fetch_threads * seconds)),
            main_busy=min(1.0, self.batch_seconds / seconds),
            held_up={
                "store": work.store_wait_seconds,
                "decoders": work.decode_wait_seconds,
                "ring": work.memory_wait_seconds,
                "main": work.prepare_wait_seconds + self.batch_seconds,
            },
        )

    @property
    def wait_share(self) -> float:
        """Share of the time, from 0 to 1, during which the caller waited for data."""
        return min(1.0, self.wait_seconds / self.seconds) if self.seconds > 0 else 0.0

    def wait_quantile(self, share: float) -> float:
        """Return the wait in seconds that a given share of all waits did not exceed.

        A share of 0.5 gives the median, and 0.99 gives the 99th percentile. The result is rounded up to one of
        WAIT_BOUNDS, or is infinite if it exceeds 50 s.
        """
        wanted, totals = share * sum(self.wait_counts), accumulate(self.wait_counts)
        bounds = zip((*WAIT_BOUNDS, math.inf), totals, strict=True)
        return next((bound for bound, total in bounds if total and total >= wanted), 0.0)

    @property
    def mean_queue_depth(self) -> float:
        """Mean number of complete batches that were ready at each step."""
        return self.queue_depth_sum / self.num_steps if self.num_steps else 0.0

    def plus(self, other: LoaderStats, sign: int = 1) -> LoaderStats:
        """Return these statistics with the sums of `other` added or, with sign=-1, subtracted."""
        sums = {name: getattr(self, name) + sign * getattr(other, name) for name in _SUMS}
        counts = tuple(mine + sign * theirs for mine, theirs in zip(self.wait_counts, other.wait_counts, strict=True))
        return replace(self, **sums, work=self.work.plus(other.work, sign), wait_counts=counts)

    def since(self, earlier: LoaderStats) -> LoaderStats:
        """Return the sums since `earlier`, a previous result from the same loader."""
        return self.plus(earlier, sign=-1)

    def figures(self) -> dict[str, float]:
        """Return this rank's loader statistics for a training log, with names that begin with data_."""
        return {
            "data_batch_seconds": round(self.batch_seconds, 4),
            "data_fetch_seconds": round(self.work.fetch_seconds, 4),
            "data_decode_seconds": round(self.work.decode_seconds, 4),
            "data_bytes": self.work.num_bytes_fetched,
            "data_retries": self.work.num_retries,
            "data_substituted": self.work.num_substituted,
            "data_queue_depth": round(self.mean_queue_depth, 2),
        }

    def to_json(self) -> dict[str, Any]:
        """Return all statistics as JSON, with seconds and shares rounded to six decimal places."""
        record = {
            one.name: getattr(self, one.name)
            for one in fields(self)
            if one.name not in ("queue_depth_sum", "wait_counts")
        }
        record |= asdict(record.pop("work"))
        record |= {"wait_share": self.wait_share, "mean_queue_depth": self.mean_queue_depth}
        record |= {
            "wait_p50_seconds": _finite(self.wait_quantile(0.5)),
            "wait_p99_seconds": _finite(self.wait_quantile(0.99)),
        }
        record["last"] = self.last and self.last.to_json()
        parts = {"store": self.store, "cache": self.cache, "resources": self.resources, "verdict": self.verdict}
        record |= {name: value and asdict(value) for name, value in parts.items()}
        return {name: round(value, 6) if isinstance(value, float) else value for name, value in record.items()}


def _finite(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None  # JSON has no infinity


_SUMS = ("num_steps", "num_samples", "seconds", "wait_seconds", "batch_seconds", "queue_depth_sum")


class StatsMeter:
    """Running totals of batch statistics, updated as batches are handed over.

    Statistics that are read in another thread may contain only a part of the batch that is being added.

    num_steps: number of batches so far.
    """

    def __init__(self, resources: Resources | None = None) -> None:
        self._resources = resources
        self._work, self._wait_counts = BatchStats(), [0] * (len(WAIT_BOUNDS) + 1)
        self.num_steps = self._num_samples = self._queue_depth_sum = 0
        self._wait_seconds = self._batch_seconds = 0.0
        self._start = self._handed_over = 0.0
        self._last: tuple[BatchStats, int, float, float, float, int] | None = None

    def add(
        self, work: BatchStats, num_samples: int, *, wait_seconds: float, batch_seconds: float, queue_depth: int
    ) -> None:
        """Add a batch that is being handed over. See LoaderStats for the arguments."""
        # In place: a new LoaderStats for each batch would take most of the time of the handover.
        now = perf_counter()
        if not self.num_steps:
            self._start = self._handed_over = now - wait_seconds
        self._last = (work, num_samples, now - self._handed_over, wait_seconds, batch_seconds, queue_depth)
        self._handed_over = now
        self.num_steps += 1
        self._num_samples += num_samples
        self._wait_seconds += wait_seconds
        self._batch_seconds += batch_seconds
        self._queue_depth_sum += queue_depth
        self._wait_counts[bisect_left(WAIT_BOUNDS, wait_seconds)] += 1
        self._work.add(work)

    @property
    def seconds(self) -> float:
        """Seconds since the first batch was requested."""
        return perf_counter() - self._start if self.num_steps else 0.0

    def stats(self) -> LoaderStats:
        """Return the statistics so far."""
        last = self._last_stats()
        return LoaderStats(
            num_steps=self.num_steps,
            num_samples=self._num_samples,
            seconds=self.seconds,
            wait_seconds=self._wait_seconds,
            batch_seconds=self._batch_seconds,
            work=replace(self._work),
            queue_depth=0 if last is None else last.queue_depth,
            queue_depth_sum=self._queue_depth_sum,
            last=last,
            wait_counts=tuple(self._wait_counts),
            resources=self._resources,
        )

    def _last_stats(self) -> LoaderStats | None:
        if self._last is None:
            return None
        work, num_samples, seconds, wait_seconds, batch_seconds, queue_depth = self._last
        place = bisect_left(WAIT_BOUNDS, wait_seconds)
        return LoaderStats(
            num_steps=1,
            num_samples=num_samples,
            seconds=seconds,
            wait_seconds=wait_seconds,
            batch_seconds=batch_seconds,
            work=work,
            queue_depth=queue_depth,
            queue_depth_sum=queue_depth,
            wait_counts=tuple(int(number == place) for number in range(len(self._wait_counts))),
        )
