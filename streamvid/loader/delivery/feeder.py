"""Feeder: it processes batches in plan order, ahead of the caller.

It allocates ring memory for each batch, then clip memory for each sample. It passes the decode tasks of clips that are
in the page cache to the workers, which read them; fetch threads read other clips first.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import takewhile

from streamvid.dataset.versions.later import LaterVersions
from streamvid.errors import StreamvidError
from streamvid.loader.delivery.clock import Clock
from streamvid.loader.delivery.delivery import Delivery
from streamvid.loader.delivery.flight import Flight, Kind
from streamvid.loader.delivery.index_rows import IndexRows
from streamvid.loader.delivery.pending import TEXT_ROW_BYTES, PendingBatch, substitution
from streamvid.loader.delivery.quarantine import Substitution
from streamvid.loader.delivery.requests import BatchRequest
from streamvid.loader.delivery.signals import Bell
from streamvid.loader.workers.arena import Arena, Block
from streamvid.storage import while_wanted

_POLL_SECONDS = 0.2
_MAX_BURST = 8  # batches


class Feeder:
    """Feeder of one pipeline. `feed` runs in the feeder thread, and the other methods in any thread.

    num_decoders: number of workers, at least 1.
    ready: batches in flight or complete, in plan order, followed by None at the end of the run.
    ring_wait_since: time since when the feeder has been waiting for ring memory; None if it is not.
    lacks_memory: True from the time when memory is exhausted until the feeder has allocated some.
    """

    def __init__(
        self, flight: Flight, rows: IndexRows, kind: Kind, later: LaterVersions, clock: Clock, num_decoders: int
    ) -> None:
        self._flight, self._rows, self._kind, self._later, self._clock = flight, rows, kind, later, clock
        self._num_decoders = num_decoders
        self.ready: deque[PendingBatch | None] = deque()
        self.ring_wait_since: float | None = None
        self.lacks_memory = False
        self._num_to_leave = -1  # the feeder rests until `ready` holds no more batches than this
        self._bell = Bell()

    def taken(self) -> None:
        """Note that the caller has taken a batch from `ready`."""
        if len(self.ready) <= self._num_to_leave:
            self._bell.ring()

    def wake(self) -> None:
        """Wake a feeder that rests or waits for memory, so that it can end if its run is over."""
        self._flight.ring.wake()
        self._flight.clips.wake()
        self._bell.ring()

    def feed(self, requests: Iterator[BatchRequest], run: int) -> None:
        """Process all batches of a run. An error ends the run.

        The run may already be over when the thread begins: if Ctrl-C interrupts `Thread.start`, `stop` does not see the
        thread yet, and does not wait for it.
        """
        signals, is_alive = self._flight.signals, partial(self._flight.is_alive, run)
        try:
            with while_wanted(is_alive):
                epoch = None
                for request in takewhile(lambda _: is_alive(), requests):
                    if request.epoch != epoch:
                        epoch = request.epoch
                        self._later.begin_epoch()
                    if not self._begin(request, run):
                        return
                if not is_alive():
                    return
                if epoch is None:  # a loop without batches uses up what was read when the datasets were opened, too
                    self._later.begin_epoch()
            self.ready.append(None)
            signals.tell()
        except StreamvidError as error:
            signals.fail(error)
        except Exception as error:  # noqa: BLE001 - the caller must receive it in its own thread
            signals.fail_unexpected(error)

    def _begin(self, request: BatchRequest, run: int) -> bool:
        deliveries, others, error = self._deliveries(request)
        ring, is_text = self._flight.ring, request.bucket.is_text
        num_bytes = TEXT_ROW_BYTES * len(request.samples) if is_text else self._kind.ring_bytes(request, deliveries)
        self.ring_wait_since = time.monotonic()
        offset = self._allocate(ring, num_bytes, run, len(request.samples))
        self.ring_wait_since = None
        if offset is None:
            return False
        num_missing = len(request.samples) - (len(deliveries) if is_text else 0)  # a text needs only its caption
        room = None if is_text else self._kind.room(request)
        block = Block(ring, offset)
        batch = PendingBatch(request, deliveries, ring.map, block, num_missing, room, error, substituted=others)
        self.ready.append(batch)
        if error is not None or is_text:
            self._flight.signals.tell()
            return error is None
        is_urgent = len(self.ready) <= 2 * self._num_decoders
        return self._kind.begin(batch, partial(self._allocate, run=run), run, is_urgent=is_urgent)

    def _allocate(self, arena: Arena, num_bytes: int, run: int, num_samples: int = 0) -> int | None:
        """Return the offset of a block, or None if the run is over.

        num_samples: number of samples in the batch for which a block of the ring is allocated; 0 for other blocks.
        """
        while self._flight.is_alive(run):
            offset = arena.allocate(num_bytes, _POLL_SECONDS if self.lacks_memory else 0.0)
            if offset is not None:
                self.lacks_memory = False
                return offset
            if not self.lacks_memory:
                self.lacks_memory = True
                if num_samples:
                    self._rest(run, num_samples)
        self.lacks_memory = False
        return None

    def _rest(self, run: int, num_samples: int) -> None:
        """Wait until the caller has taken several batches, so that several are processed together.

        A thread that wakes up finds nothing of its own in the processor's caches. One batch at a time would take about
        1.4 times as long. The other batches must keep the decoders busy: half of the batches, and two samples for each.
        """
        num_ready = len(self.ready)
        burst = min(_MAX_BURST, num_ready // 2, num_ready - math.ceil(2 * self._num_decoders / num_samples))
        if burst < 2:
            return
        self._num_to_leave = num_ready - burst
        while len(self.ready) > self._num_to_leave and self._flight.is_alive(run):
            self._bell.wait(_POLL_SECONDS)
        self._num_to_leave = -1

    def _deliveries(
        self, request: BatchRequest
    ) -> tuple[list[Delivery], dict[int, Substitution], StreamvidError | None]:
        """Return (deliveries, substitutions, error) for a batch.

        The substitutions map slot indices to the records of removed samples. If a sample fails, `error` is its error,
        and only the deliveries before it are returned. Otherwise, `error` is None.
        """
        found: list[Delivery] = []
        others: dict[int, Substitution] = {}
        for index, sample in enumerate(request.samples):
            self._clock.index_read = (sample, time.monotonic())
            try:
                if self._flight.is_removed(sample):
                    found.append(self._flight.prepare_other(sample, request.bucket))
                    reason = "a later version of the dataset removed it"
                    others[index] = substitution(sample, self._rows.key(sample), reason, found[-1].key, True)
                else:
                    found.append(self._flight.prepare(sample, request.bucket))
            except StreamvidError as error:
                return found, others, error
            finally:
                self._clock.index_read = None
        return found, others, None
