"""Pipeline that turns plan steps into complete batches, ahead of the caller.

    feeder thread    processes batches in plan order; leaves clips in the page cache to the workers (feeder.py)
    fetch threads    read other clips, and find substitutes (repair.py)
    answer thread    receives the workers' answers (or decodes if num_workers=0), frees clip memory, completes batches
    keeper thread    opens and closes the workers, the other threads and the memory
    caller           gets complete batches in plan order from `next_batch()`; checks the clock while it waits (clock.py)

The two arenas bound memory: a batch begins when the ring has room, and a clip is read when the clip arena has room.
Substitution needs no additional memory, because repairs use one block of the clip arena that is reserved at the start.
The caller shares no lock with the threads, because a signal may end the caller anywhere, and a lock held at that
moment would block every thread. For the same reason, and because a destructor may run in any thread, the keeper opens
and closes all resources.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

from streamvid.dataset.versions.later import LaterVersions
from streamvid.errors import LoaderError, RingFullError, StreamvidError, WorkerError, fresh
from streamvid.loader.delivery.clock import Clock, HeldUpBy, Wait, add_wait, held_up_by, where_threads_are
from streamvid.loader.delivery.decoded import DecodedDelivery
from streamvid.loader.delivery.feeder import Feeder
from streamvid.loader.delivery.fetch import FetchThreads
from streamvid.loader.delivery.flight import Flight, Kind
from streamvid.loader.delivery.index_rows import IndexRows
from streamvid.loader.delivery.pending import PendingBatch
from streamvid.loader.delivery.quarantine import Quarantine, Substitution
from streamvid.loader.delivery.repair import repair_bytes
from streamvid.loader.delivery.requests import BatchRequest
from streamvid.loader.delivery.signals import Signals
from streamvid.loader.delivery.stored import FeatureDelivery, StoredDelivery
from streamvid.loader.mix import MixPart
from streamvid.loader.options import LimitOptions
from streamvid.loader.stats import BatchStats
from streamvid.loader.workers.arena import ALIGN_BYTES, Arena
from streamvid.loader.workers.messages import GENERATION, Answer
from streamvid.loader.workers.pool import DecodePool, Decoder, InlineDecoder
from streamvid.video.picture import Accuracy, Pixels

_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
_CLOSE_SECONDS = 10.0  # decode workers get half of it
_STUCK_SECONDS = 1.0  # for threads that already hang
_NUM_WARMERS = 8
RING_WAIT_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """Options for the resources and the output of one pipeline.

    clip_bytes: bytes of memory for clips read ahead; the pipeline allocates `repair_bytes(parts)` in addition.
    frame_bytes: size of the ring in bytes.
    pixels: pixel format of the pictures in the ring; see PictureFormat.
    accuracy: accuracy of the conversion to RGB; see DecodedDelivery.
    decode: True to deliver pictures, False to deliver stored clips unchanged.
    """

    num_workers: int
    clip_bytes: int
    frame_bytes: int
    num_fetch_threads: int = 4
    rank: int = 0
    limits: LimitOptions = field(default_factory=LimitOptions)
    pixels: Pixels = "rgb24"
    accuracy: Accuracy | None = None
    decode: bool = True


class Pipeline:
    """Workers, threads and memory of one loader, which exist from `open` to `close`.

    A pipeline supports one run at a time. For each run, call `stop`, then `start`, then `next_batch` repeatedly.
    Raises ConfigError for invalid options, and LoaderError if workers or memory are not available.
    """

    def __init__(
        self, parts: Sequence[MixPart], options: PipelineOptions, quarantine: Quarantine | None = None
    ) -> None:
        """Create a pipeline.

        quarantine: records from an earlier pipeline for the same loader; this pipeline adds to them.
        """
        self._options, self._pid = options, os.getpid()
        self.quarantine = quarantine or Quarantine(options.limits, options.rank, [part.dataset for part in parts])
        self._signals = Signals(parts[0].dataset.url)
        # Plans leave out the removed samples of parts with an earlier version.
        silent = [part.number for part in parts if part.later is not None]
        datasets = {part.number: part.dataset for part in parts}
        self._later = LaterVersions(datasets, silent=silent, is_new=quarantine is None)
        self._clock, self._rows = Clock(options.limits.sample_timeout_seconds), IndexRows(later=self._later)
        self._kind = _kind(parts, self._rows, options)
        self._flight = Flight(self._signals, self._rows, self._kind, self._later)
        self._num_decoders = max(1, options.num_workers)  # without workers, the answer thread decodes
        self._feeder = Feeder(self._flight, self._rows, self._kind, self._later, self._clock, self._num_decoders)
        self._ready = self._feeder.ready
        self._is_remote = any(part.is_remote for part in parts)
        self._repair_bytes = repair_bytes(parts)
        self.is_open = False
        self._runs = itertools.count(1)
        self._feeding: threading.Thread | None = None
        self._keeper = threading.Thread(target=self._keep, name="streamvid-keeper", daemon=True)
        self._end: SimpleQueue[None] = SimpleQueue()

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process IDs of the decode workers."""
        return self._flight.decoder.pids if self.is_open else ()

    @property
    def substituted(self) -> list[Substitution]:
        """The last 10,000 substitutions among the samples handed over, in order."""
        return list(self.quarantine.records)

    @property
    def queue_depth(self) -> int:
        """Number of complete batches waiting for the caller."""
        depth = 0
        with contextlib.suppress(IndexError):  # another thread may end the run in the meantime
            for place in range(len(self._ready)):
                batch = self._ready[place]
                depth += batch is not None and batch.num_missing == 0
        return depth

    @property
    def num_in_ring(self) -> int:
        """Number of batches with memory in the ring, including batches that the caller holds."""
        return self.ring.num_allocated if self.is_open else 0

    @property
    def _is_copy(self) -> bool:
        # In a fork of the loader's process, threads do not exist, and workers and shared memory belong to the parent.
        return os.getpid() != self._pid

    # A run, from the caller's side.

    def open(self) -> None:
        """Start workers and threads and allocate memory.

        Call this method once, and `close` afterwards, even after an error or an interrupt.
        """
        self._keeper.start()
        while not self.is_open:
            self._check(self._signals.run)
            self._signals.wait(_POLL_SECONDS)

    def start(self, run: int, requests: Iterator[BatchRequest]) -> None:
        """Begin a run over `requests`.

        run: number that the preceding call to `stop` returned.
        If another thread has called `stop` since then, `next_batch` raises LoaderError.
        """
        self._check(run)
        self._feeding = threading.Thread(target=self._feed, args=(requests, run), name="streamvid-feeder", daemon=True)
        self._feeding.start()

    def next_batch(self, run: int) -> PendingBatch | None:
        """Return the next complete batch, or None at the end of the run. Raises the error that ended the run.

        Call `count` when handing the batch over: a batch that was only prefetched does not count as delivered.
        """
        wait, waits = Wait(), BatchStats()
        while True:
            self._check(run)
            try:
                batch = self._ready[0]
                if batch is None or batch.num_missing == 0:
                    if batch is not None:
                        batch.stats.add(waits)
                    taken = self._ready.popleft()
                    self._feeder.taken()
                    return taken
            except IndexError:  # nothing yet, or another thread has ended the run
                self._check_ring(wait.since)
            else:
                if batch.error is not None:
                    self.count(batch)
                    raise fresh(batch.error)
            self._watch(wait)
            held_up, since = self._held_up_by(), time.perf_counter()
            self._signals.wait(_POLL_SECONDS)
            add_wait(waits, held_up, time.perf_counter() - since)

    def _held_up_by(self) -> HeldUpBy:
        return held_up_by(
            self._flight.slots,
            self._num_decoders,
            self._options.num_fetch_threads,
            reads_ahead=self._kind.reads_ahead,
            reads_index=self._clock.index_read is not None,
            lacks_memory=self._feeder.lacks_memory,
        )

    def count(self, batch: PendingBatch) -> None:
        """Count, log and write a batch's substitutions once, when the batch is handed over or its error is raised.

        Raises SampleError if max_bad_fraction is exceeded, and StorageError if the quarantine file cannot be written.
        Both errors end the run.
        """
        records = [record for _, record in sorted(batch.substituted.items())]
        batch.substituted.clear()
        try:
            self.quarantine.add(records, 0 if batch.error else len(batch.deliveries))
        except StreamvidError as error:
            self._signals.fail(error)
            raise fresh(error) from None

    def has_batch(self, run: int) -> bool:
        """Return True if `next_batch` would immediately return a batch or, at the end of the run, None.

        Raises the error that ended the run.
        """
        self._check(run)
        try:
            batch = self._ready[0]
        except IndexError:
            return False
        return batch is None or batch.num_missing == 0

    def cancel(self, run: int) -> None:
        """If `run` is the current run, request its end without waiting. Safe in destructors and in any thread."""
        if run == self._signals.run and self.is_open and not self._is_copy:
            self._next_run()

    def _next_run(self) -> int:
        run = self._signals.run = next(self._runs)  # no two callers get the same number, not even in two threads
        GENERATION.pack_into(self._flight.clips.view, 0, run)  # harmless if the arena is being closed
        self._feeder.wake()
        self._signals.tell()
        return run

    def stop(self) -> int:
        """End the current run. Return the next run's number, to be passed to `start`, `next_batch` and `cancel`.

        The method waits for all work in flight, and releases the memory of batches that were not handed over.
        """
        if not self.is_open or self._is_copy:
            return self._signals.run
        run, wait, since = self._next_run(), Wait(), time.monotonic()
        while self._feeding is not None and self._feeding.is_alive() and not self._signals.is_stuck:
            if self._signals.is_closing and time.monotonic() - since > _STUCK_SECONDS:
                break  # the file system hangs
            self._watch(wait)
            self._feeder.wake()
            self._feeding.join(0.05)
        # After a failure or the close, no run will use the memory that a task may still write to.
        while self._flight.slots and self._signals.failure is None and not self._signals.is_closing:
            self._watch(wait)
            self._signals.wait(0.05)
        while self._ready:
            batch = self._ready.popleft()
            if batch is not None:
                batch.block.release()
        return run

    def close(self, wait: bool = True) -> None:
        """Stop the workers and threads, and release the memory. Batches that the caller holds stay valid. Idempotent.

        With wait=False, this method is safe to call from destructors and from any thread.
        """
        if self._is_copy:
            return
        self._signals.is_closing = True
        self._end.put(None)
        self._signals.tell()
        is_ours = threading.current_thread().name.startswith("streamvid-")  # one of them may run a caller's destructor
        is_exit = not threading.main_thread().is_alive()
        if ((wait and not is_ours) or is_exit) and self._keeper.is_alive():
            self._keeper.join(_CLOSE_SECONDS)
            if self._keeper.is_alive():
                _log.warning(
                    "a thread of a closed loader is still running after %.0f seconds; it is waiting for a read, or for "
                    "a lock that the closing thread holds",
                    _CLOSE_SECONDS,
                )

    # In the threads.

    def _keep(self) -> None:
        try:
            with contextlib.ExitStack() as resources:
                self._open(resources)
                self.is_open = True
                self._signals.tell()
                self._end.get()
            self.is_open = False
            if not self._signals.is_stuck:  # a closed loader that is still referenced must not hold the memory
                self._flight.slots.clear()
        except StreamvidError as error:
            self._signals.fail(error)
        except Exception as error:  # noqa: BLE001 - the caller must receive it in its own thread
            self._signals.fail_unexpected(error)

    def _open(self, resources: contextlib.ExitStack) -> None:
        options, flight, fail = self._options, self._flight, self._signals.fail_unexpected
        self.ring = flight.ring = Arena("ring", options.frame_bytes)
        resources.callback(self.ring.close)
        # Clips always need some memory: without any, the wait for it would never end.
        ahead = max(options.clip_bytes if self._kind.reads_ahead else 0, self._repair_bytes)
        clips = flight.clips = Arena("clips", ahead + self._repair_bytes + ALIGN_BYTES)
        resources.callback(clips.close)
        clips.allocate(GENERATION.size, 0.0)  # the first page holds the run number that workers check
        flight.repair_block = clips.allocate(self._repair_bytes, 0.0) or 0
        flight.fetchers = FetchThreads(options.num_fetch_threads, fail)
        resources.callback(self._close_threads, flight.fetchers)
        self._warmers = FetchThreads(_NUM_WARMERS, fail)  # separate, so that required clips do not wait
        resources.callback(self._close_threads, self._warmers)
        workers = options.num_workers
        flight.decoder = self._decoder(workers, clips)
        answers = threading.Thread(target=self._serve_answers, name="streamvid-answers", daemon=True)
        resources.callback(self._end_decoding, answers)
        self._kind.open(flight, resources)
        answers.start()
        resources.callback(self.stop)

    def _decoder(self, num_workers: int, clips: Arena) -> Decoder:
        if not num_workers:
            return InlineDecoder(clips, self.ring)
        opens_stores = self._is_remote and not self._kind.reads_ahead
        return DecodePool(num_workers, clips, self.ring, opens_stores=opens_stores)

    def _close_threads(self, threads: FetchThreads) -> None:
        threads.close(_STUCK_SECONDS if self._signals.is_stuck else None)

    def _end_decoding(self, answers: threading.Thread) -> None:
        self._flight.decoder.close()
        if answers.is_alive():
            answers.join(_STUCK_SECONDS if self._signals.is_stuck else None)

    def _serve_answers(self) -> None:
        try:
            while not self._signals.is_closing:
                self._flight.decoder.serve(_POLL_SECONDS, self._hear)
        except WorkerError as error:
            slot = None if error.task_id is None else self._flight.slots.get(error.task_id)
            about = "" if slot is None else f". The worker was processing {slot.name}"
            self._signals.fail(WorkerError(f"{error}{about}"))
        except Exception as error:  # noqa: BLE001 - the caller must receive it in its own thread
            self._signals.fail_unexpected(error)

    def _hear(self, answer: Answer) -> None:
        self._clock.heard_at = time.monotonic()
        self._kind.hear(answer)

    def _feed(self, requests: Iterator[BatchRequest], run: int) -> None:
        if self._is_remote:
            requests = self._rows.ahead(requests, self._warmers.submit, partial(self._flight.is_alive, run))
        self._feeder.feed(requests, run)

    # Between the caller and the threads.

    def _watch(self, wait: Wait) -> None:
        """If a read or a task has exceeded its time limit, record the failure and kill the stuck worker."""
        flight = self._flight
        if self._signals.failure:
            return
        overdue = self._clock.overdue(wait, flight.slots, flight.decoder.begun)
        if overdue is None:
            return
        self._signals.is_stuck = overdue.task_id is None or not flight.decoder.pids
        self._signals.fail(overdue.error)
        if overdue.task_id is not None:
            _log.warning("%s. Threads:\n%s", overdue.error, where_threads_are())
            flight.decoder.kill(overdue.task_id)

    def check_usable(self) -> None:
        """Raise LoaderError if the loader is closed or was created in another process."""
        if self._is_copy:
            raise LoaderError("this loader was created before a fork; create it in the process that iterates over it")
        if self._signals.is_closing:
            raise LoaderError("this loader is closed; create a new loader")

    def _check(self, run: int) -> None:
        self.check_usable()
        if run != self._signals.run:
            raise LoaderError(
                "this iteration is over, because another iteration of this loader has begun, or the loader's state "
                "or epoch was set. Iterate over the loader again; a loader supports only one iteration at a time"
            )
        if self._signals.failure is not None:
            raise fresh(self._signals.failure)

    def _check_ring(self, since: float) -> None:
        """Raise RingFullError if the feeder and the caller have both waited too long.

        since: start of the caller's wait.
        """
        feeder_since = self._feeder.ring_wait_since
        if feeder_since is None:
            return
        seconds = time.monotonic() - max(since, feeder_since)
        if seconds > RING_WAIT_SECONDS:
            raise RingFullError(
                f"the ring of {self.ring.num_bytes} bytes is full of batches that the caller still holds. Release "
                "old batches, keep batch.clone() instead of batch, or raise limits.prefetch_bytes"
            )
        if seconds > _POLL_SECONDS:
            gc.collect()  # frees batches that only reference cycles keep alive


def _kind(parts: Sequence[MixPart], rows: IndexRows, options: PipelineOptions) -> Kind:
    if options.decode:
        return DecodedDelivery(rows, options.num_workers, options.pixels, options.accuracy, parts[0].media)
    stores = {part.source.url: part.source.store for part in parts}
    has_features = any(part.sidecar is not None for part in parts)  # the other parts are text-only
    return (FeatureDelivery if has_features else StoredDelivery)(
        rows, stores, is_remote=any(part.is_remote for part in parts)
    )
