"""Quality of a shuffle, and its cost in reads, measured on the steps that a plan makes.

Places are counted within a bucket, because all samples of a batch are from one bucket. A sample's stored place is its
number in the order of the manifest. Its new place is the number of its slot in epoch 0. A full permutation of n samples
moves them by (n - 1 / n) / 3 places on average. The share of stored neighbors that it leaves at most k places apart is
(2 * n - k - 1) * k / (n * (n - 1)).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from streamvid.errors import ConfigError
from streamvid.plan.epoch import EpochPlan
from streamvid.plan.options import PlanOptions
from streamvid.plan.step import Step

Int64Array = npt.NDArray[np.int64]

WINDOW_STEPS = 64
_SLICE_STEPS = 3  # a whole step of neighbors on either side of the middle one
_MIN_SLICES = 4  # of a bucket, so that a large one is not judged from one window of shards
_MAX_RANKS = 8


@dataclass(frozen=True, slots=True)
class ShuffleQuality:
    """Result of `shuffle_quality`. All values except num_samples are means over the samples of all buckets.

    num_samples: number of samples that were measured.
    move: mean distance between a sample's new place and its stored place, relative to the mean distance in a full
        permutation; 0 for the stored order.
    neighbors_kept: share of samples whose stored successor is at most one step's samples away.
    neighbors_by_chance: the same share for a full permutation.
    shards_per_batch: number of shards that one rank's batch touches.
    reads_per_batch: number of reads for one rank's batch. Samples that are neighbors in a shard are read together.
    shards_per_window: number of shards that a rank touches in 64 steps, over all buckets.
    """

    num_samples: int
    move: float
    neighbors_kept: float
    neighbors_by_chance: float
    shards_per_batch: float
    reads_per_batch: float
    shards_per_window: float


def shuffle_quality(
    num_samples: Mapping[str, Sequence[int] | Int64Array],
    batch_sizes: Mapping[str, int],
    options: PlanOptions | None = None,
    num_ranks: int = 1,
    max_samples: int = 1 << 20,
) -> ShuffleQuality:
    """Measure the quality of the shuffle in epoch 0. The other arguments are those of `EpochPlan`.

    max_samples: approximate number of samples to measure. If there are more, only evenly spread slices of steps are
        measured, at least 12 steps per bucket. The tail is never measured, nor are buckets that do not fill a step.

    Raises ConfigError for invalid arguments, and PlanError if no bucket fills a step.
    """
    if isinstance(max_samples, bool) or not isinstance(max_samples, int) or max_samples < 1:
        raise ConfigError(f"max_samples={max_samples!r}: must be an integer of at least 1")
    # The samples of a bucket come in an order that none of these changes; with these a slot's number is its position.
    options = replace(options or PlanOptions(), tail="drop", sync="bucket", order="mixed", accumulate=1)
    plan = EpochPlan(num_samples, batch_sizes, options, num_ranks)
    plan.check()
    delivering = [report for report in plan.report() if report.num_steps]
    share = min(1.0, max_samples / sum(report.num_samples for report in delivering))
    found = []
    for report in delivering:
        name = report.bucket_id
        alone = EpochPlan({name: num_samples[name]}, {name: batch_sizes[name]}, options, num_ranks)
        found.append(_look_at(alone, np.asarray(num_samples[name], np.int64), report.num_samples, share))
    weights = [report.num_samples for report in delivering]
    means = np.average(np.array([figures for _, figures in found]), axis=0, weights=weights)
    move, kept, by_chance, shards, reads = (float(mean) for mean in means)
    return ShuffleQuality(
        sum(count for count, _ in found), move, kept, by_chance, shards, reads, _shards_per_window(plan)
    )


def _look_at(plan: EpochPlan, shard_sizes: Int64Array, total: int, share: float) -> tuple[int, tuple[float, ...]]:
    """Measure a plan of one bucket with `total` samples. Return (number of samples, figures).

    The figures are `move` to `reads_per_batch` in the order of ShuffleQuality.
    """
    starts = np.cumsum(shard_sizes) - shard_sizes
    seen = moved = candidates = kept = batches = shards = reads = 0
    for first, steps in _slices(plan, share):
        reach = steps[0].num_step_samples
        ordinals = np.concatenate([starts[step.shards] + step.indices for step in steps])
        places = first * reach + np.arange(len(ordinals))
        seen += len(ordinals)
        moved += int(np.abs(places - ordinals).sum())
        is_last_slice = first + len(steps) == plan.num_steps
        inner = slice(reach if first else 0, None if is_last_slice else -reach)
        distances = _distances_to_successors(ordinals)[inner]
        candidates += len(distances) - int((ordinals[inner] == total - 1).sum())
        kept += int((distances <= reach).sum())
        for step in steps:
            for rank in _some_ranks(plan.num_ranks):
                of_rank = _reads(step.for_rank(rank))
                batches, shards, reads = batches + 1, shards + of_rank[0], reads + of_rank[1]
    by_chance = _by_chance(total, min(reach, total - 1))
    full_move = max(1.0, (total - 1 / total) / 3)
    return seen, (
        moved / seen / full_move,
        kept / max(1, candidates),
        by_chance,
        shards / batches,
        reads / batches,
    )


def _slices(plan: EpochPlan, share: float) -> Iterator[tuple[int, list[Step]]]:
    """Yield (first step, consecutive steps) for all steps, or for slices that contain about `share` of them."""
    num_steps = plan.num_steps
    count = max(_MIN_SLICES, round(share * num_steps / _SLICE_STEPS))
    if share == 1.0 or count * _SLICE_STEPS >= num_steps:
        yield 0, plan.steps(0, num_steps)
        return
    # Rounding spreads them evenly; none overlap, since there are more steps than they take.
    for first in np.linspace(0, num_steps - _SLICE_STEPS, count).round().astype(int).tolist():
        yield first, plan.steps(first, first + _SLICE_STEPS)


def _distances_to_successors(ordinals: Int64Array) -> Int64Array:
    """Return the distance from each sample to its stored successor. If there is none, it is a very large number."""
    order = np.argsort(ordinals, kind="stable")
    follows = np.flatnonzero(np.diff(ordinals[order]) == 1)
    distances = np.full(len(ordinals), np.iinfo(np.int64).max)
    distances[order[follows]] = np.abs(order[follows + 1] - order[follows])
    return distances


def _by_chance(total: int, reach: int) -> float:
    """Return the share of all pairs of places that are at most `reach` apart."""
    return reach * (2 * total - reach - 1) / max(1, total * (total - 1))


def _some_ranks(num_ranks: int) -> list[int]:
    return sorted(set(np.linspace(0, num_ranks - 1, _MAX_RANKS).round().astype(int).tolist()))


def _reads(batch: Step) -> tuple[int, int]:
    """Return (number of shards, number of reads) for a batch."""
    order = np.lexsort((batch.indices, batch.shards))
    is_new_shard = np.diff(batch.shards[order]) != 0
    is_new_read = is_new_shard | (np.diff(batch.indices[order]) > 1)
    return 1 + int(is_new_shard.sum()), 1 + int(is_new_read.sum())


def _shards_per_window(plan: EpochPlan) -> float:
    counts = []
    for first in np.linspace(0, max(0, plan.num_steps - WINDOW_STEPS), _MIN_SLICES).round().astype(int).tolist():
        for rank in _some_ranks(plan.num_ranks)[:_MIN_SLICES]:
            steps = plan.steps(first, first + WINDOW_STEPS, rank)
            counts.append(len({(step.bucket_id, shard) for step in steps for shard in step.shards.tolist()}))
    return sum(counts) / len(counts)
