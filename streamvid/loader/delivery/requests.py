"""Conversion of plan steps to one rank's batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from streamvid.buckets.bucket import Bucket
from streamvid.errors import StateError
from streamvid.loader.mix import Mix, MixPart, SampleRequest
from streamvid.plan import Cursor, EpochPlan, PlanOptions, PlanSource, Step, World
from streamvid.plan.versions.continued import AnyPlan, ContinuedPlan
from streamvid.plan.versions.leftovers import IsKept, Leftovers

_FIRST_SLICE, _SLICE = 16, 512  # in steps; the first batch waits for the first slice


@dataclass(slots=True)
class BatchRequest:
    """Request for one of this rank's batches in an epoch. `position` records the loader's position in the run.

    loss_weight: the batch's share of the samples in its optimizer step, times the number of batches in that step.
    """

    bucket: Bucket
    samples: tuple[SampleRequest, ...]
    position: Any
    loss_weight: float = 1.0
    epoch: int = 0


@dataclass(frozen=True)
class EarlierVersion:
    """Selection from the previous versions of the datasets. Samples carried over from them are delivered first.

    is_kept: function that returns which samples in the previous versions are still in the current versions.
    """

    selection: Selection
    is_kept: IsKept


@dataclass(frozen=True)
class Selection:
    """Inputs for one rank's plan: datasets, batch sizes, options, costs per bucket, and the rank.

    earlier: the previous versions, if some of their samples are still carried over; None otherwise.

    A selection holds no reference to the loader, so a thread that iterates over `requests` does not keep the loader
    alive.
    """

    mix: Mix
    batch_sizes: Mapping[str, int]
    options: PlanOptions
    world: World
    costs: Mapping[str, int]
    earlier: EarlierVersion | None = None

    @property
    def parts(self) -> tuple[MixPart, ...]:
        """All parts to which samples in this selection can belong."""
        return self.mix.parts + (() if self.earlier is None else self.earlier.selection.mix.parts)

    @cached_property
    def _plan(self) -> EpochPlan:
        sources = [
            PlanSource(part.subset.counts, part.seed, repeats, part.subset.draws)
            for part, repeats in zip(self.mix.parts, self.mix.repeats, strict=True)
        ]
        return EpochPlan(sources, self.batch_sizes, self.options, self.world.num_ranks, costs=self.costs)

    def epoch_plan(self, cursor: Cursor) -> EpochPlan:
        """Return the same plan as `plan`, but without samples carried over from an earlier version."""
        return self._plan.at(cursor)

    def plan(self, cursor: Cursor) -> AnyPlan:
        """Return the plan for the remainder of the cursor's epoch.

        Raises StateError if the cursor belongs to another dataset.
        """
        if not cursor.carried or self.earlier is None:
            return self.epoch_plan(cursor)
        before = self.earlier.selection.epoch_plan(Cursor(cursor.epoch - 1))
        leftovers = Leftovers(before, cursor.carried, cursor.phase, self.earlier.is_kept)
        return ContinuedPlan(cursor, leftovers, self._plan, len(self.mix.parts))

    def check(self, cursor: Cursor) -> None:
        """Raise StateError if a position is past the end of the cursor's epoch."""
        plan = self.plan(cursor)
        for bucket_id, position in cursor.positions.items():
            end = plan.end_of(bucket_id)
            if position > end:
                raise StateError(
                    f"positions[{bucket_id!r}]={position} in the loader state: must be at most {end} in epoch "
                    f"{cursor.epoch}; the state is damaged or from another dataset. Use an older state, or "
                    "start without a state"
                )

    def at_share(self, epoch: int, progress: float) -> Cursor:
        """Return the cursor after the fraction `progress` (0 to 1) of the epoch's steps, rounded to a whole step."""
        plan = self.plan(Cursor(epoch))
        return plan.cursor_after(round(progress * plan.num_steps_left))

    def requests(self, plan: AnyPlan, end_epoch: int | None) -> Iterator[BatchRequest]:
        """Yield requests for this rank's batches, beginning with `plan`.

        end_epoch: epoch before which to stop; None for an endless run.

        A request's position is (plan of its epoch, number of steps in that plan up to and including the request's
        step). Steps in which the rank has no batch yield no request.
        """
        while True:
            number = 0
            for group in self._groups(plan):
                num_samples = sum(step.num_step_samples for step in group)
                for step in group:
                    number += 1
                    if len(step.shards):
                        share = len(step.shards) / num_samples
                        weight = share * len(group) * self.world.num_ranks
                        yield self._request(step, (plan, number), weight, plan.cursor.epoch)
            cursor = plan.next_epoch()
            if cursor.epoch == end_epoch:
                return
            plan = self.plan(cursor)

    def _groups(self, plan: AnyPlan) -> Iterator[list[Step]]:
        """Yield the steps of one optimizer step at a time: `accumulate` steps, or fewer after a resume within it."""
        size = self.options.accumulate
        first, length = 0, size - plan.cursor.phase % size
        group: list[Step] = []
        while first < plan.num_steps_left:
            last = first + (_SLICE if first else _FIRST_SLICE)
            for step in plan.steps(first, last, self.world.rank):
                group.append(step)
                if len(group) == length:
                    yield group
                    group, length = [], size
            first = last
        if group:
            yield group

    def samples(self, step: Step) -> tuple[SampleRequest, ...]:
        """Return the samples in one rank's part of a step."""
        slots = zip(
            step.sources.tolist(),
            step.shards.tolist(),
            step.indices.tolist(),
            step.visits.tolist(),
            step.is_repeat.tolist(),
            strict=True,
        )
        parts = self.parts
        return tuple(
            SampleRequest(parts[source], step.bucket_id, shard, place, visit, is_repeat)
            for source, shard, place, visit, is_repeat in slots
        )

    def _request(self, step: Step, position: Any, weight: float, epoch: int) -> BatchRequest:
        # All samples of a step are from the same version.
        is_earlier = self.earlier is not None and int(step.sources[0]) >= len(self.mix.parts)
        mix = self.earlier.selection.mix if self.earlier is not None and is_earlier else self.mix
        return BatchRequest(mix.buckets[step.bucket_id], self.samples(step), position, weight, epoch)
