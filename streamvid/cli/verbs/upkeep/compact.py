"""streamvid compact: delete the bytes of removed samples, merge small shards, and delete old versions."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from streamvid.cli.console import run_and_print, size
from streamvid.cli.flags import BYTE_SIZE, LOCATION, GroupedCommand
from streamvid.cli.shared_flags import storage_flags

if TYPE_CHECKING:
    from streamvid.dataset.upkeep.compact import CompactReport
    from streamvid.storage import StorageOptions

_EPILOG = """\b
Examples:
  streamvid compact ds/ --dry-run
  streamvid compact s3://bucket/ds
  streamvid compact ds/ --shard-size 1GB
  streamvid compact ds/ --expire 30d
  streamvid compact ds/ --cache-dir /nvme/cache --cache-only  on every machine, after a takedown

Tars that contain removed samples are rewritten without these samples. The old tars are deleted, including tars from
earlier versions. Shards below half of the target size are merged. Samples and their clips stay the same. If the
command is interrupted, run it again."""


@click.command(cls=GroupedCommand, epilog=_EPILOG)
@click.argument("dataset", type=LOCATION)
@click.option(
    "--shard-size",
    "shard_size_bytes",
    type=BYTE_SIZE,
    help="Target shard size.  [default: the size chosen for the dataset]",
)
@click.option(
    "--expire",
    metavar="AGE",
    help="Also delete untagged versions older than this age (such as 30d), and files that no version references.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be done, without changing anything.")
@click.option(
    "--cache-dir", type=LOCATION, metavar="DIR", help="Also remove deleted shards from this local loader cache."
)
@click.option(
    "--cache-only",
    is_flag=True,
    help=("Only remove deleted shards from the cache; requires no write access to the dataset."),
)
@click.option(
    "--workers",
    type=click.IntRange(1, 256),
    default=8,
    show_default=True,
    help=("Number of shards to write in parallel."),
)
@click.option(
    "--temp-dir",
    type=LOCATION,
    help="Scratch directory for remote stores, with room for two shards per worker.  [default: TMPDIR or /tmp]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@storage_flags
def command(
    dataset: str, cache_dir: str | None, cache_only: bool, as_json: bool, storage: StorageOptions, **options: Any
) -> None:
    """Delete the bytes of removed samples from the sealed DATASET, and merge its small shards."""
    from streamvid.dataset.upkeep.compact import compact

    if cache_only and cache_dir is None:
        raise click.UsageError("--cache-only requires --cache-dir; add --cache-dir DIR")
    if cache_dir is not None:
        storage = replace(storage, cache_dir=cache_dir, cache_bytes=sys.maxsize)
    options |= {"storage": storage, "cache_only": cache_only}
    run_and_print(lambda progress: compact(dataset, progress=progress, **options), as_json, _print)


def _print(report: CompactReport) -> None:
    if report.num_rewritten:
        click.echo(
            f"{report.num_rewritten} shards rewritten ({size(report.num_bytes_written)}): {report.num_shards_before} "
            f"shards before, {report.num_shards} after"
        )
    if report.deleted:
        click.echo(
            f"deleted tars that contained removed samples: {len(report.deleted)} ({size(report.num_bytes_deleted)}), "
            "including tars from earlier versions"
        )
    expired = report.expired
    if expired.versions or expired.files:
        numbers = ", ".join(map(str, expired.versions)) or "none"
        click.echo(
            f"expired versions: {numbers}; files that no version references: {len(expired.files)} "
            f"({size(expired.num_bytes)})"
        )
    if expired.has_unfinished_build:
        click.echo(
            "the dataset has an unfinished build, so only files of expired versions are counted; complete the build "
            "first"
        )
    if report.has_dropped_cache:
        click.echo("blocks of deleted tars were removed from the cache")
    version = "" if report.version is None else f" in version {report.version}"
    click.echo(f"{report.state}{version}: {report.dataset}\nnext: streamvid verify {report.dataset} --deep")
