"""Video datasets for training: sharding, streaming to GPUs, and a training loop.

    streamvid.shard(source, dest, options)        videos → a sealed dataset of bucketed shards
    streamvid.append(dataset, source)             more videos → the next version of a dataset
    streamvid.VideoLoader(dataset, batch_size=4)  a dataset → uniform batches, each sample once, resumable
    streamvid.open_dataset(dataset)               manifest and index as tables
    streamvid.train(config)                       a thin training loop built on accelerate

Names are imported on first use, so that `import streamvid` stays fast.
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
    from streamvid.cluster.options import ClusterOptions
    from streamvid.config import load_config
    from streamvid.dataset.annotate.annotate import annotate
    from streamvid.dataset.reader import Dataset
    from streamvid.dataset.upkeep.compact import compact
    from streamvid.dataset.upkeep.copy import copy_dataset
    from streamvid.dataset.upkeep.history import tag, versions, view
    from streamvid.dataset.upkeep.merge import merge
    from streamvid.dataset.upkeep.remove import remove
    from streamvid.dataset.upkeep.verify import verify_dataset
    from streamvid.dataset.versions.open import open_dataset
    from streamvid.errors import StreamvidError
    from streamvid.loader.batch.batch import Batch
    from streamvid.loader.loader import VideoLoader
    from streamvid.loader.mix import DatasetConfig
    from streamvid.loader.options import LimitOptions, OutputOptions, ProcessGroups, ScheduleOptions
    from streamvid.loader.stats import LoaderStats
    from streamvid.loader.view.audio import AudioOptions
    from streamvid.loader.view.text import TextOptions
    from streamvid.loader.view.view import ViewOptions
    from streamvid.loader.world import detect_world, world_from_mesh
    from streamvid.plan.cost import CostTable, fit_costs
    from streamvid.plan.position import World
    from streamvid.sharder.append import append
    from streamvid.sharder.curation.options import CurationOptions
    from streamvid.sharder.options import ClipOptions, ShardOptions
    from streamvid.sharder.sharder import dry_run, shard
    from streamvid.sharder.source_options import CaptionOptions, SourceOptions
    from streamvid.storage import StorageOptions
    from streamvid.trainer.config import TrainConfig
    from streamvid.trainer.trainer import train
    from streamvid.video.info import VideoInfo
    from streamvid.video.probe import probe

__version__ = "0.1.0"

_NAMES = {
    "streamvid.bench.batch_search": ("BatchSizeSearch", "search_batch_sizes"),
    "streamvid.buckets.bucket": ("Bucket",),
    "streamvid.buckets.config": ("BucketConfig",),
    "streamvid.buckets.document": ("load_bucket_config",),
    "streamvid.buckets.model": ("ModelRule",),
    "streamvid.buckets.table": ("BucketTable",),
    "streamvid.config": ("load_config",),
    "streamvid.dataset.annotate.annotate": ("annotate",),
    "streamvid.dataset.reader": ("Dataset",),
    "streamvid.dataset.versions.open": ("open_dataset",),
    "streamvid.dataset.upkeep.compact": ("compact",),
    "streamvid.dataset.upkeep.copy": ("copy_dataset",),
    "streamvid.dataset.upkeep.history": ("tag", "versions", "view"),
    "streamvid.dataset.upkeep.merge": ("merge",),
    "streamvid.dataset.upkeep.remove": ("remove",),
    "streamvid.dataset.upkeep.verify": ("verify_dataset",),
    "streamvid.errors": ("StreamvidError",),
    "streamvid.loader.batch.batch": ("Batch",),
    "streamvid.loader.loader": ("VideoLoader",),
    "streamvid.loader.mix": ("DatasetConfig",),
    "streamvid.loader.options": ("LimitOptions", "OutputOptions", "ProcessGroups", "ScheduleOptions"),
    "streamvid.loader.stats": ("LoaderStats",),
    "streamvid.loader.view.audio": ("AudioOptions",),
    "streamvid.loader.view.text": ("TextOptions",),
    "streamvid.loader.view.view": ("ViewOptions",),
    "streamvid.loader.world": ("detect_world", "world_from_mesh"),
    "streamvid.plan.cost": ("CostTable", "fit_costs"),
    "streamvid.plan.position": ("World",),
    "streamvid.cluster.options": ("ClusterOptions",),
    "streamvid.sharder.append": ("append",),
    "streamvid.sharder.curation.options": ("CurationOptions",),
    "streamvid.sharder.options": ("ClipOptions", "ShardOptions"),
    "streamvid.sharder.source_options": ("CaptionOptions", "SourceOptions"),
    "streamvid.sharder.work_options": ("WorkOptions",),
    "streamvid.sharder.sharder": ("dry_run", "shard"),
    "streamvid.storage": ("StorageOptions",),
    "streamvid.trainer.config": ("TrainConfig",),
    "streamvid.trainer.trainer": ("train",),
    "streamvid.video.info": ("VideoInfo",),
    "streamvid.video.probe": ("probe",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "AudioOptions",
    "Batch",
    "BatchSizeSearch",
    "Bucket",
    "BucketConfig",
    "BucketTable",
    "CaptionOptions",
    "ClipOptions",
    "ClusterOptions",
    "CostTable",
    "CurationOptions",
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
    "append",
    "compact",
    "copy_dataset",
    "detect_world",
    "dry_run",
    "fit_costs",
    "load_bucket_config",
    "load_config",
    "merge",
    "open_dataset",
    "probe",
    "remove",
    "search_batch_sizes",
    "shard",
    "tag",
    "train",
    "verify_dataset",
    "versions",
    "view",
    "world_from_mesh",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'streamvid' has no attribute {name!r}; available names: {', '.join(__all__)}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
