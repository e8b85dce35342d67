"""Messages between the loader and its decode workers: small JSON datagrams that never contain pixels.

Hostile clips may cause a worker to send any text of any length in an answer (SAFE-1). `short_text` truncates error
texts, and `answer_messages` splits answers that do not fit into one datagram.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from streamvid.loader.view.index_row import PacketsPlace, SampleFile

if TYPE_CHECKING:
    from streamvid.buckets.pick import Pick
    from streamvid.video.picture import PictureFormat
    from streamvid.video.transform import Crop

MAX_MESSAGE_BYTES = 65536
NO_BATCH = -1
"""Value of DecodeTask.batch for tasks whose answers are sent immediately."""
# The first bytes of the clip arena hold the number of the loader's current run as an unsigned 64-bit integer.
GENERATION = struct.Struct("<Q")

# "ready": a worker has started. For a task, "done": its frames are in place; "read": its clips were read; "absent":
# its bytes are not in the page cache any more; "corrupt": its bytes do not match the index; "bad": its bytes match but
# are not decodable on any machine; "error": it failed on this machine.
Kind = Literal["ready", "done", "read", "absent", "corrupt", "bad", "error"]

PictureColors: TypeAlias = tuple[str, str, str] | None
"""(matrix, range, siting) of yuv420p pictures."""

DecodedAudio: TypeAlias = tuple[bool, float] | None
"""(True if the clip has audio in the window, time from the first frame to the first sample in seconds)."""


class ClipBlock(NamedTuple):
    """Location of a clip in the clip arena: `table_bytes` of packet tables at `offset`, then `num_bytes` of clip data.

    - checks: (start, end, checksum) for each piece of the data.
    - num_frames: number of frames in the whole clip.
    - stream: StreamInfo as JSON; "" for a whole clip with its container.
    - key_time: timestamp of the first packet.
    - path, ranges: local file from which the worker reads the clip data, and the (offset, size) of its ranges there.
      The path is "" if the data is in the clip arena.
    """

    offset: int
    table_bytes: int
    num_bytes: int
    checks: tuple[tuple[int, int, bytes], ...]
    num_frames: int
    stream: str = ""
    key_time: int = 0
    path: str = ""
    ranges: Sequence[tuple[int, int]] = ()


class AudioTask(NamedTuple):
    """Audio to decode into the frame ring at `out_offset`, as float32 with shape (num_channels, num_samples).

    - stream: AudioStreamInfo as JSON; "" to decode the audio through the clip's container; None for silence.
    - table: shape of the audio's packet table, which follows the packet table of the video.
    - first_sample, offset_seconds, num_decoded: as in AudioPart. Without a stream, first_sample counts from time zero
      of a separate file (see `own_zero`).
    - num_frames: for a whole clip, number of pictures whose duration the audio is stretched to; 0 for no stretching.
    """

    sample_rate: int
    num_channels: int
    num_samples: int
    out_offset: int
    stream: str | None = None
    table: tuple[int, int] = (0, 0)
    first_sample: int | None = None
    offset_seconds: float = 0.0
    num_decoded: int = 0
    num_frames: int = 0

    @property
    def table_bytes(self) -> int:
        """Size in bytes of the packet table."""
        return 8 * self.table[0] * self.table[1]


class DecodeTask(NamedTuple):
    """Task to decode one clip: its bytes, the frames to decode, and the destination of their pictures.

    batch: number that distinguishes the batches in flight; NO_BATCH if the sample needs further tasks after this one.
    numbers: indices of the frames, if they are chosen by the timestamps of another clip; otherwise None.
    picture: format of the pictures; None for a file from which only the audio is decoded.
    out_offset: offset of the pictures in the frame ring.
    audio: audio to decode after the pictures; None if no audio is delivered.
    """

    task_id: int
    generation: int
    batch: int
    source: ClipBlock
    pick: Pick
    crop: Crop | None
    picture: PictureFormat | None
    out_offset: int
    num_threads: int = 1
    numbers: Sequence[int] | None = None
    audio: AudioTask | None = None

    def to_json(self) -> Sequence[Any]:
        # Values that are JSON already are encoded in a third of the time.
        task_id, generation, batch, source, pick, *other = self
        offset, table_bytes, num_bytes, checks, *about = source
        pieces = [(start, end, checksum.hex()) for start, end, checksum in checks]
        clip = (offset, table_bytes, num_bytes, pieces, *about)
        return ("decode", task_id, generation, batch, clip, pick.to_json(), *other)

    @staticmethod
    def from_json(value: list[Any]) -> DecodeTask:
        """Build a task from the parsed result of `to_json`, without its first element (the kind)."""
        from streamvid.buckets.pick import Pick  # a worker imports these with its first task
        from streamvid.video.picture import PictureFormat
        from streamvid.video.transform import Crop

        task_id, generation, batch, source, pick, crop, picture, out_offset, num_threads, numbers, audio = value
        offset, table_bytes, num_bytes, checks, *about = source
        pieces = tuple((start, end, bytes.fromhex(checksum)) for start, end, checksum in checks)
        return DecodeTask(
            task_id,
            generation,
            batch,
            ClipBlock(offset, table_bytes, num_bytes, pieces, *about),
            Pick.from_json(pick),
            None if crop is None else Crop(*crop),
            None if picture is None else PictureFormat(*picture),
            out_offset,
            num_threads,
            numbers,
            None if audio is None else AudioTask(*audio),
        )


class TarFile(NamedTuple):
    """Tar file in a store.

    sha256, num_bytes: checksum and size, which identify the tar in a cache; "" and 0 for local stores.
    """

    url: str
    path: str
    sha256: str = ""
    num_bytes: int = 0


class ReadSlot(NamedTuple):
    """One clip to read: its location, the wanted frames, and the destination of its bytes.

    table: index of the shard's packet table in the task; -1 if the shard has no packet table.
    row: the clip's row in the packet table.
    out_offset: offset of the destination in the ring, in bytes.
    room: size of the destination in bytes.
    """

    tar: TarFile
    clip: SampleFile
    pick: Pick
    table: int
    row: int
    out_offset: int
    room: int


class ReadTask(NamedTuple):
    """Task to read several clips. Its id is the slot number of the first clip."""

    task_id: int
    generation: int
    tables: tuple[PacketsPlace, ...]
    slots: tuple[ReadSlot, ...]

    def to_json(self) -> Sequence[Any]:
        return ("read", *self)

    @staticmethod
    def from_json(value: list[Any]) -> ReadTask:
        """Build a task from the parsed result of `to_json`, without its first element (the kind)."""
        from streamvid.buckets.pick import Pick

        task_id, generation, tables, slots = value
        found = []
        for tar, (offset, num_bytes, sha256, num_frames), pick, *places in slots:
            clip = SampleFile(offset, num_bytes, bytes.fromhex(sha256), num_frames)
            found.append(ReadSlot(TarFile(*tar), clip, Pick.from_json(pick), *places))
        return ReadTask(task_id, generation, tuple(PacketsPlace(*place) for place in tables), tuple(found))


Task: TypeAlias = DecodeTask | ReadTask


def batch_of(kind: str, value: list[Any]) -> int:
    """Return the `batch` of a DecodeTask from `open_message`, or NO_BATCH for a task of another kind."""
    return int(value[2]) if kind == "decode" else NO_BATCH


def task_messages(tasks: Sequence[Task]) -> Iterator[bytes]:
    """Yield tasks as JSON messages. If all tasks fit into one message, yield only that message."""
    data, half = _encode([task.to_json() for task in tasks]), len(tasks) // 2
    if half and len(data) > MAX_MESSAGE_BYTES:
        yield from task_messages(tasks[:half])
        yield from task_messages(tasks[half:])
    elif tasks:
        yield data


def open_message(message: bytes) -> Iterator[tuple[str, list[Any]]]:
    """Yield the kind of each task in a message ("decode" or "read") and the task's values, starting with its id."""
    return ((kind, value) for kind, *value in json.loads(message))


