"""streamvid stats: what a dataset holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from streamvid.cli.console import print_json, printable, size, table

if TYPE_CHECKING:
    from streamvid.dataset.reader import Dataset


@click.command(epilog="\b\nExamples:\n  streamvid stats ds/\n  streamvid stats ds/ --json | jq .buckets")
@click.argument("dataset", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def command(dataset: str, as_json: bool) -> None:
    """Show what a dataset holds: buckets, splits, columns, and what was rejected and why."""
    from streamvid.dataset.reader import open_dataset

    facts = collect(open_dataset(dataset))
    if as_json:
        print_json(facts)
        return
    headers = ["bucket", "T x H x W", "split", "samples", "shards", "size"]
    rows = [
        (b["bucket"], " x ".join(map(str, b["shape"])), b["split"], b["samples"], b["shards"], size(b["bytes"]))
        for b in facts["buckets"]
    ]
    click.echo(table(headers, rows))
    click.echo("")
    click.echo(
        f"{facts['samples']} samples in {facts['shards']} shards, {size(facts['bytes'])}; clips: {facts['clips']}; "
        f"format {'.'.join(map(str, facts['format_version']))}"
    )
    click.echo(f"columns: {', '.join(facts['columns']) or 'none'}")
    click.echo(f"rejected: {len(facts['rejections'])} of {facts['samples'] + len(facts['rejections'])} input rows")
    for rejection in facts["rejections"]:
        click.echo(printable(f"  row {rejection['row']}  {rejection['source']}: {rejection['reason']}"))


def collect(dataset: Dataset) -> dict[str, Any]:
    """All of it as plain values: a row a bucket and split, the counts, the user's columns, the rejections."""
    buckets: dict[tuple[str, str], dict[str, Any]] = {}
    for shard in dataset.shards:
        row = buckets.setdefault(
            (shard.bucket_id, shard.split),
            {
                "bucket": shard.bucket_id,
                "shape": list(dataset.manifest.bucket(shard.bucket_id).shape),
                "split": shard.split,
                "samples": 0,
                "shards": 0,
                "bytes": 0,
            },
        )
        row["samples"] += shard.num_samples
        row["shards"] += 1
        row["bytes"] += shard.num_bytes
    return {
        "dataset": dataset.url,
        "format_version": list(dataset.manifest.format_version),
        "clips": dataset.manifest.clips,
        "plan_fingerprint": dataset.manifest.plan_fingerprint,
        "content_fingerprint": dataset.manifest.content_fingerprint,
        "samples": sum(row["samples"] for row in buckets.values()),
        "shards": len(dataset.shards),
        "bytes": sum(row["bytes"] for row in buckets.values()),
        "buckets": list(buckets.values()),
        "columns": list(dataset.user_columns),
        "rejections": dataset.rejections_table().to_pylist(),
    }
