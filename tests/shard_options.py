"""ShardOptions from flat names, like the flags of `streamvid shard`, so that tests fit on one line."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from streamvid.buckets.config import BucketConfig
from streamvid.buckets.document import bucket_config_of
from streamvid.cli.flags import Flag, flags_of
from streamvid.sharder.options import ShardOptions

Path = tuple[str, ...]


def places(flags: list[Flag]) -> dict[str, Path]:
    """Map the name of each field, and of its flag, to its path in the options."""
    fields = {flag.path[-1]: flag.path for flag in flags}
    return fields | {flag.opts[0].removeprefix("--").replace("-", "_"): flag.path for flag in flags}


PLACES = places(flags_of(ShardOptions)) | {"storage": ("storage",)}
BUCKET_PLACES = places(flags_of(BucketConfig)) | {"policy": ("policy",)}


def put(tree: dict[str, Any], path: Path, value: Any) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value


def shard_options(**given: Any) -> ShardOptions:
    """Build ShardOptions from flat names, which modify `bucket_config`: a BucketConfig, preset name, file or
    mapping."""
    base = given.pop("bucket_config", None)
    tree: dict[str, Any] = {}
    buckets: dict[str, Any] = {}
    for name, value in given.items():
        if name in BUCKET_PLACES and value is not None:
            put(buckets, BUCKET_PLACES[name], value)
        elif name not in BUCKET_PLACES:
            put(tree, PLACES[name], value)
    if base is not None:
        config = bucket_config_of(base)
        tree["buckets"] = replace(config, **buckets) if buckets else base
    elif buckets:
        tree["buckets"] = BucketConfig(**buckets)
    return ShardOptions(**tree)
