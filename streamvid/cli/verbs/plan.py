"""streamvid plan: what a run would deliver, before a GPU is rented."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from streamvid.cli.bucket_flags import bucket_flags
from streamvid.cli.console import print_json
from streamvid.cli.flags import Rate
from streamvid.cli.plan_dataset import PlannedRun, collect, planned_keys
from streamvid.cli.plan_print import print_plan
from streamvid.cli.storage_flags import storage_flags
from streamvid.errors import ConfigError, DatasetError
from streamvid.forecast.epochs import HostCosts
from streamvid.plan.options import PlanOptions, Sync, Tail

if TYPE_CHECKING:
    from streamvid.dataset.reader import Dataset
    from streamvid.storage import StorageOptions

__all__ = ["PlannedRun", "collect", "command", "parse_sizes", "read_costs", "samples_of_shards"]

_MAX_EPOCHS = 1000
_EXAMPLES = """\b
Examples:
  streamvid plan ds/ --num-ranks 64 --batch-size 4
  streamvid plan ds/ --num-ranks 64 --batch-size '256px-*=8' --batch-size '480p-*=2' --where 'aesthetic > 5'
  streamvid plan ds/ --num-ranks 64 --max-tokens-per-batch 60000 --epochs 3 --tail shrink
  streamvid plan ds/ --num-ranks 64 --batch-size 4 --json | jq .tails
  streamvid plan ds/ --num-ranks 8 --batch-size 4 --keys keys.jsonl
  streamvid plan meta.parquet --preset wan2.1-480p --num-ranks 64 --batch-size 1

\b
SOURCE is a sealed dataset, or a metadata file (CSV, JSON, JSONL, Parquet, a folder of Parquet files) with columns
num_frames, height and width (fps, duration, bytes where a rule needs them). Nothing is decoded or probed. Flags about
buckets are for metadata; of a dataset --preset checks the model's rule, and --bucket-config gives batch sizes.

\b
A cost table (--cost-table) is YAML: decode_ms: {'480p-*': 23}, num_workers: 8, ranks_per_node: 8, request_ms: 30,
requests_in_flight: 8, link_mb_per_second: 1000, decode_ns_per_pixel: 2.0 …; what it does not say is a default that
was measured on another machine. All that comes of it is an estimate, and marked so.

