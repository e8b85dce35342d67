"""What is under way: batches, and each sample of one on its way from the store to its place in the ring."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from streamvid.errors import SampleError, StreamvidError
from streamvid.loader.arena import Block
from streamvid.loader.clip_part import ClipPart
from streamvid.loader.mix import SampleRequest
from streamvid.loader.quarantine import Substitution
from streamvid.loader.requests import BatchRequest
from streamvid.loader.stats import BatchStats
from streamvid.loader.view import View
from streamvid.loader.worker import DecodeTask
from streamvid.video.picture import Accuracy, PictureFormat

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
    clips: dict[int, StoredClip] = field(default_factory=dict)  # by slot
    substituted: dict[int, Substitution] = field(default_factory=dict)  # by slot
    is_counted: bool = False
    digest: int = 0  # of the batch, where processes that share it compare it

    @property
    def num_bytes(self) -> int:
        """What it takes of the ring, as far as that is known from the start."""
        if self.picture is None:
            return max((clip.offset + clip.table_bytes + clip.num_bytes for clip in self.clips.values()), default=0)
        return len(self.rows) * self.request.bucket.num_frames * self.picture.num_bytes

    def replace_sample(self, slot: int, sample: SampleRequest, row: dict[str, Any]) -> None:
        """Another sample in a slot."""
        samples = self.request.samples
        self.request = replace(self.request, samples=(*samples[:slot], sample, *samples[slot + 1 :]))
        self.rows[slot] = row


@dataclass(slots=True, eq=False)
class Work:
    """One slot of a batch: the sample that is tried for it, and how far that has come.

    part: what is read of its clip; num_reads, problem, problem_before: how often it was, and what was wrong with the
    last and with the one before.
    clip: offset of the clip arena's block that is this slot's own, None where it has none. color: of its pictures.
    at: stage and since when (time.monotonic), as one value, because the caller reads it without a lock.
    bad: the sample that the plan names, once it was proved bad, and why.
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
    bad: tuple[SampleRequest, str, str] | None = None  # (sample, key, reason)
    candidates: Iterator[SampleRequest] | None = None
    stats: BatchStats = field(default_factory=BatchStats)

    def enter(self, stage: str) -> None:
        """Be at a stage from now on."""
        self.at = (stage, time.monotonic())

    def task(self, block: int, num_threads: int) -> DecodeTask:
        """What a decoder is to do with what was read to this offset of the clip arena."""
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
