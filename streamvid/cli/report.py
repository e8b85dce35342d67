"""Output of bucket tables and rejections for `shard`, `stats` and `demo`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import click

from streamvid.cli.console import is_quiet, print_table, size
from streamvid.errors import printable
from streamvid.sharder.rejections import REMEDIES

if TYPE_CHECKING:
    from streamvid.sharder.rejections import RejectedKind
    from streamvid.sharder.report import BucketRow, ShardReport
    from streamvid.sharder.source.summary import AudioSummary, Counted, InputSummary, SourceSummary
    from streamvid.sharder.work.status import ShardStatus
    from streamvid.sharder.work.tasks import Remaining

MAX_REJECTIONS = 20
"""Maximum number of rejections to print individually."""

_MAX_NAMES = 8


def print_input(summary: InputSummary) -> None:
    """Print how the sharder interprets its input. Lines that begin with "note:" need the user's attention."""
    if is_quiet():
        return
    for source in summary.sources:
        _print_source(source)
    if summary.fps is not None:
        lowest, highest = (f"{fps:.4g}" for fps in summary.fps)
        rates = lowest if lowest == highest else f"{lowest} to {highest}"
        read = "every frame is read" if summary.read_fps is None else f"read at {summary.read_fps:.4g}"
        dropped = (
            f"; videos with a higher rate, some of whose frames are dropped: {summary.num_dropped}"
            if summary.num_dropped
            else ""
        )
        click.echo(f"  frames per second: {rates}, {read}{dropped}")
    slow = f"videos below {summary.read_fps or 0:.4g} frames per second, some of whose frames are repeated"
    _note(slow, summary.repeated, f"reject them with --min-fps {summary.read_fps or 0:.4g}")
    _note("rows that use the same file as an earlier row", summary.shared_files)
    _note("files with the same content as another file", summary.duplicates)
    if summary.near_duplicates is not None:
        groups = f"near-duplicates of a larger or earlier video, in {summary.near_duplicates.num_groups} groups"
        _note(groups, summary.near_duplicates.rows)
    if summary.audio is not None and summary.audio.num_videos:
        _print_audio(summary.audio)
    if summary.num_without_bucket:
        click.echo(f"  note: rows or clips that no bucket accepts: {summary.num_without_bucket}")
    click.echo("")


def _print_audio(audio: AudioSummary) -> None:
    click.echo(f"  audio: {audio.num_with_audio} of {audio.num_videos} videos")
    _note("videos whose audio cannot be read", audio.unreadable)
    _note("videos whose audio does not begin with the first frame", audio.other_start)
    _note("videos whose audio and pictures differ in length", audio.other_length)


def print_status(status: ShardStatus) -> None:
    """Print the progress of a build. If the build has stopped, also print how to resume it."""
    if status.state == "sealed":
        click.echo(printable(f"{status.url}: sealed; next: streamvid stats {status.url}"))
        return
    run = f"process {status.pid} on {status.host}, {status.seconds_ago:.0f} s ago"
    run = f"{status.num_tasks} tasks have started, last: {run}" if status.num_tasks else run
    click.echo(printable(f"{status.url}: {status.state} ({run})"))
    rows = [
        (
            phase.name,
            phase.done,
            phase.total,
            "" if phase.per_second is None else f"{phase.per_second:,.3g}",
            "" if not phase.seconds_left else str(timedelta(seconds=round(phase.seconds_left))),
        )
        for phase in status.phases
    ]
    print_table(("phase", "done", "total", "per second", "time left"), rows)
    for kind, count in status.rejections.items():
        remedy = REMEDIES.get(kind, "the final report states the reasons")
        click.echo(printable(f"rejected so far as {kind}: {count}; {remedy}"))
    if status.state == "stopped":
        command = "tasks" if status.num_tasks else "same command"
        click.echo(f"run the {command} again to resume, or add --abandon to remove the unfinished work")


def _print_source(source: SourceSummary) -> None:
    files = f" from {_names(source.metadata)}" if source.metadata else ""
    click.echo(printable(f"input: {source.url}: {source.num_rows} rows in layout {source.layout!r}{files}"))
    used = "; ".join(use if (use,) == names else f"{use}: {_names(names)}" for use, names in source.columns.items())
    if used:
        click.echo(printable(f"  columns: {used}"))
    if source.num_captions is not None and source.num_usable is not None:
        missing = source.num_usable - source.num_captions
        without = f"; without a caption: {missing}" if missing else ""
        click.echo(f"  captions: {source.num_captions} of {source.num_usable} usable rows{without}")
    _note("metadata files that were not read", source.unread_metadata, "read one with --metadata FILE")
    _note("media files that the metadata does not list", source.unnamed_files)


