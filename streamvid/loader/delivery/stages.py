"""The threads, workers and memory that every sample passes through, and what runs in each of them."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial

from streamvid.errors import StreamvidError, WorkerError
from streamvid.loader.delivery.clock import Clock, Wait, where_threads_are
from streamvid.loader.delivery.delivery import Delivery
from streamvid.loader.delivery.fetch import FetchThreads
from streamvid.loader.delivery.flight import Flight, Kind
from streamvid.loader.delivery.index_rows import IndexRows
from streamvid.loader.delivery.repair import repair_bytes
from streamvid.loader.delivery.requests import BatchRequest
from streamvid.loader.delivery.signals import Signals
from streamvid.loader.mix import MixPart, SampleRequest
from streamvid.loader.workers.arena import ALIGN_BYTES, Arena
from streamvid.loader.workers.messages import GENERATION, Answer
from streamvid.loader.workers.pool import DecodePool, InlineDecoder
from streamvid.storage import while_wanted

_log = logging.getLogger(__name__)

_NUM_WARMERS, _MAX_ASKED = 8, 4096
_LOOKAHEAD = 16  # batches whose shards' index rows are read ahead from an object store
_POLL_SECONDS = 0.2
_STUCK_SECONDS = 1.0  # for threads that hang already


class Stages:
    """Fetch threads, decoders and the memory for clips: none before `open`, which leaves their end to `resources`.

    rows: shared with `kind`, which says what is delivered.
    """

    def __init__(
        self,
        parts: Sequence[MixPart],
        kind: Kind,
        rows: IndexRows,
        signals: Signals,
        clock: Clock,
        num_workers: int,
        num_fetch_threads: int,
    ) -> None:
        self._is_remote = any(part.is_remote for part in parts)
        self._num_fetch_threads, self._num_workers = num_fetch_threads, num_workers
        self._kind, self._rows, self._signals, self._clock = kind, rows, signals, clock
        self._repair_bytes = repair_bytes(parts)
        self._flight = Flight(signals, rows, kind)

    def open(self, resources: contextlib.ExitStack, clip_bytes: int, ring: Arena) -> None:
        """Start it all over a ring. clip_bytes: memory for clips read ahead; `repair_bytes(parts)` come on top.

        The caller calls `pipeline.stop` before it closes `resources`.
        """
        flight, num_threads = self._flight, self._num_fetch_threads
        # Clips need some memory in any case: without any, the wait for it would never end.
        ahead = max(clip_bytes if self._kind.reads_ahead else 0, self._repair_bytes)
        flight.ring, flight.clips = ring, Arena("clips", ahead + self._repair_bytes + ALIGN_BYTES)
        resources.callback(flight.clips.close)
        flight.clips.allocate(GENERATION.size, 0.0)  # the first page holds the run that workers look at
        flight.repair_block = flight.clips.allocate(self._repair_bytes, 0.0) or 0
        flight.fetchers = FetchThreads(num_threads, self._signals.fail_unexpected)
        resources.callback(self._close_threads, flight.fetchers)
        self._warmers = FetchThreads(_NUM_WARMERS, self._signals.fail_unexpected)  # clips that are needed wait for none
        resources.callback(self._close_threads, self._warmers)
        flight.decoder = (
            DecodePool(self._num_workers, flight.clips, ring)
            if self._num_workers
            else InlineDecoder(flight.clips, ring)
        )
        answers = threading.Thread(target=self._serve_answers, name="streamvid-answers", daemon=True)
        resources.callback(self._end_decoding, answers)
        self._kind.open(flight, resources)
        answers.start()

    def _end_decoding(self, answers: threading.Thread) -> None:
        self._flight.decoder.close()
        if answers.is_alive():
            answers.join(_STUCK_SECONDS if self._signals.is_stuck else None)

    def _close_threads(self, threads: FetchThreads) -> None:
        threads.close(_STUCK_SECONDS if self._signals.is_stuck else None)

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the decode workers."""
        return self._flight.decoder.pids

    @property
    def is_idle(self) -> bool:
        """Whether no sample is under way."""
        return not self._flight.slots

    def set_run(self, run: int) -> None:
        """Tell the workers which run is the current one."""
        GENERATION.pack_into(self._flight.clips.view, 0, run)  # harmless if the arena is being closed

    def wake(self) -> None:
        """End the feeder's wait for memory, if its run is over."""
        self._flight.clips.wake()

    def watch(self, wait: Wait) -> None:
        """Fail if something has taken too long, and kill the worker that is stuck on it."""
        overdue = None if self._signals.failure else self._clock.overdue(wait, list(self._flight.slots.values()))
        if overdue is None:
            return
        self._signals.is_stuck = overdue.task_id is None or not self._flight.decoder.pids
        self._signals.fail(overdue.error)
        if overdue.task_id is not None:
            _log.warning("%s. Threads:\n%s", overdue.error, where_threads_are())
            self._flight.decoder.kill(overdue.task_id)

    # In the feeder.

    def ahead(self, requests: Iterator[BatchRequest]) -> Iterator[BatchRequest]:
        """Yield the requests; the index rows of those that follow are read from an object store meanwhile."""
        if not self._is_remote:
            yield from requests
            return
        coming: deque[BatchRequest] = deque()
        asked: set[tuple[int, str, int]] = set()
        for request in requests:
            run = self._signals.run
            for name, sample in {(s.part.number, s.bucket_id, s.shard): s for s in request.samples}.items():
                if name not in asked and sample.part.is_remote and not self._rows.has(sample):
                    self._warmers.submit(partial(self._warm, sample, run))
                    asked.add(name)
            if len(asked) > _MAX_ASKED:
                asked.clear()
            coming.append(request)
            if len(coming) > _LOOKAHEAD:
                yield coming.popleft()
        yield from coming

    def _warm(self, sample: SampleRequest, run: int) -> None:
        with while_wanted(partial(self._flight.is_alive, run)):
            self._rows.warm(sample)

    def deliveries(self, request: BatchRequest) -> tuple[list[Delivery], StreamvidError | None]:
        """Decide what is delivered of a batch's samples; where one fails, return those before it and the error."""
        found: list[Delivery] = []
        for sample in request.samples:
            self._clock.index_read = (sample, time.monotonic())
            try:
                found.append(self._flight.prepare(sample, request.bucket))
            except StreamvidError as error:
                return found, error
            finally:
                self._clock.index_read = None
        return found, None

    # In the answer thread.

    def _serve_answers(self) -> None:
        try:
            while not self._signals.is_closing:
                self._flight.decoder.serve(_POLL_SECONDS, self._hear)
        except WorkerError as error:
            slot = None if error.task_id is None else self._flight.slots.get(error.task_id)
            about = "" if slot is None else f". It was decoding {slot.name}"
            self._signals.fail(WorkerError(f"{error}{about}"))
        except Exception as error:  # noqa: BLE001 - the caller must hear of it, in its own thread
            self._signals.fail_unexpected(error)

    def _hear(self, answer: Answer) -> None:
        self._clock.heard_at = time.monotonic()
        self._kind.hear(answer)
