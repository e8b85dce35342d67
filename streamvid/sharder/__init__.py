"""Offline: records become a sealed dataset of shards. `shard` builds, `dry_run` tells what it would build."""

from __future__ import annotations

from streamvid.sharder.options import ShardOptions
from streamvid.sharder.probing import Progress
from streamvid.sharder.report import BucketRow, ShardReport
from streamvid.sharder.sharder import abandon, dry_run, shard
from streamvid.sharder.source.records import Rejection

__all__ = ["BucketRow", "Progress", "Rejection", "ShardOptions", "ShardReport", "abandon", "dry_run", "shard"]
