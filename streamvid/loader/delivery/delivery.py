"""Central data structure of the loader: the delivery of one sample to a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from streamvid.buckets.bucket import Bucket
from streamvid.buckets.pick import Pick
from streamvid.errors import SampleError, StreamvidError
from streamvid.loader.delivery.index_rows import IndexRows
from streamvid.loader.mix import SampleRequest
from streamvid.loader.view.clip_part import ClipPart
from streamvid.loader.view.index_row import IndexRow
from streamvid.loader.view.media import MediaPart, media_parts
from streamvid.loader.view.view import RandomChoices, View, view_of

if TYPE_CHECKING:
    from streamvid.dataset.features.tables import SidecarShard
    from streamvid.dataset.manifest import ShardInfo

_NO_FRAMES = View(Pick(1))
_NO_BYTES = ClipPart(Pick(1), (), 0, 0, ())


@dataclass(slots=True)
class Delivery:
    """Content to deliver for one sample, chosen before any of the sample's bytes are read (SAMPLE-1).

    - sample: the requested clip and visit.
    - row: the sample's index row.
    - view: the frames and crop to deliver; empty for a text-only sample.
    - part: the clip's bytes that must be read; empty for a text-only sample.
    - media: the files of the conditioning inputs.
    - fps: frame rate of the delivered frames; 0.0 if unknown.
    - caption: the text to deliver.
    - seed: seed for the training noise.
    """

    sample: SampleRequest
    row: IndexRow
    view: View
    part: ClipPart
    media: tuple[MediaPart, ...]
    fps: float
    caption: str
    seed: int

    @property
    def key(self) -> str:
        """Key of the sample."""
        return self.row.key

    @property
    def tar(self) -> ShardInfo | SidecarShard:
        """Tar that contains the files to read."""
        return self.row.tar or self.sample.file

    @property
    def block_bytes(self) -> int:
        """Size in bytes of the memory for the clip's part and the conditioning inputs that follow it."""
        return self.part.block_bytes + sum(one.file.num_bytes for one in self.media)

    @property
    def num_bytes(self) -> int:
        """Number of bytes to read."""
        return self.part.num_bytes + sum(one.file.num_bytes for one in self.media)

    @property
    def span(self) -> tuple[int, int]:
        """Byte range in the tar that covers all reads, as (start, end)."""
        clip = self.row.clip.offset
        first = clip + min(start for start, _ in self.part.ranges)
        end = clip + max(start + num_bytes for start, num_bytes in self.part.ranges)
        for one in self.media:
            first, end = min(first, one.file.offset), max(end, one.file.offset + one.file.num_bytes)
        return first, end

    def media_place(self, medium: MediaPart) -> int:
        """Return the byte offset of a conditioning input's file in the block of `block_bytes` bytes."""
        before = self.media[: self.media.index(medium)]
        return self.part.block_bytes + sum(one.file.num_bytes for one in before)

    def wanted(self, block: memoryview) -> Iterator[tuple[int, ClipPart, memoryview]]:
        """Yield (offset of the file in the tar, part, memory) for each file to read into `block`."""
        first = self.part.block_bytes
        yield self.row.clip.offset, self.part, block[:first]
        for one in self.media:
            yield one.file.offset, one.part, block[first : first + one.file.num_bytes]
            first += one.file.num_bytes


def deliver(
    sample: SampleRequest, row: IndexRow, bucket: Bucket, part_of: Callable[[IndexRow, Pick], ClipPart]
) -> Delivery:
    """Return the delivery for a sample in the given bucket.

    part_of: function that takes a row and the frames picked from its clip, and returns the bytes to read.
    Raises IntegrityError if the index row is damaged, or ConfigError if the options do not fit the sample.
    """
    part = sample.part
    own, shown_visit = RandomChoices.of(part.seed, row.key, sample.visit), sample.shown_visit
    shown = own if shown_visit == own.visit else replace(own, visit=shown_visit)
    if not bucket.is_text:
        view = view_of(part.view, part.rate, row, bucket.num_frames, shown)
        clip, fps = part_of(row, view.pick), view.pick.delivered_fps
        media = media_parts(row, part.media, row.tar or sample.shard_info, clip) if part.media else ()
    else:
        view, clip, media, fps = _NO_FRAMES, _NO_BYTES, (), row.fps
    text = part.text.text(row, fps, shown, own)
    return Delivery(sample, row, view, clip, media, fps, text, own.sample_seed())


def caption_variant(delivery: Delivery) -> str:
    """Return the variant of the caption that was delivered with a sample; see `TextRule.variant`."""
    sample = delivery.sample
    only = sample.part.text.only_variant(delivery.row)
    if only is not None:
        return only  # hashing the key again would take as long as everything else that is logged
    own = RandomChoices.of(sample.part.seed, delivery.key, sample.visit)
    return sample.part.text.variant(delivery.row, replace(own, visit=sample.shown_visit), own)


def prepare(
    rows: IndexRows, sample: SampleRequest, bucket: Bucket, part_of: Callable[[IndexRow, Pick], ClipPart]
) -> Delivery:
    """Return the delivery for a sample in the given bucket.

    Raises SampleError, which names the sample, if the delivery cannot be prepared.
    """
    key = None
    try:
        row = rows.row(sample, bucket)
        key = row.key
        return deliver(sample, row, bucket, part_of)
    except StreamvidError as error:
        raise sample_error(sample, key, error) from error


def sample_error(sample: SampleRequest, key: str | None, error: object) -> SampleError:
    """Return a SampleError that names the sample."""
    return SampleError(f"{name_sample(sample, key)} cannot be delivered: {error}")


def name_sample(sample: SampleRequest, key: str | None) -> str:
    """Return a sample's name for messages: dataset, key (if known), index, shard and bucket.

    The index counts only the samples that pass the filter.
    """
    known = "" if key is None else f"{key} "
    return (
        f"{sample.part.dataset.url}: sample {known}(index {sample.place} in {sample.shard_info.path}, "
        f"bucket {sample.bucket_id})"
    )
