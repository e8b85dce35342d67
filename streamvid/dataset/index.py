"""Encoding of the index: Parquet tables of shards, samples and rejections. packets.py encodes the packet index.

Each row group of a sample file contains the rows of one shard, in the order of its tar, so that one small read returns
all of them. The number of row groups per file is limited, so that footers do not grow with the dataset.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from streamvid.dataset.manifest import FileInfo, ShardInfo

if TYPE_CHECKING:
    import pyarrow as pa

MAX_SHARDS_PER_FILE = 256
USER_PREFIX = "user."
MEDIA_PREFIX = "media."


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One file of a conditioning input, stored as `<key>.<extension>` in the sample's tar.

    source: the user's name for the original file. The other fields describe the stored file.
    """

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
class ClipEntry:
    """Stored clip of a sample: its location in the tar and its properties. psnr_y: luma PSNR in dB; None for copies."""

    extension: str
    offset: int
    num_bytes: int
    sha256: bytes
    num_frames: int
    width: int
    height: int
    fps: float
    duration_seconds: float
    codec: str
    psnr_y: float | None = None


@dataclass(frozen=True, slots=True)
class AudioEntry:
    """Audio of a stored clip.

    codec: FFmpeg's name for the codec.
    sample_rate: sample rate in Hz.
    start_seconds: start time of the audio minus the time of the first frame.
    gap_seconds: total duration of the gaps between audio samples.
    silence_share, clipping_share: fraction of the duration that is silent, and fraction of the audio samples that are
        at full scale.
    loudness_lufs: integrated loudness (EBU R128); None if all of the audio is below -70 LUFS.

    Values that require decoding are None if the audio cannot be decoded.
    """

    codec: str
    sample_rate: int
    num_channels: int
    start_seconds: float | None = None
    gap_seconds: float | None = None
    silence_share: float | None = None
    clipping_share: float | None = None
    loudness_lufs: float | None = None


@dataclass(frozen=True, slots=True)
class SourceEntry:
    """Source file of a sample, and the window of source frames that the clip shows.

    crop_fraction: fraction of the source picture that is cropped away to fit the bucket's shape.
    upscale: factor by which the sides of the source are scaled to cover the bucket's size.

    `crop_fraction` and `upscale` are None for samples without pictures.
    """

    name: str
    width: int
    height: int
    num_bytes: int
    window_start: int
    window_num_frames: int
    crop_fraction: float | None = None
    upscale: float | None = None


@dataclass(frozen=True, slots=True)
class SampleRow:
    """Row of the samples index.

    captions: output of `captions_to_json` if the sample has several captions; otherwise None.
    columns: user columns, stored as `user.<name>`.
    media: files of each conditioning input, stored as `media.<name>`.
    audio: the clip's audio; None for a clip without audio.
    """

    key: str
    record_key: str
    index: int
    text: str | None
    clip: ClipEntry
    source: SourceEntry
    columns: Mapping[str, Any] = field(default_factory=dict)
    captions: str | None = None
    media: Mapping[str, Sequence[MediaItem]] = field(default_factory=dict)
    audio: AudioEntry | None = None


@dataclass(frozen=True, slots=True)
class TablePlace:
    """Location and checksum of a shard's packet table in a packets file."""

    offset: int
    num_bytes: int
    sha256: bytes


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows of one shard, stored as one row group. packets: location of the shard's packet table, if there is one."""

    bucket_id: str
    number: int
    split: str
    rows: Sequence[SampleRow]
    packets: TablePlace | None = None


# Page checksums verify reads that happen long after the checksum of the whole file was verified.
WRITING: dict[str, Any] = {"compression": "zstd", "store_schema": False, "write_page_checksum": True}


def _text_sha256(row: SampleRow) -> bytes:
    return hashlib.sha256((row.text or "").encode()).digest()


def _of_audio(name: str) -> Callable[[SampleRow], Any]:
    return lambda row: None if row.audio is None else getattr(row.audio, name)


