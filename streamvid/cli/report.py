"""Bucket tables and rejections, as `shard`, `stats` and `demo` show them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import click

from streamvid.cli.console import printable, size, table

if TYPE_CHECKING:
    from streamvid.sharder.report import ShardReport

_MAX_REJECTIONS = 20


def print_report(report: ShardReport, dest: str) -> None:
    """The bucket table, the rejections, the counts that add up, and what to type next."""
    headers = ["bucket", "T x H x W", "samples", "shards", "size", "video", "cropped"]
    rows = [
        (
            row.bucket_id,
            f"{row.num_frames} x {row.height} x {row.width}",
            row.num_samples,
            row.num_shards,
            size(row.num_bytes),
            f"{row.duration_seconds:.1f} s" if row.num_frames > 1 else "-",
            f"{row.mean_crop:.0%}",
        )
        for row in report.buckets
    ]
    if rows:
        click.echo(table(headers, rows))
        click.echo("")
    _print_rejections(report)
    click.echo(
        f"{report.num_records} input rows = {report.num_samples} samples in {report.num_shards} shards "
        f"({size(report.num_bytes)}) + {report.num_rejected} rejected"
    )
    if report.state == "dry run":
        click.echo("dry run: nothing was written. Leave --dry-run out to build it")
    else:
        done = "sealed there before, left as it is" if report.state == "already sealed" else "sealed"
        click.echo(f"{done}: {dest}\nnext: streamvid stats {dest}")


def _print_rejections(report: ShardReport) -> None:
    shown = report.rejections[:_MAX_REJECTIONS]
    for rejection in shown:
        click.echo(printable(f"rejected: row {rejection.row}  {rejection.source}: {rejection.reason}"))
    if len(shown) < report.num_rejected:
        reasons = Counter(_kind(rejection.reason) for rejection in report.rejections[_MAX_REJECTIONS:])
        for reason, count in reasons.most_common(10):
            click.echo(printable(f"rejected: {count} more like: {reason}"))
    if shown:
        click.echo("")


def _kind(reason: str) -> str:
    # Reasons differ by their numbers; what they have in common is what a person wants to see counted.
    return "".join("N" if c.isdigit() else c for c in reason)[:100]
