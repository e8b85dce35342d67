"""What the log says of a plan before its first step; rank 0 reports."""

from __future__ import annotations

import logging

from streamvid.plan import EpochPlan

_log = logging.getLogger("streamvid.loader")

_NUM_NAMED = 10


def report_plan(plan: EpochPlan, num_buckets: int) -> None:
    """A line a bucket; warnings that name what gets no step, with remedies."""
    for row in plan.report():
        _log.info(
            "bucket %s: %d samples, %d steps of %d; %d delivered, %d carried, %d dropped, %d repeated",
            row.bucket_id, row.num_samples, row.num_steps_left, row.global_batch,
            row.num_delivered, row.num_carried, row.num_dropped, row.num_repeated,
        )  # fmt: skip
    starved = [f"{row.bucket_id} ({row.num_samples} of {row.global_batch})" for row in plan.starved]
    if starved:
        named = ", ".join(starved[:_NUM_NAMED]) + (", …" if len(starved) > _NUM_NAMED else "")
        _log.warning(
            "no step in this epoch for %d of %d buckets, which have fewer samples than a step takes: %s. "
            "Lower their batch_size, use fewer ranks, tail='pad' or tail='shrink'",
            len(starved), num_buckets, named,
        )  # fmt: skip
    if not plan.num_steps_left and not plan.cursor.phase:
        _log.warning(
            "epoch %d has no step: a loop over it ends at once. What there is opens a later epoch (tail=%r); "
            "lower batch_size or accumulate, or use fewer ranks, for steps in every epoch",
            plan.cursor.epoch, plan.options.tail,
        )  # fmt: skip
    if plan.options.tail == "uneven":
        short = [rank for rank in (0, plan.num_ranks - 1) if plan.num_batches_left(rank) != plan.num_steps_left]
        _log.info(
            "each sample comes once: last batches of buckets are smaller%s",
            f", and rank {short[-1]} has {plan.num_batches_left(short[-1])} batches of {plan.num_steps_left} steps"
            if short else "",
        )  # fmt: skip
