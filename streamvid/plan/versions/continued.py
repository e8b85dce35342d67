"""Plan for an epoch that begins with leftovers from an earlier version and continues in the new version."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

from streamvid.config import require_integer
from streamvid.plan.epoch import EpochPlan
from streamvid.plan.position import Cursor
from streamvid.plan.span import BucketReport
from streamvid.plan.step import Step
from streamvid.plan.versions.leftovers import Leftovers


class ContinuedPlan:
    """Plan for an epoch that begins with leftovers from an earlier version of the datasets.

    The class has the methods of `EpochPlan` that loaders use.

    plan: plan of the new version's epoch, at a cursor without carried positions.
    first_source: offset that is added to the source numbers of leftovers, so that these numbers differ from the source
        numbers of `plan`.
    """

    def __init__(self, cursor: Cursor, leftovers: Leftovers, plan: EpochPlan, first_source: int) -> None:
        begins = replace(cursor, carried={}, phase=0, step=cursor.step + len(leftovers))
        self.cursor, self._leftovers, self._first_source = cursor, leftovers, first_source
        self._plan = plan.at(begins)
        self.options, self.num_ranks = plan.options, plan.num_ranks

    def at(self, cursor: Cursor) -> EpochPlan:
        """Return a plan for the datasets' new version at another cursor, without leftovers."""
        return self._plan.at(cursor)

    @property
    def num_steps(self) -> int:
        """Number of steps in the whole epoch, including completed steps."""
        return self.cursor.step + self.num_steps_left

    @property
    def num_steps_left(self) -> int:
        """Number of steps from the cursor to the end of the epoch."""
        return len(self._leftovers) + self._plan.num_steps_left

    def num_batches_left(self, rank: int, num_steps_done: int = 0) -> int:
        """Return the number of batches that a rank will still receive after `num_steps_done` steps."""
        first, later = len(self._leftovers) - num_steps_done, max(0, num_steps_done - len(self._leftovers))
        return max(0, first) + self._plan.num_batches_left(rank, later)

    def num_steps_through(self, num_epochs: int) -> int:
        """Return the number of steps that the first `num_epochs` epochs would have if they all used the new version."""
        return self._plan.num_steps_through(num_epochs)

    @property
    def starved(self) -> tuple[BucketReport, ...]:
        """Reports on the buckets that have no step in the whole epoch with the datasets' new version."""
        return self._plan.starved

    def report(self) -> tuple[BucketReport, ...]:
        """Return one report per bucket for the remainder of the epoch, sorted by bucket id."""
        found = {row.bucket_id: row for row in self._leftovers.report()}
        for row in self._plan.report():
            other = found.get(row.bucket_id)
            found[row.bucket_id] = row if other is None else _sum(row, other)
        return tuple(found[name] for name in sorted(found))

    def check(self, num_epochs: int | None = 1) -> None:
        """Raise PlanError if no bucket fills a step in `num_epochs` epochs, including the cursor's epoch."""
        if not len(self._leftovers):
            self._plan.check(num_epochs)

    def steps(self, start: int, stop: int, rank: int | None = None) -> list[Step]:
        """Return steps [start, stop), counted from the cursor and limited to `num_steps_left`."""
        require_integer("start", start, 0)
        require_integer("stop", stop, 0)
        first = len(self._leftovers)
        found = [self._leftovers.step(number, rank, self._first_source) for number in range(start, min(stop, first))]
        return found + (self._plan.steps(max(0, start - first), stop - first, rank) if stop > first else [])

    def cursor_after(self, num_steps_done: int) -> Cursor:
        """Return the cursor `num_steps_done` steps after this plan's cursor. The result is the same on every rank."""
        require_integer("num_steps_done", num_steps_done, 0, self.num_steps_left)
        if num_steps_done >= len(self._leftovers):
            return self._plan.cursor_after(num_steps_done - len(self._leftovers))
        return Cursor(
            self.cursor.epoch,
            self._plan.cursor_after(0).positions,
            (self.cursor.phase + num_steps_done) % self.options.accumulate,
            self.cursor.step + num_steps_done,
            self._leftovers.carried_after(num_steps_done),
        )

    def next_epoch(self) -> Cursor:
        """Return the cursor at the start of the next epoch, after all steps of this epoch are done."""
        return self._plan.next_epoch()

    def start_of(self, bucket_id: str) -> int:
        """Return the position at which the epoch's own samples begin in a bucket in the new version of the datasets."""
        return self._plan.start_of(bucket_id)

    def end_of(self, bucket_id: str) -> int:
        """Return the position at which the epoch ends in a bucket in the new version of the datasets."""
        return self._plan.end_of(bucket_id)


AnyPlan: TypeAlias = EpochPlan | ContinuedPlan


def _sum(row: BucketReport, other: BucketReport) -> BucketReport:
    return replace(
        row,
        num_steps=row.num_steps + other.num_steps,
        num_delivered=row.num_delivered + other.num_delivered,
        num_repeated=row.num_repeated + other.num_repeated,
    )