def _names(names: Sequence[str]) -> str:
    more = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def _note(what: str, found: Counted | None, remedy: str = "") -> None:
    if found is not None and found.count:
        more = ", …" if found.count > len(found.examples) else ""
        examples = f" ({', '.join(found.examples)}{more})" if found.examples else ""
        click.echo(printable(f"  note: {what}: {found.count}{examples}{f'; {remedy}' if remedy else ''}"))


def print_report(report: ShardReport, dest: str) -> None:
    """Print the bucket table, the rejections, the totals, and the next command."""
    if report.state == "task ended":
        _print_remaining(report.remaining)
        return
    rows = [_row(report, row) for row in report.buckets]
    if rows:
        print_table(list(rows[0]), [tuple(row.values()) for row in rows])
        click.echo("")
    _print_rejections(report)
    shards = f" in {report.num_shards} shards ({size(report.num_bytes)})" if report.is_sized else ""
    is_cut = report.num_windows != report.num_records
    cut = f", split into {report.num_windows} windows" if is_cut else ""
    kind = "new" if report.num_known else "input"
    click.echo(
        f"{report.num_records} {kind} rows{cut} = {report.num_samples} samples{shards} + {report.num_rejected} rejected"
    )
    if report.num_known:
        click.echo(f"already in the dataset: {report.num_known} rows")
    if report.stored_clips[0]:
        click.echo(stored_line(report.stored_clips))
    if report.encode_seconds is not None:
        click.echo(
            f"encoded: {size(report.source_bytes)} of sources to {size(report.num_bytes)} of clips "
            f"in {report.encode_seconds:.1f} s of CPU time"
        )
    if report.damaged_audio.count:
        is_audio = report.clips == "audio"  # of which --audio require is refused
        loader, ways = ("loader", "") if is_audio else ("loader with output.audio", "--audio require or ")
        remedy = f"a {loader} treats them as bad samples; {ways}--verify decode rejects them"
        _note("files whose audio cannot be decoded", report.damaged_audio, remedy)
    if not report.is_sized:
        what = "encoded" if report.clips == "native" else "cut"
        click.echo(f"to be {what}: {size(report.source_bytes)} of sources; shard sizes will be known afterwards")
    if report.state == "dry run":
        click.echo("dry run: nothing was written. Omit --dry-run to write the dataset")
    else:
        states = {"already sealed": "already sealed, unchanged", "already there": "no new samples"}
        done = states.get(report.state, "sealed")
        click.echo(f"{done}: {dest}\nnext: streamvid stats {dest}")


def _print_remaining(remaining: Remaining | None) -> None:
    if remaining is None:
        click.echo("all shards are built; next: run the same command without --task to seal the dataset")
        return
    units = {"probe": "files", "curate": "files", "encode": "clips", "build": "shards"}[remaining.phase]
    done = {"probe": "probed", "curate": "measured", "encode": "encoded", "build": "built"}[remaining.phase]
    click.echo(
        f"this task is finished; {remaining.num_units} of {remaining.total} {units} are not {done} yet; next: wait "
        "until all tasks have ended, then run them again, or finish on this machine by running the same command "
        "without --task"
    )


def stored_line(stored_clips: tuple[int, int]) -> str:
    """Return a line that reports how many clips are stored in several buckets."""
    return (
        f"{stored_clips[0]} clips are stored as {stored_clips[1]} samples, one in every bucket that accepts the clip; "
        "an epoch delivers each clip from at most one bucket"
    )


def _row(report: ShardReport, row: BucketRow) -> dict[str, object]:
    """Return the table cells for one bucket, as a mapping from column header to cell."""
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
    is_short = report.num_rejected <= MAX_REJECTIONS
    if is_short:
        for rejection in report.rejections:
            click.echo(printable(f"rejected: row {rejection.row}  {rejection.source}: {rejection.reason}"))
        click.echo("")
    print_kinds(report.rejected_by_kind, with_examples=not is_short)
    click.echo("")


def print_kinds(kinds: Sequence[RejectedKind], *, with_examples: bool) -> None:
    """For each kind of rejection, print the number of rejected rows and the remedy."""
    print_table(["rejected", "why", "remedy"], [(kind.count, kind.kind, kind.remedy) for kind in kinds])
    if not with_examples:
        return
    for kind in kinds:
        for row, source, reason in kind.examples:
            click.echo(printable(f"  {kind.kind}: row {row}  {source}: {reason}"))