_SAMPLE_COLUMNS: dict[str, tuple[str, Callable[[SampleRow], Any]]] = {
    "key": ("string", attrgetter("key")),
    "record_key": ("string", attrgetter("record_key")),
    "index": ("int32", attrgetter("index")),
    "text": ("string", attrgetter("text")),
    "source": ("string", attrgetter("source.name")),
    "clip_extension": ("string", attrgetter("clip.extension")),
    "clip_offset": ("int64", attrgetter("clip.offset")),
    "clip_bytes": ("int64", attrgetter("clip.num_bytes")),
    "clip_sha256": ("sha256", attrgetter("clip.sha256")),
    "text_sha256": ("sha256", _text_sha256),
    "window_start": ("int32", attrgetter("source.window_start")),
    "window_num_frames": ("int32", attrgetter("clip.num_frames")),
    "clip_width": ("int32", attrgetter("clip.width")),
    "clip_height": ("int32", attrgetter("clip.height")),
    "fps": ("float64", attrgetter("clip.fps")),
    "duration_seconds": ("float64", attrgetter("clip.duration_seconds")),
    "codec": ("string", attrgetter("clip.codec")),
    "psnr_y": ("float64", attrgetter("clip.psnr_y")),
    "source_width": ("int32", attrgetter("source.width")),
    "source_height": ("int32", attrgetter("source.height")),
    "source_bytes": ("int64", attrgetter("source.num_bytes")),
    "window_source_frames": ("int32", attrgetter("source.window_num_frames")),
    "crop_fraction": ("float64", attrgetter("source.crop_fraction")),
    "upscale": ("float64", attrgetter("source.upscale")),
    "captions": ("string", attrgetter("captions")),
    "has_audio": ("bool", lambda row: row.audio is not None),
    "audio_codec": ("string", _of_audio("codec")),
    "audio_sample_rate": ("int32", _of_audio("sample_rate")),
    "audio_channels": ("int32", _of_audio("num_channels")),
    "audio_start_seconds": ("float64", _of_audio("start_seconds")),
    "audio_gap_seconds": ("float64", _of_audio("gap_seconds")),
    "audio_silence_share": ("float64", _of_audio("silence_share")),
    "audio_loudness_lufs": ("float64", _of_audio("loudness_lufs")),
    "audio_clipping_share": ("float64", _of_audio("clipping_share")),
}
_SHARD_COLUMNS: dict[str, tuple[str, Callable[[RowGroup], Any]]] = {
    "bucket_id": ("string", attrgetter("bucket_id")),
    "shard": ("int32", attrgetter("number")),
    "split": ("string", attrgetter("split")),
    "packets_offset": ("int64", lambda group: group.packets and group.packets.offset),
    "packets_bytes": ("int64", lambda group: group.packets and group.packets.num_bytes),
    "packets_sha256": ("sha256", lambda group: group.packets and group.packets.sha256),
}
SHARD_TYPES = {
    "bucket_id": "string",
    "number": "int32",
    "build_id": "uint32",
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


def schema(types: Mapping[str, str]) -> pa.Schema:
    """Return a pyarrow schema. types: maps column names to type names; the type `sha256` stands for 32 raw bytes."""
    import pyarrow as pa

    return pa.schema(
        [(name, pa.binary(32) if kind == "sha256" else pa.type_for_alias(kind)) for name, kind in types.items()]
    )


def sample_schema(user_types: Mapping[str, str], media: Sequence[str] = ()) -> pa.Schema:
    """Return the schema of the samples index. The user columns come last. media: names of conditioning inputs."""
    import pyarrow as pa

    own = schema({name: kind for name, (kind, _) in (_SAMPLE_COLUMNS | _SHARD_COLUMNS).items()})
    items = pa.list_(pa.struct(list(schema(_MEDIA_TYPES))))
    of_media = [pa.field(MEDIA_PREFIX + name, items) for name in media]
    return pa.schema([*own, *of_media, *schema({USER_PREFIX + name: kind for name, kind in user_types.items()})])


def encode_samples(shards: Sequence[RowGroup], user_types: Mapping[str, str], media: Sequence[str] = ()) -> bytes:
    """Return the Parquet bytes of one sample file, with one row group per shard."""
    import pyarrow as pa

    target = sample_schema(user_types, media)
    return encode_row_groups((pa.table(_columns(one, user_types, media), schema=target) for one in shards), target)


def encode_row_groups(tables: Iterable[pa.Table], target: pa.Schema) -> bytes:
    """Return the bytes of a Parquet file that has the schema `target` and one row group for each table."""
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    with pq.ParquetWriter(sink, target, **WRITING) as writer:
        for table in tables:
            writer.write_table(table, row_group_size=max(1, table.num_rows))
    return sink.getvalue()


def _columns(shard: RowGroup, user_types: Mapping[str, str], media: Sequence[str]) -> dict[str, list[Any]]:
    rows = shard.rows
    columns = {name: [value(row) for row in rows] for name, (_, value) in _SAMPLE_COLUMNS.items()}
    columns |= {name: [value(shard)] * len(rows) for name, (_, value) in _SHARD_COLUMNS.items()}
    for name in media:
        columns[MEDIA_PREFIX + name] = [[asdict(item) for item in row.media.get(name, ())] or None for row in rows]
    return columns | {USER_PREFIX + name: [row.columns.get(name) for row in rows] for name in user_types}


def encode_shards(shards: Sequence[ShardInfo]) -> bytes:
    """Return the Parquet bytes of the shard table."""
    return encode_table({name: [getattr(shard, name) for shard in shards] for name in SHARD_TYPES}, SHARD_TYPES)


def encode_rejections(rejections: Sequence[tuple[int, str, str, str]]) -> bytes:
    """Return the Parquet bytes of a rejections file. rejections: (input row number, source, reason, kind) tuples."""
    columns = {name: [row[column] for row in rejections] for column, name in enumerate(_REJECTION_TYPES)}
    return encode_table(columns, _REJECTION_TYPES)


def encode_table(columns: Mapping[str, Sequence[Any]], types: Mapping[str, str]) -> bytes:
    """Return the Parquet bytes of a small table. types: maps column names to type names, as in `schema`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    pq.write_table(pa.table(dict(columns), schema=schema(types)), sink, **WRITING)
    return sink.getvalue()


def named_by_content(stem: str, number: int, data: bytes, suffix: str = "parquet") -> FileInfo:
    """Return the description of an index file.

    The file's name contains the checksum, so the name is never reused (SHARD-2).
    """
    digest = hashlib.sha256(data).hexdigest()
    return FileInfo(f"index/{stem}-{number:05d}-{digest[:12]}.{suffix}", len(data), digest)
