"""Decode worker: a process that decodes clips in shared memory to frames in shared memory.

It is started as a fresh interpreter (see pool.py). It is never forked and never imports the caller's main module, so
torch and CUDA are never loaded in it.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import resource
import socket
import time
from collections import deque
from functools import cached_property
from typing import TYPE_CHECKING, Any

from streamvid.errors import DecodeError, ProbeError
from streamvid.host.page_cache import read_cached
from streamvid.host.worker import show_stacks
from streamvid.loader.view.clip_part import wrong_bytes
from streamvid.loader.workers.board import Board
from streamvid.loader.workers.messages import (
    GENERATION,
    MAX_MESSAGE_BYTES,
    NO_BATCH,
    Answer,
    AudioTask,
    ClipBlock,
    DecodedAudio,
    DecodeTask,
    Kind,
    PictureColors,
    Task,
    answer_messages,
    batch_of,
    open_message,
    parse_task,
    short_text,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from fractions import Fraction

    from streamvid.loader.view.audio import TimeRange
    from streamvid.loader.workers.reader import ClipReader
    from streamvid.video.decode.convert import PictureColor
    from streamvid.video.packets import PacketTable
    from streamvid.video.picture import PictureFormat

    _Times = tuple[Fraction, Fraction, Fraction]

_KEPT_SECONDS = 0.02  # CPU time of the work whose answers are sent in one message
_SPARE_BYTES = 256 * 2**20  # never touched, so it costs nothing; a 4K decoder holds about this much in pictures

# More than any allowed stream needs: 17 pictures of 8192x4320 with 16-bit 4:4:4 samples take 3.4 GiB. Shared memory
# does not count.
_MAX_PRIVATE_BYTES = 8 * 2**30


class TaskRunner:
    """Task runner that reads from `clips` and writes to `ring` (any writable buffer). Not thread-safe."""

    def __init__(self, clips: memoryview, ring: Any) -> None:
        from streamvid.video.decode.stored import StoredDecoder

        self._clips, self._ring = clips, ring
        self._decoder = StoredDecoder()
        self._buffer = bytearray()  # one for all clips, so that it stays in the processor's cache

    def run(self, task: Task) -> Answer:
        """Run a task and return its result."""
        if not isinstance(task, DecodeTask):
            return self._reader.run(task)
        since = time.monotonic()
        answer = self._try(task)
        return answer._replace(text=short_text(answer.text), seconds=time.monotonic() - since)

    @cached_property
    def _reader(self) -> ClipReader:
        from streamvid.loader.workers.reader import ClipReader  # it imports the stores

        return ClipReader(self._clips, self._ring)

    def _try(self, task: DecodeTask) -> Answer:
        def answer(kind: Kind, text: str = "", color: PictureColors = None) -> Answer:
            return Answer(os.getpid(), task.task_id, kind, text, color=color)

        try:
            # Skip the tasks of a run that is over.
            if task.generation != GENERATION.unpack_from(self._clips)[0]:
                return answer("done")
            data = self._data(task.source)
            if data is None:
                return answer("absent")
            problem = wrong_bytes(data, task.source.checks)
            if problem is not None:
                return answer("corrupt", problem)
            color, times = (None, None) if task.picture is None else self._decode(task, task.picture, data)
            shown = None if times is None else times[:2]
            audio = None if task.audio is None else self._decode_audio(task.audio, task.source, data, shown)
        except Exception as error:  # noqa: BLE001 - a hostile clip may raise anything; the loader decides what it means
            if _is_out_of_memory(error) or _is_short_of_memory():
                problem = f"its decoder ran out of memory (limit: {_MAX_PRIVATE_BYTES >> 30} GiB per worker)"
                return answer("error", f"{problem}; lower num_workers or limits.prefetch_bytes")
            is_bad = isinstance(error, DecodeError | ProbeError)
            return answer("bad" if is_bad else "error", f"{type(error).__name__}: {error}")
        colors = None if color is None else (color.matrix, color.color_range, color.siting)
        start = None if times is None else (times[0] - times[2]).as_integer_ratio()
        return answer("done", color=colors)._replace(audio=audio, start=start)

    def _data(self, source: ClipBlock) -> memoryview | None:
        """Return a clip's data, or None if its file is not in the page cache any more."""
        if not source.path:
            first = source.offset + source.table_bytes
            return self._clips[first : first + source.num_bytes]
        if len(self._buffer) < source.num_bytes:
            self._buffer = bytearray(source.num_bytes)
        data = memoryview(self._buffer)[: source.num_bytes]
        return data if read_cached(source.path, source.ranges, data) else None

    def _decode(self, task: DecodeTask, picture: PictureFormat, data: memoryview) -> tuple[PictureColor, _Times | None]:
        """Decode the pictures. Return their PictureColors and, for a whole clip, three presentation times.

        The times belong to the first delivered frame, the last delivered frame and the clip's first frame.
        """
        import numpy as np

        from streamvid.video.stream_info import StreamInfo

        source, pick = task.source, task.pick
        out = np.ndarray((pick.count, picture.num_bytes), np.uint8, self._ring, task.out_offset)
        if not source.stream:
            return self._decode_file(task, picture, data, out)
        table_bytes = source.table_bytes - (0 if task.audio is None else task.audio.table_bytes)
        color = self._decoder.decode(
            StreamInfo.from_json(source.stream),
            np.ndarray((table_bytes // 32, 4), np.int64, self._clips, source.offset),
            data,
            source.key_time,
            out,
            picture,
            numbers=None if pick.needs_times else pick.numbers(source.num_frames),
            crop=task.crop,
            num_threads=task.num_threads,
        )
        return color, None

    def _decode_file(
        self, task: DecodeTask, picture: PictureFormat, data: memoryview, out: Any
    ) -> tuple[PictureColor, _Times]:
        from streamvid.video.decode.file import decode_pictures
        from streamvid.video.limits import STORED_LIMITS

        found: list[_Times] = []

        def choose(table: PacketTable) -> Sequence[int]:
            times, base = table.timestamps, table.time_base
            numbers = task.numbers or task.pick.numbers(len(times), times, base)
            found.append((times[numbers[0]] * base, times[numbers[-1]] * base, times[0] * base))
            return numbers

        color = decode_pictures(
            data,
            0,
            out,
            picture,
            num_frames=task.source.num_frames,
            limits=STORED_LIMITS,
            crop=task.crop,
            choose=choose,
        )
        return color, found[0]

    def _decode_audio(
        self, task: AudioTask, source: ClipBlock, data: memoryview, shown: TimeRange | None
    ) -> DecodedAudio:
        from streamvid.loader.workers.audio import decode_audio  # most loaders deliver no audio

        first = source.offset + source.table_bytes
        return decode_audio(task, self._clips[first - task.table_bytes : first], data, shown, self._ring)


def main(answers_fd: str, tasks_fd: str, clips_fd: str, ring_fd: str, board_fd: str, number: str) -> None:
    """Serve tasks until the loader closes its end of the socket or dies.

    number: number of this worker.
    """
    show_stacks()
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    most = _MAX_PRIVATE_BYTES if most == resource.RLIM_INFINITY else min(most, _MAX_PRIVATE_BYTES)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    answers, tasks = socket.socket(fileno=int(answers_fd)), socket.socket(fileno=int(tasks_fd))
    clips = memoryview(_map(int(clips_fd), mmap.PROT_READ))
    writable = mmap.PROT_READ | mmap.PROT_WRITE
    runner = TaskRunner(clips, _map(int(ring_fd), writable))
    board, worker = Board(memoryview(_map(int(board_fd), writable))), int(number)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        _serve(answers, tasks, runner, board, worker)
    # Skip interpreter teardown: nothing here needs it, and the loader waits for this process.
    os._exit(0)


def _serve(answers: socket.socket, tasks: socket.socket, runner: TaskRunner, board: Board, worker: int) -> None:
    """Run tasks until the loader closes its end of the socket. Answers to a batch's short tasks are sent together."""

    def send(several: Sequence[Answer]) -> None:
        for message in answer_messages(several):
            answers.send(message)

    def receive(flags: int = 0) -> tuple[str, list[Any]] | None:
        with contextlib.suppress(BlockingIOError):
            if not received and (message := tasks.recv(MAX_MESSAGE_BYTES, flags)):
                received.extend(open_message(message))
        return received.popleft() if received else None

    received: deque[tuple[str, list[Any]]] = deque()
    send([Answer(os.getpid(), -1, "ready")])
    done: list[Answer] = []
    opened, since = receive(), 0.0
    while opened:
        kind, value = opened
        # Parsing the first task imports the decoding modules, which takes time and belongs to the task.
        board.begin(worker, value[0])
        since = since if done else time.process_time()
        done.append(runner.run(parse_task(kind, value)))
        following = receive(socket.MSG_DONTWAIT)
        # Until the batch is complete, the last answer about a sample is needed only to reuse the memory of its clip.
        is_kept = following is not None and batch_of(*following) == batch_of(*opened) != NO_BATCH
        if not is_kept or done[-1].kind != "done" or time.process_time() - since > _KEPT_SECONDS:
            send(done)
            done = []
        if following is None:
            board.end(worker)
        opened = following or receive()


def _is_out_of_memory(error: BaseException | None) -> bool:
    # FFmpeg reports a lack of memory by an error code, as it does bad bytes, and either causes the same DecodeError.
    while error is not None:
        if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
            return True
        error = error.__cause__ or error.__context__
    return False


def _is_short_of_memory() -> bool:
    # FFmpeg also reports "invalid data" if it cannot allocate a picture: while memory is short, that proves nothing.
    try:
        mmap.mmap(-1, _SPARE_BYTES).close()
    except OSError:
        return True
    return False


def _map(descriptor: int, protection: int) -> mmap.mmap:
    return mmap.mmap(descriptor, os.fstat(descriptor).st_size, prot=protection)
