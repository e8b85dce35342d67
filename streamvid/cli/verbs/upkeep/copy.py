"""streamvid copy: copy a dataset between disks and object stores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from streamvid.cli.console import run_and_print, size
from streamvid.cli.flags import LOCATION, GroupedCommand
from streamvid.cli.shared_flags import storage_pair_flags

if TYPE_CHECKING:
    from streamvid.dataset.upkeep.copy import CopyReport

_EPILOG = """\b
Examples:
  streamvid copy ds/ s3://bucket/ds
  streamvid copy s3://bucket/ds /mnt/nvme/ds --region eu-west-1
  streamvid copy s3://theirs/ds s3://mine/ds --source-anon --dest-endpoint-url http://127.0.0.1:9000
  streamvid copy ds/ s3://bucket/ds --check-existing      replace files that differ

Every file's checksum is verified in transit, and manifest.json is written last, so that no reader sees a partial
dataset. If the command is interrupted, run it again to resume."""


@click.command(cls=GroupedCommand, epilog=_EPILOG)
@click.argument("source", type=LOCATION)
@click.argument("dest", type=LOCATION)
@click.option(
    "--check-existing",
    is_flag=True,
    help="Compare existing files at DEST with the source, and replace files that differ.",
)
@click.option(
    "--workers", type=click.IntRange(1, 256), default=8, show_default=True, help="Number of files to copy in parallel."
)
@click.option(
    "--temp-dir",
    type=LOCATION,
    help="Scratch directory for uploads, with room for one tar per worker.  [default: TMPDIR or /tmp]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@storage_pair_flags
def command(source: str, dest: str, as_json: bool, **options: Any) -> None:
    """Copy the sealed dataset at SOURCE to DEST, or repair an existing copy at DEST."""
    from streamvid.dataset.upkeep.copy import copy_dataset

    run_and_print(lambda progress: copy_dataset(source, dest, progress=progress, **options), as_json, _print)


def _print(report: CopyReport) -> None:
    kept = f"; {report.num_kept} were already there" if report.num_kept else ""
    click.echo(f"{report.num_copied} of {report.num_files} files copied, {size(report.num_bytes_copied)}{kept}")
    if report.num_uploads_aborted:
        click.echo(f"{report.num_uploads_aborted} unfinished uploads from killed writers were aborted")
    click.echo(f"{report.state}: {report.dest}\nnext: streamvid verify {report.dest}")
