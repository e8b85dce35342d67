"""streamvid merge: add the samples from other datasets to a dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from streamvid.cli.console import run_and_print, size
from streamvid.cli.flags import LOCATION, GroupedCommand
from streamvid.cli.shared_flags import storage_flags

if TYPE_CHECKING:
    from streamvid.dataset.upkeep.merge import MergeReport

_EPILOG = """\b
Examples:
  streamvid merge all/ part-1/ part-2/                     all/ begins as a copy of part-1/
  streamvid merge s3://bucket/all new/ --on-duplicate first

The sources do not change. Buckets with equal ids must have equal shapes, and clips, frame rate, model and encoding must
be equal. Columns that a dataset lacks are empty for its samples. If the command is interrupted, run it again."""


@click.command(cls=GroupedCommand, epilog=_EPILOG)
@click.argument("dataset", type=LOCATION)
@click.argument("sources", type=LOCATION, nargs=-1, required=True)
@click.option(
    "--on-duplicate",
    type=click.Choice(["error", "first", "last"]),
    default="error",
    show_default=True,
    help="Samples to keep if several datasets contain samples from the same source file.",
)
@click.option(
    "--workers", type=click.IntRange(1, 256), default=8, show_default=True, help="Number of shards to copy in parallel."
)
@click.option(
    "--temp-dir",
    type=LOCATION,
    help="Scratch directory for remote stores, with room for two shards per worker.  [default: TMPDIR or /tmp]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@storage_flags
def command(dataset: str, sources: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Add the samples from the sealed datasets SOURCES to DATASET."""
    from streamvid.dataset.upkeep.merge import merge

    run_and_print(lambda progress: merge(dataset, *sources, progress=progress, **options), as_json, _print)


def _print(report: MergeReport) -> None:
    click.echo(f"{report.num_added} samples added ({size(report.num_bytes)})")
    if report.num_duplicates or report.num_replaced:
        click.echo(
            f"duplicates: {report.num_duplicates} samples not added, {report.num_replaced} earlier samples replaced"
        )
    if report.num_kept_out:
        click.echo(f"{report.num_kept_out} samples not added, because they were removed from the dataset earlier")
    version = "" if report.version is None else f" in version {report.version}"
    click.echo(
        f"{report.state}{version}: {report.dataset}: {report.num_samples} samples\n"
        f"next: streamvid verify {report.dataset}"
    )
