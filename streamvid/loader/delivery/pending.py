"""What is under way: batches, and each slot of one from the plan's sample to its place in the ring."""

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
"""(name, item) of a batch's video among its pictures; those of conditioning inputs have a name."""

TEXT_ROW_BYTES = 4096
"""Ring memory of a sample without pictures. Its text is not there; this bounds how many are made ahead."""


@dataclass(frozen=True, slots=True)
class ClipPlace:
    """Where a clip lies that is not decoded: from `offset` in the batch on a packet table, and then its data.

    numbers: of the frames wanted; None: not known yet. own: the whole clip in memory of its own instead, of a sample
    that took the place of another.
    """

    numbers: Sequence[int] | None
    offset: int = 0
    table_bytes: int = 0
    num_bytes: int = 0
    stream: str = ""
    own: bytes | None = None


@dataclass(slots=True, eq=False)
class PendingBatch:
    """A batch under way: its deliveries, its place in the ring, and how many samples are still to come.

    A substitute takes the place of its bad sample in `deliveries`, not in `request` (BAD-1).
    room: where pictures lie; None for samples that are not decoded. colors: by slot and (name, item) of the pictures.
    clips: by slot, of samples that are not decoded. digest: of the batch, where processes that share it compare it.
    """

    request: BatchRequest
    deliveries: list[Delivery]
    memory: Any
    block: Block  # an interrupt may lose the batch on its way to the caller: its place goes back all the same
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
    """A sample of the plan that was proved bad, and what may still take its place."""

    delivery: Delivery
    reason: str
    candidates: Iterator[SampleRequest]

    def substitution(self, substitute_key: str | None) -> Substitution:
        """Return the record of it. substitute_key: None if nothing can take its place."""
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
    """One slot of a batch: the sample that is tried for it, and how far that has come.

    sample: the one that is tried; `delivery` follows once its index row is there.
    clip: offset of this slot's own block of the clip arena, None where it has none.
    at: stage and since when (time.monotonic), as one value, because the caller reads it without a lock.
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
        """Key of the sample that is tried, None where it is not known yet."""
        return self.delivery.key if self.delivery.sample is self.sample else None

    @property
    def name(self) -> str:
        """The sample that is tried, for messages."""
        return name_sample(self.sample, self.key)

    @property
    def is_again(self) -> bool:
        """Whether what was read before was wrong."""
        return len(self.wrong) > 0

    @property
    def is_substitute(self) -> bool:
        """Whether it is another sample than the plan's."""
        return self.bad is not None and self.sample is not self.bad.delivery.sample

    def enter(self, stage: str) -> None:
        """Be at a stage from now on."""
        self.at = (stage, time.monotonic())

    def add_read(self, read: ClipRead) -> None:
        """Count a read among what the slot cost."""
        self.stats.fetch_seconds += read.seconds
        self.stats.num_bytes_fetched += read.num_bytes
        self.stats.num_retries += self.is_again

    def deliver(self) -> None:
        """Put what was delivered, and what it cost, into the batch."""
        batch = self.batch
        for (name, item), color in self.colors.items():
            batch.colors[self.index, name, item] = color
        if self.bad is not None and self.is_substitute:
            batch.deliveries[self.index] = self.delivery
            batch.substituted[self.index] = self.bad.substitution(self.delivery.key)
            self.stats.num_substituted = 1
        batch.stats = batch.stats.plus(self.stats)
