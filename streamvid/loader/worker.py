"""A decode worker: one process that turns clips in shared memory into frames in shared memory.

It is started as a fresh interpreter (see pool.py), never forked and never importing the caller's main module, so
torch and CUDA are never in it. Tasks and answers are small JSON messages; pixels are never copied between processes.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any, Literal

from streamvid.errors import DecodeError, ProbeError

MAX_MESSAGE_BYTES = 65536
_SPARE_BYTES = 256 * 2**20  # untouched, so it costs nothing; a 4K decoder keeps about as much in pictures
# The first bytes of the clip arena: which run of the loader is alive (an unsigned 64-bit count).
GENERATION = struct.Struct("<Q")

# Of a task: it was begun; its frames are there; its clip is bad, wherever it is decoded; it went wrong here.
Kind = Literal["start", "done", "bad", "error"]


@dataclass(frozen=True, slots=True)
class DecodeTask:
    """One sample to decode: where its clip lies, which frames of it are wanted, and where they go.

    Offsets and sizes are bytes in the clip arena and the frame ring; `shape` is (T, H, W) of RGB uint8.
    """

    task_id: int
    generation: int
    clip_offset: int
    clip_bytes: int
    num_frames: int
    start: int
    out_offset: int
    shape: tuple[int, int, int]

    def to_json(self) -> bytes:
        return json.dumps([getattr(self, name) for name in self.__slots__]).encode()

    @staticmethod
    def from_json(data: bytes) -> DecodeTask:
        values = dict(zip(DecodeTask.__slots__, json.loads(data), strict=True))
        return DecodeTask(**values | {"shape": tuple(values["shape"])})


@dataclass(frozen=True, slots=True)
class Answer:
    """What is heard of a task: `text` says what went wrong, `seconds` is how long decoding took."""

    pid: int
    task_id: int
    kind: Kind
    text: str = ""
    seconds: float = 0.0

    def to_json(self) -> bytes:
        return json.dumps([getattr(self, name) for name in self.__slots__]).encode()

    @staticmethod
    def from_json(data: bytes) -> Answer:
        return Answer(*json.loads(data))


def decode_task(task: DecodeTask, clips: memoryview, ring: Any) -> None:
    """Decode one task from `clips` into `ring` (any writable buffer). Raises DecodeError or ProbeError.

    A task of a generation that the loader has left behind is passed over: nobody waits for its frames.
    """
    import numpy as np

    from streamvid.video import decode_into

    if task.generation != GENERATION.unpack_from(clips)[0]:
        return
    frames = np.ndarray((*task.shape, 3), np.uint8, ring, task.out_offset)
    clip = clips[task.clip_offset : task.clip_offset + task.clip_bytes]
    decode_into(clip, task.start, frames, num_frames=task.num_frames)


def main(tasks_fd: int, answers_fd: int, clips_fd: int, ring_fd: int, loader_pidfd: int) -> None:
    """Serve tasks until the loader closes its end of the socket, which its death does too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tasks = socket.socket(fileno=tasks_fd)
    answers = socket.socket(fileno=answers_fd)
    threading.Thread(target=_exit_with_loader, args=(answers_fd, loader_pidfd), daemon=True).start()
    clips = memoryview(mmap.mmap(clips_fd, os.fstat(clips_fd).st_size, prot=mmap.PROT_READ))
    ring = mmap.mmap(ring_fd, os.fstat(ring_fd).st_size)
    try:
        while message := tasks.recv(MAX_MESSAGE_BYTES):
            task = DecodeTask.from_json(message)
            answers.send(Answer(os.getpid(), task.task_id, "start").to_json())
            answers.send(run_task(task, clips, ring).to_json())
    except (BrokenPipeError, ConnectionResetError):
        pass
    # Skip interpreter teardown: nothing here needs it, and the loader waits for this process.
    os._exit(0)


def run_task(task: DecodeTask, clips: memoryview, ring: mmap.mmap) -> Answer:
    """`decode_task`, and what came of it."""
    since = time.monotonic()
    kind, text = _try_task(task, clips, ring)
    return Answer(os.getpid(), task.task_id, kind, text[: MAX_MESSAGE_BYTES // 8], time.monotonic() - since)


def _try_task(task: DecodeTask, clips: memoryview, ring: mmap.mmap) -> tuple[Kind, str]:
    try:
        decode_task(task, clips, ring)
    except Exception as error:  # noqa: BLE001 - a hostile clip may raise anything; the loader decides what it means
        if _is_out_of_memory(error) or _is_short_of_memory():
            return "error", "its decoder ran out of memory; use fewer workers or less prefetch_bytes"
        is_bad = isinstance(error, DecodeError | ProbeError)
        return "bad" if is_bad else "error", f"{type(error).__name__}: {error}"
    return "done", ""


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


def _exit_with_loader(answers_fd: int, loader_pidfd: int) -> None:
    # A decoder stuck in C never comes back to read the end of its task socket; this thread does. The loader's death
    # is watched besides its socket, which processes that the caller forked may hold open.
    poller = select.poll()
    poller.register(answers_fd, 0)
    poller.register(loader_pidfd, select.POLLIN)
    poller.poll()
    os._exit(1)


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:6]))
