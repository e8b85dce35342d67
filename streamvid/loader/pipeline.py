"""From steps to decoded batches, ahead of the caller.

    feeder thread    takes batches in plan order; for each, room in the ring, then for each sample room for its clip
    fetch threads    read and check clips, hand decode tasks to the workers
    answer thread    hears from the workers (num_workers=0: decodes), gives clip memory back, completes batches
    keeper thread    starts all that, and ends it
    caller           `next_batch()`: the next complete batch, in plan order

Memory is bounded by the two arenas alone: a batch is begun when the ring has room, a clip read when the clip arena has.
The caller takes no lock that a thread takes too: a signal may end it anywhere, and a lock that it held would be the end
of all. For the same reason, and because a destructor may run in any thread, the keeper opens and closes what is to
be closed.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from streamvid.errors import LoaderError, RingFullError, SampleError, StreamvidError, WorkerError
from streamvid.loader.arena import ALIGN_BYTES, Arena
from streamvid.loader.fetch import FetchThreads, IndexRows, check_row, read_clip
from streamvid.loader.mix import MixPart, SampleRequest
from streamvid.loader.pool import DecodePool, Decoder, InlineDecoder
from streamvid.loader.requests import BatchRequest
from streamvid.loader.sampling import window_start
from streamvid.loader.worker import GENERATION, DecodeTask

_log = logging.getLogger(__name__)

_NUM_FETCH_THREADS = 4
_POLL_SECONDS = 0.2
_CLOSE_SECONDS = 10.0  # decode workers are given half of it
RING_WAIT_SECONDS = 10.0


@dataclass(slots=True, eq=False)
class PendingBatch:
    """A batch under way: its place in `memory`, its samples' index rows, and how many are still to come."""

    request: BatchRequest
    memory: Any
    ring_offset: int
    num_missing: int
    rows: list[dict[str, Any]] = field(default_factory=list)
    error: StreamvidError | None = None


