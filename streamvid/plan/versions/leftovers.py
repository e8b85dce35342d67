"""Samples carried over from the previous version of the datasets, which an epoch delivers first.

Samples that tail="carry" has carried over have positions only in the previous version. They are delivered first,
bucket by bucket, in steps in which all ranks take part. The last step of each bucket can be smaller, as with
tail="shrink". Samples that the new version no longer contains are omitted. After these steps, the new version's epoch
begins at its own start.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from streamvid.errors import StateError
from streamvid.plan import check
from streamvid.plan.epoch import EpochPlan
from streamvid.plan.mix import resolve
from streamvid.plan.position import Cursor
from streamvid.plan.span import BucketReport
from streamvid.plan.step import FILL_GROUP, FILLER_VISITS, TAIL, Step

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
IsKept: TypeAlias = Callable[[str, Int64Array, Int64Array, Int64Array], BoolArray]
"""Function that takes (bucket id, sources, shards, indices) and returns which samples the new version contains."""

_MAX_SAMPLES = 1 << 24
_SCANNED_SAMPLES = 1 << 12


@dataclass(frozen=True, eq=False)
class _Rest:
    """Samples from one bucket, in the order of its stream. Arrays have one entry per sample."""

    bucket_id: str
    positions: Int64Array
    sources: Int64Array
    shards: Int64Array
    indices: Int64Array
    visits: Int64Array

    def __len__(self) -> int:
        return len(self.positions)


@dataclass(frozen=True, eq=False)
class _LeftoverStep:
    """One step: samples [first, first + count) from a bucket.

    Sample numbers past the bucket's last sample wrap around to the first samples, which are repeats.

    visits_from: start of the range of visit numbers for repeats. It is above TAIL in a step that contains only repeats.
    """

    rest: _Rest
    first: int
    count: int
    visits_from: int = TAIL

    def step(self, ranks: range, num_ranks: int, epoch: int, first_source: int) -> Step:
        """Return the step's samples for the given ranks."""
        share = self.count // num_ranks
        numbers = self.first + np.arange(ranks.start * share, ranks.stop * share)
        wraps, places = numbers // len(self.rest) + (self.visits_from != TAIL), numbers % len(self.rest)
        visits = np.where(wraps > 0, -((epoch << 32) + self.visits_from + wraps), self.rest.visits[places])
        return Step(
            bucket_ids=(self.rest.bucket_id,) * len(ranks),
            bounds=np.arange(len(ranks) + 1) * share,
            sources=self.rest.sources[places] + first_source,
            shards=self.rest.shards[places],
            indices=self.rest.indices[places],
            visits=visits,
            is_repeat=visits < 0,
            num_step_samples=self.count,
        )


