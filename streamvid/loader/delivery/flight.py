"""Slots in flight, and the work on them that all kinds of delivery share."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeAlias

from streamvid.buckets.bucket import Bucket
from streamvid.buckets.pick import Pick
from streamvid.dataset.versions.later import LaterVersions
from streamvid.errors import StreamvidError
from streamvid.loader.delivery.delivery import Delivery, prepare, sample_error
from streamvid.loader.delivery.fetch import FetchThreads
from streamvid.loader.delivery.index_rows import IndexRows
from streamvid.loader.delivery.pending import PendingBatch, Slot
from streamvid.loader.delivery.repair import Repairs
from streamvid.loader.delivery.requests import BatchRequest
from streamvid.loader.delivery.signals import Signals
from streamvid.loader.mix import SampleRequest, substitutes
from streamvid.loader.view.clip_part import ClipPart
from streamvid.loader.view.index_row import IndexRow
from streamvid.loader.view.media import PictureRoom
from streamvid.loader.view.view import substitute_visit
from streamvid.loader.workers.arena import Arena
from streamvid.loader.workers.messages import Answer
from streamvid.loader.workers.pool import Decoder
from streamvid.storage import UNPROVEN, while_wanted

_log = logging.getLogger(__name__)

_MAX_MOVES = 3
_GONE = "a later version of the dataset deleted its tar"

Allocate: TypeAlias = Callable[[Arena, int], int | None]
"""Function that waits for memory in an arena and returns its offset, or None if the run is over."""


class Kind(Protocol):
    """Kind of delivery: decoded pictures, stored clips, or precomputed features.

    reads_ahead: True if clips are read into the clip arena, ahead of the decoders.
    """

    reads_ahead: bool

    def part(self, sample: SampleRequest, row: IndexRow, pick: Pick, *, is_whole: bool) -> ClipPart:
        """Return the part of a clip that must be read, or the whole clip if `is_whole`.

        Raises IntegrityError if the index is damaged, and ConfigError if the options do not fit the clip.
        """
        ...

    def room(self, request: BatchRequest) -> PictureRoom | None:
        """Return the layout of a batch's pictures in memory, or None if samples are not decoded."""
        ...

    def ring_bytes(self, request: BatchRequest, deliveries: Sequence[Delivery]) -> int:
        """Return the number of ring bytes that a batch needs."""
        ...

    def begin(self, batch: PendingBatch, allocate: Allocate, run: int, *, is_urgent: bool) -> bool:
        """Start processing the samples of a batch. Return False if the run is over.

        is_urgent: True if the workers have so little other work that they should share the batch.
        """
        ...

    def read(self, slot: Slot) -> None:
        """Read a slot's sample again, or read its substitute. Called in a fetch thread."""
        ...

    def hear(self, answer: Answer) -> None:
        """Process the result that a worker returned for a task."""
        ...

    def open(self, flight: Flight, resources: contextlib.ExitStack) -> None:
        """Attach to the open `flight`. Closing `resources` releases all references to the memory of `flight`."""
        ...


