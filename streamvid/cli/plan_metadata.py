"""What `streamvid plan` says of a metadata file, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from posixpath import normpath
from typing import TYPE_CHECKING, Any

from streamvid.buckets.geometry import DEFAULT_MULTIPLE
from streamvid.cli.plan_dataset import PlannedRun
from streamvid.errors import ConfigError, SourceError, StreamvidError
from streamvid.forecast.epochs import Loads, forecast_counts, rank_loads
from streamvid.plan.options import PlanOptions

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from streamvid.buckets import Bucket
    from streamvid.buckets.config import BucketConfig
    from streamvid.forecast.facts import FactsBlock
    from streamvid.forecast.metadata import MetadataForecast

_OF_DATASETS = ("preset", "bucket_config")  # which say something of a sealed dataset too
_UNASKED = (None, (), DEFAULT_MULTIPLE)


def is_metadata_source(source: str) -> bool:
    """Whether SOURCE is metadata and no sealed dataset. SourceError for a folder that is neither."""
    from streamvid.forecast.facts import is_metadata

    if "://" in source:
        return False
    path = Path(source)
    if is_metadata(path):
        return True
    if path.is_dir() and not (path / "manifest.json").exists():
        raise SourceError(
            f"{source} has no manifest.json, so it is no sealed dataset, and no Parquet files. Of a folder of videos "
            f"`streamvid shard {source} DEST --dry-run` says what it would become; of metadata with sizes give the file"
        )
    return False


def check_dataset_options(given: Mapping[str, Any]) -> None:
    """ConfigError for options that say how metadata becomes buckets, which a sealed dataset is already."""
    for name, value in given.items():
        if name not in _OF_DATASETS and value not in _UNASKED:
            option = "--" + name.replace("_", "-")
            raise ConfigError(f"{option} is for metadata, and SOURCE is a sealed dataset: leave it out, or shard anew")


def collect_metadata(
    source: str, run: PlannedRun, given: Mapping[str, Any]
) -> tuple[dict[str, Any], StreamvidError | None]:
    """(all of it as plain values, the error that such a run would end with at once, if any)."""
    from streamvid.buckets.batch_size import batch_sizes
    from streamvid.forecast.facts import open_facts
    from streamvid.forecast.metadata import forecast_metadata
    from streamvid.plan.cost import CostTable, cost_classes, default_costs
    from streamvid.plan.plan import EpochPlan

    config = _config(given)
    facts_file = open_facts(Path(source), given["video_column"])
    found = forecast_metadata(facts_file.blocks(), config, _Draws(run.options.seed))
    buckets = {name: found.buckets[name].bucket for name in found.counts}
    if not buckets:
        raise SourceError(f"no row of {source} has a bucket: {_why(found)}")
    model = config.model
    sizes = batch_sizes(list(buckets.values()), _sizes(run, config, buckets), run.max_tokens_per_batch, model)
    measured = None if run.costs is None else CostTable.from_json(run.costs)
    table = default_costs(buckets.values(), model)
    costs = (measured or table).costs(sizes)
    counts = {name: [count] for name, count in found.counts.items()}

    def plan_of(options: PlanOptions) -> EpochPlan:
        return EpochPlan(counts, sizes, options, run.num_ranks, costs=costs)

    planned, failure = forecast_counts(plan_of, sizes, run.options, run.num_epochs)
    about = {
        "kind": "metadata",
        "source": source,
        "columns": dict(facts_file.columns),
        "bucket_config": config.to_json(),
        "metadata": _metadata(found),
        "notes": [*_notes(found), *_stored_notes(config)],
        "cost_classes": cost_classes(costs) if run.options.sync == "cost" else None,
        "costs_are_measured": measured is not None,
    }
    details = None
    if run.details and failure is None:
        details = _details(rank_loads(plan_of(run.options), sizes, table.tokens, costs))
        details["memory"] = _memory(found, list(buckets.values()), sizes, run)
    return about | planned | {"details": details}, failure


def _details(loads: Loads) -> dict[str, Any]:
    """Of the first epoch; which bytes a rank reads is not known before there are shards."""
    by_rank = {"samples_by_rank": loads.samples_by_rank(), "member_bytes_by_rank": None}
    return {**loads.to_json(), **by_rank, "estimates": None}


def _sizes(run: PlannedRun, config: BucketConfig, buckets: Mapping[str, Bucket]) -> int | Mapping[str, int] | None:
    """The run's batch sizes, else those of the bucket configuration."""
    if run.batch_size is not None or run.max_tokens_per_batch is not None:
        assert run.batch_size is None or isinstance(run.batch_size, int | Mapping)  # the command line gives no other
        return run.batch_size
    return {name: size for name, size in config.batch_sizes.items() if name in buckets} or None


def _config(given: Mapping[str, Any]) -> BucketConfig:
    """What `streamvid shard` would make of the same flags, for copies."""
    from streamvid.cli.bucket_flags import bucket_options
    from streamvid.sharder.options import ShardOptions

    asked = {name: value for name, value in given.items() if name != "video_column"} | {"clips": "copy"}
    bucket_options(asked)
    options = ShardOptions(**asked)
    return replace(options.config, frame_rate=options.frame_rate)


class _Draws:
    """Numbers that decide between buckets, as the sharder draws them for a source; of rows without one, by row."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, block: FactsBlock, places: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        import numpy as np

        from streamvid.plan.hashing import uniform_array
        from streamvid.sharder.assign import record_key, stable_hash

        if block.sources is None:
            return uniform_array(self._seed, places + block.row)
        seed = str(self._seed)
        keys = (record_key(normpath(block.source(place))) for place in places.tolist())
        return np.array([stable_hash("bucket", seed, key) for key in keys], np.float64) * 2.0**-64


def _metadata(found: MetadataForecast) -> dict[str, Any]:
    return {
        "rows": found.num_rows,
        "groups": found.num_groups,
        "frames_are_estimated": found.frames_are_estimated,
        "buckets": {name: row.to_json() for name, row in sorted(found.buckets.items())},
        "left_out": [left.to_json() for left in sorted(found.left_out.values(), key=lambda left: -left.expected)],
    }


def _stored_notes(config: BucketConfig) -> list[str]:
    if config.assign != "all":
        return []
    return ["--assign all stores a clip in each bucket that may take it; counts are of what one epoch draws"]


def _notes(found: MetadataForecast) -> list[str]:
    notes = ["sizes are what the metadata states; shard probes the files, and rejects those that differ or are damaged"]
    if found.frames_are_estimated:
        notes.append("no num_frames column: frames are duration x fps, rounded, and may be off by some (an estimate)")
    if not found.has_bytes:
        notes.append("no column of file sizes (num_bytes): memory for clips read ahead is left out")
    return notes


def _why(found: MetadataForecast) -> str:
    kinds = sorted(found.left_out.values(), key=lambda left: -left.drawn)
    if not kinds:
        return "it has no rows"
    return "; ".join(f"{left.kind}: {left.drawn} rows, such as {left.examples[0][2]}" for left in kinds)


def _memory(
    found: MetadataForecast, buckets: list[Bucket], sizes: Mapping[str, int], run: PlannedRun
) -> dict[str, Any]:
    from streamvid.forecast.reads import memory_of

    return memory_of(buckets, sizes, found.max_bytes, run.host, run.prefetch_bytes, run.num_ranks)
