"""Conditioning inputs of a sample: control videos, reference images, masks and audio (see dataset/README.md).

In the ring, they follow the batch's video, ordered by input, then by sample, then by item. Audio follows all pictures:

    video (B, T pictures) | control (B, T pictures) | reference (B, N, 1 picture) | … | audio (B, C, samples) | speech …
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from streamvid.buckets.pick import Pick
from streamvid.dataset.index import MEDIA_PREFIX
from streamvid.errors import ConfigError, IntegrityError
from streamvid.loader.view.clip_part import ClipPart, whole_clip
from streamvid.loader.view.index_row import IndexRow, SampleFile, sample_file

if TYPE_CHECKING:
    from streamvid.buckets.bucket import Bucket
    from streamvid.dataset.manifest import ShardInfo
    from streamvid.dataset.reader import Dataset
    from streamvid.loader.view.audio import AudioShape
    from streamvid.video.picture import PictureFormat

_ALIGN = 64
ABSENT_COLORS = ("bt709", "full", "left")
"""Colors of the pictures that `PictureRoom.blank` creates."""


@dataclass(frozen=True, slots=True)
class Medium:
    """Conditioning input that a loader delivers.

    num_items: maximum number of items per sample; 1 for an input that is not a list.
    """

    name: str
    is_list: bool = False
    is_mask: bool = False
    is_optional: bool = False
    is_still: bool = False
    num_items: int = 1
    is_audio: bool = False

    @property
    def column(self) -> str:
        """Column in the samples index that lists this input's files."""
        return MEDIA_PREFIX + self.name

    def num_pictures(self, bucket: Bucket) -> int:
        """Return the number of pictures per item, or 0 for audio."""
        return 0 if self.is_audio else 1 if self.is_still else bucket.num_frames


def find_media(names: object, datasets: Sequence[Dataset]) -> tuple[Medium, ...]:
    """Return the named conditioning inputs.

    Raises ConfigError if a dataset lacks an input or defines it differently from the other datasets.
    """
    if isinstance(names, str) or not isinstance(names, Collection):
        shown = names if isinstance(names, str) else "control"
        raise ConfigError(f"media={names!r}: must be a list of names, such as [{shown!r}]")
    if len(set(names)) < len(names):
        raise ConfigError(f"media={list(names)!r} contains a duplicate; list each name once")
    return tuple(_find(name, datasets) for name in names)


def _find(name: str, datasets: Sequence[Dataset]) -> Medium:
    found = [_medium(name, dataset) for dataset in datasets]
    first = found[0]
    for dataset, other in zip(datasets, found, strict=True):
        if (other.is_still, other.is_mask, other.is_audio) != (first.is_still, first.is_mask, first.is_audio):
            raise ConfigError(
                f"media: {name!r} is {_described(first)} in {datasets[0].url} and {_described(other)} in "
                f"{dataset.url}; shard both datasets with the same kind of input, for example "
                f"with --media video:{name}=COLUMN"
            )
    return replace(
        first,
        is_list=any(medium.is_list for medium in found),
        is_optional=any(medium.is_optional for medium in found),
        num_items=max(medium.num_items for medium in found),
    )


def _medium(name: str, dataset: Dataset) -> Medium:
    known = dataset.manifest.media
    if name not in known:
        there = f"available: {', '.join(known)}"
        if not known:
            there = f"the dataset has no conditioning inputs; shard the source again with --media {name}=COLUMN"
        raise ConfigError(f"media: {name!r} is not a conditioning input of {dataset.url}; {there}")
    info = known[name]
    return Medium(name, info.is_list, info.is_mask, info.is_optional, info.is_still, info.max_items, info.is_audio)


def _described(medium: Medium) -> str:
    if medium.is_audio:
        return "audio"
    return f"{'an image' if medium.is_still else 'a video'}{' mask' if medium.is_mask else ''}"


@dataclass(frozen=True, slots=True)
class MediaPart:
    """One file that a delivery reads for a conditioning input: item `item` of `medium`, with the bytes to read."""

    medium: Medium
    item: int
    file: SampleFile
    part: ClipPart

    @property
    def label(self) -> str:
        """Prefix for messages about this file."""
        return f"item {self.item} of its {self.medium.name}: " if self.medium.is_list else f"its {self.medium.name}: "


def media_files(
    items: Sequence[Mapping[str, object]], medium: Medium, num_clip_frames: int, shard: ShardInfo
) -> tuple[SampleFile, ...]:
    """Return a sample's files for a conditioning input, from index values. Raises IntegrityError for invalid values."""
    if len(items) > medium.num_items or not (items or medium.is_optional):
        raise IntegrityError(
            f"the index lists {len(items)} {medium.name} items for the sample, but the manifest allows "
            f"{'up to' if medium.is_optional else '1 to'} {medium.num_items}; copy the dataset again"
        )
    count = 0 if medium.is_audio else 1 if medium.is_still else num_clip_frames
    return tuple(
        sample_file(
            medium.name,
            (item["offset"], item["num_bytes"], item["sha256"], item["num_frames"]),
            shard,
            num_frames=(count, count),
        )
        for item in items
    )


