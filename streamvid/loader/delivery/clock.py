"""Checks that the caller makes while it waits for a batch: time limits, and the cause of the wait.

A read or decode that exceeds its time limit fails the run (SAFE-1). A timeout never leads to a substitution. Only the
time during which the caller waits counts. Work that is slow while the caller does something else, or while the whole
machine is suspended, does not end a run.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from streamvid.errors import SampleError, StreamvidError, WorkerError
from streamvid.loader.delivery.delivery import name_sample
from streamvid.loader.delivery.pending import DECODING, QUEUED, READING, Slot
from streamvid.loader.mix import SampleRequest
from streamvid.loader.stats import BatchStats

_STOPPED_SECONDS = 5.0  # if a waiting caller's checks are further apart, its process was suspended


@dataclass(frozen=True, slots=True)
class Overdue:
    """Exceeded time limit: the error to raise, and the id of the stuck task.

    The id is None for a read, and -1 for a task that no worker accepted.
    """

    error: StreamvidError
    task_id: int | None


class Wait:
    """One wait by the caller, with a start time that is reset if this process was suspended."""

    def __init__(self) -> None:
        self.since = self._looked = time.monotonic()

    def look(self) -> float:
        """Return the current time. If this process was suspended since the last call, restart the wait."""
        now = time.monotonic()
        if now - self._looked > _STOPPED_SECONDS:
            self.since = now
        self._looked = now
        return now


def where_threads_are() -> str:
    """Return the stack traces of the calling thread and of the loader's threads, to show where they hang."""
    frames = sys._current_frames()
    ours = [one for one in threading.enumerate() if one.name.startswith("streamvid-")]
    shown = [one for one in (threading.current_thread(), *ours) if one.ident in frames]
    return "\n".join(f"{one.name}\n{''.join(traceback.format_stack(frames[one.ident or 0]))}" for one in shown)


class Clock:
    """Time limit of `limit_seconds` for each read and each decode; None disables the limit."""

    def __init__(self, limit_seconds: float | None) -> None:
        self._limit_seconds = limit_seconds
        self.index_read: tuple[SampleRequest, float] | None = None  # the feeder's current index read and its start
        self.heard_at = 0.0  # time of the last message from a decoder

    def overdue(
        self, wait: Wait, slots: Mapping[int, Slot], begun_tasks: Callable[[], Mapping[int, float]]
    ) -> Overdue | None:
        """Return the first read or decode that exceeded the limit, or else a task that no worker accepted in time.

        Return None if nothing is overdue.

        slots: samples in flight, by number; other threads may add and remove samples.
        begun_tasks: function that returns a mapping from the id of each task in progress to the task's start time.
        """
        if self._limit_seconds is None:
            return None
        oldest = wait.look() - self._limit_seconds
        if wait.since > oldest:
            return None
        index_read = self.index_read
        if index_read is not None and index_read[1] < oldest:
            return Overdue(self._read_error(name_sample(index_read[0], None), "the index"), None)
        queued, begun = None, begun_tasks()
        # A worker that has started a task is alive, even if it keeps the answer to an earlier one.
        heard_at = max([self.heard_at, *(start for start in begun.values() if start <= time.monotonic())])
        for slot in list(slots.values()):
            stage, since = slot.at
            if stage == QUEUED and slot.number in begun:
                stage, since = DECODING, max(since, begun[slot.number])
            if stage == READING and since < oldest:
                return Overdue(self._read_error(slot.name, "its clip"), None)
            if stage == DECODING and since < oldest:
                is_read = slot.batch.room is None  # a worker reads the clip, which is delivered as it is stored
                error = (
                    self._read_error(slot.name, "its stored bytes")
                    if is_read
                    else self._decode_error(slot, "decoding it has taken")
                )
                return Overdue(error, slot.number)
            if stage == QUEUED and max(since, heard_at) < oldest:
                queued = queued or slot
        return None if queued is None else Overdue(self._decode_error(queued, "no decoder has accepted it for"), -1)

    def _read_error(self, name: str, what: str) -> SampleError:
        return SampleError(
            f"{name} cannot be delivered: reading {what} has taken more than "
            f"limits.sample_timeout_seconds={self._limit_seconds:g}; the store is slow or is not responding. Check "
            "the disk or the network, then create a new loader and load the last state. If the store is only slow, "
            "raise limits.sample_timeout_seconds"
        )

    def _decode_error(self, slot: Slot, what: str) -> WorkerError:
        return WorkerError(
            f"{slot.name} cannot be delivered: {what} more than "
            f"limits.sample_timeout_seconds={self._limit_seconds:g}; a decoder is stuck, or the machine is "
            "overloaded. This loader cannot continue: create a new loader with a lower num_workers or a higher "
            "limits.sample_timeout_seconds, and load the last state. If the same sample fails every time, exclude it"
        )


_DECODER_STAGES = (QUEUED, DECODING)

HeldUpBy: TypeAlias = Literal["store", "decode", "memory", "prepare"]


def held_up_by(
    slots: Mapping[int, Slot],
    num_decoders: int,
    num_readers: int,
    *,
    reads_ahead: bool,
    reads_index: bool,
    lacks_memory: bool,
) -> HeldUpBy:
    """Return the part of the loader that holds up the next batch while the caller waits.

    slots: as for `Clock.overdue`.
    num_decoders: number of workers, at least 1.
    reads_ahead: False if the worker processes read clips instead of decoding them.
    reads_index: True if the feeder is reading the index.
    lacks_memory: True if the feeder is waiting for memory.
    """
    if not reads_ahead:
        num_readers = min(num_readers, num_decoders)
    num_reading = num_decoding = 0
    for slot in list(slots.values()):
        stage = slot.at[0]
        if stage == READING or (stage in _DECODER_STAGES and not reads_ahead):
            num_reading += 1
        elif stage in _DECODER_STAGES:
            num_decoding += 1
            if num_decoding == num_decoders:  # usually after a few of many
                return "decode"
    if num_reading >= num_readers:
        return "store"
    if lacks_memory:
        return "memory"
    if num_reading or reads_index:
        return "store"
    return "decode" if num_decoding else "prepare"


def add_wait(stats: BatchStats, held_up: HeldUpBy, seconds: float) -> None:
    """Add part of the wait for a batch to the batch's statistics."""
    match held_up:
        case "store":
            stats.store_wait_seconds += seconds
        case "decode":
            stats.decode_wait_seconds += seconds
        case "memory":
            stats.memory_wait_seconds += seconds
        case "prepare":
            stats.prepare_wait_seconds += seconds
