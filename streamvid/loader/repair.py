"""What takes the place of samples that are proved bad (BAD-1), one at a time.

A repair is a chain of jobs for the fetch threads: read candidates until one has its checksum, hand it to a decoder, and
go on with the next one if that says that it is bad too. It reads into one block of memory that is kept for repairs: the
thread that allocates may itself be waiting for the batch that waits for a repair.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from streamvid.errors import StreamvidError
from streamvid.loader.arena import ALIGN_BYTES
from streamvid.loader.fetch import ClipRead, IndexRows, finish_row, read_clip
from streamvid.loader.mix import MixPart, SampleRequest, substitutes
from streamvid.loader.pending import READING, Work, sample_error
from streamvid.loader.sampling import substitute_visit


def repair_bytes(parts: Sequence[MixPart]) -> int:
    """Size of the block that is kept for repairs: the largest clip of all."""
    return max(1, *(part.max_clip_bytes for part in parts)) + ALIGN_BYTES


class Repairs:
    """The queue of slots whose sample is bad, and all samples that were proved bad, so that none is read again.

    All of it runs on the loader's own threads.
    """

    def __init__(self, rows: IndexRows) -> None:
        self._rows = rows
        self._lock = threading.Lock()  # over the three that follow
        self._queue: deque[Work] = deque()
        self._active: Work | None = None
        self._known: dict[tuple[int, str, int], str] = {}

    def reason(self, sample: SampleRequest) -> str | None:
        """Why a sample is known to be bad, None where it is not."""
        return self._known.get(_name(sample))

    def add(self, work: Work, reason: str) -> bool:
        """The sample that `work` tries is bad; whether `find` is to be called for it now."""
        with self._lock:
            self._known[_name(work.sample)] = reason
            if work.bad is None:
                work.bad = (work.sample, work.row["key"], reason)
                work.candidates = substitutes(work.sample)
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

    def find(self, work: Work, buffer: memoryview, is_alive: Callable[[], bool]) -> bool:
        """Make the next candidate with right bytes what `work` tries, its clip in `buffer`; False once nobody waits.

        Raises SampleError where there is none, or where one cannot be read.
        """
        assert work.bad is not None and work.candidates is not None
        bad, key, reason = work.bad
        visit = substitute_visit(key, bad.visit)
        for shard, place in work.candidates:
            if not is_alive():
                return False
            sample = replace(bad, shard=shard, place=place, visit=visit, is_repeat=True)
            if self.reason(sample) is None and self._try(work, sample, buffer):
                return True
        work.note(None)
        raise sample_error(
            bad, key, f"{reason}. No other sample of its bucket can take its place: all are bad. Copy the dataset again"
        )

    def _try(self, work: Work, sample: SampleRequest, buffer: memoryview) -> bool:
        row: dict[str, Any] = {"key": None}
        work.sample, work.row = sample, row
        work.enter(READING)
        try:
            row = self._rows.row(sample)
            finish_row(row, sample, work.batch.request.bucket.num_frames)
            work.row = row
            read = read_clip(sample.part.dataset, sample.shard_info, row, buffer[: row["clip_bytes"]])
        except StreamvidError as error:
            raise sample_error(sample, row["key"], str(error)) from error
        add_read(work, read)
        if read.problem is None:
            return True
        with self._lock:
            self._known[_name(sample)] = read.problem
        return False


def add_read(work: Work, read: ClipRead) -> None:
    """Count a read among what a slot cost."""
    work.stats.fetch_seconds += read.seconds
    work.stats.num_bytes_fetched += read.num_bytes
    work.stats.num_retries += read.num_retries


def _name(sample: SampleRequest) -> tuple[int, str, int]:
    return sample.part.number, sample.shard_info.path, sample.place
