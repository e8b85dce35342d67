"""Output of bucket tables and rejections for `shard`, `stats` and `demo`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from streamvid.cli.console import print_table, printable, size

if TYPE_CHECKING:
    from streamvid.sharder.rejections import RejectedKind
    from streamvid.sharder.report import BucketRow, ShardReport

_MAX_REJECTIONS = 20


def print_report(report: ShardReport, dest: str) -> None:
    """Print the bucket table, the rejections, the totals, and the next command."""
    rows = [_row(report, row) for row in report.buckets]
    if rows:
        print_table(list(rows[0]), [tuple(row.values()) for row in rows])
        click.echo("")
    _print_rejections(report)
    is_unknown = report.state == "dry run" and report.clips == "native"
    shards = "" if is_unknown else f" in {report.num_shards} shards ({size(report.num_bytes)})"
    is_cut = report.num_windows != report.num_records
    cut = f", cut into {report.num_windows} windows" if is_cut else ""
    click.echo(
        f"{report.num_records} input rows{cut} = {report.num_samples} samples{shards} + {report.num_rejected} rejected"
    )
    if report.stored_clips[0]:
        click.echo(stored_line(report.stored_clips))
    if report.encode_seconds is not None:
        click.echo(
            f"encoded: {size(report.source_bytes)} of sources as {size(report.num_bytes)} of clips, "
            f"in {report.encode_seconds:.1f} s of CPU time"
        )
    if is_unknown:
        click.echo(f"to be encoded: {size(report.source_bytes)} of sources; sizes and shards are known after encoding")
    if report.state == "dry run":
        click.echo("dry run: nothing was written. Omit --dry-run to build the dataset")
    else:
        done = "already sealed, unchanged" if report.state == "already sealed" else "sealed"
        click.echo(f"{done}: {dest}\nnext: streamvid stats {dest}")


def stored_line(stored_clips: tuple[int, int]) -> str:
    """Return the line about clips that are stored in several buckets."""
    return (
        f"{stored_clips[0]} clips are stored {stored_clips[1]} times, in every bucket that accepts them; an epoch "
        "delivers each from at most one bucket"
    )


def _row(report: ShardReport, row: BucketRow) -> dict[str, object]:
    """Return the cells of a table row by header."""
    cells: dict[str, object] = {
        "bucket": row.bucket_id,
        "T x H x W": f"{row.num_frames} x {row.height} x {row.width}",
        "samples": row.num_samples,
        "shards": row.num_shards or "-",
        "size": size(row.num_bytes) if row.num_bytes else "-",
        "video": f"{row.duration_seconds:.1f} s" if row.num_frames > 1 else "-",
        "cropped": f"{row.mean_crop:.0%}",
    }
    if report.clips == "native":
        cells["sources"] = size(row.source_bytes)
    if row.mean_psnr_y is not None and row.min_psnr_y is not None:
        cells |= {"PSNR-Y": f"{row.mean_psnr_y:.1f} dB", "lowest": f"{row.min_psnr_y:.1f} dB"}
    return cells


def _print_rejections(report: ShardReport) -> None:
    if not report.num_rejected:
        return
    if report.num_rejected <= _MAX_REJECTIONS:
        for rejection in report.rejections:
            click.echo(printable(f"rejected: row {rejection.row}  {rejection.source}: {rejection.reason}"))
        click.echo("")
    print_kinds(report.rejected_by_kind, with_examples=report.num_rejected > _MAX_REJECTIONS)
    click.echo("")


def print_kinds(kinds: Sequence[RejectedKind], *, with_examples: bool) -> None:
    """Print the number of rejections and the remedy for each kind."""
    print_table(["rejected", "why", "remedy"], [(kind.count, kind.kind, kind.remedy) for kind in kinds])
    if not with_examples:
        return
    for kind in kinds:
        for row, source, reason in kind.examples:
            click.echo(printable(f"  {kind.kind}: row {row}  {source}: {reason}"))