def media_parts(row: IndexRow, media: Sequence[Medium], shard: ShardInfo, clip: ClipPart) -> tuple[MediaPart, ...]:
    """Return the parts to read for a sample's conditioning inputs, with the same frames as `clip`.

    Raises IntegrityError if the sizes of the files contradict the manifest (SAFE-1).
    """
    found: list[MediaPart] = []
    for medium in media:
        pick, numbers = (Pick(1), range(1)) if medium.is_still else (clip.pick, clip.numbers)
        for number, file in enumerate(row.media[medium.name]):
            found.append(MediaPart(medium, number, file, whole_clip(file, pick, numbers)))
    total = sum(one.file.num_bytes for one in found) + row.clip.num_bytes
    if found and total > shard.max_clip_bytes:
        raise IntegrityError(
            f"the index lists {total} bytes for the clip and its conditioning inputs, but the shard table allows at "
            f"most {shard.max_clip_bytes}; copy the dataset again"
        )
    return tuple(found)


@dataclass(frozen=True, slots=True)
class PictureRoom:
    """Layout of a batch's pictures and audio in its memory. Offsets are in bytes from the start of that memory.

    picture: format of the video's pictures; None for a bucket without pictures.
    audio: audio per sample, for the clip and for each audio input; None if no audio is delivered.
    """

    picture: PictureFormat | None
    bucket: Bucket
    num_samples: int
    media: tuple[Medium, ...] = ()
    audio: AudioShape | None = None

    @property
    def num_bytes(self) -> int:
        """Size in bytes of the video, all conditioning inputs and the audio."""
        if self.audio is None:
            return self.start(len(self.media))
        return self.audio_place(self.num_samples, len(self._audio_media))

    @property
    def _audio_media(self) -> tuple[Medium, ...]:
        return tuple(medium for medium in self.media if medium.is_audio)

    def audio_place(self, index: int, number: int = 0) -> int:
        """Return the byte offset of a sample's audio.

        index: index of the sample, or `num_samples` for the end of the last sample's audio.
        number: 0 for the audio of the clip, 1 for the first audio input.
        """
        assert self.audio is not None
        first = -(-self.start(len(self.media)) // _ALIGN) * _ALIGN
        return first + (number * self.num_samples + index) * self.audio.num_bytes

    def start(self, number: int) -> int:
        """Return the byte offset of conditioning input `number`. For `len(media)`, return the end of the last input."""
        before = sum(self._sample_bytes(medium) for medium in self.media[:number])
        return self.num_samples * (self._video_bytes + before)

    def video_place(self, index: int) -> int:
        """Return the byte offset of a sample's video."""
        return index * self._video_bytes

    @property
    def _video_bytes(self) -> int:
        return 0 if self.picture is None else self.bucket.num_frames * self.picture.num_bytes

    def picture_of(self, medium: Medium) -> PictureFormat:
        """Return the format of an input's pictures. For inputs other than masks, it is the format of the video."""
        assert self.picture is not None
        return replace(self.picture, pixels="mask") if medium.is_mask else self.picture

    def place(self, medium: Medium, index: int, item: int) -> int:
        """Return the byte offset of one item in a sample's conditioning input."""
        if medium.is_audio:
            return self.audio_place(index, 1 + self._audio_media.index(medium))
        size = medium.num_pictures(self.bucket) * self.picture_of(medium).num_bytes
        return self.start(self.media.index(medium)) + index * self._sample_bytes(medium) + item * size

    def blank(self, memory: Any, first: int, index: int, present: Collection[tuple[str, int]]) -> None:
        """Fill in the items that sample `index` lacks: pictures with black, and audio with silence.

        first: byte offset of the batch in `memory`.
        present: (input name, item) of each item that the sample has.
        """
        import numpy as np

        for medium in self._audio_media:
            if (medium.name, 0) not in present:
                assert self.audio is not None
                np.ndarray((self.audio.num_bytes,), np.uint8, memory, first + self.place(medium, index, 0))[:] = 0
        for medium in self.media:
            picture = self.picture_of(medium)
            size = picture.num_bytes
            for item in range(medium.num_items):
                if (medium.name, item) not in present:
                    shape = (medium.num_pictures(self.bucket), size)
                    pictures = np.ndarray(shape, np.uint8, memory, first + self.place(medium, index, item))
                    pictures[:] = 0
                    if picture.pixels == "yuv420p":
                        pictures[:, size * 2 // 3 :] = 128

    def _sample_bytes(self, medium: Medium) -> int:
        return medium.num_items * medium.num_pictures(self.bucket) * self.picture_of(medium).num_bytes
