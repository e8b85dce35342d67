"""Work in flight: batches, and their slots on the way from the planned sample to the ring."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
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
from streamvid.loader.workers.messages import DecodedAudio, PictureColors
from streamvid.storage import WrongReads

WAITING, READING, QUEUED, DECODING = "waiting", "reading", "queued", "decoding"
VIDEO = ("", 0)
"""(name, item) that identifies the video among a batch's pictures; conditioning inputs have non-empty names."""

TEXT_ROW_BYTES = 4096
"""Ring bytes reserved per text-only sample. They hold no text, but limit how many samples are prepared ahead."""


@dataclass(frozen=True, slots=True)
class ClipPlace:
    """Location of an undecoded clip. The packet table is at `offset` in the batch, and the data follows it.

    numbers: indices of the wanted frames; None if not known yet.
    stream: StreamInfo as JSON.
    own: whole clip of a substitute, in separate memory; None for other clips.
    """

    numbers: Sequence[int] | None
    offset: int = 0
    table_bytes: int = 0
    num_bytes: int = 0
    stream: str = ""
    own: bytes | None = None


@dataclass(slots=True, eq=False)
class PendingBatch:
    """Batch in flight: its deliveries, its memory in the ring, and the number of samples still missing.

    A substitute replaces the bad sample in `deliveries`, but not in `request` (BAD-1).

    room: layout of the pictures; None if samples are not decoded.
    colors: maps (slot index, name, item) to the colors of the picture.
    audio: maps slot indices to the presence and offset of the audio.
    clips: maps slot indices to the locations of undecoded clips.
    digest: hash of the batch, computed only if processes that share the batch compare hashes; otherwise 0.
    """

    request: BatchRequest
    deliveries: list[Delivery]
    memory: Any
    block: Block  # releases the memory even if an interrupt loses the batch on its way to the caller
    num_missing: int
    room: PictureRoom | None = None
    error: StreamvidError | None = None
    stats: BatchStats = field(default_factory=BatchStats)
    colors: dict[tuple[int, str, int], PictureColors] = field(default_factory=dict)
    audio: dict[int, DecodedAudio] = field(default_factory=dict)
    clips: dict[int, ClipPlace] = field(default_factory=dict)
    substituted: dict[int, Substitution] = field(default_factory=dict)
    digest: int = 0

    @property
    def num_bytes(self) -> int:
        """Number of ring bytes that the batch occupies."""
        if self.room is None:
            return max((clip.offset + clip.table_bytes + clip.num_bytes for clip in self.clips.values()), default=0)
        return self.room.num_bytes


@dataclass(slots=True, eq=False)
class BadSample:
    """Planned sample that was verified to be bad, and the remaining candidates to replace it.

    is_gone: True if the sample is not bad, but a later version deleted its tar. In that case, the sample itself is the
        first candidate.
    """

    delivery: Delivery
    reason: str
    candidates: Iterator[SampleRequest]
    is_gone: bool = False

    def substitution(self, substitute_key: str | None) -> Substitution:
        """Return the record of the substitution.

        substitute_key: key of the substitute; None if the bad sample has no substitute.
        """
        return substitution(self.delivery.sample, self.delivery.key, self.reason, substitute_key, self.is_gone)


def substitution(
    sample: SampleRequest, key: str, reason: str, substitute_key: str | None, is_removed: bool
) -> Substitution:
    """Return the record of a substitution.

    key: key of the planned sample.
    """
    return Substitution(
        dataset=sample.part.dataset.url,
        shard=sample.shard_info.path,
        bucket_id=sample.bucket_id,
        place=sample.place,
        key=key,
        reason=reason,
        substitute_key=substitute_key,
        is_removed=is_removed,
    )


@dataclass(slots=True, eq=False)
class Slot:
    """One slot in a batch: the sample that is currently being tried for it, and its progress.

    sample: the sample that is being tried; `delivery` is updated once the sample's index row is known.
    clip: offset of the slot's own block in the clip arena; None if the slot has no block.
    path: local file from which a worker reads the clip; "" if the clip is read into its block.
    at: (stage, start time from time.monotonic()), as one value because the caller reads it without a lock.
    colors: maps (name, item) to the colors of the picture, for the pictures decoded so far.
    audio: presence and offset of the decoded audio.
    start_seconds: time from the clip's first frame to the first delivered frame, if the clip was decoded through its
        container.
    num_moves: number of times that the sample was looked up in another tar because its own tar was missing.
    """

    number: int
    run: int
    batch: PendingBatch
    index: int
    sample: SampleRequest
    delivery: Delivery
    clip: int | None
    path: str = ""
    at: tuple[str, float] = (WAITING, 0.0)
    wrong: WrongReads = field(default_factory=WrongReads)
    colors: dict[tuple[str, int], PictureColors] = field(default_factory=dict)
    audio: DecodedAudio = None
    start_seconds: Fraction = Fraction(0)
    bad: BadSample | None = None
    stats: BatchStats = field(default_factory=BatchStats)
    num_moves: int = 0

    @property
    def key(self) -> str | None:
        """Key of the sample that is currently being tried, or None if the key is not known yet."""
        return self.delivery.key if self.delivery.sample is self.sample else None

    @property
    def name(self) -> str:
        """Name of the sample that is currently being tried, for messages."""
        return name_sample(self.sample, self.key)

    @property
    def is_again(self) -> bool:
        """True if the previous read of the sample returned wrong bytes."""
        return len(self.wrong) > 0

    @property
    def is_substitute(self) -> bool:
        """True if the sample that is currently being tried is not the planned sample."""
        return self.bad is not None and self.sample is not self.bad.delivery.sample

    def enter(self, stage: str) -> None:
        """Record the current time as the time at which the slot entered a stage."""
        self.at = (stage, time.monotonic())

    def add_read(self, read: ClipRead) -> None:
        """Add a read to the slot's statistics."""
        self.stats.fetch_seconds += read.seconds
        self.stats.num_bytes_fetched += read.num_bytes
        self.stats.num_retries += self.is_again

    def deliver(self) -> None:
        """Store the slot's delivery and statistics in the batch."""
        batch = self.batch
        for (name, item), color in self.colors.items():
            batch.colors[self.index, name, item] = color
        if self.audio is not None:
            batch.audio[self.index] = self.audio
        if self.bad is not None and self.is_substitute:
            batch.deliveries[self.index] = self.delivery
            batch.substituted[self.index] = self.bad.substitution(self.delivery.key)
            self.stats.num_substituted = 0 if self.bad.is_gone else 1
        batch.stats.add(self.stats)
