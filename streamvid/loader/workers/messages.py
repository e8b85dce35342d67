"""Messages between the loader and its decode workers: small JSON datagrams; pixels never travel in them.

A worker that decodes hostile clips may be made to send any text of any length in an answer (SAFE-1): `short_text` cuts
it, and `Answer.messages` splits what does not fit into one datagram.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from streamvid.loader.view.index_row import PacketsPlace, SampleFile

if TYPE_CHECKING:
    from streamvid.buckets.pick import Pick
    from streamvid.video.picture import PictureFormat
    from streamvid.video.transform import Crop

MAX_MESSAGE_BYTES = 65536
# The first bytes of the clip arena: number of the loader's current run (an unsigned 64-bit count).
GENERATION = struct.Struct("<Q")

# About a worker: it has started. About a task: it was begun; its frames are in place; its clips were read; its bytes
# are not those of the index; its bytes are right but do not decode anywhere; it failed here.
Kind = Literal["ready", "start", "done", "read", "corrupt", "bad", "error"]

PictureColors: TypeAlias = tuple[str, str, str] | None
"""(matrix, range, siting) of yuv420p pictures."""


class ClipBlock(NamedTuple):
    """Bytes of a clip in the clip arena: from `offset` on a packet table of `table_bytes`, then `num_bytes`.

    - checks: (start, end, checksum) of pieces of the bytes. num_frames: of the whole clip.
    - stream: StreamInfo as JSON, key_time: a PacketWindow's; "" for a whole clip with its container.
    """

    offset: int
    table_bytes: int
    num_bytes: int
    checks: tuple[tuple[int, int, bytes], ...]
    num_frames: int
    stream: str = ""
    key_time: int = 0


class DecodeTask(NamedTuple):
    """One sample to decode: its bytes, the frames to decode, and the place for their pictures.

    numbers: of the frames, if the pick goes by the times of another clip.
    out_offset: in the frame ring.
    """

    task_id: int
    generation: int
    source: ClipBlock
    pick: Pick
    crop: Crop | None
    picture: PictureFormat
    out_offset: int
    num_threads: int = 1
    numbers: Sequence[int] | None = None

    def to_json(self) -> bytes:
        return _encode(("decode", *self))

    @staticmethod
    def from_json(value: list[Any]) -> DecodeTask:
        """Return the task that `to_json` wrote, without the first word."""
        from streamvid.buckets.pick import Pick  # a worker imports these with its first task
        from streamvid.video.picture import PictureFormat
        from streamvid.video.transform import Crop

        task_id, generation, source, pick, crop, picture, *others = value
        offset, table_bytes, num_bytes, checks, num_frames, stream, key_time = source
        pieces = tuple((start, end, bytes.fromhex(checksum)) for start, end, checksum in checks)
        return DecodeTask(
            task_id,
            generation,
            ClipBlock(offset, table_bytes, num_bytes, pieces, num_frames, stream, key_time),
            Pick.from_json(pick),
            None if crop is None else Crop(*crop),
            PictureFormat(*picture),
            *others,
        )


class TarFile(NamedTuple):
    """A tar in a store. sha256, num_bytes: identify it in a cache, if there may be one."""

    url: str
    path: str
    sha256: str = ""
    num_bytes: int = 0


class ReadSlot(NamedTuple):
    """One clip to read: its location, the wanted frames, and the place for its bytes.

    table: number of its shard's packet table in the task, -1 for none. row: the clip's row in it.
    out_offset, room: the place in the ring, and its size in bytes.
    """

    tar: TarFile
    clip: SampleFile
    pick: Pick
    table: int
    row: int
    out_offset: int
    room: int


class ReadTask(NamedTuple):
    """Clips to read; task_id is that of the first clip."""

    task_id: int
    generation: int
    tables: tuple[PacketsPlace, ...]
    slots: tuple[ReadSlot, ...]

    def to_json(self) -> bytes:
        return _encode(("read", *self))

    @staticmethod
    def from_json(value: list[Any]) -> ReadTask:
        """Return the task that `to_json` wrote, without the first word."""
        from streamvid.buckets.pick import Pick

        task_id, generation, tables, slots = value
        found = []
        for tar, (offset, num_bytes, sha256, num_frames), pick, *places in slots:
            clip = SampleFile(offset, num_bytes, bytes.fromhex(sha256), num_frames)
            found.append(ReadSlot(TarFile(*tar), clip, Pick.from_json(pick), *places))
        return ReadTask(task_id, generation, tuple(PacketsPlace(*place) for place in tables), tuple(found))


Task: TypeAlias = DecodeTask | ReadTask


def open_message(message: bytes) -> tuple[str, list[Any]]:
    """Return the kind of the task in a message, "decode" or "read", and its values, of which the first is its id."""
    kind, *value = json.loads(message)
    return kind, value


def parse_task(kind: str, value: list[Any]) -> Task:
    """Return the task in an opened message."""
    return ReadTask.from_json(value) if kind == "read" else DecodeTask.from_json(value)


class ReadResult(NamedTuple):
    """Result of a ReadTask for one clip.

    table_bytes, num_bytes: sizes of its packet table and its data in the ring. stream: StreamInfo as JSON.
    numbers: of the frames, if they follow from timestamps.
    """

    kind: Literal["done", "bad", "error"]
    text: str = ""
    table_bytes: int = 0
    num_bytes: int = 0
    stream: str = ""
    num_retries: int = 0
    numbers: Sequence[int] | None = None


class Answer(NamedTuple):
    """Message about a task: `text` describes a problem, `seconds` is the duration of the work.

    color: of yuv420p pictures. results: of the clips of a ReadTask; empty if its run is over.
    """

    pid: int
    task_id: int
    kind: Kind
    text: str = ""
    seconds: float = 0.0
    color: PictureColors = None
    results: tuple[ReadResult, ...] = ()

    def messages(self) -> Iterator[bytes]:
        """Yield the answer as JSON. Results that are too long for one message are split."""
        data, results = _encode(self), self.results
        if len(data) <= MAX_MESSAGE_BYTES or len(results) < 2:
            yield data
            return
        half = len(results) // 2
        for part in (results[:half], results[half:]):
            yield from self._replace(seconds=self.seconds * len(part) / len(results), results=part).messages()

    @staticmethod
    def from_json(data: bytes) -> Answer:
        pid, task_id, kind, text, seconds, color, results = json.loads(data)
        return Answer(pid, task_id, kind, text, seconds, color, tuple(ReadResult(*one) for one in results))


def _plain(value: Any) -> Any:
    """Return JSON for values that are not messages: a checksum, a frame choice, a file, a crop, a picture format."""
    if isinstance(value, bytes):
        return value.hex()
    return value.to_json() if hasattr(value, "to_json") else [getattr(value, name) for name in value.__slots__]


_encoder = json.JSONEncoder(default=_plain)


def _encode(message: tuple[Any, ...]) -> bytes:
    return _encoder.encode(message).encode()


def short_text(error: BaseException | str) -> str:
    """Return the text of an error, cut to fit into a message."""
    return str(error)[: MAX_MESSAGE_BYTES // 8]
