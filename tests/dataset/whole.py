"""Small sealed dataset with correct checksums, and a store that counts reads, fails or returns wrong bytes."""

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

from streamvid.dataset.manifest import Manifest
from streamvid.storage import Ranges, Store
from tests.dataset.samples import BUCKETS, ROW, USER_TYPES, Part, clip_offsets, seal_parts, tar_bytes


def seal_whole(
    root: Path, num_shards: int = 6, clip_bytes: int = 3000, caption: str = "words {}", has_shards: bool = True
) -> Manifest:
    """Seal three samples per shard, whose clips are not videos. Caption checksums always match "words KEY"."""

    def part_of(number: int) -> Part:
        keys = [f"s{number}-{index}" for index in range(3)]
        clips = [hashlib.sha256(key.encode()).digest() * (clip_bytes // 32) for key in keys]
        tar = tar_bytes([(k, {"mp4": c, "txt": caption.format(k).encode()}) for k, c in zip(keys, clips, strict=True)])
        rows = []
        for index, (key, data, offset) in enumerate(zip(keys, clips, clip_offsets(tar), strict=True)):
            clip = replace(ROW.clip, offset=offset, num_bytes=len(data), sha256=hashlib.sha256(data).digest())
            rows.append(replace(ROW, key=key, index=index, text=f"words {key}", clip=clip, columns={"score": 1.0}))
        return Part(BUCKETS[0], number, tar, rows)

    parts = [part_of(number) for number in range(num_shards)]
    return seal_parts(
        root,
        BUCKETS[:1],
        parts,
        USER_TYPES,
        change_index=lambda data: with_captions(data, caption),
        has_shards=has_shards,
    )


def with_captions(data: bytes, caption: str) -> bytes:
    """Return a sample file with other captions and the unchanged caption checksums."""
    file, sink = pq.ParquetFile(pa.BufferReader(data)), io.BytesIO()
    with pq.ParquetWriter(sink, file.schema_arrow) as writer:
        for number in range(file.num_row_groups):
            table = file.read_row_group(number)
            texts = pa.array([caption.format(key) for key in table.column("key").to_pylist()])
            place = table.schema.get_field_index("text")
            writer.write_table(table.set_column(place, table.schema.field("text"), texts))
    return sink.getvalue()


class Watched:
    """Store that counts the bytes read from each file and lets a test inspect, change or refuse operations."""

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
    """Change a byte of a file in place."""
    with path.open("r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ mask]))
