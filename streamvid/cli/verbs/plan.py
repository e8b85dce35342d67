"""streamvid plan: show what a run would deliver before you rent a GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from streamvid.cli.console import print_json
from streamvid.cli.flags import LOCATION, RATE, GroupedCommand, Location, Values, add_flags, build, flags_of, take
from streamvid.cli.shared_flags import BUCKET_FLAGS, storage_flags, take_buckets
from streamvid.config import load_config
from streamvid.errors import ConfigError, SourceError
from streamvid.forecast.costs import read_costs
from streamvid.forecast.host import HostCosts
from streamvid.forecast.run import PlannedRun

if TYPE_CHECKING:
    from streamvid.forecast.run import RunForecast
    from streamvid.storage import StorageOptions

_RUN_FLAGS = flags_of(PlannedRun, exclude=("shuffle", "window", "order", "shard_locality"))
_BOTH_KINDS = ("preset", "bucket_config")  # bucket options that also apply to a sealed dataset
_EXAMPLES = """\b
Examples:
  streamvid plan ds/ --num-ranks 64 --batch-size 4
  streamvid plan ds/ --num-ranks 64 --batch-size '256px-*=8' --batch-size '480p-*=2' --where 'aesthetic > 5'
  streamvid plan ds/ --num-ranks 64 --max-tokens-per-batch 60000 --epochs 3 --tail shrink
  streamvid plan ds/ --num-ranks 64 --batch-size 4 --json | jq .tails
  streamvid plan ds/ --num-ranks 8 --batch-size 4 --keys keys.jsonl
  streamvid plan ds/ --num-ranks 8 --batch-size 4 --html plan.html
  streamvid plan meta.parquet --preset wan2.1-480p --num-ranks 64 --batch-size 1

\b
SOURCE is a sealed dataset, or a metadata file (CSV, JSON, JSONL, Parquet, or a folder of Parquet files) with the
columns num_frames, height and width (and fps, duration or bytes if a rule needs them). Nothing is decoded or probed.
Bucket options are for metadata. For a dataset, --preset checks the model's rule and --bucket-config sets batch sizes.

\b
A cost table (--cost-table) is a YAML file with fields such as decode_ms: {'480p-*': 23}, num_workers: 8,
ranks_per_node: 8, request_ms: 30, requests_in_flight: 8, link_mb_per_second: 1000 and decode_ns_per_pixel: 2.0.
The defaults were measured on another machine. All results derived from the table are estimates, marked with ~.

