"""What takes the place of samples that are proved bad (BAD-1), one at a time.

A repair is a chain of jobs for the fetch threads: read a candidate, hand it to a decoder, and go on with the next one
if that says that it is bad too. The first candidate for a clip whose packets do not decode is the clip itself, by way
of its container. Repairs read into one block of memory that is kept for them: the thread that allocates may itself be
waiting for the batch that waits for a repair.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, TypeAlias

from streamvid.errors import StreamvidError
from streamvid.loader.delivery.clip_part import TABLE_BYTES, clip_part
from streamvid.loader.delivery.fetch import ClipRead, IndexRows, finish_row
from streamvid.loader.delivery.pending import READING, Work, sample_error
from streamvid.loader.mix import MixPart, SampleRequest, substitutes
from streamvid.loader.view.media import media_parts
from streamvid.loader.view.sampling import substitute_visit
from streamvid.loader.workers.arena import ALIGN_BYTES

MISSING = "its sidecar has no tensors of this visit, which could not be made"


def repair_bytes(parts: Sequence[MixPart]) -> int:
    """Size of the block that is kept for repairs: the largest part of a clip that there may be."""
    return max(1, *(part.max_clip_bytes for part in parts)) + TABLE_BYTES + ALIGN_BYTES


_Name: TypeAlias = tuple[int, str, int, int]


class Repairs:
    """The queue of slots whose sample is bad, and all samples that were proved bad, so that none is read again.

    All of it runs on the loader's own threads.
    """

    def __init__(self, rows: IndexRows) -> None:
        self._rows = rows
        self._lock = threading.Lock()  # over the three that follow
        self._queue: deque[Work] = deque()
        self._active: Work | None = None
        self._known: dict[_Name, str] = {}

    def reason(self, sample: SampleRequest) -> str | None:
        """Why the stored bytes of a sample are known to be wrong somewhere, None where they are not.

        What does not decode is not kept in mind: another window of the clip may, and whether a delivery is substituted
        must not hang on what came before it.
        """
        return self._known.get(_name(sample))

    def add(self, work: Work, reason: str, *, is_corrupt: bool) -> bool:
        """What `work` tries is bad, its bytes wrong or not to be decoded; whether `find` is to be called for it now."""
        with self._lock:
            by_packets = work.part.window is not None
            if work.bad is None:
                work.bad = (work.sample, work.row["key"], reason)
                others = (replace(work.sample, shard=shard, place=place) for shard, place in substitutes(work.sample))
                work.candidates = chain([work.sample] if by_packets else [], others)
            if is_corrupt and not by_packets:  # else the packet index may be what is wrong
                self._known[_name(work.sample)] = reason
            if self._active is not None and self._active is not work:
                self._queue.append(work)
                return False
            self._active = work
            return True

    def end(self, work: Work) -> Work | None:
        """`work` is finished; the next one to call `find` for, if there is one."""
        with self._lock:
            if self._active is not work:
                return None
            self._active = self._queue.popleft() if self._queue else None
            return self._active

    def find(self, work: Work, is_alive: Callable[[], bool]) -> bool:
        """Make the next candidate that is not known to be bad what `work` tries; False once nobody waits.

        Raises SampleError where there is none, or where its index row cannot be read.
        """
        assert work.bad is not None and work.candidates is not None
        bad, key, reason = work.bad
        visit = substitute_visit(key, bad.visit)
        for candidate in work.candidates:
            if not is_alive():
                return False
            is_itself = candidate is bad
            sample = bad if is_itself else replace(candidate, visit=visit, is_repeat=True)
            if self.reason(sample) is None:
                self._take(work, sample)
                if not work.row.get("is_missing"):
                    return True
        work.note(None)
        raise sample_error(
            bad, key, f"{reason}. No other sample of its bucket can take its place: all are bad. Copy the dataset again"
        )

    def _take(self, work: Work, sample: SampleRequest) -> None:
        row: dict[str, Any] = {"key": None}
        work.sample, work.row = sample, row
        work.enter(READING)
        num_frames = work.batch.request.bucket.num_frames
        try:
            row = self._rows.row(sample)
            finish_row(row, sample, num_frames)
            # Whole, so that there is no second way to try.
            work.part = clip_part(row, None, row["view"].pick)
            work.media = media_parts(row, sample.part.media, sample.shard_info, work.part)
            work.num_reads, work.problem_before = 0, None
        except StreamvidError as error:
            raise sample_error(sample, row["key"], str(error)) from error
        work.row = row


def add_read(work: Work, read: ClipRead) -> None:
    """Count a read among what a slot cost."""
    work.num_reads += 1
    work.problem = read.problem
    work.stats.fetch_seconds += read.seconds
    work.stats.num_bytes_fetched += read.num_bytes
    work.stats.num_retries += work.num_reads > 1


def _name(sample: SampleRequest) -> _Name:
    # The visits of a sidecar are stored one by one; of a clip, all visits read the same bytes.
    visit = 0 if sample.part.sidecar is None else sample.shown_visit
    return sample.part.number, sample.shard_info.path, sample.place, visit
