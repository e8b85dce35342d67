"""One step: the samples that all ranks take together, dealt so that each rank reads few shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from streamvid.errors import ConfigError
from streamvid.plan.lane import Lane
from streamvid.plan.mix import MixedStream
from streamvid.plan.tail import BucketSpan

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

_Row: TypeAlias = tuple[Int64Array, Int64Array, Int64Array, Int64Array, BoolArray]

# Positions past the end of a block are taken for three reasons, and perhaps in several lives of a run; each has visits
# of its own, so that none occurs twice: those of a bucket's last batch, of a lane's last step, and of the steps that
# complete a group, by their number.
TAIL, FILL_STEP, FILL_GROUP = 0, 1 << 31, 1 << 30
FILLER_VISITS = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What all ranks take at a step or, after `for_rank`, one of them.

    bucket_ids: the bucket of each rank. bounds: int64 (num_ranks + 1,), where each rank's samples begin and end in the
        arrays, which are (samples,), sorted by shard, then index, in stretches of `PlanOptions.deal` samples.
    sources: int64, number of the dataset. shards: int64, number of the shard within the dataset's bucket, in manifest
        order. indices: int64, place in the shard.
    visits: int64, which pass over its bucket the sample is in, from 0; repeats have negative visits: no visit occurs
        twice for a sample of a dataset.
    is_repeat: bool, whether it is one that the tail policy repeats.
    num_step_samples: samples of all ranks together.
    """

    bucket_ids: tuple[str, ...]
    bounds: Int64Array
    sources: Int64Array
    shards: Int64Array
    indices: Int64Array
    visits: Int64Array
    is_repeat: BoolArray
    num_step_samples: int

    @property
    def bucket_id(self) -> str:
        """The bucket that all these ranks have; ConfigError where they differ, as with sync="cost"."""
        if len(set(self.bucket_ids)) != 1:
            there = ", ".join(sorted(set(self.bucket_ids)))
            raise ConfigError(f"the ranks of this step have several buckets ({there}); ask for_rank(rank) first")
        return self.bucket_ids[0]

    def for_rank(self, rank: int) -> Step:
        """The part of a rank."""
        if not 0 <= rank < len(self.bucket_ids):
            raise ConfigError(f"rank={rank}: this step has ranks 0 to {len(self.bucket_ids) - 1}")
        part = slice(int(self.bounds[rank]), int(self.bounds[rank + 1]))
        return Step(
            (self.bucket_ids[rank],), np.array([0, part.stop - part.start]), self.sources[part], self.shards[part],
            self.indices[part], self.visits[part], self.is_repeat[part], self.num_step_samples,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class FinalStep:
    """A step of one bucket after all others of the epoch: what "shrink" and "uneven" take, or one that fills a group.

    visits_from: TAIL, or FILL_GROUP and more for a filler.
    """

    span: BucketSpan
    position: int
    num_samples: int
    visits_from: int = TAIL

    def bound(self, rank: int) -> int:
        """Where a rank's samples begin: as even as can be, lower ranks first."""
        share, more = divmod(self.num_samples, self.span.num_ranks)
        return rank * share + min(rank, more)


def deal_bucket(span: BucketSpan, stream: MixedStream, steps: Int64Array, ranks: range, deal: int) -> Iterator[Step]:
    """The part of `ranks` in steps of one bucket, numbered from the span's position."""
    size = span.batch_size
    first, last = _stretches(ranks.start * size, ranks.stop * size, span.global_batch, deal)
    positions = span.position + steps[:, None] * span.global_batch + np.arange(first, last)
    mine = slice(ranks.start * size - first, ranks.stop * size - first)
    rows = _rows(span, stream, positions, TAIL, deal, mine)
    names, bounds = (span.bucket_id,) * len(ranks), np.arange(len(ranks) + 1) * size
    return (Step(names, bounds, *row, span.global_batch) for row in rows)


def deal_final(final: FinalStep, stream: MixedStream, ranks: range, deal: int) -> Step:
    """The part of `ranks` in a final step."""
    bounds = np.array([final.bound(rank) for rank in range(ranks.start, ranks.stop + 1)], np.int64)
    first, last = _stretches(int(bounds[0]), int(bounds[-1]), final.num_samples, deal)
    positions = final.position + np.arange(first, last)[None]
    mine = slice(int(bounds[0]) - first, int(bounds[-1]) - first)
    (row,) = _rows(final.span, stream, positions, final.visits_from, deal, mine)
    return Step((final.span.bucket_id,) * len(ranks), bounds - bounds[0], *row, final.num_samples)


def deal_lane(
    lane: Lane, streams: Mapping[str, MixedStream], steps: Int64Array, ranks: range, deal: int
) -> Iterator[Step]:
    """The part of `ranks` in neighbouring steps of a lane of several buckets."""
    first, last = int(steps[0]), int(steps[-1]) + 1
    numbers, units, extra = (part.reshape(-1, lane.num_ranks) for part in lane.units(*_times(lane, first, last)))
    totals = np.array([span.batch_size for span in lane.spans])[numbers].sum(axis=1)
    numbers, units, extra = (part[:, ranks.start : ranks.stop] for part in (numbers, units, extra))
    found: dict[tuple[int, int], _Row] = {}
    for number, span in enumerate(lane.spans):
        for kind, begin in ((TAIL, span.position), (FILL_STEP, span.end)):
            rows, columns = np.nonzero((numbers == number) & (extra == (kind == FILL_STEP)))
            if len(rows):
                positions = begin + units[rows, columns][:, None] * span.batch_size + np.arange(span.batch_size)
                dealt = _rows(span, streams[span.bucket_id], positions, kind, deal, slice(None))
                found.update(zip(zip(rows.tolist(), columns.tolist(), strict=True), dealt, strict=True))
    for row in (steps - first).tolist():
        parts = [found[row, column] for column in range(len(ranks))]
        bounds = np.cumsum([0, *(len(part[0]) for part in parts)])
        names = tuple(lane.spans[number].bucket_id for number in numbers[row].tolist())
        sources, shards, indices, visits, is_repeat = (np.concatenate(column) for column in zip(*parts, strict=True))
        yield Step(names, bounds, sources, shards, indices, visits, is_repeat, int(totals[row]))


def _times(lane: Lane, first: int, last: int) -> tuple[int, int]:
    return first * lane.num_ranks, last * lane.num_ranks


def _stretches(first: int, last: int, total: int, deal: int) -> tuple[int, int]:
    """The stretches of `deal` samples, counted from the step's first, that hold [first, last)."""
    return first // deal * deal, min(total, -(-last // deal) * deal)


def _rows(
    span: BucketSpan, stream: MixedStream, positions: Int64Array, visits_from: int, deal: int, mine: slice
) -> Iterator[_Row]:
    """Of each row of positions: sources, shards, indices, visits, is_repeat of the part `mine`, sorted in stretches."""
    ordinals, visits = _resolve(span, stream, positions, visits_from)
    if deal > 1:
        order = np.empty(ordinals.shape, np.intp)
        for first in range(0, ordinals.shape[1], deal):
            stretch = slice(first, first + deal)
            # Stable: of equal samples, which repeats make, the earlier position comes first.
            order[:, stretch] = np.argsort(ordinals[:, stretch], axis=1, kind="stable") + first
        ordinals = np.take_along_axis(ordinals, order[:, mine], axis=1)
        visits = np.take_along_axis(visits, order[:, mine], axis=1)
    else:
        ordinals, visits = ordinals[:, mine], visits[:, mine]
    return zip(*stream.locate(ordinals), visits, visits < 0, strict=True)


def _resolve(
    span: BucketSpan, stream: MixedStream, positions: Int64Array, visits_from: int
) -> tuple[Int64Array, Int64Array]:
    """(ordinals, visits); positions past the end of the block wrap into it and have visits of their own."""
    if positions.size == 0:
        return positions, positions
    if int(positions.max()) < span.end:
        ordinals, passes, _ = stream.resolve(positions)
        return ordinals, passes
    wraps = np.maximum(positions - span.end, -1) // span.length + 1
    ordinals, passes, members = stream.resolve(positions - wraps * span.length)
    first, num_passes = stream.passes_in(span.epoch)
    # A block may hold several passes of a dataset, and then the same sample more than once.
    numbers = (wraps - 1) * num_passes[members] + passes - first[members] + 1
    visits = -((span.epoch << 32) + visits_from + numbers)
    return ordinals, np.where(wraps > 0, visits, passes)
