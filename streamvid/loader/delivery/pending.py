"""What is under way: batches, and each sample of one on its way from the store to its place in the ring."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from streamvid.errors import SampleError, StreamvidError
from streamvid.loader.delivery.clip_part import ClipPart
from streamvid.loader.delivery.quarantine import Substitution
from streamvid.loader.delivery.requests import BatchRequest
from streamvid.loader.mix import SampleRequest
from streamvid.loader.stats import BatchStats
from streamvid.loader.view.media import MediaPart, MediaRoom
from streamvid.loader.view.view import View
from streamvid.loader.workers.arena import Block
from streamvid.loader.workers.worker import DecodeTask
from streamvid.video.picture import Accuracy, PictureFormat

PictureColors: TypeAlias = tuple[str, str, str] | None
"""(matrix, range, siting) of yuv420p pictures."""

WAITING, READING, QUEUED, DECODING = "waiting", "reading", "queued", "decoding"


@dataclass(frozen=True, slots=True)
class StoredClip:
    """Where a clip lies that is not decoded: a table of packets and then its data, in the ring from `offset` on.

    numbers: of the frames wanted; None: not known yet.   own: the whole clip in memory of its own instead, where it
    took the place of another.
    """

    numbers: Sequence[int] | None
    offset: int = 0
    table_bytes: int = 0
    num_bytes: int = 0
    stream: str = ""
    own: bytes | None = None


@dataclass(slots=True, eq=False)
class PendingBatch:
    """A batch under way: its place in the ring, its samples' index rows, and how many are still to come.

    A substitute takes the place of its bad sample in `request` and in `rows` (BAD-1). accuracy: of RGB; None: what is
    cheap enough, exact where pictures are scaled anyway, which adds little to what that costs, else fast.
    """

    request: BatchRequest
    picture: PictureFormat | None  # None: clips are handed over as they are stored
    memory: Any
    block: Block  # an interrupt may lose the batch on its way to the caller: its place goes back all the same
    num_missing: int
    accuracy: Accuracy | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    error: StreamvidError | None = None
    stats: BatchStats = field(default_factory=BatchStats)
    colors: dict[int, tuple[str, str, str] | None] = field(default_factory=dict)  # by slot
    room: MediaRoom | None = None  # where further media lie
    media_colors: dict[tuple[int, str, int], PictureColors] = field(default_factory=dict)  # by slot, medium, item
    clips: dict[int, StoredClip] = field(default_factory=dict)  # by slot
    substituted: dict[int, Substitution] = field(default_factory=dict)  # by slot
    is_counted: bool = False
    digest: int = 0  # of the batch, where processes that share it compare it

    @property
    def num_bytes(self) -> int:
        """What it takes of the ring, as far as that is known from the start."""
        if self.picture is None:
            return max((clip.offset + clip.table_bytes + clip.num_bytes for clip in self.clips.values()), default=0)
        if self.room is not None:
            return self.room.num_bytes
        return len(self.rows) * self.request.bucket.num_frames * self.picture.num_bytes

    def replace_sample(self, slot: int, sample: SampleRequest, row: dict[str, Any]) -> None:
        """Another sample in a slot."""
        samples = self.request.samples
        self.request = replace(self.request, samples=(*samples[:slot], sample, *samples[slot + 1 :]))
        self.rows[slot] = row


TEXT_ROW_BYTES = 4096
"""What a sample without pictures takes of the ring, where its text does not lie: so many are not read ahead of time."""


def text_batch(request: BatchRequest, memory: Any, block: Block, rows: list[dict[str, Any]]) -> PendingBatch:
    """A batch of samples without pictures, which is complete with their rows."""
    return PendingBatch(request, None, memory, block, 0, rows=rows)


@dataclass(slots=True, eq=False)
class Work:
    """One slot of a batch: the sample that is tried for it, and how far that has come.

    part: what is read of its clip; num_reads, problem, problem_before: how often it was, and what was wrong with the
    last and with the one before.
    clip: offset of the clip arena's block that is this slot's own, None where it has none. color: of its pictures.
    at: stage and since when (time.monotonic), as one value, because the caller reads it without a lock.
    bad: the sample that the plan names, once it was proved bad, and why.
    media: what is read beside the clip, behind it in the block. num_decoded: of the clip and those, one by one.
    """

    number: int
    run: int
    batch: PendingBatch
    slot: int
    sample: SampleRequest
    row: dict[str, Any]
    part: ClipPart
    clip: int | None
    num_reads: int = 0
    problem: str | None = None
    problem_before: str | None = None
    color: tuple[str, str, str] | None = None
    stored: StoredClip | None = None
    at: tuple[str, float] = (WAITING, 0.0)
    media: tuple[MediaPart, ...] = ()
    num_decoded: int = 0
    media_colors: dict[tuple[str, int], PictureColors] = field(default_factory=dict)  # by medium, item
    bad: tuple[SampleRequest, str, str] | None = None  # (sample, key, reason)
    candidates: Iterator[SampleRequest] | None = None
    stats: BatchStats = field(default_factory=BatchStats)

    def enter(self, stage: str) -> None:
        """Be at a stage from now on."""
        self.at = (stage, time.monotonic())

    def task(self, block: int, num_threads: int) -> DecodeTask:
        """What a decoder is to do next with what was read to this offset of the clip arena."""
        if self.num_decoded:
            return self._media_task(block)
        part, batch = self.part, self.batch
        num_frames, picture, window = batch.request.bucket.num_frames, batch.picture, part.window
        view: View = self.row["view"]
        assert picture is not None
        stream = "" if part.stream is None else part.stream.to_json()
        return DecodeTask(
            task_id=self.number,
            generation=self.run,
            block_offset=block,
            table_bytes=part.table_bytes,
            num_bytes=part.num_bytes,
            checks=tuple((start, end, digest.hex()) for start, end, digest in part.checks),
            num_clip_frames=self.row["window_num_frames"],
            pick=part.pick.to_json(),
            crop=None if view.crop is None else (view.crop.left, view.crop.top, view.crop.scale),
            stream=stream,
            key_time=0 if window is None else window.key_time,
            num_threads=num_threads,
            out_offset=batch.block.offset + self.slot * num_frames * picture.num_bytes,
            picture=(picture.height, picture.width, picture.pixels, self._accuracy),
        )

    def _media_task(self, block: int) -> DecodeTask:
        number, room, picture, view = self.num_decoded - 1, self.batch.room, self.batch.picture, self.row["view"]
        one = self.media[number]
        assert room is not None and picture is not None
        crop, part = view.crop, one.part
        known = part.numbers if part.pick.needs_times else None
        return DecodeTask(
            task_id=self.number,
            generation=self.run,
            block_offset=block + self.part.block_bytes + sum(before.part.num_bytes for before in self.media[:number]),
            table_bytes=0,
            num_bytes=part.num_bytes,
            checks=tuple((start, end, digest.hex()) for start, end, digest in part.checks),
            num_clip_frames=one.num_frames,
            pick=part.pick.to_json(),
            crop=None if crop is None else (crop.left, crop.top, crop.scale),
            stream="",
            key_time=0,
            num_threads=1,
            out_offset=self.batch.block.offset + room.place(one.medium, self.slot, one.item)[0],
            picture=(picture.height, picture.width, picture.pixels, self._accuracy),
            numbers=None if known is None else [int(number) for number in known],
        )

    @property
    def block_bytes(self) -> int:
        """Memory for all that is read."""
        return self.part.block_bytes + sum(one.part.num_bytes for one in self.media)

    @property
    def num_bytes(self) -> int:
        """That are read."""
        return self.part.num_bytes + sum(one.part.num_bytes for one in self.media)

    @property
    def span(self) -> tuple[int, int]:
        """From where to where in the tar that lies."""
        places = [(int(self.row["clip_offset"]) + self.part.first_byte, self.part.num_bytes)]
        places += [(one.offset, one.part.num_bytes) for one in self.media]
        return min(start for start, _ in places), max(start + size for start, size in places)

    def wanted(self, block: memoryview) -> Iterator[tuple[int, ClipPart, memoryview]]:
        """(where its clip begins in the tar, part, memory) of all that is read into a block."""
        first = self.part.block_bytes
        yield self.row["clip_offset"], self.part, block[:first]
        for one in self.media:
            yield one.offset, one.part, block[first : first + one.part.num_bytes]
            first += one.part.num_bytes

    def decoded(self, color: PictureColors) -> bool:
        """One more is in its place; whether that was the last."""
        if self.num_decoded:
            one = self.media[self.num_decoded - 1]
            self.media_colors[one.medium.name, one.item] = color
        else:
            self.color = color
        self.num_decoded += 1
        if self.num_decoded <= len(self.media):
            return False
        if self.batch.room is not None:
            memory, picture = self.batch.memory, self.batch.picture
            assert picture is not None
            self.batch.room.blank(memory, self.batch.block.offset, self.slot, set(self.media_colors), picture.pixels)
        return True

    @property
    def label(self) -> str:
        """What of the sample is decoded now, for messages; empty for its clip."""
        return self.media[self.num_decoded - 1].label if self.num_decoded else ""

    @property
    def _accuracy(self) -> Accuracy:
        is_scaled = self.sample.part.dataset.manifest.clips == "copy"
        return self.batch.accuracy or ("exact" if is_scaled else "fast")

    @property
    def is_substitute(self) -> bool:
        """Whether it is another sample than the plan's."""
        return self.bad is not None and self.sample is not self.bad[0]

    def deliver(self) -> None:
        """Count in the batch what this slot cost, and what took its place."""
        total = self.batch.stats
        total.fetch_seconds += self.stats.fetch_seconds
        total.decode_seconds += self.stats.decode_seconds
        total.num_bytes_fetched += self.stats.num_bytes_fetched
        total.num_retries += self.stats.num_retries
        self.batch.colors[self.slot] = self.color
        for (name, item), color in self.media_colors.items():
            self.batch.media_colors[self.slot, name, item] = color
        if self.stored is not None:
            self.batch.clips[self.slot] = self.stored
        if self.is_substitute:
            self.batch.replace_sample(self.slot, self.sample, self.row)
            self.note(self.row["key"])
            total.num_substituted += 1

    def note(self, substitute_key: str | None) -> None:
        """Keep in the batch that its sample was bad, and the key of what takes its place, None if nothing can."""
        if self.bad is None:
            return
        sample, key, reason = self.bad
        self.batch.substituted[self.slot] = Substitution(
            dataset=sample.part.dataset.url,
            shard=sample.shard_info.path,
            bucket_id=sample.bucket_id,
            place=sample.place,
            key=key,
            reason=reason,
            substitute_key=substitute_key,
        )


def sample_error(sample: SampleRequest, key: object, error: str) -> SampleError:
    """SampleError that says which sample it is about."""
    return SampleError(f"{name_sample(sample, key)} cannot be delivered: {error}")


def name_sample(sample: SampleRequest, key: object) -> str:
    """A sample for people: dataset, key (None where it is not known), place, shard and bucket."""
    known = "" if key is None else f"{key} "
    return (
        f"{sample.part.dataset.url}: sample {known}(number {sample.place} of {sample.shard_info.path}, "
        f"bucket {sample.bucket_id})"
    )