def parse_task(kind: str, value: list[Any]) -> Task:
    """Return the task with the kind and values from `open_message`."""
    return ReadTask.from_json(value) if kind == "read" else DecodeTask.from_json(value)


class ReadResult(NamedTuple):
    """Result of a ReadTask for one clip.

    table_bytes: size of the clip's packet table in the ring.
    num_bytes: size of the clip's data in the ring.
    stream: StreamInfo as JSON; "" for a whole clip.
    numbers: indices of the wanted frames, if they are chosen by timestamp; otherwise None.
    """

    kind: Literal["done", "bad", "error"]
    text: str = ""
    table_bytes: int = 0
    num_bytes: int = 0
    stream: str = ""
    num_retries: int = 0
    numbers: Sequence[int] | None = None


class Answer(NamedTuple):
    """Message from a worker about a task: `text` describes a problem, and `seconds` is the duration of the work.

    color: (matrix, range, siting) of yuv420p pictures.
    results: one result per clip in a ReadTask; empty if the run is over.
    audio: result of a DecodeTask's AudioTask.
    start: time from a clip's first frame to the first delivered frame, as a fraction (numerator, denominator); None if
        the clip was not decoded through its container.
    """

    pid: int
    task_id: int
    kind: Kind
    text: str = ""
    seconds: float = 0.0
    color: PictureColors = None
    results: tuple[ReadResult, ...] = ()
    audio: DecodedAudio = None
    start: tuple[int, int] | None = None

    @property
    def first_time(self) -> Fraction:
        """`start` as a Fraction, or 0 if `start` is None. Raises ValueError if the worker's value is invalid."""
        if self.start is None:
            return _ZERO
        over, under = self.start
        if not (isinstance(over, int) and isinstance(under, int) and abs(over) < 1 << 63 and 0 < under < 1 << 63):
            raise ValueError(f"a decode worker sent the invalid time {str(self.start)[:100]}")
        return Fraction(over, under)

    def halves(self) -> tuple[Answer, ...]:
        """Return two answers with half of the results each, or this answer if it has fewer than two results."""
        results, half = self.results, len(self.results) // 2
        if not half:
            return (self,)
        parts = (results[:half], results[half:])
        return tuple(self._replace(seconds=self.seconds * len(part) / len(results), results=part) for part in parts)


