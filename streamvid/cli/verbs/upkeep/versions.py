"""streamvid versions: list and name the versions of a dataset, and store views."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from streamvid.cli.console import print_json, print_table, size
from streamvid.cli.flags import LOCATION, GroupedCommand
from streamvid.cli.shared_flags import storage_flags
from streamvid.errors import printable

if TYPE_CHECKING:
    from streamvid.dataset.upkeep.history import VersionsReport
    from streamvid.storage import StorageOptions

_EPILOG = """\b
Examples:
  streamvid versions ds/
  streamvid versions ds/ --tag v1                             tag the newest version
  streamvid versions ds/ --tag paper=7
  streamvid versions ds/ --untag paper
  streamvid versions ds/ --view hq --where "aesthetic > 5"
  streamvid stats ds/@paper

A dataset can be opened as DATASET@VERSION, where VERSION is a number, a tag or `latest`, and as DATASET#VIEW."""


@click.command(cls=GroupedCommand, epilog=_EPILOG)
@click.argument("dataset", type=LOCATION)
@click.option("--tag", "tagged", metavar="NAME[=VERSION]", help="Tag a version.  [default version: the newest]")
@click.option("--move", is_flag=True, help="Allow --tag to move an existing tag to another version.")
@click.option("--untag", metavar="NAME", help="Remove a tag.")
@click.option("--view", "viewed", metavar="NAME", help="Store a view with this name and the condition from --where.")
@click.option("--where", metavar="CONDITION", help="Condition that samples must meet to be in the view.")
@click.option("--drop-view", metavar="NAME", help="Remove a view.")
@click.option("--json", "as_json", is_flag=True, help="Print the versions as JSON.")
@storage_flags
def command(
    dataset: str,
    tagged: str | None,
    move: bool,
    untag: str | None,
    viewed: str | None,
    where: str | None,
    drop_view: str | None,
    as_json: bool,
    storage: StorageOptions,
) -> None:
    """List the versions of the sealed DATASET, or change its tags and views."""
    from streamvid.dataset.upkeep.history import tag, versions, view

    if sum(value is not None for value in (tagged, untag, viewed, drop_view)) > 1:
        raise click.UsageError(
            "--tag, --untag, --view and --drop-view cannot be combined; run the command once for each change"
        )
    if (viewed is None) != (where is None):
        raise click.UsageError("--view and --where must be given together; add the missing flag")
    if move and tagged is None:
        raise click.UsageError("--move requires --tag; add --tag NAME, or omit --move")
    if tagged is not None:
        name, _, version = tagged.partition("=")
        report = tag(dataset, name, version or "latest", move=move, storage=storage)
    elif untag is not None:
        report = tag(dataset, untag, None, storage=storage)
    elif viewed is not None or drop_view is not None:
        report = view(dataset, viewed or drop_view or "", where, storage=storage)
    else:
        report = versions(dataset, storage=storage)
    if as_json:
        print_json(report.to_json())
    else:
        _print(report)


def _print(report: VersionsReport) -> None:
    rows = [
        (
            info.number,
            datetime.fromtimestamp(info.modified, UTC).strftime("%Y-%m-%d %H:%M") if info.modified else "unknown",
            info.verb,
            f"+{info.num_added}",
            f"-{info.num_removed}",
            info.num_samples,
            size(info.num_bytes),
            ", ".join(info.tags),
            info.note,
        )
        for info in report.versions
    ]
    headers = ["version", "when (UTC)", "verb", "added", "removed", "samples", "size", "tags", "note"]
    print_table(headers, rows)
    for name, condition in sorted(report.views.items()):
        click.echo(printable(f"view {name}: {condition}"))
