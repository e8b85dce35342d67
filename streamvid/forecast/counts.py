"""Exact step and sample counts of a run, per bucket and per tail policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from streamvid.errors import PlanError
from streamvid.plan.epoch import EpochPlan
from streamvid.plan.options import PlanOptions, Sync
from streamvid.plan.span import BucketReport
from streamvid.plan.tail import TAIL_RULES, Tail

_SUMMED = ("num_steps", "num_delivered", "num_dropped", "num_repeated")


@dataclass(frozen=True, slots=True)
class TailCounts:
    """Counts over all buckets under one tail policy."""

    tail: Tail
    num_steps: int
    num_delivered: int
    num_carried: int
    num_dropped: int
    num_repeated: int
    share_left_out: float
    share_repeated: float
    num_starved_buckets: int


@dataclass(frozen=True, slots=True)
class StarvedBucket:
    """Bucket that has samples, none of which is delivered.

    num_samples: number of available samples per epoch.
    """

    bucket_id: str
    num_samples: int
    global_batch: int
    remedies: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunCounts:
    """Exact counts for a run that is never interrupted.

    steps: number of steps in each epoch.
    buckets: reports summed over the epochs, except that `num_carried` counts only the last epoch's carried samples,
        which are never delivered.
    tails: counts under each allowed tail policy.
    """

    tail: Tail
    sync: Sync
    accumulate: int
    num_ranks: int
    num_epochs: int
    steps: tuple[int, ...]
    buckets: tuple[BucketReport, ...]
    starved: tuple[StarvedBucket, ...]
    tails: tuple[TailCounts, ...]


def count_run(plan_of: Callable[[PlanOptions], EpochPlan], options: PlanOptions, num_epochs: int) -> RunCounts:
    """Return the counts for a run.

    plan_of: function that returns the plan for epoch 0, given options that differ from `options` only in the tail
        policy.
    """
    tails = [tail for tail, rule in TAIL_RULES.items() if rule.is_equal or options.accumulate == 1]
    plans = {tail: plan_of(replace(options, tail=tail)) for tail in tails}
    epochs = {tail: _epochs(plan, num_epochs) for tail, plan in plans.items()}
    buckets = {tail: _totals(reports) for tail, (_, reports) in epochs.items()}
    num_ranks = plans[options.tail].num_ranks
    return RunCounts(
        tail=options.tail,
        sync=options.sync,
        accumulate=options.accumulate,
        num_ranks=num_ranks,
        num_epochs=num_epochs,
        steps=tuple(epochs[options.tail][0]),
        buckets=buckets[options.tail],
        starved=tuple(
            _starved(report, options, num_ranks, num_epochs) for report in buckets[options.tail] if report.is_starved
        ),
        tails=tuple(_tail_counts(tail, sum(epochs[tail][0]), buckets[tail]) for tail in tails),
    )


def failure_of(plan: EpochPlan, num_epochs: int) -> PlanError | None:
    """Return the error that a run with this plan would raise before its first step, or None."""
    try:
        plan.check(num_epochs)
    except PlanError as error:
        return error
    return None


def _epochs(plan: EpochPlan, num_epochs: int) -> tuple[list[int], list[tuple[BucketReport, ...]]]:
    """Return (number of steps per epoch, bucket reports per epoch) for a run that is never interrupted."""
    steps, reports = [], []
    for _ in range(num_epochs):
        steps.append(plan.num_steps_left)
        reports.append(plan.report())
        plan = plan.at(plan.next_epoch())
    return steps, reports


def _totals(epochs: Sequence[tuple[BucketReport, ...]]) -> tuple[BucketReport, ...]:
    """Return one report per bucket, summed over the epochs."""
    return tuple(
        replace(reports[-1], **{name: sum(getattr(report, name) for report in reports) for name in _SUMMED})
        for reports in zip(*epochs, strict=True)
    )


def _tail_counts(tail: Tail, num_steps: int, buckets: Sequence[BucketReport]) -> TailCounts:
    names = ("num_delivered", "num_carried", "num_dropped", "num_repeated")
    total = {name: sum(getattr(report, name) for report in buckets) for name in names}
    left_out = total["num_dropped"] + total["num_carried"]
    return TailCounts(
        tail=tail,
        num_steps=num_steps,
        share_left_out=left_out / max(1, sum(report.num_available for report in buckets)),
        share_repeated=total["num_repeated"] / max(1, total["num_delivered"]),
        num_starved_buckets=sum(report.is_starved for report in buckets),
        **total,
    )


def _starved(report: BucketReport, options: PlanOptions, num_ranks: int, num_epochs: int) -> StarvedBucket:
    """Describe a starved bucket, and list the remedies that would give the bucket at least one step."""
    samples, remedies = -(-report.num_available // num_epochs), []
    if options.sync == "bucket" and samples >= num_ranks:
        remedies.append(f"batch size {samples // num_ranks}")
    if options.sync == "bucket" and samples >= report.batch_size:
        remedies.append(f"{samples // report.batch_size} rank(s)")
    if options.sync == "bucket" and samples and options.tail_rule.carries:
        remedies.append(f"{-(-report.global_batch // samples)} epochs")
    if samples:
        remedies.append("--tail pad or shrink")
    return StarvedBucket(report.bucket_id, samples, report.global_batch, tuple(remedies))
