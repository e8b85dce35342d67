"""streamvid report: write the contents of a dataset as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from streamvid.cli.console import ProgressBar, is_quiet, size
from streamvid.cli.flags import LOCATION, GroupedCommand, Location, option_flags
from streamvid.cli.shared_flags import storage_flags
from streamvid.errors import printable
from streamvid.preview.options import ReportOptions

if TYPE_CHECKING:
    from streamvid.storage import StorageOptions


@click.command(
    cls=GroupedCommand,
    epilog="\b\nExamples:\n  streamvid report ds/ -o report.html\n"
    "  streamvid report s3://bucket/ds -o report.html --samples-per-bucket 24",
)
@click.argument("dataset", type=LOCATION)
@click.option(
    "-o",
    "--output",
    type=Location(dir_okay=False),
    required=True,
    help="HTML file to write. Missing folders are created.",
)
@option_flags(ReportOptions, "options")
@storage_flags
def command(dataset: str, output: str, options: ReportOptions, storage: StorageOptions) -> None:
    """Write the contents of a dataset as one HTML file: counts, buckets, distributions, rejections, and a contact
    sheet per bucket. The file is self-contained, so it can be attached to a pull request or a wiki.
    """
    from streamvid.dataset.versions.open import open_dataset
    from streamvid.preview.report import report_of
    from streamvid.storage import LocalStore

    opened = open_dataset(dataset, storage=storage)
    with ProgressBar() as progress:
        data = report_of(opened, options, progress).encode()
    path = Path(output)
    LocalStore(path.parent).put(path.name, data)
    if not is_quiet():
        click.echo(printable(f"wrote {path} ({size(len(data))})"))
