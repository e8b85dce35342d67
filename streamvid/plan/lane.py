"""Lanes of an epoch. A lane is one bucket or, with sync="cost", a class of buckets that share steps.

A lane's batches (units, see span.py) are ordered, and its step k takes the R units [k * R, (k + 1) * R), one per rank.
The units of a single bucket are consecutive; units of several buckets are merged in the same way as the lanes of an
epoch.

A lane of several buckets has no position. Instead, a step is identified by the number of units from it to the end of
the epoch, which does not depend on the position at which the run began.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from streamvid.plan.hashing import hash_text
from streamvid.plan.options import PlanOptions
from streamvid.plan.order import EpochOrder, Track
from streamvid.plan.span import BucketSpan

Int64Array = npt.NDArray[np.int64]

Units: TypeAlias = tuple[Int64Array, Int64Array, npt.NDArray[np.bool_]]
"""(bucket indices in the lane, unit indices in the bucket, True for fillers)."""

_FEW_RANKS = 4  # per bucket
_UNIT_ORDER = 4  # keeps this use of the seed apart from others


@dataclass(frozen=True)
class Lane:
    """One bucket, or several buckets that share steps. `spans` are sorted by bucket id."""

    spans: tuple[BucketSpan, ...]
    options: PlanOptions
    epoch: int
    num_ranks: int

    @cached_property
    def num_units(self) -> int:
        """Number of units left in the buckets, not counting the fillers that the tail policy adds to the last step."""
        return sum(span.num_units for span in self.spans)

    @cached_property
    def num_steps(self) -> int:
        """Number of steps left in the lane. All ranks take part in each step."""
        units = self.num_units
        return -(-units // self.num_ranks) if self.options.tail_rule.pads else units // self.num_ranks

    @property
    def filler(self) -> int:
        """Index of the bucket with the most samples. Samples from this bucket are repeated to pad the last step."""
        return max(range(len(self.spans)), key=lambda number: (self.spans[number].length, -number))

    def track(self, first_keys: Mapping[str, float]) -> Track:
        """Return the lane's steps as a track, from which their order in the epoch is computed.

        first_keys: bucket id → key of the first step, for order="largest-first".
        """
        num_steps = self.num_steps
        if len(self.spans) == 1:
            (span,) = self.spans
            stride, offset, length = span.global_batch, span.position - span.start, float(span.length)
            name, first_id, id_stride, is_begun = span.bucket_id, span.position, span.global_batch, span.position > 0
        else:
            units = self.num_units
            length = sum(span.length / span.batch_size for span in self.spans)
            offset, stride = round(length) - units, self.num_ranks
            name, first_id, id_stride = "+".join(span.bucket_id for span in self.spans), units, -self.num_ranks
            is_begun = any(span.position > 0 for span in self.spans)
        first_key = None if is_begun or not first_keys else min(first_keys[span.bucket_id] for span in self.spans)
        return Track(hash_text(name), num_steps, offset, stride, max(1.0, length), first_id, id_stride, first_key)

    def units(self, steps: Int64Array, ranks: range) -> tuple[Units, Int64Array]:
        """Return the units of `ranks` in consecutive steps, and the number of samples per step over all ranks.

        The arrays of units are flat.
        """
        sizes = np.array([span.batch_size for span in self.spans])
        first, last = steps[:1] * self.num_ranks, steps[-1:] * self.num_ranks + self.num_ranks
        if self.num_ranks <= _FEW_RANKS * len(self.spans):
            # Finding a place in the order costs as much as a few units of every bucket; here, all units cost less.
            numbers, units, extra = self._stretches(first, last)
            mine = np.arange(len(numbers)).reshape(-1, self.num_ranks)[:, ranks.start : ranks.stop].ravel()
            totals: Int64Array = sizes[numbers].reshape(-1, self.num_ranks).sum(axis=1)
            return (numbers[mine], units[mine], extra[mine]), totals
        starts = steps * self.num_ranks
        taken = self._order.counts_at(np.minimum(np.append(starts, last), self.num_units)) @ sizes
        taken[-1] += max(0, int(last[0]) - self.num_units) * sizes[self.filler]
        return self._stretches(starts + ranks.start, starts + ranks.stop), np.diff(taken)

    def _stretches(self, starts: Int64Array, stops: Int64Array) -> Units:
        """Return the units [starts[i], stops[i]) in the lane's order, concatenated over all i."""
        last = self.num_units
        numbers, units = self._order.stretches(np.minimum(starts, last), np.minimum(stops, last))
        extra = np.arange(max(starts[-1], last), stops[-1]) - last  # only the very last step has fillers
        return (
            np.concatenate([numbers, np.full(len(extra), self.filler)]),
            np.concatenate([units, extra]),
            np.concatenate([np.zeros(len(units), bool), np.ones(len(extra), bool)]),
        )

    def counts(self, num_steps: int) -> list[int]:
        """Return the number of units from each bucket in the first `num_steps` steps, not counting fillers."""
        taken = num_steps * self.num_ranks
        if len(self.spans) == 1:  # positions simply continue past the end of the block
            return [taken]
        return [int(count) for count in self._order.counts(min(taken, self.num_units))]

    @cached_property
    def _order(self) -> EpochOrder:
        tracks = [
            Track(
                hash=hash_text(span.bucket_id),
                num_steps=span.num_units,
                offset=span.position - span.start,
                stride=span.batch_size,
                length=max(1.0, float(span.length)),
                first_id=span.position,
                id_stride=span.batch_size,
            )
            for span in self.spans
        ]
        return EpochOrder(tracks, _UNIT_ORDER, self.options.seed, self.epoch, self.options.shuffle != "none")
