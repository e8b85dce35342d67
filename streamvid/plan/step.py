"""Step of an epoch: its samples, assigned to the ranks so that each rank reads few shards."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from streamvid.errors import ConfigError
from streamvid.plan.hashing import hash_below, hash_text
from streamvid.plan.lane import Lane
from streamvid.plan.mix import MixedStream, resolve
from streamvid.plan.span import BucketSpan

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# Three kinds of repeats use positions past the end of a block: those that complete a bucket's last batch, a lane's last
# step, and a group of steps. A resumed run may use the same positions again. Each kind has its own range of visits, so
# that no visit occurs twice.
TAIL, FILL_STEP, FILL_GROUP = 0, 1 << 31, 1 << 30
FILLER_VISITS = 1 << 19  # a group of at most 2**10 steps, begun with another `accumulate`, has less than 2**11


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """Samples in one step, for all ranks or, after `for_rank`, for one rank.

    bucket_ids: bucket of each rank.
    bounds: int64, with shape (num_ranks + 1,); boundaries between the ranks' samples in the arrays below, which have
        shape (samples,). Each run of `PlanOptions.shard_locality` samples is sorted by shard and index, separately for
        each dataset.
    sources: int64, index of the dataset.
    shards: int64, index of the shard within the dataset's bucket, in manifest order.
    indices: int64, index of the sample in the shard.
    visits: int64, number of the pass over the bucket, from 0; negative for repeats. No sample has the same
        visit number twice, except for repeats with tail="pad" if costs change within an epoch.
    is_repeat: bool, True for a repeat that the tail policy adds.
    num_step_samples: total number of samples over all ranks.
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
        """Bucket of all ranks in this step. Raises ConfigError if ranks have different buckets, as with sync="cost"."""
        if len(set(self.bucket_ids)) != 1:
            there = ", ".join(sorted(set(self.bucket_ids)))
            raise ConfigError(f"the ranks of this step have different buckets ({there}); call for_rank(rank) first")
        return self.bucket_ids[0]

    def for_rank(self, rank: int) -> Step:
        """Return one rank's part of the step. Raises ConfigError if the step has no such rank."""
        if not 0 <= rank < len(self.bucket_ids):
            raise ConfigError(f"rank={rank}: must be a rank of this step, from 0 to {len(self.bucket_ids) - 1}")
        part = slice(int(self.bounds[rank]), int(self.bounds[rank + 1]))
        return Step(
            bucket_ids=(self.bucket_ids[rank],),
            bounds=np.array([0, part.stop - part.start]),
            sources=self.sources[part],
            shards=self.shards[part],
            indices=self.indices[part],
            visits=self.visits[part],
            is_repeat=self.is_repeat[part],
            num_step_samples=self.num_step_samples,
        )


@dataclass(frozen=True, slots=True)
class FinalStep:
    """Final step of one bucket: a remainder (tail="shrink" or "uneven"), or repeats that complete a group of steps.

    visits_from: start of the range of visit numbers for repeats. It is TAIL for a remainder, and at least FILL_GROUP
        for repeats that complete a group.
    """

    span: BucketSpan
    position: int
    num_samples: int
    visits_from: int = TAIL

    def bound(self, rank: int) -> int:
        """Return the index of a rank's first sample. Samples are split as evenly as possible.

        The ranks that get one more sample are consecutive, starting at a rank that depends on the bucket. Otherwise,
        with many small buckets, the lowest ranks would get most of the samples.
        """
        num_ranks = self.span.num_ranks
        share, more = divmod(self.num_samples, num_ranks)
        first = hash_below(num_ranks, hash_text(self.span.bucket_id))
        wrapped = max(0, first + more - num_ranks)
        return rank * share + min(rank, wrapped) + min(max(rank - first, 0), more - wrapped)