class Leftovers:
    """Steps that deliver, on all ranks, the few samples carried over from the previous epoch.

    plan: plan for the previous epoch, with the previous version of the datasets.
    carried: bucket id → position of the first carried sample in that version.
    phase: number of steps done in an incomplete group of `accumulate` steps. Repeats complete the last group.
    is_kept: function that returns which samples the new version still contains.
    Raises StateError for positions that the plan does not contain.
    """

    def __init__(self, plan: EpochPlan, carried: Mapping[str, int], phase: int, is_kept: IsKept) -> None:
        self._plan, self._is_kept, self.epoch = plan, is_kept, plan.cursor.epoch
        check.check_cursor(Cursor(positions=carried), plan.batch_sizes)
        ends = {name: plan.end_of(name) for name in carried}
        if any(position > ends[name] for name, position in carried.items()) or (
            sum(ends[name] - position for name, position in carried.items()) > _MAX_SAMPLES
        ):
            raise StateError(
                f"carried={dict(carried)} in the loader state: no position may exceed its limit ({ends}), and "
                f"all positions together may be at most {_MAX_SAMPLES} samples below their limits; the state is "
                "damaged. Use an older state, or start without a state"
            )
        self._rests = [self._rest(name, position, ends[name]) for name, position in sorted(carried.items())]
        real = [part for rest in self._rests for part in self._parts(rest)]
        self._places = [(part.rest.bucket_id, part.first + part.count) for part in real]
        self._steps = [*real, *self._fillers(len(real), phase)]

    def _rest(self, bucket_id: str, start: int, end: int) -> _Rest:
        """Return the samples in a range of positions, except samples that are no longer in the datasets."""
        stream, positions = self._plan.stream(bucket_id), np.arange(start, end, dtype=np.int64)
        ((ordinals, visits, _),) = resolve([(stream, positions)])
        sources, shards, indices = stream.locate(ordinals)
        kept = self._is_kept(bucket_id, sources, shards, indices)
        return _Rest(bucket_id, positions[kept], sources[kept], shards[kept], indices[kept], visits[kept])

    def _parts(self, rest: _Rest) -> Sequence[_LeftoverStep]:
        num_ranks = self._plan.num_ranks
        size = num_ranks * self._plan.batch_sizes[rest.bucket_id]
        counts = [min(size, len(rest) - first) for first in range(0, len(rest), size)]
        return [_LeftoverStep(rest, n * size, -(-count // num_ranks) * num_ranks) for n, count in enumerate(counts)]

    def _fillers(self, num_steps: int, phase: int) -> Sequence[_LeftoverStep]:
        """Return the steps, with one repeat per rank, that complete the last group of `accumulate` steps."""
        size = self._plan.options.accumulate
        first = (num_steps + phase) % size
        if not first:
            return []
        rest = next((rest for rest in self._rests if len(rest)), None) or self._any_kept()
        if rest is None:
            return []
        ranks = self._plan.num_ranks
        return [_LeftoverStep(rest, 0, ranks, FILL_GROUP + number * FILLER_VISITS) for number in range(first, size)]

    def _any_kept(self) -> _Rest | None:
        """Return a few of the epoch's samples that the new version still contains."""
        for name in self._plan.batch_sizes:
            start, end = self._plan.start_of(name), self._plan.end_of(name)
            for first in range(start, end, _SCANNED_SAMPLES):
                rest = self._rest(name, first, min(end, first + _SCANNED_SAMPLES))
                if len(rest):
                    return rest
        return None

    def __len__(self) -> int:
        """Return the number of steps."""
        return len(self._steps)

    def step(self, number: int, rank: int | None, first_source: int) -> Step:
        """Return a step for one rank, or for all ranks if `rank` is None.

        first_source: number that is added to the step's source numbers.
        """
        num_ranks = self._plan.num_ranks
        ranks = range(num_ranks) if rank is None else range(rank, rank + 1)
        return self._steps[number].step(ranks, num_ranks, self.epoch, first_source)

    def carried_after(self, num_steps: int) -> Mapping[str, int]:
        """Map each bucket id to the position of the first sample that is still carried over after `num_steps` steps.

        The mapping is empty after the last step.
        """
        if num_steps >= len(self):
            return {}
        taken = defaultdict[str, int](int, self._places[:num_steps])
        found = {}
        for rest in self._rests:
            count = taken[rest.bucket_id]
            name, is_done = rest.bucket_id, count >= len(rest)
            found[name] = self._plan.end_of(name) if is_done else int(rest.positions[count])
        return found

    def report(self) -> Sequence[BucketReport]:
        """Return one report for each bucket that has leftover steps."""
        found = []
        for name in dict.fromkeys(part.rest.bucket_id for part in self._steps):
            mine = [part for part in self._steps if part.rest.bucket_id == name]
            delivered = sum(part.count for part in mine)
            fillers = sum(part.count for part in mine if part.visits_from != TAIL)
            real = len(mine[0].rest) if fillers < delivered else 0
            size = self._plan.batch_sizes[name]
            stored, whole = self._plan.stream(name).num_samples, size * self._plan.num_ranks
            found.append(BucketReport(name, stored, size, whole, len(mine), delivered, 0, 0, delivered - real))
        return found
