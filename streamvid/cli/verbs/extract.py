"""streamvid extract: write single samples to files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from streamvid.cli.console import run_and_print
from streamvid.cli.flags import LOCATION, GroupedCommand, Location
from streamvid.cli.shared_flags import storage_flags
from streamvid.errors import printable

if TYPE_CHECKING:
    from streamvid.preview.extract import ExtractReport
    from streamvid.storage import StorageOptions


@click.command(
    cls=GroupedCommand,
    epilog="\b\nExamples:\n  streamvid extract ds/ KEY -o sample\n"
    "  streamvid extract ds/ KEY KEY -o samples --visit 3 --view temporal=uniform",
)
@click.argument("dataset", type=LOCATION)
@click.argument("keys", nargs=-1, required=True)
@click.option("-o", "--output", type=Location(file_okay=False), required=True, help="Folder to write to.")
@click.option("--visit", type=click.IntRange(min=0), default=0, show_default=True, help="Visit to extract.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the loader.")
@click.option(
    "--view",
    multiple=True,
    metavar="NAME=VALUE",
    help="Loader view option, such as temporal=uniform or spatial=random_crop; repeatable.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the file names as JSON.")
@storage_flags
def command(
    dataset: str,
    keys: tuple[str, ...],
    output: str,
    visit: int,
    seed: int,
    view: tuple[str, ...],
    as_json: bool,
    storage: StorageOptions,
) -> None:
    """Write each sample with one of these KEYS to a separate folder: the stored clip, the frames that a model gets (as
    PNG), the caption, and the sample's metadata (as JSON).
    """
    from streamvid.config import load_config
    from streamvid.dataset.versions.open import open_dataset
    from streamvid.loader.view.view import ViewOptions
    from streamvid.preview.deliver import ViewSettings
    from streamvid.preview.extract import extract

    opened = open_dataset(dataset, storage=storage)
    settings = ViewSettings(seed, load_config(ViewOptions, None, view))
    run_and_print(lambda bar: extract(opened, keys, Path(output), settings, visit, bar), as_json, _print)


def _print(report: ExtractReport) -> None:
    for one in report.samples:
        click.echo(printable(f"{report.output / one.folder}: {len(one.files)} files"))