@dataclass(frozen=True, slots=True)
class Draw:
    """Positions in one bucket, one row per step or batch. Each row is sorted in stretches before `mine` is selected.

    positions: positions in the bucket's stream, with shape (rows, samples).
    mine: slice of each row.
    places: indices of the selected samples among all samples in the draft.
    visits_from: start of the range of visit numbers for repeats.
    """

    span: BucketSpan
    stream: MixedStream
    positions: Int64Array
    mine: slice
    places: Any
    visits_from: int = TAIL


@dataclass(frozen=True, slots=True)
class Draft:
    """Steps whose samples have not been looked up yet.

    draws: samples to look up. All other fields have one entry per step.
    """

    bucket_ids: Sequence[tuple[str, ...]]
    bounds: Sequence[Int64Array]
    num_step_samples: Sequence[int]
    draws: Sequence[Draw]


def draft_bucket(span: BucketSpan, stream: MixedStream, steps: Int64Array, ranks: range, locality: int) -> Draft:
    """Draft the samples for `ranks` in steps of one bucket, counted from the span's position."""
    size = span.batch_size
    first, last = _stretches(ranks.start * size, ranks.stop * size, span.global_batch, locality)
    positions = span.position + steps[:, None] * span.global_batch + np.arange(first, last)
    mine = slice(ranks.start * size - first, ranks.stop * size - first)
    names, bounds = (span.bucket_id,) * len(ranks), np.arange(len(ranks) + 1) * size
    count = len(steps)
    return Draft(
        [names] * count, [bounds] * count, [span.global_batch] * count, [Draw(span, stream, positions, mine, ...)]
    )


def draft_final(final: FinalStep, stream: MixedStream, ranks: range, locality: int) -> Draft:
    """Draft the samples for `ranks` in a final step."""
    bounds = np.array([final.bound(rank) for rank in range(ranks.start, ranks.stop + 1)], np.int64)
    first, last = _stretches(int(bounds[0]), int(bounds[-1]), final.num_samples, locality)
    positions = final.position + np.arange(first, last)[None]
    mine = slice(int(bounds[0]) - first, int(bounds[-1]) - first)
    draw = Draw(final.span, stream, positions, mine, ..., final.visits_from)
    return Draft([(final.span.bucket_id,) * len(ranks)], [bounds - bounds[0]], [final.num_samples], [draw])


def draft_lane(lane: Lane, streams: Mapping[str, MixedStream], steps: Int64Array, ranks: range) -> Draft:
    """Draft the samples for `ranks` in consecutive steps of a lane with several buckets."""
    (numbers, units, extra), totals = lane.units(steps, ranks)
    sizes = np.array([span.batch_size for span in lane.spans])[numbers]
    starts = np.cumsum(sizes) - sizes
    draws = []
    for number, span in enumerate(lane.spans):
        each = np.arange(span.batch_size)
        for kind, begin in ((TAIL, span.position), (FILL_STEP, span.end)):
            here = np.flatnonzero((numbers == number) & (extra == (kind == FILL_STEP)))
            if len(here):
                positions, places = begin + units[here][:, None] * span.batch_size + each, starts[here][:, None] + each
                draws.append(Draw(span, streams[span.bucket_id], positions, slice(None), places.ravel(), kind))
    ids = np.array([span.bucket_id for span in lane.spans], object)
    names = [tuple(row) for row in ids[numbers].reshape(len(steps), -1).tolist()]
    bounds = np.zeros((len(steps), len(ranks) + 1), np.int64)
    np.cumsum(sizes.reshape(len(steps), -1), axis=1, out=bounds[:, 1:])
    return Draft(names, list(bounds), totals.tolist(), draws)


