"""Work in flight: batches, and each of their slots from the plan's sample to its place in the ring."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamvid.errors import StreamvidError
from streamvid.loader.delivery.delivery import Delivery, name_sample
from streamvid.loader.delivery.fetch import ClipRead
from streamvid.loader.delivery.quarantine import Substitution
from streamvid.loader.delivery.requests import BatchRequest
from streamvid.loader.mix import SampleRequest
from streamvid.loader.stats import BatchStats
from streamvid.loader.view.media import PictureRoom
from streamvid.loader.workers.arena import Block
from streamvid.loader.workers.messages import PictureColors
from streamvid.storage import WrongReads

WAITING, READING, QUEUED, DECODING = "waiting", "reading", "queued", "decoding"
VIDEO = ("", 0)
"""(name, item) of a batch's video among its pictures; conditioning inputs have a name."""

TEXT_ROW_BYTES = 4096
"""Ring memory of a sample without pictures. It does not hold the text, but limits how many are made ahead."""


@dataclass(frozen=True, slots=True)
class ClipPlace:
    """Place of a clip that is not decoded: from `offset` in the batch on a packet table, and then its data.

    numbers: of the wanted frames; None: not known yet. own: instead, the whole clip in separate memory, for a sample
    that replaces another.
    """

    numbers: Sequence[int] | None
    offset: int = 0
    table_bytes: int = 0
    num_bytes: int = 0
    stream: str = ""
    own: bytes | None = None


@dataclass(slots=True, eq=False)
class PendingBatch:
    """A batch in flight: its deliveries, its place in the ring, and the number of samples that are still missing.

    A substitute takes the place of its bad sample in `deliveries`, not in `request` (BAD-1).
    room: layout of pictures; None for samples that are not decoded. colors: by slot and (name, item) of the pictures.
    clips: by slot, for samples that are not decoded. digest: of the batch, if the processes that share it compare it.
    """

    request: BatchRequest
    deliveries: list[Delivery]
    memory: Any
    block: Block  # an interrupt may lose the batch on its way to the caller: its place is returned even then
    num_missing: int
    room: PictureRoom | None = None
    error: StreamvidError | None = None
    stats: BatchStats = field(default_factory=BatchStats)
    colors: dict[tuple[int, str, int], PictureColors] = field(default_factory=dict)
    clips: dict[int, ClipPlace] = field(default_factory=dict)
    substituted: dict[int, Substitution] = field(default_factory=dict)
    digest: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the ring that hold the batch."""
        if self.room is None:
            return max((clip.offset + clip.table_bytes + clip.num_bytes for clip in self.clips.values()), default=0)
        return self.room.num_bytes


@dataclass(slots=True, eq=False)
class BadSample:
    """A sample of the plan that was verified to be bad, and what may still replace it."""

    delivery: Delivery
    reason: str
    candidates: Iterator[SampleRequest]

    def substitution(self, substitute_key: str | None) -> Substitution:
        """Return the record of the substitution. substitute_key: None if no sample can replace it."""
        sample = self.delivery.sample
        return Substitution(
            dataset=sample.part.dataset.url,
            shard=sample.shard_info.path,
            bucket_id=sample.bucket_id,
            place=sample.place,
            key=self.delivery.key,
            reason=self.reason,
            substitute_key=substitute_key,
        )


@dataclass(slots=True, eq=False)
class Slot:
    """One slot of a batch: the sample that is tried for it, and its progress.

    sample: the sample that is tried; `delivery` follows once its index row is known.
    clip: offset of this slot's own block of the clip arena, None if it has none.
    at: stage and its start (time.monotonic), as one value, because the caller reads it without a lock.
    colors: by (name, item), of the pictures that are decoded.
    """

    number: int
    run: int
    batch: PendingBatch
    index: int
    sample: SampleRequest
    delivery: Delivery
    clip: int | None
    at: tuple[str, float] = (WAITING, 0.0)
    wrong: WrongReads = field(default_factory=WrongReads)
    colors: dict[tuple[str, int], PictureColors] = field(default_factory=dict)
    bad: BadSample | None = None
    stats: BatchStats = field(default_factory=BatchStats)

    @property
    def key(self) -> str | None:
        """Key of the sample that is tried, None if it is not known yet."""
        return self.delivery.key if self.delivery.sample is self.sample else None

    @property
    def name(self) -> str:
        """Name of the sample that is tried, for messages."""
        return name_sample(self.sample, self.key)

    @property
    def is_again(self) -> bool:
        """True if the previous read was wrong."""
        return len(self.wrong) > 0

    @property
    def is_substitute(self) -> bool:
        """True if it is not the plan's sample."""
        return self.bad is not None and self.sample is not self.bad.delivery.sample

    def enter(self, stage: str) -> None:
        """Enter a stage now."""
        self.at = (stage, time.monotonic())

    def add_read(self, read: ClipRead) -> None:
        """Add a read to the cost of the slot."""
        self.stats.fetch_seconds += read.seconds
        self.stats.num_bytes_fetched += read.num_bytes
        self.stats.num_retries += self.is_again

    def deliver(self) -> None:
        """Put the delivery and its cost into the batch."""
        batch = self.batch
        for (name, item), color in self.colors.items():
            batch.colors[self.index, name, item] = color
        if self.bad is not None and self.is_substitute:
            batch.deliveries[self.index] = self.delivery
            batch.substituted[self.index] = self.bad.substitution(self.delivery.key)
            self.stats.num_substituted = 1
        batch.stats = batch.stats.plus(self.stats)
