"""Files beside the shards that let Megatron-Energon open a dataset as it is: `.nv-meta/` and one `.tar.idx` a shard."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence

from streamvid.dataset.manifest import ShardInfo
from streamvid.dataset.tar import BLOCK_BYTES, Member

ENERGON_VERSION = "7.4.1"


def tar_index(members: Sequence[Member]) -> bytes:
    """Energon's `.tar.idx`: where each sample starts and where the last ends, little-endian uint64 bytes."""
    offsets: list[int] = []
    last_key = None
    for member in members:
        if member.key != last_key:
            offsets.append(member.header_offset)
            last_key = member.key
    end = members[-1].offset + -(-members[-1].num_bytes // BLOCK_BYTES) * BLOCK_BYTES
    return struct.pack(f"<{len(offsets) + 1}Q", *offsets, end)


def energon_files(shards: Iterable[ShardInfo]) -> dict[str, bytes]:
    """Path → content of the three files in `.nv-meta/`; splits named as the shards' are."""
    counts: dict[str, int] = {}
    parts: dict[str, list[str]] = {"train": [], "val": [], "test": []}
    for shard in shards:
        counts[shard.path] = shard.num_samples
        parts.setdefault(shard.split, []).append(shard.path)
    info = {"energon_version": ENERGON_VERSION, "shard_counts": counts}
    # JSON is YAML, and needs no library to be written the same way for ever.
    split = {"exclude": [], "split_parts": parts}
    dataset = {"__class__": "CrudeWebdataset", "__module__": "megatron.energon"}
    return {
        ".nv-meta/.info.json": _json(info),
        ".nv-meta/dataset.yaml": _json(dataset),
        ".nv-meta/split.yaml": _json(split),
    }


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()
