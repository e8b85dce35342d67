"""Substitution of samples that are verified to be bad (BAD-1), one at a time.

A repair is a chain of jobs for the fetch threads: read a candidate, pass it to a decoder, and continue with the next
candidate if it is bad too. If a clip's packets do not decode, the first candidate is the same clip, decoded through its
container. Repairs read into a reserved block of memory, because the allocating thread may itself be waiting for the
batch that waits for a repair.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import TypeAlias

from streamvid.buckets.bucket import Bucket
from streamvid.loader.delivery.delivery import Delivery, sample_error
from streamvid.loader.delivery.pending import READING, BadSample, Slot
from streamvid.loader.mix import MixPart, SampleRequest, substitutes
from streamvid.loader.view.clip_part import TABLE_BYTES
from streamvid.loader.view.view import substitute_visit
from streamvid.loader.workers.arena import ALIGN_BYTES
from streamvid.storage import WrongReads

_MISSING = "its features have no tensors for this visit, because they could not be computed"

_Name: TypeAlias = tuple[int, str, int, int]


def repair_bytes(parts: Sequence[MixPart]) -> int:
    """Return the number of bytes to reserve for repairs, enough for the largest possible part of a clip."""
    return max(1, *(part.max_clip_bytes for part in parts)) + TABLE_BYTES + ALIGN_BYTES


class Repairs:
    """Queue of slots that wait for a substitute, and a record of corrupt samples, which are not read again.

    prepare: function that prepares the delivery of a sample's whole clip, so that a failure is final for the sample.
    is_removed: function that returns True for a sample that was removed from the dataset.
    All methods run on the loader's own threads.
    """

    def __init__(
        self, prepare: Callable[[SampleRequest, Bucket], Delivery], is_removed: Callable[[SampleRequest], bool]
    ) -> None:
        self._prepare, self._is_removed = prepare, is_removed
        self._lock = threading.Lock()  # protects the next three attributes
        self._queue: deque[Slot] = deque()
        self._active: Slot | None = None
        self._known: dict[_Name, str] = {}

    def reason(self, delivery: Delivery, *, is_whole: bool) -> str | None:
        """Return the reason why a delivery is bad, or None if the delivery is not known to be bad.

        is_whole: True if the delivery reads the whole clip. If it reads only a part, the result is None unless features
            are missing, because the bad bytes may be outside the part.

        Clips that do not decode are not remembered, because another window of the clip may decode.
        """
        if delivery.row.is_missing:
            return _MISSING
        return self._known.get(_name(delivery.sample)) if is_whole else None

    def add(self, slot: Slot, reason: str, *, is_corrupt: bool, is_gone: bool = False) -> bool:
        """Record that the slot's sample is corrupt or undecodable. Return True if the caller must call `find` now.

        is_gone: True if the sample is intact, but a later version deleted its tar.
        """
        with self._lock:
            sample, by_packets = slot.sample, not slot.delivery.part.is_whole
            if slot.bad is None:
                others = (replace(sample, shard=shard, place=place) for shard, place in substitutes(sample))
                is_first = by_packets or is_gone
                slot.bad = BadSample(slot.delivery, reason, chain([sample] if is_first else [], others), is_gone)
            elif is_gone:
                slot.bad.candidates = chain([sample], slot.bad.candidates)
            elif slot.bad.is_gone and not slot.is_substitute:  # read from another tar, and bad there too
                slot.bad.reason, slot.bad.is_gone = reason, False
            if is_corrupt and not by_packets:  # else the packet index may be wrong
                self._known[_name(sample)] = reason
            if self._active is not None and self._active is not slot:
                self._queue.append(slot)
                return False
            self._active = slot
            return True

    def end(self, slot: Slot) -> Slot | None:
        """Record that `slot` is finished. Return the next slot, for which the caller must call `find`, or None."""
        with self._lock:
            if self._active is not slot:
                return None
            self._active = self._queue.popleft() if self._queue else None
            return self._active

    def find(self, slot: Slot, is_alive: Callable[[], bool]) -> bool:
        """Assign to `slot` the next candidate that is not known to be bad. Return False if the slot's run is over.

        Raises SampleError if no candidate remains, or if a candidate's index row cannot be read.
        """
        bad = slot.bad
        assert bad is not None
        planned = bad.delivery.sample
        visit = substitute_visit(bad.delivery.key, planned.visit)
        for candidate in bad.candidates:
            if not is_alive():
                return False
            sample = planned if candidate is planned else replace(candidate, visit=visit, is_repeat=True)
            if _name(sample) in self._known or self._is_removed(sample):
                continue
            slot.sample = sample
            slot.enter(READING)
            slot.delivery = self._prepare(sample, slot.batch.request.bucket)
            slot.wrong = WrongReads()
            if not slot.delivery.row.is_missing:
                return True
        slot.batch.substituted[slot.index] = bad.substitution(None)
        remedy = "Copy the dataset again" if planned.part.sidecar is None else "Copy the features or encode them again"
        raise sample_error(
            planned,
            bad.delivery.key,
            f"{bad.reason}. No other sample in its bucket can replace it, because none of them is good. {remedy}",
        )


def _name(sample: SampleRequest) -> _Name:
    # Each visit of features is stored separately; all visits of a clip read the same bytes.
    visit = 0 if sample.part.sidecar is None else sample.shown_visit
    return sample.part.number, sample.shard_info.path, sample.place, visit
