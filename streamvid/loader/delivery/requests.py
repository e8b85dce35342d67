"""Steps of the plan as the batches of this rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from streamvid.buckets.bucket import Bucket
from streamvid.errors import StateError
from streamvid.loader.mix import Mix, SampleRequest
from streamvid.plan import Cursor, EpochPlan, PlanOptions, PlanSource, Step, World

_FIRST_SLICE, _SLICE = 16, 512  # steps; the first batch waits for the first slice


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One batch of this rank. `position` is the loader's own record of its place in the run.

    loss_weight: the batch's share of all ranks' samples up to the optimizer step, times the number of batches.
    """

    bucket: Bucket
    samples: tuple[SampleRequest, ...]
    position: Any
    loss_weight: float = 1.0


@dataclass(frozen=True)
class Selection:
    """Input of one rank's plan: datasets, batch sizes, options, costs by bucket, and the rank's position.

    Has no reference to the loader, so that a thread that iterates over `requests` keeps no loader alive.
    """

    mix: Mix
    batch_sizes: Mapping[str, int]
    options: PlanOptions
    world: World
    costs: Mapping[str, int]

    @cached_property
    def _plan(self) -> EpochPlan:
        sources = [
            PlanSource(part.subset.counts, part.seed, repeats, part.subset.draws)
            for part, repeats in zip(self.mix.parts, self.mix.repeats, strict=True)
        ]
        return EpochPlan(sources, self.batch_sizes, self.options, self.world.num_ranks, costs=self.costs)

    def plan(self, cursor: Cursor) -> EpochPlan:
        """Return the remainder of the cursor's epoch. Raises StateError for a cursor of another dataset."""
        return self._plan.at(cursor)

    def check(self, cursor: Cursor) -> None:
        """Raise StateError for an impossible position: past the end of the cursor's epoch there would be no step."""
        plan = self.plan(cursor)
        for bucket_id, position in cursor.positions.items():
            end = plan.end_of(bucket_id)
            if position > end:
                raise StateError(
                    f"positions[{bucket_id!r}]={position} in the state: epoch {cursor.epoch} ends at {end}; "
                    "it is damaged, or of another dataset. Use an older state, or start without one"
                )

    def at_share(self, epoch: int, progress: float) -> Cursor:
        """Return the cursor at which that share of the epoch's steps is done, rounded to a step."""
        plan = self.plan(Cursor(epoch))
        return plan.cursor_after(round(progress * plan.num_steps_left))

    def requests(self, plan: EpochPlan, end_epoch: int | None) -> Iterator[BatchRequest]:
        """Yield this rank's batches from `plan` on, through all epochs before `end_epoch`; None: endless.

        A request's position is (its epoch's plan, steps done after it). A step in which the rank has no batch has no
        request.
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
                        yield self._request(step, (plan, number), weight)
            cursor = plan.next_epoch()
            if cursor.epoch == end_epoch:
                return
            plan = self.plan(cursor)

    def _groups(self, plan: EpochPlan) -> Iterator[list[Step]]:
        """Yield the steps between two optimizer steps: `accumulate` of them, fewer if a run resumes within."""
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

    def _request(self, step: Step, position: Any, weight: float) -> BatchRequest:
        slots = zip(
            step.sources.tolist(),
            step.shards.tolist(),
            step.indices.tolist(),
            step.visits.tolist(),
            step.is_repeat.tolist(),
            strict=True,
        )
        samples = tuple(
            SampleRequest(self.mix.parts[source], step.bucket_id, shard, place, visit, is_repeat)
            for source, shard, place, visit, is_repeat in slots
        )
        return BatchRequest(self.mix.buckets[step.bucket_id], samples, position, weight)