class Flight:
    """Slots in flight, with the threads, the memory and the substitutes that they need.

    When the pipeline opens, it sets `clips`, `ring`, `fetchers`, `decoder` and `repair_block` (an offset in `clips`).
    """

    clips: Arena
    ring: Arena
    fetchers: FetchThreads
    decoder: Decoder
    repair_block: int

    def __init__(self, signals: Signals, rows: IndexRows, kind: Kind, later: LaterVersions) -> None:
        self.signals, self.slots = signals, dict[int, Slot]()
        self._rows, self._kind, self._later = rows, kind, later
        self._repairs = Repairs(partial(self.prepare, is_whole=True), self.is_removed)
        self._lock = threading.Lock()  # protects the slots; only the loader's threads take it
        self._next_number = 0

    def prepare(self, sample: SampleRequest, bucket: Bucket, *, is_whole: bool = False) -> Delivery:
        """Return the delivery for a sample, with the whole clip if `is_whole`.

        Raises SampleError if the delivery cannot be prepared.
        """
        return prepare(self._rows, sample, bucket, partial(self._kind.part, sample, is_whole=is_whole))

    def is_removed(self, sample: SampleRequest) -> bool:
        """Return True if a later version of the dataset removed a sample. Raises an error for an unreadable index."""
        number = sample.part.number
        return self._later.removes(number) and self._later.is_removed(number, self._rows.key(sample))

    def prepare_other(self, sample: SampleRequest, bucket: Bucket) -> Delivery:
        """Return the delivery for the sample that replaces a removed sample.

        The replacement is the sample that would be chosen if the removed sample were bad (BAD-1). Raises SampleError if
        no sample is left.
        """
        key = self._rows.key(sample)
        visit = substitute_visit(key, sample.visit)
        for shard, place in substitutes(sample):
            other = replace(sample, shard=shard, place=place, visit=visit, is_repeat=True)
            if not self.is_removed(other):
                return self.prepare(other, bucket)
        raise sample_error(
            sample,
            key,
            "it was removed from the dataset, and so were all other samples in its bucket. Create a new loader, which "
            "opens the newest version, and resume with load_state_dict(state, force=True)",
        )

    def is_alive(self, run: int) -> bool:
        """Return True if `run` is the current run and the loader is not closing."""
        return run == self.signals.run and not self.signals.is_closing

    def while_alive(self, run: int) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that cancels the reads in its block once the run is over."""
        return while_wanted(partial(self.is_alive, run))

    def begin(self, run: int, batch: PendingBatch, index: int, clip: int | None = None) -> Slot:
        """Start a slot in a batch.

        clip: offset of the slot's own block in the clip arena; None if the slot has no block.
        """
        delivery = batch.deliveries[index]
        with self._lock:
            slot = Slot(self._next_number, run, batch, index, delivery.sample, delivery, clip)
            self._next_number += 1
            self.slots[slot.number] = slot
        return slot

    def reject_known(self, run: int, batch: PendingBatch, index: int, *, is_whole: bool) -> bool:
        """If a sample is known to be bad, replace it and return True.

        is_whole: see Repairs.reason.
        """
        reason = self._repairs.reason(batch.deliveries[index], is_whole=is_whole)
        if reason is None:
            return False
        self.reject(self.begin(run, batch, index), reason, is_corrupt=False)
        return True

    def block(self, slot: Slot) -> int:
        """Return the offset of the memory into which a slot's clip is read."""
        return self.repair_block if slot.clip is None else slot.clip

    def wrong(self, slot: Slot, problem: str) -> None:
        """Handle bytes that do not match the index: read them again until the cause is known (FETCH-1)."""
        verdict = slot.wrong.judge(problem)
        if verdict == "stored":
            self.reject(
                slot, (f"{problem}, and a second read gave the same result; copy the shard again"), is_corrupt=True
            )
        elif verdict == "unproven":
            self.fail(slot, UNPROVEN)
        else:
            sample = slot.sample
            _log.info("%s: reading %s of %s again: %s", sample.part.source.url, slot.key, sample.file.path, problem)
            self.fetchers.submit(partial(self._kind.read, slot))

    def reject(self, slot: Slot, reason: str, *, is_corrupt: bool, is_gone: bool = False) -> None:
        """Replace a slot's sample, which was verified to be bad (BAD-1) or whose tar a later version deleted."""
        if slot.clip is not None:
            self.clips.release(slot.clip)
            slot.clip = None
        if self._repairs.add(slot, reason, is_corrupt=is_corrupt, is_gone=is_gone):
            self.fetchers.submit(partial(self._replace, slot))

    def _replace(self, slot: Slot) -> None:
        try:
            with self.while_alive(slot.run):
                is_found = self._repairs.find(slot, lambda: slot.run == self.signals.run)
        except StreamvidError as error:
            self.finish(slot, error)
            return
        if is_found:
            self._kind.read(slot)
        else:
            self.finish(slot)

    def fail(self, slot: Slot, error: object) -> None:
        """Finish a slot with an error that states why the sample cannot be delivered. The sample itself may be good.

        If a later version has deleted the sample's tar, the slot continues with the tar that replaces the deleted tar,
        or with another sample.
        """
        if slot.sample.part.sidecar is None and slot.num_moves < _MAX_MOVES:
            self.fetchers.submit(partial(self._look_again, slot, error))
        else:
            self.finish(slot, sample_error(slot.sample, slot.key, error))

    def _look_again(self, slot: Slot, error: object) -> None:
        slot.num_moves += 1
        dataset, tar = slot.sample.part.dataset, slot.delivery.tar
        try:
            with self.while_alive(slot.run):
                is_gone = dataset.store.state(tar.path) is None
                is_moved = is_gone and (self._later.refresh() or slot.num_moves == 1)
                if is_moved and self._later.shards_of(slot.sample.part.number, slot.sample.shard_info) is not None:
                    self.reject(slot, f"{_GONE} {tar.path}", is_corrupt=False, is_gone=True)
                    return
        except StreamvidError as later_error:
            _log.info("%s: later versions cannot be read: %s", dataset.url, later_error)
        self.finish(slot, sample_error(slot.sample, slot.key, error))

    def finish(self, slot: Slot, error: StreamvidError | None = None) -> None:
        """Finish a slot whose sample is in place, whose run is over, or whose batch has failed."""
        with self._lock:
            del self.slots[slot.number]
            batch = slot.batch
            if error is not None:  # its batch stays incomplete and is never handed over
                batch.error = batch.error or error
            elif slot.run == self.signals.run:
                slot.deliver()
                batch.num_missing -= 1
            is_news = batch.num_missing == 0 or error is not None or not self.slots
        if slot.clip is not None:
            self.clips.release(slot.clip)
        following = self._repairs.end(slot)
        if following is not None:
            self.fetchers.submit(partial(self._replace, following))
        if is_news:
            self.signals.tell()
