"""One sample on its way to a batch: the central value of the loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from streamvid.buckets.bucket import Bucket
from streamvid.buckets.pick import Pick
from streamvid.errors import SampleError, StreamvidError
from streamvid.loader.delivery.index_rows import IndexRows
from streamvid.loader.mix import SampleRequest
from streamvid.loader.view.clip_part import ClipPart
from streamvid.loader.view.index_row import IndexRow
from streamvid.loader.view.media import MediaPart, media_parts
from streamvid.loader.view.view import RandomChoices, View, view_of

_NO_FRAMES = View(Pick(1))
_NO_BYTES = ClipPart(Pick(1), (), 0, 0, ())


@dataclass(frozen=True, slots=True)
class Delivery:
    """Content of one sample's delivery, decided before any of it is read (SAMPLE-1).

    - sample: the clip and the visit. row: its index row.
    - view: the frames and the crop. part: the bytes of the clip to read. Both are empty for a text.
    - media: the files of its conditioning inputs.
    - fps: of the delivered frames, 0.0 if unknown. caption: its text. seed: for the training step's noise.
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
    def block_bytes(self) -> int:
        """Memory for everything that is read: the clip's part, and the media after it."""
        return self.part.block_bytes + sum(one.file.num_bytes for one in self.media)

    @property
    def num_bytes(self) -> int:
        """Bytes to read."""
        return self.part.num_bytes + sum(one.file.num_bytes for one in self.media)

    @property
    def span(self) -> tuple[int, int]:
        """(first byte, end of the last byte) that is read in the tar."""
        first = self.row.clip.offset + self.part.first_byte
        end = first + self.part.num_bytes
        for one in self.media:
            first, end = min(first, one.file.offset), max(end, one.file.offset + one.file.num_bytes)
        return first, end

    def wanted(self, block: memoryview) -> Iterator[tuple[int, ClipPart, memoryview]]:
        """Yield (start of its file in the tar, part, memory) for everything that is read into a block."""
        first = self.part.block_bytes
        yield self.row.clip.offset, self.part, block[:first]
        for one in self.media:
            yield one.file.offset, one.part, block[first : first + one.file.num_bytes]
            first += one.file.num_bytes


def deliver(
    sample: SampleRequest, row: IndexRow, bucket: Bucket, part_of: Callable[[IndexRow, Pick], ClipPart]
) -> Delivery:
    """Decide the view and the text of a delivery for this bucket. part_of: returns what to read for its frames.

    Raises IntegrityError, ConfigError.
    """
    part = sample.part
    own, shown_visit = RandomChoices.of(part.seed, row.key, sample.visit), sample.shown_visit
    shown = own if shown_visit == own.visit else replace(own, visit=shown_visit)
    if not bucket.is_text:
        view = view_of(part.view, part.rate, row, bucket.num_frames, shown)
        clip, fps = part_of(row, view.pick), view.pick.delivered_fps
        media = media_parts(row, part.media, sample.shard_info, clip) if part.media else ()
    else:
        view, clip, media, fps = _NO_FRAMES, _NO_BYTES, (), row.fps
    text = part.text.text(row, fps, shown, own)
    return Delivery(sample, row, view, clip, media, fps, text, own.sample_seed())


def prepare(
    rows: IndexRows, sample: SampleRequest, bucket: Bucket, part_of: Callable[[IndexRow, Pick], ClipPart]
) -> Delivery:
    """Decide the delivery of a sample of this bucket. Raises SampleError."""
    key = None
    try:
        row = rows.row(sample, bucket)
        key = row.key
        return deliver(sample, row, bucket, part_of)
    except StreamvidError as error:
        raise sample_error(sample, key, error) from error


def sample_error(sample: SampleRequest, key: str | None, error: object) -> SampleError:
    """Return an error that names its sample."""
    return SampleError(f"{name_sample(sample, key)} cannot be delivered: {error}")


def name_sample(sample: SampleRequest, key: str | None) -> str:
    """Name a sample for messages: dataset, key (None if unknown), place, shard and bucket."""
    known = "" if key is None else f"{key} "
    return (
        f"{sample.part.dataset.url}: sample {known}(number {sample.place} of {sample.shard_info.path}, "
        f"bucket {sample.bucket_id})"
    )
