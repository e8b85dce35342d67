"""Text output of `streamvid plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

from streamvid.cli.console import print_table, size
from streamvid.cli.report import print_input
from streamvid.errors import printable

if TYPE_CHECKING:
    from streamvid.forecast.counts import RunCounts
    from streamvid.forecast.host import Estimates, HostMemory
    from streamvid.forecast.loads import LoadSummary
    from streamvid.forecast.run import BucketShape, MetadataFacts, RunForecast

_MAX_SHOWN = 10
_MAX_RANKS_SHOWN = 8
_COUNTS = {
    "bucket": "bucket_id",
    "samples": "num_samples",
    "batch": "batch_size",
    "per step": "global_batch",
    "steps": "num_steps",
    "delivered": "num_delivered",
    "carried": "num_carried",
    "dropped": "num_dropped",
    "repeated": "num_repeated",
}
"""Maps each table header to a field of BucketReport."""


def print_forecast(found: RunForecast) -> None:
    """Print all parts of a forecast. A "~" before a number marks an estimate."""
    from streamvid.forecast.run import MetadataFacts

    print_input(found.input)
    _print_counts(found.counts)
    if found.cost_classes is not None:
        _print_classes(found.cost_classes, found.costs_are_measured)
    _print_tails(found.counts)
    if found.shapes:
        _print_shapes(found.shapes, found.kind == "metadata")
    if isinstance(found.about, MetadataFacts):
        _print_left_out(found.about)
    if found.details is not None:
        _print_loads(found.details.loads)
        _print_memory(found.details.memory)
        if found.details.estimates is not None:
            _print_estimates(found.details.estimates)
    for line in found.notes:
        click.echo(printable(f"note: {line}"))


def _print_counts(counts: RunCounts) -> None:
    rows = [[getattr(bucket, field) for field in _COUNTS.values()] for bucket in counts.buckets]
    print_table(list(_COUNTS), rows)
    shown = ", ".join(map(str, counts.steps[:_MAX_SHOWN])) + (", ..." if len(counts.steps) > _MAX_SHOWN else "")
    click.echo(
        f"\n{counts.num_ranks} ranks, tail {counts.tail}, sync {counts.sync}: {sum(counts.steps)} steps in "
        f"{counts.num_epochs} epoch(s): {shown}"
    )
    stored = sum(bucket.num_samples for bucket in counts.buckets)
    available = sum(bucket.num_available for bucket in counts.buckets)
    if available != stored * counts.num_epochs:
        click.echo(f"{stored} samples are stored; {counts.num_epochs} epoch(s) deliver {available}")
    for starved in counts.starved[:_MAX_SHOWN]:
        click.echo(
            f"starved: {starved.bucket_id} has {starved.num_samples} sample(s), but a step needs {starved.global_batch}"
            f". Remedies: {', or '.join(starved.remedies) or 'leave it out of the dataset'}"
        )
    more = len(counts.starved) - _MAX_SHOWN
    if more > 0:
        click.echo(f"and {more} more buckets with fewer samples than a step needs (--json lists all)")


def _print_classes(cost_classes: Mapping[str, int], are_measured: bool) -> None:
    members: dict[int, list[str]] = {}
    for bucket_id, number in cost_classes.items():
        members.setdefault(number, []).append(bucket_id)
    origin = "measured" if are_measured else "predicted from tokens, not measured"
    click.echo(f"\nBuckets that share steps, with costs within 10 % of each other ({origin}):")
    for number, names in members.items():
        more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
        click.echo(f"  {number}: {', '.join(names[:_MAX_SHOWN])}{more}")


def _print_tails(counts: RunCounts) -> None:
    click.echo("\nAll tail policies:")
    rows = [
        (
            tail.tail + (" *" if tail.tail == counts.tail else ""),
            tail.num_steps,
            tail.num_delivered,
            f"{tail.share_left_out:.2%}",
            f"{tail.share_repeated:.2%}",
            tail.num_starved_buckets,
        )
        for tail in counts.tails
    ]
    print_table(["tail", "steps", "delivered", "left out", "repeated", "starved buckets"], rows)


def _print_shapes(shapes: Mapping[str, BucketShape], is_metadata: bool) -> None:
    click.echo("\nCost of each bucket's shape:")
    headers = ["bucket", "cropped", "at most", "scaled by", "frames unused", "expected" if is_metadata else "clip"]
    rows = [
        (
            name,
            _recorded(shape.crop_mean, ".1%"),
            _recorded(shape.crop_max, ".1%"),
            _recorded(shape.upscale_mean, ".2f"),
            f"{shape.frames_unused_share:.1%}",
            size(round(shape.bytes_mean)) if shape.expected is None else f"{shape.expected:.1f}",
        )
        for name, shape in shapes.items()
    ]
    print_table(headers, rows)


def _recorded(value: float | None, form: str) -> str:
    return "not recorded" if value is None else format(value, form)


def _print_left_out(about: MetadataFacts) -> None:
    total = sum(left.num_rows for left in about.left_out)
    click.echo(f"\n{about.num_rows} rows, {about.num_rows - total} with a bucket, {total} without:")
    for left in about.left_out:
        click.echo(f"  {left.kind}: {left.num_rows} rows (expected number: {float(left.expected):.1f})")
        for example in left.examples:
            name = f" {example.source}" if example.source else ""
            click.echo(printable(f"    row {example.row}{name}: {example.reason}"))


def _print_loads(loads: LoadSummary) -> None:
    mark = "~" if loads.is_estimate else ""
    click.echo(
        f"\ntokens per rank per step: {mark}{loads.tokens_mean:.0f} on average, {loads.tokens_min} to "
        f"{loads.tokens_max}; the busiest rank has {mark}{loads.imbalance_tokens:.3f} times the average "
        f"({mark}{loads.imbalance_costs:.3f} times by predicted cost)"
    )
    if loads.member_bytes_by_rank is not None:
        mark = "~" if loads.bytes_are_estimate else ""
        click.echo(f"bytes of clips per rank per epoch: {mark}{_ranks(loads.member_bytes_by_rank)}")


def _ranks(by_rank: Sequence[int]) -> str:
    if len(by_rank) <= _MAX_RANKS_SHOWN:
        return ", ".join(size(each) for each in by_rank)
    return f"{size(min(by_rank))} to {size(max(by_rank))}"


def _print_memory(memory: HostMemory) -> None:
    yuv420p = "" if memory.ring_bytes_yuv420p is None else f" (yuv420p {size(memory.ring_bytes_yuv420p)})"
    click.echo(
        f"host memory per rank: ring {size(memory.ring_bytes)}{yuv420p}, workers ~{size(memory.workers_bytes)}; "
        f"{memory.ranks_per_node} rank(s) on one machine need ~{size(memory.per_node_bytes)}"
    )


def _print_estimates(estimates: Estimates) -> None:
    work, epoch = estimates.work, estimates.epoch
    parts = ", ".join(
        f"{name} {'not measured' if seconds is None else _duration(seconds)}" for name, seconds in epoch.parts.items()
    )
    click.echo("estimates (describe your machine in --cost-table):")
    click.echo(
        f"  requests to an object store, busiest rank: ~{work.num_requests:.0f} "
        f"(~{estimates.requests_per_sample:.2f} per sample for clips), ~{size(round(work.num_bytes))} read"
    )
    click.echo(f"  an epoch: ~{_duration(epoch.seconds)}, limited by {epoch.bound_by} ({parts})")


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
