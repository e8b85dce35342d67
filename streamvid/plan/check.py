"""Validation of a plan's inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from streamvid.config import require_integer
from streamvid.errors import ConfigError, PlanError, StateError
from streamvid.plan.mix import MAX_BLOCK_SAMPLES, PlanSource
from streamvid.plan.options import PlanOptions
from streamvid.plan.position import MAX_POSITION, Cursor
from streamvid.plan.span import BucketSpan
from streamvid.plan.step import FILL_GROUP, FILLER_VISITS

Int64Array = npt.NDArray[np.int64]

_NUM_NAMED = 10


def shard_counts(sources: Sequence[PlanSource]) -> dict[str, dict[int, Int64Array]]:
    """Return the number of samples per shard for each bucket id and source index, sorted by bucket id."""
    counts: dict[str, dict[int, Int64Array]] = {}
    for number, source in enumerate(sources):
        for name, of_shards in source.num_samples.items():
            counts.setdefault(name, {})[number] = _counts_of(name, of_shards)
    return dict(sorted(counts.items()))


def _counts_of(bucket_id: str, num_samples: Sequence[int] | Int64Array) -> Int64Array:
    counts = np.asarray(num_samples if len(num_samples) else np.zeros(0, np.int64))
    if counts.ndim != 1 or counts.dtype.kind not in "iu":
        raise ConfigError(
            f"num_samples[{bucket_id!r}]: must contain one integer per shard, but has dtype {counts.dtype} and shape "
            f"{counts.shape}"
        )
    if counts.size and (int(counts.min()) < 0 or float(counts.sum(dtype=np.float64)) > MAX_POSITION):
        raise ConfigError(
            f"num_samples[{bucket_id!r}]: must be at least 0 for each shard, and at most {MAX_POSITION} in total"
        )
    return counts.astype(np.int64, copy=False)


def check_ids(counts: Mapping[str, object], batch_sizes: Mapping[str, int]) -> None:
    """Raise ConfigError if a bucket has no batch size, or if a batch size is invalid or is for an unknown bucket."""
    for name, size in batch_sizes.items():
        require_integer(f"batch_sizes[{name!r}]", size, 1, 1 << 20)
    if missing := sorted(counts.keys() - batch_sizes.keys()):
        raise ConfigError(
            f"batch_sizes has no entry for these buckets in the dataset: {named(missing)}; add an entry for each"
        )
    if unknown := sorted(batch_sizes.keys() - counts.keys()):
        raise ConfigError(
            f"batch_sizes has entries for buckets that the dataset lacks: {named(unknown)}; remove these entries"
        )


def check_costs(counts: Mapping[str, object], options: PlanOptions, costs: Mapping[str, int] | None) -> dict[str, int]:
    """Return the cost of each bucket. Raises ConfigError for a missing or invalid cost."""
    missing = sorted(counts.keys() - (costs or {}).keys())
    if missing or costs is None:
        raise ConfigError(
            f"sync={options.sync!r} with order={options.order!r} requires a cost for each bucket, but these buckets "
            f"have no cost: {named(missing)}; give a cost for each bucket, or use sync='bucket' and order='mixed'"
        )
    for name, cost in costs.items():
        require_integer(f"costs[{name!r}]", cost, 1, (1 << 62) - 1)
    return {name: costs[name] for name in counts}


def check_cursor(cursor: Cursor, streams: Mapping[str, object]) -> None:
    """Raise StateError if the cursor has a position in a bucket that the dataset does not contain."""
    foreign = sorted(cursor.positions.keys() - streams.keys())
    if foreign:
        raise StateError(
            f"the state has positions in buckets that the dataset lacks: {named(foreign)}; load the state with the "
            "dataset and filter that it was saved with, or start without a state"
        )


def check_span(span: BucketSpan, num_samples: int, accumulate: int) -> None:
    """Raise ConfigError or StateError if positions or repeat counts exceed the supported range."""
    passes = span.length // max(1, num_samples) + 2
    most = FILLER_VISITS if accumulate > 1 else FILL_GROUP
    if span.tail.repeats and span.length and (span.global_batch // span.length + 2) * passes >= most:
        raise ConfigError(
            f"bucket {span.bucket_id}: a step of {span.global_batch} samples would repeat the epoch's {span.length} "
            f"samples too often ({passes} passes over {num_samples} samples); lower batch_size, the number of ranks "
            "or num_repeats, or use tail='drop' or tail='carry'"
        )
    if span.global_batch >= 1 << 30:
        raise ConfigError(
            f"bucket {span.bucket_id}: num_ranks * batch_size is {span.global_batch}, but must be less than 2**30; "
            "lower batch_size or the number of ranks"
        )
    if span.length > MAX_BLOCK_SAMPLES and span.length != num_samples:
        raise ConfigError(
            f"bucket {span.bucket_id}: an epoch has {span.length} samples, but the maximum for repeated or mixed "
            f"datasets is {MAX_BLOCK_SAMPLES}; lower num_repeats or samples_per_epoch"
        )
    reached = max(span.end, span.position) + span.global_batch
    if reached > MAX_POSITION:
        raise StateError(
            f"bucket {span.bucket_id}: epoch {span.epoch}, with {num_samples} samples, reaches position "
            f"{reached}, but the maximum position is {MAX_POSITION}; start at an earlier epoch"
        )


def no_step(spans: Sequence[BucketSpan], options: PlanOptions, num_ranks: int, soonest: int | None) -> PlanError:
    """Return the error for a run without steps.

    soonest: number of epochs until samples fill a step; None if they never do.
    """
    if not any(span.num_samples for span in spans):
        return PlanError("the dataset has no samples to deliver; check its split and filter")
    rows = [
        f"{span.bucket_id} has {span.available} of the {span.global_batch} samples that a step needs "
        f"(num_ranks={num_ranks} times batch_size={span.batch_size})"
        for span in spans
    ]
    remedies = ["a smaller batch_size", "fewer ranks", "tail='pad'", "tail='shrink'"]
    if options.accumulate > 1:
        remedies.insert(0, f"a value of accumulate below {options.accumulate}")
    if soonest is not None:
        remedies.append(f"at least {soonest} epochs (tail='carry' carries samples over)")
    *others, last = remedies
    return PlanError(f"no bucket can fill one step: {named(rows, '; ')}. Use {', '.join(others)} or {last}")


def named(names: Sequence[str], separator: str = ", ") -> str:
    """Return the first few names as one string, followed by the number of omitted names, if any."""
    more = len(names) - _NUM_NAMED
    return separator.join([*names[:_NUM_NAMED], f"and {more} more"] if more > 0 else names)