def assign_steps(drafts: Sequence[Draft], locality: int) -> Iterator[Step]:
    """Yield the steps from all drafts, one draft after the other."""
    draws = [draw for draft in drafts for draw in draft.draws]
    rows = iter(zip(draws, _resolve(draws), strict=True))
    for draft in drafts:
        ends = np.cumsum([int(bounds[-1]) for bounds in draft.bounds]).tolist()
        columns = np.empty((4, ends[-1]), np.int64)
        for draw, found in itertools.islice(rows, len(draft.draws)):
            columns[:, draw.places] = _assigned(draw, *found, locality).reshape(4, -1)
        sources, shards, indices, visits = columns
        is_repeat = visits < 0
        each = zip(draft.bucket_ids, draft.bounds, draft.num_step_samples, [0, *ends], ends, strict=False)
        for names, bounds, total, first, last in each:
            part = slice(first, last)
            yield Step(names, bounds, sources[part], shards[part], indices[part], visits[part], is_repeat[part], total)


def _stretches(first: int, last: int, total: int, locality: int) -> tuple[int, int]:
    """Return the range [first, last) of a step's samples, extended to whole stretches of `locality` samples."""
    return first // locality * locality, min(total, -(-last // locality) * locality)


def _assigned(draw: Draw, ordinals: Int64Array, visits: Int64Array, locality: int) -> Int64Array:
    """Return the sources, shards, indices and visits of the selected samples, with shape (4, rows, samples).

    Every stretch is sorted before the slice `draw.mine` is selected.
    """
    mine, rows = draw.mine, np.arange(len(ordinals))[:, None]
    if locality > 1:
        order = np.empty(ordinals.shape, np.intp)
        for first in range(0, ordinals.shape[1], locality):
            stretch = slice(first, first + locality)
            order[:, stretch] = _sorted(draw.stream, ordinals[:, stretch]) + first
        ordinals, visits = ordinals[rows, order[:, mine]], visits[rows, order[:, mine]]
    else:
        ordinals, visits = ordinals[:, mine], visits[:, mine]
    return np.stack([*draw.stream.locate(ordinals), visits])


def _sorted(stream: MixedStream, ordinals: Int64Array) -> npt.NDArray[np.intp]:
    """Return the indices that sort each row, with shape (rows, samples).

    Samples change places only with samples from the same dataset.
    """
    # Stable: among equal samples (repeats), the earlier position comes first.
    order = np.argsort(ordinals, axis=1, kind="stable")
    if stream.has_several:  # ordinals count one dataset after the other, and so does `order`
        places = np.argsort(stream.member_of(ordinals), axis=1, kind="stable")
        np.put_along_axis(order, places, order.copy(), axis=1)
    return order


def _resolve(draws: Sequence[Draw]) -> list[tuple[Int64Array, Int64Array]]:
    """Return (ordinals, visits) for each draw.

    Positions past the end of the block wrap around to its start and count as separate visits.
    """
    wraps = [_wraps(draw) for draw in draws]
    each = zip(draws, wraps, strict=True)
    resolved = resolve([(draw.stream, draw.positions - wrap * draw.span.length) for draw, wrap in each])
    return [
        (ordinals, _visits(draw, wrap, passes, members))
        for draw, wrap, (ordinals, passes, members) in zip(draws, wraps, resolved, strict=True)
    ]


def _wraps(draw: Draw) -> Int64Array | int:
    """Return the number of times that each position wraps around the block, or 0 if no position wraps."""
    if not draw.positions.size or int(draw.positions.max()) < draw.span.end:
        return 0
    return np.maximum(draw.positions - draw.span.end, -1) // draw.span.length + 1


def _visits(draw: Draw, wraps: Int64Array | int, passes: Int64Array, members: Int64Array) -> Int64Array:
    if isinstance(wraps, int):
        return passes
    first, num_passes = draw.stream.passes_in(draw.span.epoch)
    # A block may contain several passes of a dataset, and so the same sample more than once.
    numbers = (wraps - 1) * num_passes[members] + passes - first[members] + 1
    visits = -((draw.span.epoch << 32) + draw.visits_from + numbers)
    return np.where(wraps > 0, visits, passes)