\b
Exit codes: 0 the run has steps, 1 it has none or the source cannot be read, 2 incorrect usage."""


@click.command(cls=GroupedCommand, epilog=_EXAMPLES)
@click.argument("source", type=LOCATION)
@click.option(
    "--batch-size",
    "sizes",
    multiple=True,
    metavar="N|BUCKET=N",
    help="Samples per rank per step. BUCKET is an id, WxH@F or a glob; '*' covers all other buckets.",
)
@add_flags(_RUN_FLAGS)
@click.option("--costs", type=LOCATION, help="JSON file with a CostTable, for --sync cost and for time estimates.")
@click.option("--cost-table", type=LOCATION, help="YAML file with machine and store speeds, for time estimates.")
@click.option("--counts-only", is_flag=True, help="Show counts only, without bytes, shapes or times.")
@click.option(
    "--keys", type=Location(dir_okay=False), help="JSONL file to write batch keys to; SOURCE must be a dataset."
)
@add_flags(BUCKET_FLAGS)
@click.option("--fps", type=RATE, help="Frame rate of the clips, if the input is metadata; see --fps-rule.")
@click.option(
    "--fps-rule",
    type=click.Choice(["cap", "resample", "fix_frame_rate"]),
    help="Rule for choosing frames at --fps, if the input is metadata.  [default: resample]",
)
@click.option("--video-column", metavar="C", help="Metadata column that holds media paths.")
@click.option("--json", "as_json", is_flag=True, help="Print the forecast as JSON.")
@click.option("--html", type=Location(dir_okay=False), help="Also write the forecast to this HTML file.")
@storage_flags
def command(
    source: str,
    sizes: tuple[str, ...],
    costs: str | None,
    cost_table: str | None,
    counts_only: bool,
    keys: str | None,
    as_json: bool,
    html: str | None,
    storage: StorageOptions,
    **given: Any,
) -> None:
    """Show what training would deliver: steps per bucket, samples that each tail policy leaves out or repeats, bytes,
    waste, memory and time. For metadata, also show which rows fit no bucket and why.
    """
    from streamvid.cli.plan_print import print_forecast

    run = _run(given)
    if costs is not None and run.options.sync != "cost" and counts_only:
        raise ConfigError(f"--costs {costs} has no effect with --sync bucket --counts-only; omit --costs")
    run = replace(
        run,
        batch_size=parse_sizes(sizes) if sizes else None,
        costs=None if costs is None else read_costs(costs, "--costs"),
        host=load_config(HostCosts, cost_table),
        details=not counts_only,
    )
    if _is_metadata(source):
        if keys is not None or run.where is not None:
            raise ConfigError(f"--keys and --where are for sealed datasets, but {source} is metadata; omit them")
        found = _from_metadata(source, run, given)
    else:
        found = _from_dataset(source, run, storage, given, keys)
    if as_json:
        print_json(found.to_json() | ({} if keys is None else {"keys": keys}))
    else:
        print_forecast(found)
    if html is not None:
        _write_html(found, Path(html))
    if found.failure is not None:
        raise found.failure


def _write_html(found: RunForecast, path: Path) -> None:
    from streamvid.preview.report import plan_page
    from streamvid.storage import LocalStore

    LocalStore(path.parent).put(path.name, plan_page(found).encode())


def _run(given: Values) -> PlannedRun:
    """Remove the flags that describe the run from `given`, and build a PlannedRun from their values.

    The default tail policy depends on the split, as in VideoLoader.
    """
    tree = take(_RUN_FLAGS, given)
    default_tail = "carry" if tree.get("split", "train") == "train" else "uneven"
    tree["options"] = {"tail": default_tail, **tree.get("options", {})}
    return build(PlannedRun, _RUN_FLAGS, tree)


def _is_metadata(source: str) -> bool:
    """Return True if `source` is metadata, and False if it is a sealed dataset.

    Raises SourceError if `source` is a folder without a dataset."""
    from streamvid.forecast.facts import is_metadata

    if "://" in source:
        return False
    path = Path(source)
    if is_metadata(path):
        return True
    if path.is_dir() and not (path / "manifest.json").exists():
        raise SourceError(
            f"{source} is not a sealed dataset (it has no manifest.json), and it contains no Parquet files. For a "
            f"folder of videos, run `streamvid shard {source} DEST --dry-run`; for metadata with sizes, pass "
            "the metadata file"
        )
    return False


def _from_metadata(source: str, run: PlannedRun, given: Values) -> RunForecast:
    from streamvid.forecast.metadata import forecast_metadata
    from streamvid.sharder.options import ClipOptions, ShardOptions

    video_column = given.pop("video_column")
    # `streamvid shard --clips copy` would create the same buckets from the same flags.
    clips = ClipOptions(fps=given.pop("fps"), fps_rule=given.pop("fps_rule"))
    options = ShardOptions(buckets=take_buckets(given), clips=clips)
    config = replace(options.config, frame_rate=options.frame_rate)
    return forecast_metadata(Path(source), run, config, video_column)


def _from_dataset(
    source: str, run: PlannedRun, storage: StorageOptions, given: Values, keys: str | None
) -> RunForecast:
    from streamvid.buckets.document import load_bucket_config
    from streamvid.dataset.versions.open import open_dataset
    from streamvid.forecast.batches import planned_keys
    from streamvid.forecast.dataset import forecast_dataset

    flags = {flag.name: flag.opts[0] for flag in BUCKET_FLAGS}
    for name, value in given.items():
        if name not in _BOTH_KINDS and value is not None:
            option = flags.get(name, "--" + name.replace("_", "-"))
            raise ConfigError(f"{option} is for metadata, but SOURCE is a sealed dataset; omit this option")
    dataset = open_dataset(source, storage=storage)
    run = replace(run, preset=given["preset"])
    if given["bucket_config"] is not None:
        if run.batch_size is not None or run.max_tokens_per_batch is not None:
            raise ConfigError(
                "--bucket-config sets the batch sizes and cannot be combined with --batch-size or "
                "--max-tokens-per-batch; omit --bucket-config, or omit the other flags"
            )
        run = replace(run, batch_size=load_bucket_config(given["bucket_config"]))
    found = forecast_dataset(dataset, run)
    if keys is not None:
        with Path(keys).open("w", encoding="utf-8") as file:
            for batch in planned_keys(dataset, run):
                file.write(json.dumps(batch) + "\n")
    return found


def parse_sizes(sizes: Sequence[str]) -> int | dict[str, int]:
    """Parse batch sizes: one number for all buckets, or items of the form `BUCKET=N`.

    Raises ConfigError if an item is invalid.
    """
    pairs: dict[str, int] = {}
    for text in sizes:
        name, equals, number = text.rpartition("=")
        if not number.isascii() or not number.isdigit() or bool(equals) != bool(name) or name in pairs:
            raise ConfigError(
                f"--batch-size {text!r}: must be N or BUCKET=N, where N is an integer; specify N, or each BUCKET, "
                "only once"
            )
        pairs[name] = int(number)
    if "" in pairs and len(pairs) > 1:
        raise ConfigError(
            f"--batch-size {pairs['']} applies to all buckets and cannot be combined with BUCKET=N; to set the "
            f"batch size of the remaining buckets, write '*={pairs['']}'"
        )
    return pairs.get("", pairs)
