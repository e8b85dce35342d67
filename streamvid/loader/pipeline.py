"""From steps to decoded batches, ahead of the caller.

    feeder thread    takes batches in plan order; for each, room in the ring, then for each sample room for its clip
    fetch threads    read and check clips, hand decode tasks to the workers
    answer thread    hears from the workers, gives clip memory back, completes batches   (num_workers=0: the caller)
    caller           `next_batch()`: the next complete batch, in plan order

Memory is bounded by the two arenas alone: a batch is begun when the ring has room, a clip read when the clip arena has.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from streamvid.buckets.bucket import Bucket
from streamvid.dataset.manifest import ShardInfo
from streamvid.dataset.reader import Dataset
from streamvid.errors import LoaderError, RingFullError, SampleError, StreamvidError, WorkerError
from streamvid.loader.arena import ALIGN_BYTES, Arena
from streamvid.loader.fetch import FetchThreads, IndexRows, read_clip
from streamvid.loader.pool import DecodePool, Decoder, InlineDecoder
from streamvid.loader.sampling import window_start
from streamvid.loader.worker import GENERATION, DecodeTask

_NUM_FETCH_THREADS = 4
_POLL_SECONDS = 0.2
RING_WAIT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One slot of a batch: which stored sample, at which visit."""

    shard: ShardInfo
    index: int
    visit: int
    is_repeat: bool


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One batch of this rank; `position` is the loader's own note of where in the run it stands."""

    bucket: Bucket
    samples: tuple[SampleRequest, ...]
    position: Any

    @property
    def num_bytes(self) -> int:
        frames, height, width = self.bucket.shape
        return len(self.samples) * frames * height * width * 3


@dataclass(slots=True, eq=False)
class PendingBatch:
    """A batch under way: its place in the ring, its samples' index rows, and how many are still to come."""

    request: BatchRequest
    ring_offset: int
    rows: list[dict[str, Any]] = field(default_factory=list)
    num_missing: int = 0
    error: StreamvidError | None = None


