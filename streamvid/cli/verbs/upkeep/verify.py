"""streamvid verify: check a dataset against its manifest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from streamvid.cli.console import run_and_print, size
from streamvid.cli.flags import LOCATION, GroupedCommand
from streamvid.cli.shared_flags import storage_flags
from streamvid.errors import printable

if TYPE_CHECKING:
    from streamvid.dataset.upkeep.verify import VerifyReport

_MAX_SHOWN = 20

_EPILOG = """\b
Examples:
  streamvid verify ds/
  streamvid verify s3://bucket/ds --deep
  streamvid verify s3://bucket/ds --deep --endpoint-url http://127.0.0.1:9000 --json | jq .problems

Without --deep, verify checks the manifest and the index by checksum, and shards by size. The exit code is 0 if no
problem is found, otherwise 1; the last line then states the remedy. If the command is interrupted, run it again to
resume."""


@click.command(cls=GroupedCommand, epilog=_EPILOG)
@click.argument("url", type=LOCATION)
@click.option("--deep", is_flag=True, help="Read and verify every byte of shards, clips, captions and packets.")
@click.option("--fresh", is_flag=True, help="With --deep, start over instead of resuming an interrupted run.")
@click.option(
    "--workers",
    type=click.IntRange(1, 256),
    default=8,
    show_default=True,
    help="Number of files to read in parallel; each uses 16 MiB of memory.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@storage_flags
def command(url: str, as_json: bool, **options: Any) -> int:
    """Check the dataset at URL without changing it."""
    from streamvid.dataset.upkeep.verify import verify_dataset

    report = run_and_print(lambda progress: verify_dataset(url, progress=progress, **options), as_json, _print)
    return 0 if report.is_right else 1


def _print(report: VerifyReport) -> None:
    for problem in report.problems[:_MAX_SHOWN]:
        click.echo(printable(str(problem)))
    if report.num_problems > _MAX_SHOWN:
        click.echo(f"… and {report.num_problems - _MAX_SHOWN} more problems; --json shows more")
    for path in report.extra[:_MAX_SHOWN]:
        click.echo(printable(f"not part of this dataset, ignored: {path}"))
    if (report.num_extra or 0) > _MAX_SHOWN:
        click.echo(f"… and {(report.num_extra or 0) - _MAX_SHOWN} more files that are not part of this dataset")
    if report.num_shards_resumed:
        click.echo(f"{report.num_shards_resumed} shards were read by an interrupted run; --fresh reads them again")
    if report.num_moved or report.num_removed:
        click.echo(
            f"a later version deleted shards of this version: {report.num_moved} samples are stored elsewhere now, "
            f"{report.num_removed} were removed"
        )
    if report.removed_in:
        click.echo(
            f"{len(report.removed_in)} tar(s) still contain removed samples; streamvid compact {report.url} deletes "
            "them"
        )
    if report.is_right:
        how = "every byte was read" if report.is_deep else "shards were checked by size only; --deep reads every byte"
        click.echo(f"OK: {report.url}: {_counts(report)}; {how}")
        return
    unseen = "" if report.is_complete else ", and some shards could not be checked"
    click.echo(f"{report.num_problems} problem(s) in {report.num_files_wrong} file(s){unseen}: {report.url}")
    click.echo(f"next: {report.remedy}")


def _counts(report: VerifyReport) -> str:
    totals = report.totals
    return (
        f"{totals.num_samples} samples in {totals.num_shards} shards, {totals.num_files} files, "
        f"{size(totals.num_bytes)}"
    )
