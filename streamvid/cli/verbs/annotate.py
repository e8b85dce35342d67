"""streamvid annotate: new or further captions and columns for a sealed dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from streamvid.cli.console import ProgressBar, print_json, printable, size
from streamvid.cli.flags import GroupedCommand
from streamvid.cli.shared_flags import storage_flags

if TYPE_CHECKING:
    from streamvid.dataset.annotate.annotate import AnnotateReport

_EPILOG = """\b
Examples:
  streamvid annotate ds/ scores.parquet
  streamvid annotate ds/ scores.csv --columns aesthetic,motion --overwrite
  streamvid annotate s3://bucket/ds captions.jsonl --key-column source

FILE is a CSV, JSON, JSON lines or parquet file with a column `key`, `record_key` or `source` (or path, video,
file_name) that says which sample a row is of. Tars and index files stay as they are, and so do plans and saved states;
the new columns are there for columns=, where= and captions as soon as this ends. A sample without a row, or with an
empty cell, keeps what it had. Stopped at any point, the same command ends the same."""


def _names(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    if value is None:
        return None
    names = tuple(name.strip() for name in value.split(",") if name.strip())
    if not names:
        raise click.BadParameter(f"{value!r} is empty; write it as aesthetic,motion, or leave it out", ctx, param)
    return names


@click.command(cls=GroupedCommand, epilog=_EPILOG, short_help="Put captions and columns into a sealed dataset.")
@click.argument("dataset")
@click.argument("file", type=click.Path())
@click.option("--key-column", metavar="C", help="key, record_key or source.  [default: the first that FILE has]")
@click.option("--columns", metavar="LIST", callback=_names, help="Columns to take, as a,b.  [default: all but the key]")
@click.option(
    "--caption-column",
    metavar="C",
    help="Column with captions: a text, or a list of them; '' for none.  [default: caption, text, …]",
)
@click.option("--overwrite", is_flag=True, help="Give columns that DATASET has new values too.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@storage_flags
def command(dataset: str, file: str, as_json: bool, **options: Any) -> None:
    """Put columns and captions of FILE beside the samples of the sealed DATASET."""
    from streamvid.dataset.annotate.annotate import annotate

    progress = ProgressBar()
    try:
        report = annotate(dataset, file, progress=progress, **options)
    finally:
        progress.close()
    if as_json:
        print_json(report.to_json())
    else:
        _print(report)


def _print(report: AnnotateReport) -> None:
    what = [*(["captions"] if report.has_captions else []), *report.columns]
    click.echo(
        f"{report.num_annotated} of {report.num_samples} samples have a row of the file's {report.num_rows}; "
        f"put: {printable(', '.join(what))} ({size(report.num_bytes)})"
    )
    if report.num_unmatched:
        shown = ", ".join(report.unmatched) + (", …" if report.num_unmatched > len(report.unmatched) else "")
        click.echo(printable(f"{report.num_unmatched} rows are of no sample: {shown}"))
    click.echo(f"{report.state}: {report.dataset}\nnext: streamvid stats {report.dataset}")
