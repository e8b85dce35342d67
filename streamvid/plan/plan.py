"""The epoch as arithmetic: which bucket a step has, which samples it takes, and where it leaves the run.

A plan is a function of the samples in each shard, the batch sizes, the options, the number of ranks and the cursor, and
of nothing else. It holds the prefix sums of the shards; steps are computed when they are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from streamvid.errors import ConfigError, PlanError, StateError
from streamvid.plan.cursor import MAX_EPOCH, MAX_POSITION, Cursor
from streamvid.plan.options import PlanOptions
from streamvid.plan.order import EpochOrder
from streamvid.plan.step import Step, deal
from streamvid.plan.stream import BucketStream
from streamvid.plan.tail import BucketReport, BucketSpan, num_steps_through
from streamvid.plan.world import validate_num_ranks

Int64Array = npt.NDArray[np.int64]

# Work arrays hold at most about so many samples at once, whatever is asked for.
_SLICE_SAMPLES = 1 << 18
_NUM_NAMED = 10


class EpochPlan:
    """The rest of one epoch for all ranks, from a cursor.

    num_samples: bucket id → samples in each of its shards, in manifest order. batch_sizes: bucket id → samples a rank
    takes at a step; exactly the same ids. ConfigError for arguments that cannot be, StateError for a cursor of another
    dataset.
    """

    def __init__(
        self,
        num_samples: Mapping[str, Sequence[int] | Int64Array],
        batch_sizes: Mapping[str, int],
        options: PlanOptions | None = None,
        num_ranks: int = 1,
        cursor: Cursor | None = None,
    ) -> None:
        validate_num_ranks(num_ranks)
        self.options = options or PlanOptions()
        self.num_ranks = num_ranks
        self.cursor = cursor or Cursor()
        _validate_ids(num_samples, batch_sizes, self.cursor)
        counts = {bucket_id: _shard_counts(bucket_id, num_samples[bucket_id]) for bucket_id in sorted(num_samples)}
        self._streams = {name: BucketStream(name, of_shards, self.options) for name, of_shards in counts.items()}
        self._spans = tuple(
            BucketSpan.open(
                name,
                stream.num_samples,
                num_ranks * batch_sizes[name],
                self.options.tail,
                self.cursor.epoch,
                self.cursor.positions.get(name),
            )
            for name, stream in self._streams.items()
        )
        for span in self._spans:
            _validate_span(span)
        self._planned = tuple(span for span in self._spans if span.num_steps_left)

    @cached_property
    def _order(self) -> EpochOrder:
        return EpochOrder(self._planned, self.options, self.cursor.epoch)

    @property
    def num_steps(self) -> int:
        """Steps of the whole epoch from its natural start, on every rank."""
        return sum(span.num_steps for span in self._spans)

    @property
    def num_steps_left(self) -> int:
        """Steps from the cursor to the end of the epoch, on every rank."""
        return sum(span.num_steps_left for span in self._planned)

    @property
    def starved(self) -> tuple[BucketReport, ...]:
        """The buckets that have no step in the whole epoch; worth a warning."""
        return tuple(span.report() for span in self._spans if not span.num_steps and not span.num_steps_left)

    def report(self) -> tuple[BucketReport, ...]:
        """What the rest of the epoch makes of each bucket, by bucket id."""
        return tuple(span.report() for span in self._spans)

    def num_steps_through(self, num_epochs: int) -> int:
        """Steps of the first `num_epochs` epochs together, from epoch 0, with these batch sizes and ranks."""
        _validate_count("num_epochs", num_epochs, MAX_EPOCH)
        return sum(
            num_steps_through(span.num_samples, span.global_batch, span.tail, num_epochs) for span in self._spans
        )

    def check(self, num_epochs: int | None = 1) -> None:
        """PlanError if no bucket makes a step in so many epochs from the cursor's; None stands for endless ones.

        A cursor at the end of an epoch that had steps is no error.
        """
        if self.num_steps_left or self.num_steps:
            return
        num_epochs = MAX_EPOCH if num_epochs is None else num_epochs
        _validate_count("num_epochs", num_epochs, MAX_EPOCH)
        # Other tails make the same steps every epoch: none.
        if self.options.tail != "carry" or not any(
            span.num_samples and _num_epochs_to_a_step(span) <= num_epochs for span in self._spans
        ):
            raise PlanError(_why_no_step(self._spans, self.num_ranks))

    def steps(self, start: int, stop: int) -> list[Step]:
        """Steps [start, stop), counted from the cursor and cut to `num_steps_left`.

        A slice costs a search of the order besides its samples, so take 256 steps or more at a time.
        """
        _validate_count("start", start, None)
        _validate_count("stop", stop, None)
        stop = min(stop, self.num_steps_left)
        if start >= stop:
            return []
        length = max(1, _SLICE_SAMPLES // max(span.global_batch for span in self._planned))
        return [step for first in range(start, stop, length) for step in self._slice(first, min(first + length, stop))]

    def _slice(self, start: int, stop: int) -> list[Step]:
        buckets, indices = self._order.steps(start, stop)
        steps: dict[int, Step] = {}
        for number in np.unique(buckets):
            span = self._planned[number]
            places = np.flatnonzero(buckets == number)
            dealt = deal(span, self._streams[span.bucket_id], indices[places])
            steps.update(zip(places.tolist(), dealt, strict=True))
        return [steps[place] for place in range(stop - start)]

    def cursor_after(self, num_steps_done: int) -> Cursor:
        """Where the run stands after so many steps from this plan's cursor; the same on every rank."""
        _validate_count("num_steps_done", num_steps_done, self.num_steps_left)
        counts = dict(
            zip((span.bucket_id for span in self._planned), self._order.counts(num_steps_done).tolist(), strict=True)
        )
        positions = {span.bucket_id: span.position_after(counts.get(span.bucket_id, 0)) for span in self._spans}
        return Cursor(self.cursor.epoch, positions)

    def next_epoch(self) -> Cursor:
        """The cursor that opens the next epoch once all steps of this one are done."""
        return Cursor(self.cursor.epoch + 1, {span.bucket_id: span.next_position for span in self._spans})


