"""streamvid remove: remove samples from a dataset, for example to honor a takedown request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from streamvid.cli.console import run_and_print
from streamvid.cli.flags import LOCATION, GroupedCommand
from streamvid.cli.shared_flags import storage_flags
from streamvid.errors import printable

if TYPE_CHECKING:
    from streamvid.dataset.upkeep.remove import RemoveReport

_SHOWN = 20

_EPILOG = """\b
Examples:
  streamvid remove ds/ --keys takedown.txt --reason "request 2031"
  streamvid remove s3://bucket/ds --source "studio-7/*" --dry-run
  streamvid remove ds/ --where "nsfw > 0.5" --json > record.json
  streamvid compact ds/                                       then delete the bytes

FILE lists sample keys, record keys or source names: one per line in a .txt file, or in a column named key, record_key
or source in a CSV, JSON, JSON Lines or Parquet file. Loaders that start after this command do not deliver the samples.
Their bytes remain stored until `streamvid compact` rewrites the tars. If the command is interrupted, run it again."""


@click.command(cls=GroupedCommand, epilog=_EPILOG)
@click.argument("dataset", type=LOCATION)
@click.option("--keys", type=LOCATION, metavar="FILE", help="File that lists the samples to remove.")
@click.option("--where", metavar="CONDITION", help="Remove the samples that match a condition.")
@click.option("--source", metavar="PATTERN", help="Remove samples by source name, with a glob such as 'studio-7/*'.")
@click.option("--reason", default="", metavar="TEXT", help="Reason to record in the version and in the report.")
@click.option("--dry-run", is_flag=True, help="Show what would be removed, without changing anything.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@storage_flags
def command(dataset: str, as_json: bool, **options: Any) -> int:
    """Remove samples from the sealed DATASET. The exit code is 1 if no sample is selected."""
    from streamvid.dataset.upkeep.remove import NOTHING_SELECTED, remove

    report = run_and_print(lambda progress: remove(dataset, progress=progress, **options), as_json, _print)
    return 1 if report.state == NOTHING_SELECTED else 0


def _print(report: RemoveReport) -> None:
    for clip in report.removed[:_SHOWN]:
        click.echo(printable(f"{clip.key}  {clip.source}  sha256 {clip.clip_sha256}"))
    if len(report.removed) > _SHOWN:
        click.echo(f"… and {len(report.removed) - _SHOWN} more; --json lists all")
    if report.num_already_removed:
        click.echo(f"{report.num_already_removed} of the keys were removed by an earlier command")
    if report.num_unmatched:
        shown = ", ".join(report.unmatched[:_SHOWN]) + (", …" if report.num_unmatched > _SHOWN else "")
        click.echo(printable(f"{report.num_unmatched} of the keys match no sample: {shown}"))
    if report.num_same_clips:
        click.echo(
            printable(
                f"{report.num_same_clips} remaining samples have the same clips as removed samples: "
                f"{report.same_clips[0]}, …"
            )
        )
    if report.stored_in:
        click.echo(f"bytes of removed samples are still stored in {len(report.stored_in)} tar(s)")
    reason = f"; reason: {report.reason}" if report.reason else ""
    version = "" if report.version is None else f" in version {report.version}"
    click.echo(
        printable(
            f"{report.state}{version}: {len(report.removed)} samples, {report.num_left} remain: "
            f"{report.dataset}{reason}"
        )
    )
    for step in report.next_steps:
        click.echo(f"next: {step}")
