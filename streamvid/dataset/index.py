"""The index as it is written: parquet tables of shards, samples and rejections. Packets are in packets.py.

A row group of a samples file is one shard, in the order of its tar, so that a reader takes what it needs with one
small read; a samples file holds a limited number of row groups, so that no footer grows with the dataset.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from streamvid.dataset.manifest import FileInfo, ShardInfo

if TYPE_CHECKING:
    import pyarrow as pa

MAX_SHARDS_PER_FILE = 256
USER_PREFIX = "user."
MEDIA_PREFIX = "media."


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One file of a sample's further media: `<key>.<extension>` in its tar. Frames and sizes are the stored file's."""

    source: str
    extension: str
    offset: int
    num_bytes: int
    sha256: bytes
    num_frames: int
    width: int
    height: int
    fps: float
    codec: str


@dataclass(frozen=True, slots=True)
class SampleRow:
    """A row of the samples index; `columns` are the user's own, stored as `user.<name>`.

    `psnr_y` is None where clips are copies. crop_fraction: share of the source's picture that its bucket cuts away.
    upscale: by which factor its sides are scaled to the bucket's. media: what else it has, by name, stored as
    `media.<name>`. captions: where it has several, all of them, as
    `captions_to_json` writes them.
    """

    key: str
    record_key: str
    index: int
    text: str | None
    source: str
    clip_extension: str
    clip_offset: int
    clip_bytes: int
    clip_sha256: bytes
    text_sha256: bytes
    window_start: int
    window_num_frames: int
    clip_width: int
    clip_height: int
    fps: float
    duration_seconds: float
    codec: str
    columns: dict[str, Any]
    psnr_y: float | None = None
    source_width: int | None = None
    source_height: int | None = None
    source_bytes: int | None = None
    window_source_frames: int | None = None
    crop_fraction: float | None = None
    upscale: float | None = None
    captions: str | None = None
    media: Mapping[str, Sequence[MediaItem]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TablePlace:
    """Where a shard's packet table lies in the packets file that belongs to its samples file."""

    offset: int
    num_bytes: int
    sha256: bytes


# Page checksums prove what is read long after the file's own checksum was.
WRITING: dict[str, Any] = {"compression": "zstd", "store_schema": False, "write_page_checksum": True}

_SAMPLE_TYPES = {
    "key": "string",
    "record_key": "string",
    "index": "int32",
    "text": "string",
    "source": "string",
    "clip_extension": "string",
    "clip_offset": "int64",
    "clip_bytes": "int64",
    "clip_sha256": "sha256",
    "text_sha256": "sha256",
    "window_start": "int32",
    "window_num_frames": "int32",
    "clip_width": "int32",
    "clip_height": "int32",
    "fps": "float64",
    "duration_seconds": "float64",
    "codec": "string",
    "psnr_y": "float64",
    "source_width": "int32",
    "source_height": "int32",
    "source_bytes": "int64",
    "window_source_frames": "int32",
    "crop_fraction": "float64",
    "upscale": "float64",
    "captions": "string",
}
_PLACE_TYPES = {
    "bucket_id": "string",
    "shard": "int32",
    "split": "string",
    "packets_offset": "int64",
    "packets_bytes": "int64",
    "packets_sha256": "sha256",
}
SHARD_TYPES = {
    "bucket_id": "string",
    "number": "int32",
    "split": "string",
    "path": "string",
    "num_samples": "int32",
    "num_bytes": "int64",
    "sha256": "string",
    "offsets_num_bytes": "int64",
    "offsets_sha256": "string",
    "max_clip_bytes": "int64",
    "index_path": "string",
    "index_row_group": "int32",
}
_REJECTION_TYPES = {"row": "int64", "source": "string", "reason": "string", "kind": "string"}


def schema(types: dict[str, str]) -> pa.Schema:
    """A pyarrow schema out of column → type name; `sha256` is 32 raw bytes."""
    import pyarrow as pa

    return pa.schema(
        [(name, pa.binary(32) if kind == "sha256" else pa.type_for_alias(kind)) for name, kind in types.items()]
    )


_MEDIA_TYPES = {
    "source": "string",
    "extension": "string",
    "offset": "int64",
    "num_bytes": "int64",
    "sha256": "sha256",
    "num_frames": "int32",
    "width": "int32",
    "height": "int32",
    "fps": "float64",
    "codec": "string",
}


def sample_schema(user_types: dict[str, str], media: Sequence[str] = ()) -> pa.Schema:
    """The schema of the samples index, the user's columns last. media: names of further media."""
    import pyarrow as pa

    items = pa.list_(pa.struct(list(schema(_MEDIA_TYPES))))
    of_media = [pa.field(MEDIA_PREFIX + name, items) for name in media]
    own = schema({**_SAMPLE_TYPES, **_PLACE_TYPES})
    return pa.schema([*own, *of_media, *schema({USER_PREFIX + k: v for k, v in user_types.items()})])


@dataclass(frozen=True, slots=True)
class RowGroup:
    """A shard as it stands in a samples file; `packets` is None where none of its clips has a packet index."""

    bucket_id: str
    number: int
    split: str
    rows: Sequence[SampleRow]
    packets: TablePlace | None = None


def encode_samples(shards: Sequence[RowGroup], user_types: dict[str, str], media: Sequence[str] = ()) -> bytes:
    """Parquet bytes of one samples file: each shard becomes one row group. media: names of further media."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    target = sample_schema(user_types, media)
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, target, **WRITING) as writer:
        for shard in shards:
            rows, place = shard.rows, shard.packets
            columns: dict[str, list[Any]] = {name: [getattr(row, name) for row in rows] for name in _SAMPLE_TYPES}
            of_shard = (
                *(shard.bucket_id, shard.number, shard.split),
                *((None, None, None) if place is None else (place.offset, place.num_bytes, place.sha256)),
            )
            columns |= {name: [value] * len(rows) for name, value in zip(_PLACE_TYPES, of_shard, strict=True)}
            columns |= {
                MEDIA_PREFIX + name: [[asdict(item) for item in row.media.get(name, ())] or None for row in rows]
                for name in media
            }
            columns |= {USER_PREFIX + name: [row.columns.get(name) for row in rows] for name in user_types}
            writer.write_table(pa.table(columns, schema=target), row_group_size=max(1, len(rows)))
    return sink.getvalue()


def encode_shards(shards: Sequence[ShardInfo]) -> bytes:
    """Parquet bytes of the shard table."""
    return _encode({name: [getattr(shard, name) for shard in shards] for name in SHARD_TYPES}, SHARD_TYPES)


def encode_rejections(rejections: Sequence[tuple[int, str, str] | tuple[int, str, str, str]]) -> bytes:
    """Parquet bytes of (input row, source, reason) and, where it is known, the reason's kind in a word."""
    rows = [(*row, None)[:4] for row in rejections]
    return _encode(
        {name: [row[column] for row in rows] for column, name in enumerate(_REJECTION_TYPES)}, _REJECTION_TYPES
    )


def _encode(columns: dict[str, list[Any]], types: dict[str, str]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    pq.write_table(pa.table(columns, schema=schema(types)), sink, **WRITING)
    return sink.getvalue()


def named_by_content(stem: str, number: int, data: bytes, suffix: str = "parquet") -> FileInfo:
    """An index file's name holds its checksum, so that a name never means two contents (SHARD-2)."""
    digest = hashlib.sha256(data).hexdigest()
    return FileInfo(f"index/{stem}-{number:05d}-{digest[:12]}.{suffix}", len(data), digest)