def answer_messages(answers: Sequence[Answer]) -> Iterator[bytes]:
    """Yield answers as JSON messages. If all answers fit into one message, yield only that message."""
    data = _encode(tuple(answers))
    if len(data) <= MAX_MESSAGE_BYTES:
        yield data
        return
    parts = answers if len(answers) > 1 else answers[0].halves()
    if len(parts) < 2:
        yield data
        return
    for one in parts:
        yield from answer_messages([one])


def parse_answers(message: bytes) -> Iterator[Answer]:
    """Yield the answers in a message from `answer_messages`."""
    for pid, task_id, kind, text, seconds, color, results, audio, start in json.loads(message.decode()):
        found = tuple(ReadResult(*one) for one in results)
        yield Answer(pid, task_id, kind, text, seconds, color, found, audio, start)


def _plain(value: Any) -> Any:
    """Return a JSON value for an object in a message: a checksum, a pick, a file, a crop or a picture format."""
    if isinstance(value, bytes):
        return value.hex()
    return value.to_json() if hasattr(value, "to_json") else [getattr(value, name) for name in value.__slots__]


_ZERO = Fraction()
_encoder = json.JSONEncoder(default=_plain)


def _encode(message: Sequence[Any]) -> bytes:
    return _encoder.encode(message).encode()


def short_text(error: BaseException | str) -> str:
    """Return the text of an error, truncated to fit into a message."""
    return str(error)[: MAX_MESSAGE_BYTES // 8]