class Pipeline:
    """Workers, threads and memory of one loader: none before `open`, none after `close`.

    One run at a time: `start`, `next_batch` …, `stop`. Raises LoaderError where workers or memory cannot be had.
    """

    def __init__(self, parts: Sequence[MixPart], *, num_workers: int, clip_bytes: int, frame_bytes: int) -> None:
        self._sizes = (num_workers, clip_bytes, frame_bytes)
        self._parts, self._pid = tuple(parts), os.getpid()
        self._rows = IndexRows()
        self._ready: deque[PendingBatch | None] = deque()  # None: the run has ended
        self._news: SimpleQueue[None] = SimpleQueue()  # holds something whenever the caller has something to look at
        self._lock = threading.Lock()  # over what follows; only our own threads take it
        self._tasks: dict[int, tuple[PendingBatch, SampleRequest, str, int]] = {}
        self._next_task = 0
        self._run = 0  # number of the run that is alive; what belongs to another is passed over
        self._failure: StreamvidError | None = None
        self.is_open = self._closing = False
        self._ring_wait_since: float | None = None
        self._feeder: threading.Thread | None = None
        self._keeper = threading.Thread(target=self._keep, name="streamvid-keeper", daemon=True)
        self._end: SimpleQueue[None] = SimpleQueue()

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the decode workers."""
        return self._decoder.pids if self.is_open else ()

    @property
    def _is_copy(self) -> bool:
        # In a process forked from the loader's: threads are not here, workers and shared memory are the parent's.
        return os.getpid() != self._pid

    # A run, as the caller sees it.

    def open(self) -> None:
        """Start workers and threads and take the memory: once, and `close` even if it fails or is interrupted."""
        self._keeper.start()
        while not self.is_open:
            self._check(self._run)
            self._wait(_POLL_SECONDS)

    def start(self, requests: Iterator[BatchRequest]) -> int:
        """End the run that is alive and begin one over `requests`; its number, for `next_batch` and `cancel`."""
        self.stop()
        self._check(self._run)
        self._feeder = threading.Thread(
            target=self._feed, args=(requests, self._run), name="streamvid-feeder", daemon=True
        )
        self._feeder.start()
        return self._run

    def next_batch(self, run: int) -> PendingBatch | None:
        """The next batch, complete; None at the end of the run. Raises what made the run fail or end."""
        since = time.monotonic()
        while True:
            self._check(run)
            try:
                batch = self._ready[0]
                if batch is None or batch.num_missing == 0:
                    return self._ready.popleft()
            except IndexError:  # nothing yet; or another thread has ended the run
                self._check_ring(since)
            else:
                if batch.error is not None:
                    raise _fresh(batch.error)
            self._wait(_POLL_SECONDS)

    def cancel(self, run: int) -> None:
        """Let a run end, if it is still alive, without waiting for it: fit for destructors, in any thread."""
        if run != self._run or not self.is_open or self._is_copy:
            return
        self._run += 1
        GENERATION.pack_into(self._clips.map, 0, self._run)
        self.ring.wake()
        self._clips.wake()
        self._tell()

    def stop(self) -> None:
        """End the run: nothing is under way any more, and memory of batches not handed over is free again."""
        if not self.is_open or self._is_copy:
            return
        self.cancel(self._run)
        while self._feeder is not None and self._feeder.is_alive():
            self.ring.wake()
            self._clips.wake()
            self._feeder.join(0.05)
        # Once something has failed or all is closed, no run will use the memory that a task may still write to.
        while self._tasks and self._failure is None and not self._closing:
            self._wait(0.05)
        while self._ready:
            batch = self._ready.popleft()
            if batch is not None:
                self.ring.release(batch.ring_offset)

    def close(self, wait: bool = True) -> None:
        """End workers and threads and let go of the memory; batches that the caller holds stay valid. Idempotent.

        Without `wait` it is fit for destructors, in any thread.
        """
        if self._is_copy:
            return
        self._closing = True
        self._end.put(None)
        self._tell()
        is_ours = threading.current_thread().name.startswith("streamvid-")  # as where one runs a caller's destructor
        is_exit = not threading.main_thread().is_alive()
        if ((wait and not is_ours) or is_exit) and self._keeper.is_alive():
            self._keeper.join(_CLOSE_SECONDS)
            if self._keeper.is_alive():
                _log.warning(
                    "a thread of a closed loader still runs after %.0f seconds: it waits for a read, or for "
                    "a lock of the thread that closes",
                    _CLOSE_SECONDS,
                )

    # Behind the caller's back.

    def _keep(self) -> None:
        try:
            with contextlib.ExitStack() as resources:
                self._open(resources)
                self.is_open = True
                self._tell()
                self._end.get()
            self.is_open = False
        except StreamvidError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - the caller must hear of it, in its own thread
            self._fail_unexpected(error)

    def _open(self, resources: contextlib.ExitStack) -> None:
        num_workers, clip_bytes, frame_bytes = self._sizes
        self._clips = Arena("clips", clip_bytes + ALIGN_BYTES)
        resources.callback(self._clips.close)
        self.ring = Arena("ring", frame_bytes)
        resources.callback(self.ring.close)
        self._clips.allocate(GENERATION.size, 0.0)  # its first page is the run that workers look at
        self._fetchers = FetchThreads(_NUM_FETCH_THREADS)
        resources.callback(self._fetchers.close)
        self._decoder: Decoder = (
            DecodePool(num_workers, self._clips, self.ring) if num_workers else InlineDecoder(self._clips, self.ring)
        )
        answers = threading.Thread(
            target=self._serve_answers, args=(self._decoder,), name="streamvid-answers", daemon=True
        )
        resources.callback(self._end_decoding, self._decoder, answers)
        answers.start()

    def _end_decoding(self, decoder: Decoder, answers: threading.Thread) -> None:
        self.stop()
        decoder.close()
        if answers.is_alive():
            answers.join()

    def _feed(self, requests: Iterator[BatchRequest], run: int) -> None:
        try:
            for request in requests:
                if not self._begin(request, run):
                    return
            self._ready.append(None)
            self._tell()
        except StreamvidError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - the caller must hear of it, in its own thread
            self._fail_unexpected(error)

    def _begin(self, request: BatchRequest, run: int) -> bool:
        self._ring_wait_since = time.monotonic()
        offset = self._allocate(self.ring, request.num_bytes, run)
        self._ring_wait_since = None
        if offset is None:
            return False
        batch = PendingBatch(request, self.ring.map, offset, num_missing=len(request.samples))
        self._ready.append(batch)
        for slot, sample in enumerate(request.samples):
            row = self._rows.row(sample)
            try:
                check_row(row, sample.shard_info, request.bucket.num_frames)
            except StreamvidError as error:
                batch.error = self._sample_error(sample, row["key"], str(error))
                self._tell()
                return False
            clip = self._allocate(self._clips, row["clip_bytes"], run)
            if clip is None:
                return False
            batch.rows.append(row)
            task = self._make_task(batch, slot, row, clip, run)
            self._fetchers.submit(partial(self._fetch, sample, row, task))
        return True

    def _allocate(self, arena: Arena, num_bytes: int, run: int) -> int | None:
        while run == self._run and not self._closing:
            offset = arena.allocate(num_bytes, _POLL_SECONDS)
            if offset is not None:
                return offset
        return None

    def _make_task(self, batch: PendingBatch, slot: int, row: dict[str, Any], clip: int, run: int) -> DecodeTask:
        frames, height, width = shape = batch.request.bucket.shape
        sample = batch.request.samples[slot]
        start = window_start(
            row["window_num_frames"], frames, seed=sample.part.seed, key=row["key"], visit=sample.visit
        )
        with self._lock:
            task_id = self._next_task
            self._next_task += 1
            self._tasks[task_id] = (batch, sample, row["key"], clip)
        return DecodeTask(
            task_id=task_id,
            generation=run,
            clip_offset=clip,
            clip_bytes=row["clip_bytes"],
            num_frames=row["window_num_frames"],
            start=start,
            out_offset=batch.ring_offset + slot * frames * height * width * 3,
            shape=shape,
        )

    def _fetch(self, sample: SampleRequest, row: dict[str, Any], task: DecodeTask) -> None:
        try:
            if task.generation != self._run:
                self._done(task.task_id, None)
                return
            buffer = self._clips.view[task.clip_offset : task.clip_offset + task.clip_bytes]
            read_clip(sample.part.dataset, sample.shard_info, row, buffer)
            self._decoder.submit(task)
        except StreamvidError as error:
            self._done(task.task_id, str(error))
        except Exception as error:  # noqa: BLE001 - the caller must hear of it, in its own thread
            self._fail_unexpected(error)

    def _serve_answers(self, decoder: Decoder) -> None:
        try:
            while not self._closing:
                decoder.serve(_POLL_SECONDS, self._done)
        except WorkerError as error:
            self._fail(self._name_sample(error))
        except Exception as error:  # noqa: BLE001 - the caller must hear of it, in its own thread
            self._fail_unexpected(error)

    def _done(self, task_id: int, error: str | None) -> None:
        with self._lock:
            batch, sample, key, clip = self._tasks.pop(task_id)
            self._clips.release(clip)
            if error is None:
                batch.num_missing -= 1
            else:  # its batch stays incomplete, and is never handed over
                batch.error = batch.error or self._sample_error(sample, key, error)
            is_news = batch.num_missing == 0 or error is not None or not self._tasks
        if is_news:
            self._tell()

    def _sample_error(self, sample: SampleRequest, key: object, error: str) -> SampleError:
        return SampleError(
            f"{sample.part.dataset.url}: sample {key} (number {sample.place} of {sample.shard_info.path}, "
            f"bucket {sample.bucket_id}) cannot be delivered: {error}"
        )

    def _name_sample(self, error: WorkerError) -> WorkerError:
        if error.task_id not in self._tasks:
            return error
        _, sample, key, _ = self._tasks[error.task_id]
        return WorkerError(f"{error}. It was decoding {key} of {sample.shard_info.path} in {sample.part.dataset.url}")

    def _fail(self, error: StreamvidError) -> None:
        self._failure = self._failure or error
        self._tell()

    def _fail_unexpected(self, error: Exception) -> None:
        wrapped = LoaderError(
            f"{self._parts[0].dataset.url}: the loader failed unexpectedly: {type(error).__name__}: {error}"
        )
        wrapped.__cause__ = error
        self._fail(wrapped)

    # Between the caller and the threads.

    def _tell(self) -> None:
        if self._news.empty():
            self._news.put(None)

    def _wait(self, timeout_seconds: float) -> None:
        with contextlib.suppress(Empty):
            self._news.get(timeout=timeout_seconds)

    def _check(self, run: int) -> None:
        if self._is_copy:
            raise LoaderError("this loader was made before a fork; make it in the process that iterates it")
        if self._closing:
            raise LoaderError("this loader is closed; make a new one")
        if run != self._run:
            raise LoaderError(
                "this iteration is over: another iteration of this loader has begun, or its state or epoch was set; "
                "one loader serves one loop at a time"
            )
        if self._failure is not None:
            raise _fresh(self._failure)

    def _check_ring(self, since: float) -> None:
        """RingFullError if both sides have waited for long: the feeder for room, the caller, from `since`, for it."""
        feeder_since = self._ring_wait_since
        if feeder_since is None:
            return
        seconds = time.monotonic() - max(since, feeder_since)
        if seconds > RING_WAIT_SECONDS:
            raise RingFullError(
                f"the ring of {self.ring.num_bytes} bytes is full of batches that the caller still holds. Let go of "
                "old batches, keep batch.clone() instead of batch, or raise prefetch_bytes"
            )
        if seconds > _POLL_SECONDS:
            gc.collect()  # batches in reference cycles are the caller's no longer


def _fresh(error: StreamvidError) -> StreamvidError:
    # Raising gives an error the frames it passes through, and they hold the loader: those kept here stay unraised.
    again = copy.copy(error)
    again.__cause__ = error.__cause__
    return again
