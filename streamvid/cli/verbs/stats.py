"""streamvid stats: show the contents of a dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from streamvid.cli.console import print_json, print_table, size
from streamvid.cli.flags import LOCATION, GroupedCommand
from streamvid.cli.report import MAX_REJECTIONS, stored_line
from streamvid.cli.shared_flags import storage_flags
from streamvid.errors import printable

if TYPE_CHECKING:
    from streamvid.dataset.reader import Dataset
    from streamvid.dataset.shard_table import Int64s
    from streamvid.sharder.rejections import RejectedKind
    from streamvid.storage import StorageOptions


@click.command(
    cls=GroupedCommand,
    epilog="\b\nExamples:\n  streamvid stats ds/\n  streamvid stats s3://bucket/ds\n"
    "  streamvid stats ds/ --rejections\n"
    "  streamvid stats ds/ --json | jq .buckets",
)
@click.argument("dataset", type=LOCATION)
@click.option("--rejections", is_flag=True, help="Show rejections by kind, with remedies.")
@click.option("--json", "as_json", is_flag=True, help="Print the statistics as JSON.")
@storage_flags
def command(dataset: str, rejections: bool, as_json: bool, storage: StorageOptions) -> None:
    """Show the contents of a dataset: buckets, splits, columns, and rejected rows with the reasons."""
    from streamvid.dataset.versions.open import open_dataset

    opened = open_dataset(dataset, storage=storage)
    if rejections:
        _print_rejections(opened, as_json)
        return
    facts = collect(opened)
    if as_json:
        print_json(facts)
    else:
        _print(facts)


def _print(facts: Mapping[str, Any]) -> None:
    headers = ["bucket", "T x H x W", "split", "samples", "shards", "size"]
    rows = [
        (b["bucket"], " x ".join(map(str, b["shape"])), b["split"], b["samples"], b["shards"], size(b["bytes"]))
        for b in facts["buckets"]
    ]
    print_table(headers, rows)
    click.echo("")
    click.echo(
        f"{facts['samples']} samples in {facts['shards']} shards, {size(facts['bytes'])}; clips: {facts['clips']}; "
        f"format {facts['format_version']}, version {facts['version']}"
    )
    if facts["where"] is not None:
        click.echo(printable(f"only samples of the view: {facts['where']}; sizes are those of whole shards"))
    if facts["native"]:
        _print_encoding(facts["native"]["encoding"], facts["native"]["quality"]["psnr_y"])
    click.echo(printable(f"columns: {', '.join(facts['columns']) or 'none'}"))
    for group in facts["annotations"]:
        click.echo(printable(f"added by annotate: {', '.join(group['columns'])} ({size(group['bytes'])})"))
    clips, stored = facts["stored_clips"]
    if clips:
        click.echo(stored_line((clips, stored)))
    windows = facts["samples"] - stored + clips + len(facts["rejections"])
    cut = "" if windows == facts["records"] else f"{windows} windows of "
    if facts["version"] == 1:
        click.echo(f"rejected: {len(facts['rejections'])} of {cut}{facts['records']} input rows")
    else:  # samples may have been removed, so samples and rejections no longer add up
        click.echo(f"rejected: {len(facts['rejections'])} of {facts['records']} input rows")
    _print_first_rejections(facts["rejections"])


def _print_encoding(encoding: Mapping[str, Any], psnr_y: Mapping[str, float]) -> None:
    crf = "" if encoding["crf"] is None else f" crf {encoding['crf']}"
    rate = "as in the sources" if encoding["fps"] is None else encoding["fps"]
    click.echo(
        f"encoded: {encoding['codec']}{crf}, gop {encoding['gop']}, fps {rate}; PSNR-Y mean {psnr_y['mean']:.1f}, "
        f"5th percentile {psnr_y['p5']:.1f}, lowest {psnr_y['min']:.1f} dB"
    )


def _print_first_rejections(rejections: Sequence[Mapping[str, Any]]) -> None:
    for rejection in rejections[:MAX_REJECTIONS]:
        click.echo(printable(f"  row {rejection['row']}  {rejection['source']}: {rejection['reason']}"))
    if len(rejections) > MAX_REJECTIONS:
        more = len(rejections) - MAX_REJECTIONS
        click.echo(f"  and {more} more; --rejections shows them by kind with remedies, --json lists all")


_WITH_CAPTIONS = ("text_sha256", "captions")
"""Columns that are added along with `text` when captions are annotated."""


def _print_rejections(dataset: Dataset, as_json: bool) -> None:
    from streamvid.cli.report import print_kinds

    kinds = rejected_by_kind(dataset)
    total = sum(kind.count for kind in kinds)
    if as_json:
        values = [kind.to_json() for kind in kinds]
        print_json({"dataset": dataset.url, "rejections": total, "rejected_by_kind": values})
        return
    if kinds:
        print_kinds(kinds, with_examples=True)
        click.echo("")
    click.echo(f"rejected: {total} of {dataset.manifest.counts.records} input rows")


def rejected_by_kind(dataset: Dataset) -> tuple[RejectedKind, ...]:
    """Return the rejections of a dataset, grouped by kind."""
    from streamvid.sharder.rejections import by_kind

    table = dataset.rejections_table()
    columns = (table.column(name).to_pylist() for name in ("kind", "row", "source", "reason"))
    return by_kind(zip(*columns, strict=True))


def collect(dataset: Dataset) -> dict[str, Any]:
    """Return JSON-serializable statistics: one row per bucket and split, counts, the user's columns, and rejections."""
    from streamvid.dataset.filter.filter import count_matches, parse_filter
    from streamvid.dataset.manifest import FORMAT_VERSION

    shards = dataset.shards
    counts = shards.num_samples
    if dataset.where is not None:
        counts = count_matches(dataset, shards, parse_filter(dataset.where, dataset))
    native = dataset.manifest.native
    return {
        "dataset": dataset.url,
        "format_version": FORMAT_VERSION,
        "clips": dataset.manifest.clips,
        "plan_fingerprint": dataset.manifest.fingerprints.plan,
        "content_fingerprint": dataset.manifest.fingerprints.content,
        "native": None if native is None else asdict(native),
        "records": dataset.manifest.counts.records,
        "samples": int(counts.sum()),
        "version": dataset.manifest.version,
        "where": dataset.where,
        "stored_clips": list(dataset.stored_clips),
        "shards": len(shards),
        "bytes": int(shards.num_bytes.sum()),
        "buckets": _of_buckets(dataset, counts),
        "columns": list(dataset.user_columns),
        "annotations": [
            {
                "columns": [name.removeprefix("user.") for name in group.columns if name not in _WITH_CAPTIONS],
                "bytes": sum(file.num_bytes for file in group.known_files),
            }
            for group in dataset.manifest.columns
        ],
        "rejections": dataset.rejections_table().to_pylist(),
        "rejected_by_kind": [kind.to_json() for kind in rejected_by_kind(dataset)],
    }


def _of_buckets(dataset: Dataset, counts: Int64s) -> list[dict[str, Any]]:
    """Return the statistics of each bucket and split. counts: number of samples in each shard."""
    shards = dataset.shards
    places = [(rows, bucket_id, split) for split in shards.splits for bucket_id, rows in shards.select(split).items()]
    return [
        {
            "bucket": bucket_id,
            "shape": list(dataset.manifest.bucket(bucket_id).shape),
            "split": split,
            "samples": int(counts[rows].sum()),
            "shards": len(rows),
            "bytes": int(shards.num_bytes[rows].sum()),
        }
        for rows, bucket_id, split in sorted(places, key=lambda place: int(place[0][0]))
    ]
