"""Plan of one epoch: the bucket and samples of each step, and the run's position after the step.

A plan is a pure function of the samples in each shard, the batch sizes, the options, the costs, the number of ranks
and the cursor. It stores the prefix sums of the shards' sample counts; steps are computed on demand.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from streamvid.config import require_integer
from streamvid.plan import check
from streamvid.plan.cost import cost_classes
from streamvid.plan.lane import Lane
from streamvid.plan.mix import MixedStream, PlanSource
from streamvid.plan.options import PlanOptions
from streamvid.plan.order import EpochOrder
from streamvid.plan.position import MAX_EPOCH, MAX_NUM_RANKS, Cursor
from streamvid.plan.span import BucketReport, BucketSpan
from streamvid.plan.step import (
    FILL_GROUP,
    FILLER_VISITS,
    FinalStep,
    Step,
    assign_steps,
    draft_bucket,
    draft_final,
    draft_lane,
)

Int64Array = npt.NDArray[np.int64]

# Approximate limit on the number of samples in work arrays, for any request.
_SLICE_SAMPLES = 1 << 18
_STEP_ORDER = 3  # keeps this use of the seed apart from others


class EpochPlan:
    """Plan for all ranks, from a cursor to the end of the cursor's epoch.

    sources: the datasets or, for a single dataset, a mapping from bucket id to the number of samples in each shard, in
        manifest order.
    batch_sizes: bucket id → number of samples per rank per step, for exactly the buckets in the datasets.
    costs: bucket id → predicted cost of a batch, in any unit; required by sync="cost" and order="largest-first".
    Raises ConfigError for invalid arguments and StateError if the cursor belongs to a different dataset.
    """

    def __init__(
        self,
        sources: Sequence[PlanSource] | Mapping[str, Sequence[int] | Int64Array],
        batch_sizes: Mapping[str, int],
        options: PlanOptions | None = None,
        num_ranks: int = 1,
        cursor: Cursor | None = None,
        costs: Mapping[str, int] | None = None,
    ) -> None:
        require_integer("num_ranks", num_ranks, 1, MAX_NUM_RANKS)
        self.options = options or PlanOptions()
        self.num_ranks = num_ranks
        parts = [PlanSource(sources, self.options.seed)] if isinstance(sources, Mapping) else list(sources)
        counts = check.shard_counts(parts)
        check.check_ids(counts, batch_sizes)
        self._batch_sizes = dict(batch_sizes)
        self._streams = {name: MixedStream(name, of, parts, self.options) for name, of in counts.items()}
        self._classes, self._first_keys = _classes(counts, self.options, costs)
        self._open(cursor or Cursor())

    def at(self, cursor: Cursor) -> EpochPlan:
        """Return the same plan, starting at a different cursor."""
        other = object.__new__(EpochPlan)
        other.options = self.options
        other.num_ranks = self.num_ranks
        other._batch_sizes = self._batch_sizes
        other._streams = self._streams
        other._classes = self._classes
        other._first_keys = self._first_keys
        other._open(cursor)
        return other

    def _open(self, cursor: Cursor) -> None:
        check.check_cursor(cursor, self._streams)
        self.cursor = cursor
        spans = {name: self._span(name) for name in self._streams}
        for name, span in spans.items():
            check.check_span(span, self._streams[name].samples_per_pass, self.options.accumulate)
        self._spans = tuple(spans.values())
        lanes: dict[object, list[BucketSpan]] = {}
        for name, span in spans.items():
            lanes.setdefault(self._classes.get(name, name), []).append(span)
        every = [Lane(tuple(lane), self.options, cursor.epoch, self.num_ranks) for lane in lanes.values()]
        self._idle = tuple(lane for lane in every if not lane.num_steps)
        self._lanes = tuple(lane for lane in every if lane.num_steps)

    def _span(self, name: str) -> BucketSpan:
        stream, epoch, tail = self._streams[name], self.cursor.epoch, self.options.tail_rule
        start, end = stream.boundary(epoch), stream.boundary(epoch + 1)
        size, position = self._batch_sizes[name], self.cursor.positions.get(name)
        if position is None:
            grid = size * (1 if self.options.sync == "cost" else self.num_ranks)
            position = start // grid * grid if tail.carries else start
        elif not tail.carries:
            position = max(position, start)
        return BucketSpan(name, stream.num_samples, size, self.num_ranks, tail, epoch, start, end, position)

    @property
    def batch_sizes(self) -> Mapping[str, int]:
        """Mapping from bucket id to number of samples per rank per step."""
        return self._batch_sizes

    def stream(self, bucket_id: str) -> MixedStream:
        """Return the stream of one bucket's samples."""
        return self._streams[bucket_id]

    # Number of steps.

    @property
    def num_steps(self) -> int:
        """Number of steps in the whole epoch, including completed steps and steps without a batch on some ranks."""
        return self.cursor.step + self.num_steps_left

    @cached_property
    def num_steps_left(self) -> int:
        """Number of steps from the cursor to the end of the epoch, including steps without a batch on some ranks."""
        natural = self._num_mixed + len(self._finals)
        if self.options.tail_rule.delivers_all:
            return natural
        return max(0, natural - (natural + self.cursor.phase) % self.options.accumulate)

    def num_batches_left(self, rank: int, num_steps_done: int = 0) -> int:
        """Return the number of batches that a rank will still receive after `num_steps_done` steps."""
        first = max(0, num_steps_done - self._num_mixed)
        empty = sum(final.bound(rank) == final.bound(rank + 1) for final in self._finals[first:])
        return self.num_steps_left - num_steps_done - empty

    def num_steps_through(self, num_epochs: int) -> int:
        """Return the total number of steps in the first `num_epochs` epochs for this plan's batch sizes and ranks."""
        require_integer("num_epochs", num_epochs, 0, MAX_EPOCH)
        if self.options.tail_rule.carries:
            return self._num_carried_steps(dict.fromkeys(self._streams, 0), num_epochs)
        period = 1
        for stream in self._streams.values():
            period = stream.period(period)
        if any(stream.is_drawn for stream in self._streams.values()):
            period = max(1, num_epochs)
        if self.options.tail_rule.has_final_step and any(len(x.spans) > 1 for x in (*self._lanes, *self._idle)):
            # The order of each epoch decides which buckets have a remainder, and so a final step.
            period = max(1, num_epochs)
        counts = [self.at(Cursor(epoch)).num_steps_left for epoch in range(min(period, num_epochs))]
        whole, rest = divmod(num_epochs, period)
        return whole * sum(counts) + sum(counts[:rest]) if whole else sum(counts)

    def _num_carried_steps(self, positions: Mapping[str, int], num_epochs: int) -> int:
        """Return the number of steps from `positions` to the end of epoch `num_epochs - 1`, with tail="carry"."""
        total = 0
        for lane in (*self._lanes, *self._idle):
            units = 0
            for span in lane.spans:
                end = self._streams[span.bucket_id].boundary(num_epochs)
                units += max(0, end - positions[span.bucket_id]) // span.batch_size
            total += units // self.num_ranks
        return total // self.options.accumulate * self.options.accumulate

    # Reports.

    @property
    def starved(self) -> tuple[BucketReport, ...]:
        """Reports on the buckets that have no step in the whole epoch."""
        rows = [row for row in self.report() if not row.num_delivered]
        if not rows or not self.cursor.positions:
            return tuple(rows)
        whole = {row.bucket_id for row in self.at(Cursor(self.cursor.epoch)).report() if row.num_delivered}
        return tuple(row for row in rows if row.bucket_id not in whole)

    def report(self) -> tuple[BucketReport, ...]:
        """Return one report per bucket for the remainder of the epoch, sorted by bucket id."""
        delivered = dict.fromkeys(self._streams, 0)
        repeated = dict.fromkeys(self._streams, 0)
        units, fillers = self._taken(self.num_steps_left)
        for span in self._spans:
            delivered[span.bucket_id] += units[span.bucket_id] * span.batch_size
        for span, num_units in fillers:
            delivered[span.bucket_id] += num_units * span.batch_size
            repeated[span.bucket_id] += num_units * span.batch_size
        for final in self._finals:
            delivered[final.span.bucket_id] += final.num_samples
            repeated[final.span.bucket_id] += final.num_samples if final.visits_from else 0
        return tuple(
            _report(span, delivered[span.bucket_id], repeated[span.bucket_id])
            for span in sorted(self._spans, key=lambda span: span.bucket_id)
        )

    def check(self, num_epochs: int | None = 1) -> None:
        """Raise PlanError if no bucket fills a step in `num_epochs` epochs, including the cursor's epoch.

        num_epochs: number of epochs to check; None for an endless run. A cursor at the end of an epoch that had steps
            is not an error.
        """
        if self.num_steps or self.at(Cursor(self.cursor.epoch)).num_steps_left:
            return
        last = MAX_EPOCH if num_epochs is None else num_epochs
        require_integer("num_epochs", last, 0, MAX_EPOCH)
        soonest = self._num_epochs_to_a_step()
        if soonest is None or soonest > last:
            raise check.no_step(self._spans, self.options, self.num_ranks, soonest)

    def _num_epochs_to_a_step(self) -> int | None:
        """Return the number of epochs, including this one, until samples fill a step, or None if they never do."""
        if not self.options.tail_rule.carries:
            return None  # other tails have the same steps in every epoch, here none
        positions = {span.bucket_id: span.position for span in self._spans}
        if not self._num_carried_steps(positions, MAX_EPOCH):
            return None
        later = range(self.cursor.epoch + 1, MAX_EPOCH)
        return 1 + bisect_right(later, 0, key=lambda epoch: self._num_carried_steps(positions, epoch))

    # Steps.

    def steps(self, start: int, stop: int, rank: int | None = None) -> list[Step]:
        """Return steps [start, stop), counted from the cursor and limited to `num_steps_left`.

        Each call has a fixed overhead, so request at least 256 steps at a time.
        rank: rank whose part is returned; None for all ranks. With many ranks, computing one part is much cheaper than
            computing all parts.
        """
        ranks = range(self.num_ranks) if rank is None else range(rank, rank + 1)
        require_integer("start", start, 0)
        require_integer("stop", stop, 0)
        stop = min(stop, self.num_steps_left)
        if start >= stop:
            return []
        mixed = min(stop, self._num_mixed)
        widest = max((span.batch_size for lane in self._lanes for span in lane.spans), default=1) * len(ranks)
        locality = self.options.shard_locality
        length = max(1, _SLICE_SAMPLES // max(widest, locality))
        steps = [
            step
            for first in range(start, mixed, length)
            for step in self._slice(first, min(first + length, mixed), ranks)
        ]
        for final in self._finals[max(start - self._num_mixed, 0) : stop - self._num_mixed if stop > mixed else 0]:
            steps += assign_steps([draft_final(final, self._streams[final.span.bucket_id], ranks, locality)], locality)
        return steps

    def _slice(self, start: int, stop: int, ranks: range) -> list[Step]:
        lanes, indices = self._order.steps(start, stop)
        drafts, places = [], []
        for number in sorted({*lanes.tolist()}):  # np.unique would import numpy.ma, which takes 50 ms
            lane, here = self._lanes[number], np.flatnonzero(lanes == number)
            places += here.tolist()
            if len(lane.spans) == 1:
                stream = self._streams[lane.spans[0].bucket_id]
                drafts.append(draft_bucket(lane.spans[0], stream, indices[here], ranks, self.options.shard_locality))
            else:
                drafts.append(draft_lane(lane, self._streams, indices[here], ranks))
        steps = dict(zip(places, assign_steps(drafts, self.options.shard_locality), strict=True))
        return [steps[place] for place in range(stop - start)]

    # Positions.

    def cursor_after(self, num_steps_done: int) -> Cursor:
        """Return the cursor `num_steps_done` steps after this plan's cursor. The result is the same on every rank."""
        require_integer("num_steps_done", num_steps_done, 0, self.num_steps_left)
        units, _ = self._taken(num_steps_done)
        positions = {span.bucket_id: span.position_after(units[span.bucket_id]) for span in self._spans}
        for final in self._finals[: max(0, num_steps_done - self._num_mixed)]:
            positions[final.span.bucket_id] = final.span.end
        phase = (self.cursor.phase + num_steps_done) % self.options.accumulate
        return Cursor(self.cursor.epoch, positions, phase, self.cursor.step + num_steps_done)

    def next_epoch(self) -> Cursor:
        """Return the cursor at the start of the next epoch, after all steps of this epoch are done."""
        positions = dict(self.cursor_after(self.num_steps_left).positions)
        if not self.options.tail_rule.carries:
            positions = {span.bucket_id: max(positions[span.bucket_id], span.end) for span in self._spans}
        return Cursor(self.cursor.epoch + 1, positions)

    def start_of(self, bucket_id: str) -> int:
        """Return the position at which the epoch's own samples begin in a bucket, after any carried samples."""
        return self._streams[bucket_id].boundary(self.cursor.epoch)

    def end_of(self, bucket_id: str) -> int:
        """Return the position at which the epoch ends in a bucket. No run exceeds this position."""
        return self._streams[bucket_id].boundary(self.cursor.epoch + 1)

    @cached_property
    def _num_mixed(self) -> int:
        return sum(lane.num_steps for lane in self._lanes)

    @cached_property
    def _order(self) -> EpochOrder:
        tracks = [lane.track(self._first_keys) for lane in self._lanes]
        options = self.options
        return EpochOrder(tracks, _STEP_ORDER, options.seed, self.cursor.epoch, options.shuffle != "none")

    def _taken(self, num_steps: int) -> tuple[dict[str, int], list[tuple[BucketSpan, int]]]:
        """Return (units, fillers) for the first `num_steps` steps.

        units: bucket id → number of units in these steps.
        fillers: (bucket, number of filler units) for each bucket that completes a step with fillers.
        """
        mixed = min(num_steps, self._num_mixed)
        per_lane = self._order.counts(mixed).tolist() if self._lanes else []
        units = dict.fromkeys(self._streams, 0)
        fillers = []
        for lane, num_lane_steps in zip(self._lanes, per_lane, strict=True):
            counts = lane.counts(num_lane_steps)
            units.update(zip((span.bucket_id for span in lane.spans), counts, strict=True))
            missing = num_lane_steps * self.num_ranks - sum(counts)
            if missing:
                fillers.append((lane.spans[lane.filler], missing))
        return units, fillers

    @cached_property
    def _finals(self) -> tuple[FinalStep, ...]:
        """Final steps: first the remainders of buckets, then repeats that complete a group of `accumulate` steps."""
        finals, tail = [], self.options.tail_rule
        if tail.has_final_step:
            units, _ = self._taken(self._num_mixed)
            for span in self._spans:
                position = span.position_after(units[span.bucket_id])
                rest = max(0, span.end - position)
                if tail.is_equal:
                    rest = -(-rest // self.num_ranks) * self.num_ranks
                if rest:
                    finals.append(FinalStep(span, position, rest))
        if tail.repeats:
            real, phase = self._num_mixed + len(finals), self.cursor.phase
            missing = -(real + phase) % self.options.accumulate
            # Numbered by place in the group, so that a run that begins between two of them continues with the others,
            # also if `accumulate` has changed.
            first = (real + phase) % self.options.accumulate if real else phase
            if any(span.length for span in self._spans):
                largest = max(self._spans, key=lambda span: span.length)
                size = self.num_ranks * (largest.batch_size if tail.pads else 1)
                for number in range(first, first + missing):
                    position = largest.end + number * size % largest.length
                    finals.append(FinalStep(largest, position, size, FILL_GROUP + number * FILLER_VISITS))
        return tuple(finals)


def _report(span: BucketSpan, delivered: int, fillers: int) -> BucketReport:
    real = min(span.available, delivered - fillers)
    rest = span.available - real
    return BucketReport(
        bucket_id=span.bucket_id,
        num_samples=span.num_samples,
        batch_size=span.batch_size,
        global_batch=span.global_batch,
        num_steps=-(-delivered // span.global_batch),
        num_delivered=delivered,
        num_carried=rest if span.tail.carries else 0,
        num_dropped=0 if span.tail.carries else rest,
        num_repeated=delivered - real,
    )


def _classes(
    counts: Mapping[str, object], options: PlanOptions, costs: Mapping[str, int] | None
) -> tuple[dict[str, int], dict[str, float]]:
    """Return two mappings: bucket id → cost class, and bucket id → key of the bucket's first step in epoch 0.

    A mapping that the options do not need is empty.
    """
    if options.sync == "bucket" and options.order == "mixed":
        return {}, {}
    known = check.check_costs(counts, options, costs)
    ascending = sorted(known, key=lambda name: (known[name], name))
    classes = cost_classes(known) if options.sync == "cost" else {}
    # Below every other key: less than one step is carried, and a step has fewer than 2**30 samples.
    firsts = {name: -float(1 << 31) * (number + 1) for number, name in enumerate(ascending)}
    return classes, firsts if options.order == "largest-first" else {}