class Pipeline:
    """Workers, threads and memory of one loader. One run at a time: `start`, `next_batch` …, `stop`; then `close`."""

    def __init__(
        self, dataset: Dataset, *, num_workers: int, clip_bytes: int, frame_bytes: int, seed: int, columns: list[str]
    ) -> None:
        self._dataset, self._seed, self._pid = dataset, seed, os.getpid()
        self._rows = IndexRows(dataset, columns)
        self._changed = threading.Condition()
        self._ready: deque[PendingBatch | None] = deque()  # None: the run has ended
        self._tasks: dict[int, tuple[PendingBatch, SampleRequest, str, int]] = {}
        self._next_task = 0
        self._generation = 0
        self._failure: StreamvidError | None = None
        self._stopping = self._closing = False
        self._ring_wait_since: float | None = None
        self._feeder: threading.Thread | None = None
        self._clips = Arena("clips", clip_bytes + ALIGN_BYTES)
        self.ring = Arena("ring", frame_bytes)
        self._clips.allocate(GENERATION.size, 0.0)  # its first page is the generation that workers look at
        self._decoder: Decoder = (
            DecodePool(num_workers, self._clips, self.ring) if num_workers else InlineDecoder(self._clips, self.ring)
        )
        self._inline = num_workers == 0
        self._fetchers = FetchThreads(_NUM_FETCH_THREADS)
        self._answers = threading.Thread(target=self._serve_answers, name="streamvid-answers", daemon=True)
        if not self._inline:
            self._answers.start()

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the decode workers."""
        return self._decoder.pids

    @property
    def _is_copy(self) -> bool:
        # In a process forked from the loader's: threads are not here, workers and shared memory are the parent's.
        return os.getpid() != self._pid

    # A run, as the caller sees it.

    def start(self, requests: Iterator[BatchRequest]) -> None:
        """Begin a run over `requests`; nothing of an earlier run may be left."""
        self._check_failure()
        self._stopping = False
        self._feeder = threading.Thread(target=self._feed, args=(requests,), name="streamvid-feeder", daemon=True)
        self._feeder.start()

    def next_batch(self) -> PendingBatch | None:
        """The next batch, complete; None at the end of the run. Raises what made the run fail."""
        while True:
            with self._changed:
                self._check_failure()
                batch = self._ready[0] if self._ready else None
                if self._ready and (batch is None or batch.num_missing == 0):
                    return self._ready.popleft()
                if batch is not None and batch.error is not None:
                    raise batch.error
                if not self._ready:
                    self._check_ring()
                if not self._inline:
                    self._changed.wait(_POLL_SECONDS)
            if self._inline:
                self._decoder.serve(_POLL_SECONDS if not self._ready else 0.01, self._done)

    def stop(self) -> None:
        """End the run: nothing is under way any more, and memory of batches not handed over is free again."""
        if self._feeder is None or self._is_copy:
            return
        self._stopping = True
        self._generation += 1
        GENERATION.pack_into(self._clips.map, 0, self._generation)
        while self._feeder.is_alive():
            self.ring.wake()
            self._clips.wake()
            self._feeder.join(0.05)
        self._feeder = None
        while self._tasks and self._failure is None and not self._closing:
            if self._inline:
                self._decoder.serve(0.01, self._done)
            else:
                with self._changed:
                    self._changed.wait(0.05)
        while self._ready:
            batch = self._ready.popleft()
            if batch is not None:
                self.ring.release(batch.ring_offset)

    def close(self) -> None:
        """End workers and threads and let go of the memory; batches that the caller holds stay valid."""
        if self._closing or self._is_copy:
            return
        self._closing = True
        self.stop()
        self._decoder.close()
        self._fetchers.close()
        if self._answers.is_alive():
            self._answers.join()
        self._clips.close()
        self.ring.close()

    # Behind the caller's back.

    def _feed(self, requests: Iterator[BatchRequest]) -> None:
        try:
            for request in requests:
                if not self._begin(request):
                    return
            self._enqueue(None)
        except StreamvidError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - the caller must hear of it, in its own thread
            self._fail_unexpected(error)

    def _begin(self, request: BatchRequest) -> bool:
        self._ring_wait_since = time.monotonic()
        offset = self._allocate(self.ring, request.num_bytes)
        self._ring_wait_since = None
        if offset is None:
            return False
        batch = PendingBatch(request, offset, num_missing=len(request.samples))
        self._enqueue(batch)
        for slot, sample in enumerate(request.samples):
            row = self._rows.row(sample.shard, sample.index)
            clip = self._allocate(self._clips, row["clip_bytes"])
            if clip is None:
                return False
            batch.rows.append(row)
            task = self._make_task(batch, sample, slot, row, clip)
            self._fetchers.submit(lambda b=batch, s=sample, r=row, t=task: self._fetch(b, s, r, t))  # type: ignore[misc]
        return True

    def _allocate(self, arena: Arena, num_bytes: int) -> int | None:
        while not self._stopping:
            offset = arena.allocate(num_bytes, _POLL_SECONDS)
            if offset is not None:
                return offset
        return None

    def _make_task(
        self, batch: PendingBatch, sample: SampleRequest, slot: int, row: dict[str, Any], clip: int
    ) -> DecodeTask:
        frames, height, width = shape = batch.request.bucket.shape
        start = window_start(row["window_num_frames"], frames, seed=self._seed, key=row["key"], visit=sample.visit)
        with self._changed:
            task_id = self._next_task
            self._next_task += 1
            self._tasks[task_id] = (batch, sample, row["key"], clip)
        return DecodeTask(
            task_id=task_id,
            generation=self._generation,
            clip_offset=clip,
            clip_bytes=row["clip_bytes"],
            num_frames=row["window_num_frames"],
            start=start,
            out_offset=batch.ring_offset + slot * frames * height * width * 3,
            shape=shape,
        )

    def _fetch(self, batch: PendingBatch, sample: SampleRequest, row: dict[str, Any], task: DecodeTask) -> None:
        try:
            if task.generation != self._generation:
                self._done(task.task_id, None)
                return
            buffer = self._clips.view[task.clip_offset : task.clip_offset + task.clip_bytes]
            read_clip(self._dataset, sample.shard, row, buffer)
            self._decoder.submit(task)
        except WorkerError as error:
            self._fail(error)
        except StreamvidError as error:
            self._done(task.task_id, str(error))
        except Exception as error:  # noqa: BLE001 - the caller must hear of it, in its own thread
            self._fail_unexpected(error)

    def _serve_answers(self) -> None:
        while not self._closing:
            try:
                self._decoder.serve(_POLL_SECONDS, self._done)
            except WorkerError as error:
                if not self._closing:
                    self._fail(self._name_sample(error))
                return
            except OSError:
                return  # the sockets are closed under it when the loader closes

    def _done(self, task_id: int, error: str | None) -> None:
        with self._changed:
            batch, sample, key, clip = self._tasks.pop(task_id)
            self._clips.release(clip)
            batch.num_missing -= 1
            if error is not None and batch.error is None:
                batch.num_missing += 1  # an incomplete batch is never handed over
                batch.error = SampleError(
                    f"{self._dataset.url}: sample {key} (number {sample.index} of {sample.shard.path}, "
                    f"bucket {sample.shard.bucket_id}) cannot be delivered: {error}"
                )
            self._changed.notify_all()

    def _name_sample(self, error: WorkerError) -> WorkerError:
        if error.task_id not in self._tasks:
            return error
        _, sample, key, _ = self._tasks[error.task_id]
        return WorkerError(f"{error}. It was decoding {key} of {sample.shard.path} in {self._dataset.url}")

    def _enqueue(self, batch: PendingBatch | None) -> None:
        with self._changed:
            self._ready.append(batch)
            self._changed.notify_all()

    def _fail(self, error: StreamvidError) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _fail_unexpected(self, error: Exception) -> None:
        wrapped = LoaderError(f"{self._dataset.url}: the loader failed unexpectedly: {type(error).__name__}: {error}")
        wrapped.__cause__ = error
        self._fail(wrapped)

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _check_ring(self) -> None:
        since = self._ring_wait_since
        if since is None or time.monotonic() - since < RING_WAIT_SECONDS:
            if since is not None and time.monotonic() - since > RING_WAIT_SECONDS / 2:
                gc.collect()  # batches in reference cycles are the caller's no longer
            return
        raise RingFullError(
            f"the ring of {self.ring.num_bytes} bytes is full of batches that the caller still holds. Let go of old "
            "batches, keep batch.clone() instead of batch, or raise prefetch_bytes"
        )
