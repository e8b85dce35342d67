"""Small sealed datasets without videos."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from streamvid.buckets.bucket import Bucket
from streamvid.dataset.index import ClipEntry, RowGroup, SampleRow, SourceEntry, encode_samples
from streamvid.dataset.manifest import Manifest, ShardInfo, manifest_to_json, offsets_path
from streamvid.dataset.sealed_json import MANIFEST, manifest_checksum
from streamvid.dataset.tar import scan_tar, tar_index, write_shard
from streamvid.storage import LocalStore
from tools.synthetic_dataset import put_file, put_index

BUCKETS = (Bucket(9, 64, 96), Bucket(16, 192, 336, "256px", "16:9"))
USER_TYPES = {"score": "double", "tag": "string"}
ROW = SampleRow(
    key="a-0",
    record_key="a",
    index=0,
    text="words",
    clip=ClipEntry("mp4", 512, 3, bytes(32), 9, 96, 64, 24.0, 0.375, "h264"),
    source=SourceEntry("a.mp4", 96, 64, 3, 0, 9),
    columns={"score": 0.5, "tag": None},
)


def rows(count: int) -> list[SampleRow]:
    return [replace(ROW, key=f"a-{index}", index=index, columns={"score": float(index)}) for index in range(count)]


def tar_bytes(samples: list[tuple[str, dict[str, bytes]]]) -> bytes:
    file = io.BytesIO()
    write_shard(file, samples)
    return file.getvalue()


def clip_offsets(tar: bytes) -> list[int]:
    """Return the offsets of the clips in a tar, in order."""
    return [member.offset for member in scan_tar(io.BytesIO(tar)) if member.extension == "mp4"]


def shard_info(bucket: Bucket, number: int, num_samples: int, data: bytes, index_path: str, group: int) -> ShardInfo:
    digest = hashlib.sha256(data).hexdigest()
    return ShardInfo(
        bucket.id,
        number,
        0,
        "train",
        num_samples,
        len(data),
        digest,
        8 * (num_samples + 1),
        "0" * 64,
        3,
        index_path,
        group,
    )


@dataclass(frozen=True)
class Part:
    """Shard to be sealed: its tar and the rows of its samples."""

    bucket: Bucket
    number: int
    tar: bytes
    rows: list[SampleRow]
    split: str = "train"

    def info(self, index_path: str, group: int) -> ShardInfo:
        offsets = self.offsets
        return ShardInfo(
            bucket_id=self.bucket.id,
            number=self.number,
            build_id=0,
            split=self.split,
            num_samples=len(self.rows),
            num_bytes=len(self.tar),
            sha256=hashlib.sha256(self.tar).hexdigest(),
            offsets_num_bytes=len(offsets),
            offsets_sha256=hashlib.sha256(offsets).hexdigest(),
            max_clip_bytes=max(row.clip.num_bytes for row in self.rows),
            index_path=index_path,
            index_row_group=group,
        )

    @property
    def offsets(self) -> bytes:
        return tar_index(list(scan_tar(io.BytesIO(self.tar))))


def seal_parts(
    root: Path,
    buckets: Sequence[Bucket],
    parts: Sequence[Part],
    user_types: Mapping[str, str],
    *,
    rejections: Sequence[tuple[int, str, str, str]] = (),
    change_index: Callable[[bytes], bytes] = bytes,
    has_shards: bool = True,
    **changes: Any,
) -> Manifest:
    """Seal a dataset, passing its sample file through `change_index` and changing fields of its manifest.

    `manifest_counts`, `manifest_files` and `manifest_fingerprints` are mappings of the fields to change.
    """
    store = LocalStore(root)
    groups = [RowGroup(part.bucket.id, part.number, part.split, part.rows) for part in parts]
    samples = put_file(store, "samples", 0, change_index(encode_samples(groups, user_types)))
    shards = [part.info(samples.path, group) for group, part in enumerate(parts)]
    for shard, part in zip(shards, parts if has_shards else [], strict=has_shards):
        store.put(shard.path, part.tar)
        store.put(offsets_path(shard.path), part.offsets)
    manifest = put_index(store, buckets, shards, [samples], rejections=rejections, build={"options": {"seed": 0}})
    for name in ("counts", "files", "fingerprints"):
        if (nested := changes.pop(f"manifest_{name}", None)) is not None:
            changes[name] = replace(getattr(manifest, name), **nested)
    manifest = replace(manifest, **changes)
    store.put(MANIFEST, manifest_to_json(manifest))
    return manifest


def seal(root: Path, counts: tuple[int, ...] = (2, 3, 1), **changes: Any) -> Manifest:
    """Seal shards with these sample counts, the last one in the second bucket; pass `changes` to `seal_parts`."""
    places = [(BUCKETS[0], number) for number in range(len(counts) - 1)] + [(BUCKETS[1], 0)]
    parts = [
        Part(bucket, number, tar_bytes([(f"a-{i}", {"mp4": b"mp4", "txt": b""}) for i in range(count)]), rows(count))
        for (bucket, number), count in zip(places, counts, strict=True)
    ]
    return seal_parts(root, BUCKETS, parts, USER_TYPES, rejections=[(7, "b.mp4", "no video", "not-media")], **changes)


def edit_manifest(root: Path, change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Change the manifest of a dataset or of features in place, and update its checksum."""
    path = root / MANIFEST
    value: dict[str, Any] = json.loads(path.read_bytes())
    change(value)
    value["manifest_sha256"] = manifest_checksum(value)
    path.write_text(json.dumps(value))
    return value
