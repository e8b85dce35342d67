"""Search for batch sizes at which the steps of all buckets take about the same time.

The search follows Open-Sora's cost model: the base bucket gets the largest batch that fits in memory, and every other
bucket gets the largest batch whose step takes no longer than the step of the base bucket. Ranks then rarely wait for
each other.

    base      1 2 4 8 ✗ 6 7 ✗                                   largest that runs: 6, in 2.1 s
    another   guess 24 (same number of pixels) 48 slower 36 42 39 …     largest within 2.1 s: 38
"""

from __future__ import annotations

import gc
import logging
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamvid.config import require_integer
from streamvid.errors import ConfigError

_log = logging.getLogger(__name__)

MAX_BATCH_SIZE = 1024
Step = Callable[[tuple[int, ...]], object]


@dataclass(frozen=True, slots=True)
class Trial:
    """Trial with one batch size.

    seconds: median duration of the timed steps, or None if a step ran out of memory.
    """

    bucket_id: str
    batch_size: int
    seconds: float | None


@dataclass(frozen=True, slots=True)
class BatchSizeSearch:
    """Result of `search_batch_sizes`.

    base: id of the bucket whose step time is the limit.
    sizes: bucket id → samples per rank per step, for use as `batch_size=`.
    seconds: bucket id → seconds per step with that batch size.
    too_large: buckets omitted from `sizes` because not even one sample fits in memory.
    slower: buckets whose step takes longer than the base bucket's step even with batch size 1.
    """

    base: str
    sizes: Mapping[str, int]
    seconds: Mapping[str, float]
    too_large: tuple[str, ...]
    slower: tuple[str, ...]
    trials: tuple[Trial, ...]

    @property
    def measurements(self) -> list[tuple[str, int, float]]:
        """(bucket id, batch size, seconds per step) tuples, one per completed trial, as input for `fit_costs`."""
        return [(t.bucket_id, t.batch_size, t.seconds) for t in self.trials if t.seconds is not None]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serializable dict."""
        return {
            "base": self.base,
            "batch_size": dict(self.sizes),
            "seconds": dict(self.seconds),
            "too_large": list(self.too_large),
            "slower": list(self.slower),
            "trials": [[trial.bucket_id, trial.batch_size, trial.seconds] for trial in self.trials],
        }


def search_batch_sizes(
    step: Step,
    shapes: Sequence[tuple[str, tuple[int, ...]]],
    *,
    base: str | None = None,
    max_batch_size: int = MAX_BATCH_SIZE,
    warmup: int = 5,
    steps: int = 5,
    tolerance: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
    on_trial: Callable[[Trial], None] | None = None,
) -> BatchSizeSearch:
    """Find, for each bucket, the largest batch size whose step takes no longer than the base bucket's step.

    The base bucket gets the largest batch size that fits in memory.

    step: function that runs one training step on a batch of the given shape, which is (B, …) in the loader's layout.
        The function creates the batch itself, and its result is ignored. The search waits for work that the function
        queues on a CUDA device.
    shapes: `loader.shapes`; the batch sizes in them are ignored.
    base: id of the base bucket; None for the bucket with the largest samples.
    warmup: number of unmeasured steps before each measurement.
    steps: number of measured steps; the median of their durations is used.
    tolerance: fraction of the base bucket's step time by which the steps of other buckets may exceed it.
    clock: function that returns the time in seconds.
    on_trial: function to call after each trial.

    A batch size is too large if its step runs out of memory (torch.cuda.OutOfMemoryError, MemoryError). Any other
    error from the step is propagated.
    Each process measures only its own steps, so wrap the model as in training and run one process per rank.
    Raises ConfigError for invalid arguments, or if the base bucket runs out of memory with one sample.
    """
    named = _named_shapes(shapes)
    base = _checked_base(base, named)
    for name, value, least in (("max_batch_size", max_batch_size, 1), ("warmup", warmup, 0), ("steps", steps, 1)):
        require_integer(name, value, least)
    if not 0 <= tolerance <= 1:
        raise ConfigError(f"tolerance={tolerance!r}: must be a number from 0 to 1, such as 0.05")
    search = _Search(step, named, warmup, steps, clock, on_trial)
    size = _largest(lambda n: search.seconds(base, n) is not None, 1, max_batch_size)
    if not size:
        raise ConfigError(
            f"not even one sample from bucket {base} fits in memory; reduce memory use (activation checkpointing, "
            f"sharding), pass a smaller bucket as base, or leave bucket {base} out of the dataset"
        )
    limit = (search.seconds(base, size) or 0.0) * (1 + tolerance)
    found = {base: size}
    for bucket_id, sample in named.items():
        if bucket_id != base:
            guess = size * math.prod(named[base]) // math.prod(sample)
            found[bucket_id] = _largest(search.is_within(bucket_id, limit), guess, max_batch_size)
    return search.result(base, found)


@dataclass(frozen=True)
class _Search:
    """Search for batch sizes. No trial is run more than once.

    samples: bucket id → shape of one sample.
    """

    step: Step
    samples: Mapping[str, tuple[int, ...]]
    warmup: int
    steps: int
    clock: Callable[[], float]
    on_trial: Callable[[Trial], None] | None
    trials: dict[tuple[str, int], Trial] = field(default_factory=dict)

    def seconds(self, bucket_id: str, batch_size: int) -> float | None:
        """Return the median seconds per step, or None if the step runs out of memory."""
        trial = self.trials.get((bucket_id, batch_size))
        if trial is None:
            trial = Trial(bucket_id, batch_size, self._measure((batch_size, *self.samples[bucket_id])))
            self.trials[bucket_id, batch_size] = trial
            what = "out of memory" if trial.seconds is None else f"{trial.seconds:.4g} s per step"
            _log.info("bucket %s, %d samples: %s", bucket_id, batch_size, what)
            if self.on_trial is not None:
                self.on_trial(trial)
        return trial.seconds

    def is_within(self, bucket_id: str, limit: float) -> Callable[[int], bool]:
        """Return a predicate that accepts batch sizes whose step takes at most `limit` seconds."""

        def fits(batch_size: int) -> bool:
            seconds = self.seconds(bucket_id, batch_size)
            return seconds is not None and seconds <= limit

        return fits

    def result(self, base: str, found: Mapping[str, int]) -> BatchSizeSearch:
        sizes, too_large, slower = {}, [], []
        for bucket_id in self.samples:
            size = found[bucket_id]
            if not size and self.seconds(bucket_id, 1) is None:
                too_large.append(bucket_id)
                continue
            if not size:
                slower.append(bucket_id)
            sizes[bucket_id] = max(1, size)
        seconds = {name: value for name, size in sizes.items() if (value := self.seconds(name, size)) is not None}
        return BatchSizeSearch(base, sizes, seconds, tuple(too_large), tuple(slower), tuple(self.trials.values()))

    def _measure(self, shape: tuple[int, ...]) -> float | None:
        try:
            for _ in range(self.warmup):
                self.step(shape)
            return statistics.median(self._timed(shape) for _ in range(self.steps))
        except Exception as error:
            if not _is_out_of_memory(error):
                raise
        # The memory of the failed step can be freed only here, once the error and its frames are gone.
        _free_memory()
        return None

    def _timed(self, shape: tuple[int, ...]) -> float:
        _wait_for_device()
        start = self.clock()
        self.step(shape)
        _wait_for_device()
        return self.clock() - start


def _largest(fits: Callable[[int], bool], guess: int, most: int) -> int:
    """Return the largest number from 1 to `most` for which `fits` returns True, or 0 if no number fits.

    If `fits` accepts a number, it must accept all smaller numbers too. The search doubles or halves the guess and then
    bisects, so a good guess needs few trials.
    """
    low, high = 0, most + 1
    number = min(max(1, guess), most)
    while high - low > 1:
        if fits(number):
            low = number
        else:
            high = number
        if not low:
            number = max(1, high // 2)
        elif high > most:
            number = min(2 * low, most)
        else:
            number = (low + high) // 2
    return low


def _is_out_of_memory(error: BaseException) -> bool:
    torch = sys.modules.get("torch")
    return isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.cuda.OutOfMemoryError))


def _uses_cuda() -> Any:
    # torch matters only if the step has imported it, so this file never imports it.
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_initialized() else None


def _wait_for_device() -> None:
    torch = _uses_cuda()
    if torch is not None:
        torch.cuda.synchronize()


def _free_memory() -> None:
    gc.collect()
    torch = _uses_cuda()
    if torch is not None:
        torch.cuda.empty_cache()


def _named_shapes(shapes: Sequence[tuple[str, tuple[int, ...]]]) -> dict[str, tuple[int, ...]]:
    """Map each bucket id to the shape of one sample, in the given order."""
    named: dict[str, tuple[int, ...]] = {}
    for bucket_id, shape in shapes:
        if bucket_id in named:
            raise ConfigError(f"shapes contains bucket {bucket_id!r} more than once; pass loader.shapes unchanged")
        if len(shape) < 2 or min(shape) < 1:
            raise ConfigError(
                f"shapes[{bucket_id!r}]={shape!r}: must have at least 2 dimensions, all above 0; pass loader.shapes"
            )
        named[bucket_id] = tuple(shape[1:])
    if not named:
        raise ConfigError("shapes is empty; pass loader.shapes")
    return named


def _checked_base(base: str | None, named: Mapping[str, tuple[int, ...]]) -> str:
    if base is None:
        return max(named, key=lambda bucket_id: math.prod(named[bucket_id]))
    if base not in named:
        raise ConfigError(f"base={base!r} is not a bucket in shapes; allowed: {', '.join(named)}")
    return base
