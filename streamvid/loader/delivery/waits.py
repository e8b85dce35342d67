"""Reasons for the caller's waits: what is holding up the next batch."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, TypeAlias

from streamvid.loader.delivery.pending import DECODING, QUEUED, READING, Slot
from streamvid.loader.stats import BatchStats

HeldUpBy: TypeAlias = Literal["store", "decode", "memory", "prepare"]


def held_up_by(
    slots: Collection[Slot],
    num_decoders: int,
    num_readers: int,
    *,
    reads_ahead: bool,
    reads_index: bool,
    lacks_memory: bool,
) -> HeldUpBy:
    """Return the part of the loader that holds up the next batch while the caller waits.

    slots: samples in flight.
    reads_ahead: False if the worker processes read clips instead of decoding them.
    reads_index: True if the feeder is reading the index.
    lacks_memory: True if the feeder is waiting for memory.
    """
    stages = [slot.at[0] for slot in slots]
    num_reading = stages.count(READING)
    num_decoding = stages.count(QUEUED) + stages.count(DECODING)
    if not reads_ahead:
        num_reading, num_decoding = num_reading + num_decoding, 0
        num_readers = min(num_readers, num_decoders)
    if num_decoding >= num_decoders:
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
