"""streamvid: the way video reaches a GPU.

    streamvid.shard(source, dest, options)      videos → a sealed dataset of bucketed shards
    streamvid.VideoLoader(dataset, batch_size=4)  a dataset → uniform batches, exactly and resumably
    streamvid.open_dataset(dataset)             manifest and index as tables
    streamvid.train(config)                     the thin trainer

Names load on first use, so that importing streamvid costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamvid.bench.batch_search import BatchSizeSearch, search_batch_sizes
    from streamvid.buckets.bucket import Bucket
    from streamvid.buckets.config import BucketConfig
    from streamvid.buckets.document import load_bucket_config
    from streamvid.buckets.model import ModelRule
    from streamvid.buckets.table import BucketTable
    from streamvid.config import load_config
    from streamvid.dataset.annotate.annotate import annotate
    from streamvid.dataset.reader import Dataset, open_dataset
    from streamvid.dataset.upkeep.copy import copy_dataset
    from streamvid.dataset.upkeep.verify import verify_dataset
    from streamvid.errors import StreamvidError
    from streamvid.loader.batch.batch import Batch
    from streamvid.loader.loader import VideoLoader
    from streamvid.loader.mix import DatasetConfig
    from streamvid.loader.options import LimitOptions, OutputOptions, ProcessGroups, ScheduleOptions
    from streamvid.loader.stats import LoaderStats
    from streamvid.loader.view.text import TextOptions
    from streamvid.loader.view.view import ViewOptions
    from streamvid.loader.world import detect_world, world_from_mesh
    from streamvid.plan.cost import CostTable, fit_costs
    from streamvid.plan.position import World
    from streamvid.sharder.options import CaptionOptions, ClipOptions, ShardOptions, SourceOptions, WorkOptions
    from streamvid.sharder.sharder import dry_run, shard
    from streamvid.storage import StorageOptions
    from streamvid.trainer.config import TrainConfig
    from streamvid.trainer.trainer import train
    from streamvid.video import VideoInfo, probe

__version__ = "0.1.0"

_HOMES = {
    "Batch": "streamvid.loader.batch.batch",
    "BatchSizeSearch": "streamvid.bench.batch_search",
    "Bucket": "streamvid.buckets.bucket",
    "BucketConfig": "streamvid.buckets.config",
    "BucketTable": "streamvid.buckets.table",
    "CaptionOptions": "streamvid.sharder.options",
    "ClipOptions": "streamvid.sharder.options",
    "CostTable": "streamvid.plan.cost",
    "Dataset": "streamvid.dataset.reader",
    "DatasetConfig": "streamvid.loader.mix",
    "LimitOptions": "streamvid.loader.options",
    "LoaderStats": "streamvid.loader.stats",
    "ModelRule": "streamvid.buckets.model",
    "OutputOptions": "streamvid.loader.options",
    "ProcessGroups": "streamvid.loader.options",
    "ScheduleOptions": "streamvid.loader.options",
    "ShardOptions": "streamvid.sharder.options",
    "SourceOptions": "streamvid.sharder.options",
    "StorageOptions": "streamvid.storage",
    "StreamvidError": "streamvid.errors",
    "TextOptions": "streamvid.loader.view.text",
    "TrainConfig": "streamvid.trainer.config",
    "VideoInfo": "streamvid.video",
    "VideoLoader": "streamvid.loader.loader",
    "ViewOptions": "streamvid.loader.view.view",
    "WorkOptions": "streamvid.sharder.options",
    "World": "streamvid.plan.position",
    "annotate": "streamvid.dataset.annotate.annotate",
    "copy_dataset": "streamvid.dataset.upkeep.copy",
    "detect_world": "streamvid.loader.world",
    "dry_run": "streamvid.sharder.sharder",
    "fit_costs": "streamvid.plan.cost",
    "load_bucket_config": "streamvid.buckets.document",
    "load_config": "streamvid.config",
    "open_dataset": "streamvid.dataset.reader",
    "probe": "streamvid.video",
    "search_batch_sizes": "streamvid.bench.batch_search",
    "shard": "streamvid.sharder.sharder",
    "train": "streamvid.trainer.trainer",
    "verify_dataset": "streamvid.dataset.upkeep.verify",
    "world_from_mesh": "streamvid.loader.world",
}

__all__ = [
    "Batch",
    "BatchSizeSearch",
    "Bucket",
    "BucketConfig",
    "BucketTable",
    "CaptionOptions",
    "ClipOptions",
    "CostTable",
    "Dataset",
    "DatasetConfig",
    "LimitOptions",
    "LoaderStats",
    "ModelRule",
    "OutputOptions",
    "ProcessGroups",
    "ScheduleOptions",
    "ShardOptions",
    "SourceOptions",
    "StorageOptions",
    "StreamvidError",
    "TextOptions",
    "TrainConfig",
    "VideoInfo",
    "VideoLoader",
    "ViewOptions",
    "WorkOptions",
    "World",
    "__version__",
    "annotate",
    "copy_dataset",
    "detect_world",
    "dry_run",
    "fit_costs",
    "load_bucket_config",
    "load_config",
    "open_dataset",
    "probe",
    "search_batch_sizes",
    "shard",
    "train",
    "verify_dataset",
    "world_from_mesh",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'streamvid' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
