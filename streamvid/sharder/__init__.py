"""Offline: records become a sealed dataset of shards. `shard` builds it, `dry_run` reports what it would build.

May import lower floors (buckets, video, storage, dataset, plan, host), never loader. Read the files in this order, in
which each imports only from those before it:

    media_columns, rejections, windows → options → source/, work/ → probing → where, media_fit → assign
    → encode, plan → build, report → seal → sharder
"""

from __future__ import annotations

from streamvid.sharder.options import CaptionOptions, ClipOptions, ShardOptions, SourceOptions, WorkOptions
from streamvid.sharder.probing import Progress
from streamvid.sharder.report import BucketRow, ShardReport
from streamvid.sharder.sharder import abandon, dry_run, shard
from streamvid.sharder.source.records import Rejection

__all__ = [
    "BucketRow",
    "CaptionOptions",
    "ClipOptions",
    "Progress",
    "Rejection",
    "ShardOptions",
    "ShardReport",
    "SourceOptions",
    "WorkOptions",
    "abandon",
    "dry_run",
    "shard",
]
