"""A decode worker: one process that turns clips in shared memory into frames in shared memory.

It is started as a fresh interpreter (see pool.py), never forked and never importing the caller's main module, so
torch and CUDA are never in it. Tasks and answers are small JSON messages; pixels are never copied between processes.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from streamvid.errors import DecodeError, ProbeError
from streamvid.host.worker import show_stacks
from streamvid.loader.delivery.clip_part import wrong_bytes

if TYPE_CHECKING:
    from streamvid.loader.workers.encoded import ReadTask
    from streamvid.video.decode.convert import PictureColor
    from streamvid.video.picture import Accuracy, Pixels

MAX_MESSAGE_BYTES = 65536
_SPARE_BYTES = 256 * 2**20  # untouched, so it costs nothing; a 4K decoder keeps about as much in pictures
# The first bytes of the clip arena: which run of the loader is alive (an unsigned 64-bit count).
GENERATION = struct.Struct("<Q")

# Of a worker: it is up. Of a task: it was begun; its frames are there; its clips were read; its bytes are not those
# that the index means; they are, and do not decode, wherever that is tried; it went wrong here.
Kind = Literal["ready", "start", "done", "read", "corrupt", "bad", "error"]


@dataclass(frozen=True, slots=True)
class DecodeTask:
    """One sample to decode: where its bytes lie, which frames of it are wanted, and where they go.

    - block_offset: in the clip arena, of a table of packets of `table_bytes` (0: none), then `num_bytes` of the clip.
    - checks: (start, end, checksum as hex) of pieces of those bytes.
    - num_clip_frames: of the whole clip. pick: the frames wanted, as `Pick.to_json` has them. crop: a Crop's fields.
    - numbers: of the frames, where those of another clip are meant, whose times the pick goes by.
    - stream: StreamInfo as JSON, key_time: a PacketWindow's; empty: it is the whole clip, with its container.
    - out_offset: in the frame ring, of pictures (height, width, pixels, accuracy) one after the other.
    """

    task_id: int
    generation: int
    block_offset: int
    table_bytes: int
    num_bytes: int
    checks: tuple[tuple[int, int, str], ...]
    num_clip_frames: int
    pick: list[Any]
    crop: tuple[int, int, int] | None
    stream: str
    key_time: int
    num_threads: int
    out_offset: int
    picture: tuple[int, int, Pixels, Accuracy]
    numbers: list[int] | None = None

    def to_json(self) -> bytes:
        return json.dumps([getattr(self, name) for name in self.__slots__]).encode()


@dataclass(frozen=True, slots=True)
class Answer:
    """What is heard of a task: `text` says what went wrong, `seconds` is how long decoding took.

    color: (matrix, range, siting) of yuv420p pictures. results: of each clip of a ReadTask.
    """

    pid: int
    task_id: int
    kind: Kind
    text: str = ""
    seconds: float = 0.0
    color: tuple[str, str, str] | None = None
    results: list[Any] | None = None

    def to_json(self) -> bytes:
        return json.dumps([getattr(self, name) for name in self.__slots__]).encode()

    def messages(self) -> Iterator[bytes]:
        """It as JSON: where its results are too long for one message, some of them in each of several."""
        data, results = self.to_json(), self.results or []
        if len(data) <= MAX_MESSAGE_BYTES or len(results) < 2:
            yield data
            return
        half = len(results) // 2
        for part in (results[:half], results[half:]):
            yield from replace(self, seconds=self.seconds * len(part) / len(results), results=part).messages()

    @staticmethod
    def from_json(data: bytes) -> Answer:
        return Answer(*json.loads(data))


def parse_task(message: bytes) -> DecodeTask | ReadTask:
    """A task out of its message."""
    from streamvid.loader.workers.encoded import ReadTask

    value = json.loads(message)
    return ReadTask.from_json(value["read"]) if isinstance(value, dict) else DecodeTask(*value)


class CorruptError(Exception):
    """Bytes have another checksum than the index says."""


class TaskRunner:
    """Decodes tasks from `clips` into `ring` (any writable buffer), with decoders that stay open. One thread."""

    def __init__(self, clips: memoryview, ring: Any) -> None:
        from streamvid.loader.workers.encoded import ClipReader
        from streamvid.video.decode.stored import StoredDecoder

        self._clips, self._ring = clips, ring
        self._decoder, self._reader = StoredDecoder(), ClipReader(clips, ring)

    def run(self, task: DecodeTask | ReadTask) -> Answer:
        """Do a task, and say what came of it."""
        if not isinstance(task, DecodeTask):
            return self._reader.run(task)
        since = time.monotonic()
        kind, text, color = self._try(task)
        text = text[: MAX_MESSAGE_BYTES // 8]
        return Answer(os.getpid(), task.task_id, kind, text, time.monotonic() - since, color)

    def _try(self, task: DecodeTask) -> tuple[Kind, str, tuple[str, str, str] | None]:
        try:
            # A task of a generation that the loader has left behind is passed over: nobody waits for its frames.
            if task.generation != GENERATION.unpack_from(self._clips)[0]:
                return "done", "", None
            color = self._decode(task)
        except CorruptError as error:
            return "corrupt", str(error), None
        except Exception as error:  # noqa: BLE001 - a hostile clip may raise anything; the loader decides what it means
            if _is_out_of_memory(error) or _is_short_of_memory():
                return "error", "its decoder ran out of memory; use fewer workers or less prefetch_bytes", None
            is_bad = isinstance(error, DecodeError | ProbeError)
            return "bad" if is_bad else "error", f"{type(error).__name__}: {error}", None
        return "done", "", (color.matrix, color.color_range, color.siting)

    def _decode(self, task: DecodeTask) -> PictureColor:
        import numpy as np

        from streamvid.buckets.pick import Pick
        from streamvid.video.decode.file import decode_pictures
        from streamvid.video.limits import STORED_LIMITS
        from streamvid.video.picture import PictureFormat
        from streamvid.video.stream_info import StreamInfo
        from streamvid.video.transform import Crop

        first = task.block_offset + task.table_bytes
        data = self._clips[first : first + task.num_bytes]
        problem = wrong_bytes(data, [(start, end, bytes.fromhex(checksum)) for start, end, checksum in task.checks])
        if problem is not None:
            raise CorruptError(problem)
        picture, pick = PictureFormat(*task.picture), Pick.from_json(task.pick)
        crop = None if task.crop is None else Crop(*task.crop)
        out = np.ndarray((pick.count, picture.num_bytes), np.uint8, self._ring, task.out_offset)
        if not task.stream:
            return decode_pictures(
                data, 0, out, picture, num_frames=task.num_clip_frames, limits=STORED_LIMITS, crop=crop,
                choose=lambda table: (
                    task.numbers or pick.numbers(len(table.timestamps), table.timestamps, table.time_base)
                ),
            )  # fmt: skip
        packets = np.ndarray((task.table_bytes // 32, 4), np.int64, self._clips, task.block_offset)
        info = StreamInfo.from_json(task.stream)
        numbers = None if pick.needs_times else pick.numbers(task.num_clip_frames)
        return self._decoder.decode(
            info, packets, data, task.key_time, out, picture, numbers=numbers, crop=crop, num_threads=task.num_threads
        )


def main(answers_fd: str, tasks_fd: str, clips_fd: str, ring_fd: str) -> None:
    """Serve tasks until the loader closes its end of the socket, which its death does too."""
    show_stacks()
    answers, tasks = socket.socket(fileno=int(answers_fd)), socket.socket(fileno=int(tasks_fd))
    clips = memoryview(_map(int(clips_fd), mmap.PROT_READ))
    runner = TaskRunner(clips, _map(int(ring_fd), mmap.PROT_READ | mmap.PROT_WRITE))
    try:
        answers.send(Answer(os.getpid(), -1, "ready").to_json())
        while message := tasks.recv(MAX_MESSAGE_BYTES):
            task = parse_task(message)
            if isinstance(task, DecodeTask):  # others are over as soon as anybody could make use of knowing
                answers.send(Answer(os.getpid(), task.task_id, "start").to_json())
            for answer in runner.run(task).messages():
                answers.send(answer)
    except (BrokenPipeError, ConnectionResetError):
        pass
    # Skip interpreter teardown: nothing here needs it, and the loader waits for this process.
    os._exit(0)


def _is_out_of_memory(error: BaseException | None) -> bool:
    # FFmpeg's own is an error code like those of bad bytes, and comes as the cause of the same DecodeError.
    while error is not None:
        if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
            return True
        error = error.__cause__ or error.__context__
    return False


def _is_short_of_memory() -> bool:
    # FFmpeg also calls a picture that it has no memory for "invalid data": where memory is short, nothing is proved.
    try:
        mmap.mmap(-1, _SPARE_BYTES).close()
    except OSError:
        return True
    return False


def _map(descriptor: int, protection: int) -> mmap.mmap:
    return mmap.mmap(descriptor, os.fstat(descriptor).st_size, prot=protection)
