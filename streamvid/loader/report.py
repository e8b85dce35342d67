"""Log messages about a plan and its memory before the first step. Only rank 0 logs them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from streamvid.buckets.batch_size import host_bytes
from streamvid.buckets.bucket import Bucket
from streamvid.plan import BucketReport
from streamvid.plan.versions.continued import AnyPlan
from streamvid.video.picture import Pixels

_log = logging.getLogger("streamvid.loader")

_NUM_NAMED = 10


def report_memory(
    buckets: Sequence[Bucket], batch_sizes: Mapping[str, int], pixels: Pixels | None, ring_bytes: int
) -> None:
    """Log the sizes of the shared memory and of the largest decoded batch.

    pixels: None if frames are not decoded.
    """
    _log.info("shared memory: %d bytes for the ring and the clips read ahead (see limits.prefetch_bytes)", ring_bytes)
    if pixels is None:
        return
    largest = max(buckets, key=lambda bucket: host_bytes(bucket, batch_sizes[bucket.id], pixels))
    size = batch_sizes[largest.id]
    _log.info(
        "the largest batch in host memory has %d samples from bucket %s and takes %d bytes as %s (%d bytes per sample)",
        size,
        largest.id,
        host_bytes(largest, size, pixels),
        pixels,
        host_bytes(largest, 1, pixels),
    )


def report_plan(plan: AnyPlan, num_buckets: int) -> None:
    """Log one line per bucket, and warnings with remedies for buckets without a step."""
    for row in plan.report():
        _log.info(
            "bucket %s: %d samples, %d steps of %d samples; %d delivered, %d carried, %d dropped, %d repeated",
            row.bucket_id,
            row.num_samples,
            row.num_steps,
            row.global_batch,
            row.num_delivered,
            row.num_carried,
            row.num_dropped,
            row.num_repeated,
        )
    starved = [row for row in plan.starved if row.num_available]  # an epoch may draw no samples of a bucket
    if starved:
        shares = plan.options.sync == "cost"
        sharing = "" if shares else ", or set sync='cost' to let buckets of similar cost share steps"
        _log.warning(
            "%d of %d buckets have no step in this epoch, because they have fewer samples than a step needs: %s. "
            "Lower their batch_size, use fewer ranks, or set tail='pad' or tail='shrink'%s",
            len(starved),
            num_buckets,
            _named(starved, plan.cursor.epoch),
            sharing,
        )
    if not plan.num_steps_left and not plan.cursor.phase:
        _log.warning(
            "epoch %d has no steps, so a loop over it ends immediately. Its samples are delivered later (tail=%r). "
            "To get steps in every epoch, lower batch_size or accumulate, or use fewer ranks",
            plan.cursor.epoch,
            plan.options.tail,
        )
    if not plan.options.tail_rule.is_equal:
        short = [rank for rank in (0, plan.num_ranks - 1) if plan.num_batches_left(rank) != plan.num_steps_left]
        _log.info(
            "each sample is delivered once, so the last batch of a bucket may be smaller%s",
            f", and rank {short[-1]} has {plan.num_batches_left(short[-1])} batches in {plan.num_steps_left} steps"
            if short
            else "",
        )


def _named(starved: Sequence[BucketReport], epoch: int) -> str:
    """Return the first few starved buckets as text, each with the epoch of its first step."""
    names = []
    for row in starved[:_NUM_NAMED]:
        more = row.num_epochs_to_step
        first = "" if more is None else f", first step in epoch {epoch + more - 1}"
        names.append(f"{row.bucket_id} ({row.num_available} of {row.global_batch}{first})")
    return ", ".join(names) + (", …" if len(starved) > _NUM_NAMED else "")
