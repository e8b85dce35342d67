"""Datasets of real clips with any layout of shards, written through the dataset room itself."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from streamvid.buckets.bucket import Bucket
from streamvid.dataset import index, manifest, tar
from streamvid.dataset.index import ClipEntry, SampleRow, SourceEntry
from streamvid.dataset.manifest import FileInfo, Manifest, ShardInfo
from streamvid.storage import LocalStore
from tests.clips import encode, frames_of

SMALL = Bucket(num_frames=5, height=64, width=96)
TALL = Bucket(num_frames=9, height=96, width=64)
LONG = Bucket(num_frames=17, height=64, width=96)


@cache
def clip_bytes(variant: int, width: int, height: int, num_frames: int) -> bytes:
    """A numbered clip; variants differ in content."""
    names = ("bikes", "carphone_pristine", "bigbuckbunny")
    frames = frames_of(names[variant % 3], width, height, num_frames + variant)
    return encode(frames[variant:], fps=24)


def build_dataset(
    root: Path,
    layout: Mapping[Bucket, Sequence[int]],
    *,
    clip_frames: int = 24,
    split: str = "train",
    variants: int = 3,
    damage: Mapping[str, bytes] | None = None,
) -> Path:
    """A sealed dataset with shards of these sizes in each bucket; `damage`: key → clip bytes stored in its place."""
    store = LocalStore(root)
    shards: list[ShardInfo] = []
    pieces = []
    for bucket, sizes in layout.items():
        first = 0
        for number, size in enumerate(sizes):
            samples, rows = [], []
            for i in range(size):
                key = f"{bucket.id}-{first + i}"
                clip = clip_bytes((first + i) % variants, bucket.width * 2, bucket.height * 2, clip_frames)
                clip = (damage or {}).get(key, clip)
                text = f"clip {first + i}".encode()
                samples.append((key, {"json": b"{}", "mp4": clip, "txt": text}))
            sink = io.BytesIO()
            tar.write_shard(sink, samples)
            data = sink.getvalue()
            members = list(tar.scan_tar(io.BytesIO(data)))
            clips = {member.key: member for member in members if member.extension == "mp4"}
            for i, (key, parts) in enumerate(samples):
                rows.append(
                    SampleRow(
                        key=key,
                        record_key=key,
                        index=i,
                        text=parts["txt"].decode() if i % 5 else None,
                        clip=ClipEntry(
                            extension="mp4",
                            offset=clips[key].offset,
                            num_bytes=clips[key].num_bytes,
                            sha256=hashlib.sha256(parts["mp4"]).digest(),
                            num_frames=clip_frames,
                            width=bucket.width * 2,
                            height=bucket.height * 2,
                            fps=24.0,
                            duration_seconds=clip_frames / 24,
                            codec="h264",
                        ),
                        source=SourceEntry(
                            key, bucket.width * 2, bucket.height * 2, clips[key].num_bytes, 0, clip_frames
                        ),
                        columns={"score": (first + i) / 2 if i % 3 else None, "place": f"p{i}", "year": 2000 + i},
                    )
                )
            offsets = tar.tar_index(members)
            path = manifest.shard_path(bucket.id, number)
            store.put(path, data)
            store.put(manifest.offsets_path(path), offsets)
            pieces.append(index.RowGroup(bucket.id, number, split, rows))
            shards.append(_shard(bucket, number, split, data, offsets, rows, len(shards)))
            first += size
    encoded = index.encode_samples(pieces, {"score": "double", "place": "string", "year": "int64"})
    samples_file = index.named_by_content("samples", 0, encoded)
    shards = [_with_index(shard, samples_file.path) for shard in shards]
    table = index.encode_shards(shards)
    shards_file = index.named_by_content("shards", 0, table)
    rejected = index.encode_rejections([])
    rejections_file = index.named_by_content("rejections", 0, rejected)
    for file, content in ((samples_file, encoded), (shards_file, table), (rejections_file, rejected)):
        store.put(file.path, content)
    _seal(store, tuple(layout), shards, (shards_file,), (samples_file,), (rejections_file,))
    return root


def _shard(
    bucket: Bucket, number: int, split: str, data: bytes, offsets: bytes, rows: list[SampleRow], group: int
) -> ShardInfo:
    return ShardInfo(
        bucket_id=bucket.id,
        number=number,
        split=split,
        num_samples=len(rows),
        num_bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        offsets_num_bytes=len(offsets),
        offsets_sha256=hashlib.sha256(offsets).hexdigest(),
        max_clip_bytes=max(row.clip.num_bytes for row in rows),
        index_path="index/pending",
        index_row_group=group,
    )


def _with_index(shard: ShardInfo, path: str) -> ShardInfo:
    values: dict[str, Any] = {name: getattr(shard, name) for name in ShardInfo.__slots__}
    return ShardInfo(**values | {"index_path": path})


def _seal(
    store: LocalStore,
    buckets: tuple[Bucket, ...],
    shards: list[ShardInfo],
    shard_files: tuple[FileInfo, ...],
    sample_files: tuple[FileInfo, ...],
    rejection_files: tuple[FileInfo, ...],
) -> None:
    num_samples = sum(shard.num_samples for shard in shards)
    sealed = Manifest(
        buckets=buckets,
        clips="copy",
        counts=manifest.Counts(num_samples, num_samples, 0, len(shards), sum(shard.num_bytes for shard in shards)),
        files=manifest.ManifestFiles(shard_files, sample_files, rejection_files),
        fingerprints=manifest.Fingerprints.of(buckets, shards, sample_files),
    )
    store.put(manifest.MANIFEST, manifest.manifest_to_json(sealed))


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two buckets, five shards, 23 samples."""
    return build_dataset(tmp_path_factory.mktemp("dataset"), {SMALL: [5, 4, 3], TALL: [6, 5]})
