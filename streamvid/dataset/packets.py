"""Packet index: one table per shard with one row per clip. It lets a loader read and decode parts of clips.

A table is stored as the length of an Arrow stream (uint64, little-endian), followed by that stream compressed with
zstd. A file contains the tables of many shards end to end. A reader fetches a table with one ranged read, and verifies
it with the checksum in the samples index.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from streamvid.dataset.arrow import chunk_of, numbers_of
from streamvid.errors import DecodeError, IntegrityError, StreamvidError
from streamvid.video.clip_index import CHECKSUM_BYTES, ClipIndex, facts_of
from streamvid.video.stream_info import StreamInfo

if TYPE_CHECKING:
    import pyarrow as pa

MAX_TABLE_BYTES = 2**31 - 1
_SIZE_BYTES = 8
_MAX_STREAM_BYTES = 2**29  # limit on a decompressed table
_MAX_CLIP_BYTES = 2**24  # limit on a decompressed clip, which has at most 500,000 packets of 25 bytes


def _schema() -> pa.Schema:
    import pyarrow as pa

    return pa.schema(
        [
            ("stream", pa.string()),
            ("time_step", pa.list_(pa.int64())),
            ("gap", pa.list_(pa.int64())),
            ("size", pa.list_(pa.int32())),
            ("flags", pa.list_(pa.uint8())),
            ("checksums", pa.binary()),
        ]
    )


def _described(columns: pa.Schema) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in columns)


def encode_packets(clips: Sequence[ClipIndex | None]) -> bytes:
    """Return the encoded packet table of a shard. Each clip is one row; None becomes a row of nulls.

    Times are stored as differences from the previous packet, and offsets as gaps after the end of the previous packet.
    """
    import numpy as np
    import pyarrow as pa

    rows: list[dict[str, Any]] = []
    for clip in clips:
        if clip is None:
            rows.append({})
            continue
        ends = clip.offsets + clip.sizes
        rows.append(
            {
                "stream": clip.info.to_json(),
                "time_step": np.diff(clip.times, prepend=0),
                "gap": clip.offsets - np.concatenate(([0], ends[:-1])),
                "size": clip.sizes,
                "flags": clip.flags,
                "checksums": clip.checksums.tobytes(),
            }
        )
    schema = _schema()
    columns = {field.name: pa.array([row.get(field.name) for row in rows], field.type) for field in schema}
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_table(pa.table(columns, schema=schema))
    return pack_stream(sink.getvalue())


def pack_stream(stream: bytes) -> bytes:
    """Compress the Arrow stream of a table, and prepend its uncompressed length."""
    import pyarrow as pa

    packed: bytes = pa.compress(stream, codec="zstd", asbytes=True)
    return len(stream).to_bytes(_SIZE_BYTES, "little") + packed


class PacketTables:
    """Reader of the packet table of one shard. Raises IntegrityError for invalid data.

    where: name of the table in error messages.
    """

    def __init__(self, data: bytes, sha256: bytes, num_clips: int, where: str) -> None:
        import pyarrow as pa

        self._where = where
        if hashlib.sha256(data).digest() != sha256:
            raise IntegrityError(f"{where}: checksum mismatch; copy the dataset again")
        try:
            table = pa.ipc.open_stream(unpack_stream(data, num_clips)).read_all().combine_chunks()
            table.validate(full=True)
            if table.schema != _schema() or table.num_rows != num_clips:
                raise ValueError(
                    f"it has {table.num_rows} rows with the columns {_described(table.schema)}; expected {num_clips} "
                    f"rows with the columns {_described(_schema())}"
                )
            self._take({name: chunk_of(table, name) for name in table.column_names})
        except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
            raise IntegrityError(f"{where} cannot be read ({error}); copy or rebuild the dataset") from error

    def _take(self, columns: dict[str, pa.Array]) -> None:
        """Decode the packets of all clips at once. Decoding one clip at a time takes ten times as long."""
        import numpy as np

        self._texts, self._checksums = columns["stream"], columns["checksums"]
        edges = numbers_of(columns["size"].offsets).astype(np.int64)
        for name in ("time_step", "gap", "flags"):
            if not np.array_equal(numbers_of(columns[name].offsets), edges):
                raise ValueError(f"{name} and size have different lengths")
        start = int(edges[0])
        self._edges = edges - start

        def numbers(name: str) -> Any:
            return numbers_of(columns[name].values)[start : int(edges[-1])]

        def summed(steps: Any) -> Any:
            sums = np.cumsum(steps)
            before = np.concatenate(([0], sums))[self._edges[:-1]]
            return sums - np.repeat(before, np.diff(self._edges))

        self._sizes = numbers("size").astype(np.int64)
        self._flags = numbers("flags")
        self._times = summed(numbers("time_step"))
        self._offsets = summed(numbers("gap") + self._sizes) - self._sizes
        self._facts = facts_of(self._times, self._offsets, self._sizes, self._flags, self._edges)
        # The time, offset, size, segment and flags of a packet take 33 bytes.
        self.num_bytes: int = len(self._sizes) * 33 + self._checksums.nbytes + self._texts.nbytes

    def clip(self, row: int) -> ClipIndex | None:
        """Return the packet index of the clip in `row`, or None for a clip that is decoded through its container."""
        import numpy as np

        text = self._texts[row].as_py()
        if text is None:
            return None
        try:
            info = StreamInfo.from_json(text)
            facts = self._facts[row]
            if facts is None:
                raise DecodeError("the clip has no packets, or a packet with an invalid offset, size or flag")
            mine = slice(self._edges[row], self._edges[row + 1])
            checksums = np.frombuffer(self._checksums[row].as_buffer(), np.uint8).reshape(-1, CHECKSUM_BYTES)
            packets = (self._times[mine], self._offsets[mine], self._sizes[mine], self._flags[mine])
            return ClipIndex(info, *packets, checksums, facts)
        except (StreamvidError, ValueError, TypeError, AttributeError, OverflowError) as error:
            raise IntegrityError(f"{self._where}, row {row}: {error}; rebuild the dataset") from error


def unpack_stream(data: bytes, num_clips: int) -> pa.Buffer:
    """Return the Arrow stream of a table. Raises ValueError if it is too large for `num_clips` clips (SAFE-1)."""
    import pyarrow as pa

    size = int.from_bytes(data[:_SIZE_BYTES], "little")
    limit = min(_MAX_STREAM_BYTES, (num_clips + 1) * _MAX_CLIP_BYTES)
    if not 0 < size <= limit:
        raise ValueError(f"it unpacks to {size} bytes; 1 to {limit} are allowed")
    stream = pa.decompress(memoryview(data)[_SIZE_BYTES:], decompressed_size=size, codec="zstd")
    messages = pa.ipc.MessageReader.open_stream(stream)
    with contextlib.suppress(StopIteration):
        while True:
            message = messages.read_next_message()
            if message.type not in ("schema", "record batch") or _is_compressed(message):
                raise ValueError("it contains messages other than a schema and uncompressed record batches")
    return stream


def _is_compressed(message: pa.Message) -> bool:
    """Return True if a record batch is compressed.

    Such batches are refused, because pyarrow does not limit their uncompressed size.

    The metadata is a flatbuffer: field 2 of a Message is the header, and field 3 of a RecordBatch is the compression.
    """
    data = bytes(message.metadata)

    def field(table: int, number: int) -> int:
        vtable = table - struct.unpack_from("<i", data, table)[0]
        if 4 + 2 * number >= struct.unpack_from("<H", data, vtable)[0]:
            return 0
        place: int = struct.unpack_from("<H", data, vtable + 4 + 2 * number)[0]
        return table + place if place else 0

    try:
        header = field(struct.unpack_from("<I", data)[0], 2)
        batch = header + struct.unpack_from("<I", data, header)[0]
        return message.type == "record batch" and field(batch, 3) > 0
    except struct.error as error:
        raise ValueError("one of its messages is damaged") from error