\b
Exit codes: 0 the run has steps, 1 it has none or the source cannot be read, 2 wrong usage."""


@click.command(epilog=_EXAMPLES)
@click.argument("source", type=click.Path())
@click.option("--num-ranks", type=int, default=1, show_default=True, help="Data-parallel ranks of the run.")
@click.option(
    "--batch-size",
    "sizes",
    multiple=True,
    metavar="N|BUCKET=N",
    help="Samples a rank and step. BUCKET: an id, WxH@F or glob; a name goes before globs, '*' is for all others.",
)
@click.option("--max-tokens-per-batch", type=int, help="Instead: as many samples of a bucket as fit.")
@click.option(
    "--tail",
    type=click.Choice(get_args(Tail)),
    help="The epoch's rest.  [default: as the loader, carry for split train, uneven for others]",
)
@click.option(
    "--sync", type=click.Choice(get_args(Sync)), default="bucket", show_default=True, help="What ranks share."
)
@click.option("--costs", type=click.Path(), help="Measured costs of steps (JSON of a CostTable), for --sync and time.")
@click.option("--cost-table", type=click.Path(), help="What machine and store give (YAML), for estimates of time.")
@click.option("--epochs", "num_epochs", type=click.IntRange(1, _MAX_EPOCHS), default=1, show_default=True)
@click.option("--accumulate", type=int, default=1, show_default=True, help="Steps of an epoch are a multiple of it.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the run; of metadata, of the draws.")
@click.option("--split", default="train", show_default=True)
@click.option("--where", metavar="CONDITION", help="Only samples that meet it, as VideoLoader(where=…).")
@click.option("--counts-only", is_flag=True, help="Dataset: read the shard table alone; no bytes, waste or times.")
@click.option("--keys", type=click.Path(dir_okay=False), help="Dataset: write every batch's keys to this JSONL file.")
@bucket_flags
@click.option("--fps", type=Rate(), help="Metadata: frames a second; the rule says how.")
@click.option("--fps-rule", type=click.Choice(["cap", "resample", "fix_frame_rate"]), help="[default: resample]")
@click.option("--video-column", metavar="C", help="Metadata: its column with paths.")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
@storage_flags
def command(
    source: str,
    num_ranks: int,
    sizes: tuple[str, ...],
    max_tokens_per_batch: int | None,
    tail: Tail | None,
    sync: Sync,
    costs: str | None,
    cost_table: str | None,
    num_epochs: int,
    accumulate: int,
    seed: int,
    split: str,
    where: str | None,
    counts_only: bool,
    keys: str | None,
    as_json: bool,
    storage: StorageOptions,
    **metadata: Any,
) -> None:
    """Show what training would deliver: steps, and what is left out or repeated, by bucket and tail; bytes, waste,
    memory and time; and of metadata which rows no bucket takes, and why.
    """
    if costs is not None and sync != "cost" and counts_only:
        raise ConfigError(f"--costs {costs} does nothing with --sync {sync} --counts-only; leave one of them out")
    tail = tail or ("carry" if split == "train" else "uneven")
    run = PlannedRun(
        num_ranks=num_ranks,
        batch_size=parse_sizes(sizes) if sizes else None,
        max_tokens_per_batch=max_tokens_per_batch,
        options=PlanOptions(seed=seed, tail=tail, sync=sync, accumulate=accumulate),
        num_epochs=num_epochs,
        split=split,
        costs=read_costs(costs),
        where=where,
        host=_host_costs(cost_table),
        details=not counts_only,
    )
    facts, failure = _facts(source, run, storage, metadata, keys)
    if as_json:
        print_json(facts)
    else:
        print_plan(facts)
    if failure is not None:
        raise failure


def _facts(
    source: str, run: PlannedRun, storage: StorageOptions, metadata: Mapping[str, Any], keys: str | None
) -> tuple[dict[str, Any], Exception | None]:
    from streamvid.buckets.config import load_bucket_config
    from streamvid.cli.plan_metadata import check_dataset_options, collect_metadata, is_metadata_source
    from streamvid.dataset.reader import open_dataset

    if is_metadata_source(source):
        if keys is not None or run.where is not None:
            raise ConfigError(f"--keys and --where are for sealed datasets, and {source} is metadata; leave them out")
        return collect_metadata(source, run, metadata)
    check_dataset_options(metadata)
    dataset = open_dataset(source, storage=storage)
    run = replace(run, preset=metadata["preset"])
    if metadata["bucket_config"] is not None:
        if run.batch_size is not None or run.max_tokens_per_batch is not None:
            raise ConfigError("--bucket-config gives a dataset's batch sizes, and so does another option: give one")
        run = replace(run, batch_size=load_bucket_config(metadata["bucket_config"]))
    facts, failure = collect(dataset, run)
    if keys is not None:
        facts["keys"] = keys
        with Path(keys).open("w", encoding="utf-8") as file:
            for batch in planned_keys(dataset, run):
                file.write(json.dumps(batch) + "\n")
    return facts, failure


def parse_sizes(sizes: Sequence[str]) -> int | dict[str, int]:
    """Batch sizes of `4`, or of `BUCKET=N` as often as given; ConfigError for anything else."""
    pairs: dict[str, int] = {}
    for text in sizes:
        name, equals, number = text.rpartition("=")
        if not number.isascii() or not number.isdigit() or bool(equals) != bool(name) or name in pairs:
            raise ConfigError(f"--batch-size {text!r}: expected N, or BUCKET=N once for each bucket or glob")
        pairs[name] = int(number)
    if "" in pairs and len(pairs) > 1:
        raise ConfigError(f"--batch-size {pairs['']} for all buckets beside others: write '*={pairs['']}' or name all")
    return pairs.get("", pairs)


def read_costs(path: str | None) -> Mapping[str, Any] | None:
    """The JSON of a cost table; ConfigError where there is none."""
    if path is None:
        return None
    try:
        value: Mapping[str, Any] = json.loads(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--costs {path}: {error}; give a file with the JSON of CostTable.to_json()") from error
    return value


def _host_costs(path: str | None) -> HostCosts:
    from streamvid.config import load_config

    return load_config(HostCosts, path)


def samples_of_shards(dataset: Dataset, split: str) -> dict[str, Any]:
    """Bucket id → int64 array of the samples in each shard of a split, in the order that plans count them."""
    shards = dataset.shards
    if split not in shards.splits:
        raise DatasetError(
            f"split={split!r} has no samples in {dataset.url}; it has {', '.join(sorted(shards.splits))}"
        )
    return {bucket_id: shards.num_samples[rows] for bucket_id, rows in sorted(shards.select(split).items())}
