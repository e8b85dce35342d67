"""A small sealed dataset with all checksums right, and stores that count, fail or lie."""

from __future__ import annotations

import hashlib
import io
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from streamvid.dataset.index import RowGroup, encode_rejections, encode_samples, encode_shards, named_by_content
from streamvid.dataset.manifest import (
    MANIFEST,
    Counts,
    FileInfo,
    Fingerprints,
    Manifest,
    ManifestFiles,
    ShardInfo,
    manifest_to_json,
    offsets_path,
)
from streamvid.dataset.tar import energon_files, scan_tar, tar_index
from streamvid.storage import LocalStore, Ranges, Store
from tests.dataset.samples import BUCKETS, ROW, USER_TYPES, tar_bytes


def seal_whole(
    root: Path, num_shards: int = 6, clip_bytes: int = 3000, caption: str = "words {}", has_shards: bool = True
) -> Manifest:
    """Seal three samples per shard, whose clips are not videos. Captions' checksums are always those of "words KEY"."""
    store, bucket = LocalStore(root), BUCKETS[0]
    groups, tars = [], []
    for number in range(num_shards):
        keys = [f"s{number}-{index}" for index in range(3)]
        clips = [hashlib.sha256(key.encode()).digest() * (clip_bytes // 32) for key in keys]
        data = tar_bytes([(k, {"mp4": c, "txt": caption.format(k).encode()}) for k, c in zip(keys, clips, strict=True)])
        members = list(scan_tar(io.BytesIO(data)))
        tars.append((data, tar_index(members)))
        offsets = [member.offset for member in members if member.extension == "mp4"]
        groups.append(
            RowGroup(
                bucket.id,
                number,
                "train",
                [
                    replace(
                        ROW,
                        key=key,
                        index=index,
                        text=f"words {key}",
                        clip=replace(
                            ROW.clip, offset=offset, num_bytes=len(clip), sha256=hashlib.sha256(clip).digest()
                        ),
                        columns={"score": 1.0},
                    )
                    for index, (key, offset, clip) in enumerate(zip(keys, offsets, clips, strict=True))
                ],
            )
        )
    samples_data = with_captions(encode_samples(groups, USER_TYPES), caption)
    samples = named_by_content("samples", 0, samples_data)
    shards = [
        ShardInfo(
            bucket.id, number, "train", 3, len(tar), hashlib.sha256(tar).hexdigest(), len(index),
            hashlib.sha256(index).hexdigest(), clip_bytes, samples.path, number,
        )
        for number, (tar, index) in enumerate(tars)
    ]  # fmt: skip
    for shard, (tar, index) in zip(shards, tars if has_shards else [], strict=has_shards):
        store.put(shard.path, tar)
        store.put(offsets_path(shard.path), index)
    return _seal_index(store, shards, samples, samples_data)


def with_captions(data: bytes, caption: str) -> bytes:
    """A samples file with other captions, beside the checksums of those that it had."""
    file, sink = pq.ParquetFile(pa.BufferReader(data)), io.BytesIO()
    with pq.ParquetWriter(sink, file.schema_arrow) as writer:
        for number in range(file.num_row_groups):
            table = file.read_row_group(number)
            texts = pa.array([caption.format(key) for key in table.column("key").to_pylist()])
            place = table.schema.get_field_index("text")
            writer.write_table(table.set_column(place, table.schema.field("text"), texts))
    return sink.getvalue()


def _seal_index(store: Store, shards: list[ShardInfo], samples: FileInfo, samples_data: bytes) -> Manifest:
    shard_data, rejection_data, others = encode_shards(shards), encode_rejections([]), energon_files(shards)
    files = named_by_content("shards", 0, shard_data), named_by_content("rejections", 0, rejection_data)
    manifest = Manifest(
        buckets=BUCKETS[:1],
        clips="copy",
        counts=Counts(3 * len(shards), 3 * len(shards), 0, len(shards), sum(shard.num_bytes for shard in shards)),
        files=ManifestFiles(
            shards=(files[0],),
            samples=(samples,),
            rejections=(files[1],),
            other=tuple(FileInfo.of(path, data) for path, data in others.items()),
        ),
        fingerprints=Fingerprints.of(BUCKETS[:1], shards, (samples,)),
        build={"options": {"seed": 0}},
    )
    for file, data in ((samples, samples_data), (files[0], shard_data), (files[1], rejection_data)):
        store.put(file.path, data)
    for path, data in others.items():
        store.put(path, data)
    store.put(MANIFEST, manifest_to_json(manifest))
    return manifest


class Watched:
    """A store that counts what is read of each file, and lets a test look at, change or refuse what is done."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.bytes_read: dict[str, int] = {}
        self.largest_read = 0
        self.puts: list[str] = []
        self.before_put: Callable[[str], None] = lambda path: None
        self.before_read: Callable[[str], None] = lambda path: None
        self.after_read: Callable[[str, memoryview], None] = lambda path, buffer: None
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def state(self, path: str) -> Any:
        self.before_read(path)
        return self._store.state(path)

    def read_ranges(self, path: str, ranges: Ranges, version: str = "") -> None:
        self.before_read(path)
        self._store.read_ranges(path, ranges, version)
        with self._lock:
            self.bytes_read[path] = self.bytes_read.get(path, 0) + sum(len(buffer) for _, buffer in ranges)
            self.largest_read = max(self.largest_read, *(len(buffer) for _, buffer in ranges))
        for _, buffer in ranges:
            self.after_read(path, buffer)

    def put(self, path: str, data: bytes | Path) -> None:
        self.before_put(path)
        with self._lock:
            self.puts.append(path)
        self._store.put(path, data)


def flip(path: Path, position: int, mask: int = 1) -> None:
    """Change a byte of a file, in place."""
    with path.open("r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ mask]))