def _validate_ids(num_samples: Mapping[str, object], batch_sizes: Mapping[str, int], cursor: Cursor) -> None:
    for name, size in batch_sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= 1 << 20:
            raise ConfigError(f"batch_sizes[{name!r}]={size!r}: allowed are the integers 1 to {1 << 20}")
    differing = sorted(num_samples.keys() ^ batch_sizes.keys())
    if differing:
        raise ConfigError(
            f"batch_sizes and the dataset differ in bucket(s) {_named(differing)}; give each of the dataset's a size"
        )
    foreign = sorted(cursor.positions.keys() - num_samples.keys())
    if foreign:
        raise StateError(
            f"the state has a position in bucket(s) {_named(foreign)}, which the dataset lacks; load it with the "
            "dataset and filter that it was saved with, or start anew without it"
        )


def _validate_span(span: BucketSpan) -> None:
    """Positions stay exact in int64 and float64, and a pad's visit (step.py) in int64."""
    if span.global_batch >= 1 << 32:
        raise ConfigError(f"bucket {span.bucket_id}: num_ranks * batch_size is {span.global_batch}, not under 2**32")
    reached = max(span.end, span.position) + span.global_batch
    if reached > MAX_POSITION:
        raise StateError(
            f"bucket {span.bucket_id}: epoch {span.epoch} of {span.num_samples} samples reaches position {reached}; "
            f"positions end at {MAX_POSITION}"
        )


def _shard_counts(bucket_id: str, num_samples: Sequence[int] | Int64Array) -> Int64Array:
    counts = np.asarray(num_samples if len(num_samples) else np.zeros(0, np.int64))
    if counts.ndim != 1 or counts.dtype.kind not in "iu":
        raise ConfigError(f"num_samples[{bucket_id!r}]: expected an integer a shard, got {counts.dtype} {counts.shape}")
    if counts.size and (int(counts.min()) < 0 or float(counts.sum(dtype=np.float64)) > MAX_POSITION):
        raise ConfigError(f"num_samples[{bucket_id!r}]: a shard has 0 or more samples, a bucket at most {MAX_POSITION}")
    return counts.astype(np.int64, copy=False)


def _validate_count(name: str, value: int, highest: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0 or (highest is not None and value > highest):
        allowed = "of at least 0" if highest is None else f"0 to {highest}"
        raise ConfigError(f"{name}={value!r}: allowed are integers {allowed}")


def _num_epochs_to_a_step(span: BucketSpan) -> int:
    """Epochs, this one included, until a bucket that carries its remainder has the samples of one step."""
    return max(1, -(-(span.position + span.global_batch - span.start) // span.num_samples))


def _why_no_step(spans: Sequence[BucketSpan], num_ranks: int) -> str:
    if not any(span.num_samples for span in spans):
        return "the dataset has no samples to deliver; check its split and filter"
    named = [
        f"{span.bucket_id} has {span.num_samples} sample(s), a step takes {span.global_batch} "
        f"({num_ranks} rank(s) x batch_size {span.global_batch // num_ranks})"
        for span in spans
    ]
    remedies = "take a smaller batch_size, fewer ranks or tail='pad'"
    if spans[0].tail == "carry":
        soonest = min(_num_epochs_to_a_step(span) for span in spans if span.num_samples)
        remedies += f", or more epochs: with tail='carry' a first step needs {soonest} of them"
    return f"no bucket can fill one step: {_named(named, '; ')}. Remedies: {remedies}"


def _named(names: Sequence[str], separator: str = ", ") -> str:
    more = len(names) - _NUM_NAMED
    return separator.join([*names[:_NUM_NAMED], f"and {more} more"] if more > 0 else names)
