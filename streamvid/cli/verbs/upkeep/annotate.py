"""streamvid annotate: add captions and columns to a sealed dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from streamvid.cli.console import run_and_print, size
from streamvid.cli.flags import LOCATION, GroupedCommand, list_of
from streamvid.cli.shared_flags import storage_flags
from streamvid.errors import printable

if TYPE_CHECKING:
    from streamvid.dataset.annotate.annotate import AnnotateReport

_EPILOG = """\b
Examples:
  streamvid annotate ds/ scores.parquet
  streamvid annotate ds/ scores.csv --columns aesthetic,motion --overwrite
  streamvid annotate s3://bucket/ds captions.jsonl --key-column source

FILE is a CSV, JSON, JSON Lines or Parquet file. Its column `key`, `record_key` or `source` (or path, video, file_name)
identifies the samples of each row. Tars and index files do not change, and plans and saved states remain valid. Loaders
that start after this command see the new columns. A sample without a row, or with an empty cell, keeps its value. If
the command is interrupted, run it again."""


@click.command(cls=GroupedCommand, epilog=_EPILOG)
@click.argument("dataset", type=LOCATION)
@click.argument("file", type=LOCATION)
@click.option(
    "--key-column",
    metavar="C",
    help="Column that identifies the samples: key, record_key or source.  [default: first found]",
)
@click.option(
    "--columns", type=list_of(str), metavar="LIST", help="Columns to add.  [default: all except the key column]"
)
@click.option(
    "--caption-column",
    metavar="C",
    help="Column with one or more captions per row; '' for none.  [default: caption, text, …]",
)
@click.option("--overwrite", is_flag=True, help="Also replace values in existing columns.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@storage_flags
def command(dataset: str, file: str, as_json: bool, **options: Any) -> None:
    """Add the columns and captions in FILE to the sealed DATASET."""
    from streamvid.dataset.annotate.annotate import annotate

    run_and_print(lambda progress: annotate(dataset, file, progress=progress, **options), as_json, _print)


def _print(report: AnnotateReport) -> None:
    what = [*(["captions"] if report.has_captions else []), *report.columns]
    click.echo(
        f"{report.num_annotated} of {report.num_samples} samples match one of the {report.num_rows} rows; "
        f"added: {printable(', '.join(what))} ({size(report.num_bytes)})"
    )
    if report.num_unmatched:
        shown = ", ".join(report.unmatched) + (", …" if report.num_unmatched > len(report.unmatched) else "")
        click.echo(printable(f"{report.num_unmatched} rows match no sample: {shown}"))
    click.echo(f"{report.state}: {report.dataset}\nnext: streamvid stats {report.dataset}")
