"""Further media of a sample, as a loader delivers them: control videos, reference images, masks (dataset/README.md).

In the ring they lie behind the batch's video, medium by medium, sample by sample, item by item:

    video (B, T pictures) | control (B, T pictures) | reference (B, N, 1 picture) | …
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from streamvid.buckets.pick import Pick
from streamvid.dataset.index import MEDIA_PREFIX
from streamvid.errors import ConfigError, IntegrityError
from streamvid.loader.delivery.clip_part import ClipPart

if TYPE_CHECKING:
    import torch

    from streamvid.buckets.bucket import Bucket
    from streamvid.dataset.manifest import ShardInfo
    from streamvid.dataset.reader import Dataset
    from streamvid.loader.batch.batch import Planes
    from streamvid.loader.options import Layout

ABSENT_COLORS = ("bt709", "full", "left")
"""Of the pictures that `MediaRoom.blank` makes."""

_SHA256_BYTES = 32


@dataclass(frozen=True, slots=True)
class Medium:
    """One medium of a loader. num_items: of a list the most that a sample has, 1 where it is none."""

    name: str
    is_list: bool = False
    is_mask: bool = False
    is_optional: bool = False
    is_still: bool = False
    num_items: int = 1

    @property
    def column(self) -> str:
        """Of the samples index."""
        return MEDIA_PREFIX + self.name

    def num_pictures(self, bucket: Bucket) -> int:
        """Of each item."""
        return 1 if self.is_still else bucket.num_frames


def find_media(names: Sequence[str], datasets: Sequence[Dataset]) -> tuple[Medium, ...]:
    """The media of these names, as all datasets have them. ConfigError where one has them not, or otherwise."""
    if isinstance(names, str):
        raise ConfigError(f"media={names!r} is a string; give a list of names: [{names!r}]")
    if len(set(names)) < len(names):
        raise ConfigError(f"media={list(names)!r} names one twice; leave one out")
    return tuple(_find(name, datasets) for name in names)


def _find(name: str, datasets: Sequence[Dataset]) -> Medium:
    found = [_medium(name, dataset) for dataset in datasets]
    first = found[0]
    for dataset, other in zip(datasets, found, strict=True):
        if (other.is_still, other.is_mask) != (first.is_still, first.is_mask):
            raise ConfigError(
                f"media: {name!r} is {_described(first)} in {datasets[0].url} and {_described(other)} in "
                f"{dataset.url}; say which it is when both are sharded (image:{name}, video:{name}, mask:{name})"
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
        there = f"it has {', '.join(known)}" if known else "it has none: shard it with --media NAME=COLUMN"
        raise ConfigError(f"media: {name!r} is not in the dataset at {dataset.url}; {there}")
    info = known[name]
    return Medium(
        name,
        is_list=info.is_list,
        is_mask=info.is_mask,
        is_optional=info.is_optional,
        is_still=info.is_still,
        num_items=info.max_items,
    )


def _described(medium: Medium) -> str:
    return f"{'one picture' if medium.is_still else 'a video'}{' and a mask' if medium.is_mask else ''}"


@dataclass(frozen=True, slots=True)
class MediaPart:
    """One file of a medium that a delivery reads.

    - medium, item: which; offset: of its first byte in the tar; part: what is read of it.
    """

    medium: Medium
    item: int
    offset: int
    part: ClipPart
    num_frames: int

    @property
    def label(self) -> str:
        """For messages."""
        return f"its {self.medium.name}, number {self.item}: " if self.medium.is_list else f"its {self.medium.name}: "


def media_parts(
    row: Mapping[str, Any], media: Sequence[Medium], shard: ShardInfo, clip: ClipPart
) -> tuple[MediaPart, ...]:
    """What is read of a sample's media, of which `clip` is read of its clip: frames of the same numbers.

    row: with the media's columns under "media". Raises IntegrityError (SAFE-1).
    """
    if not media:
        return ()
    found: list[MediaPart] = []
    for medium in media:
        items = row["media"][medium.name] or []
        if len(items) > medium.num_items or not (items or medium.is_optional):
            raise IntegrityError(
                f"the index says that the sample has {len(items)} of {medium.name}, the manifest "
                f"{'up to' if medium.is_optional else '1 to'} {medium.num_items}; copy the dataset again"
            )
        num_frames = 1 if medium.is_still else int(row["window_num_frames"])
        for number, item in enumerate(items):
            _check_item(item, medium, num_frames, shard)
            checks = ((0, item["num_bytes"], item["sha256"]),)
            pick, numbers = (Pick(1), range(1)) if medium.is_still else (clip.pick, clip.numbers)
            part = ClipPart(pick, numbers, 0, item["num_bytes"], checks)
            found.append(MediaPart(medium, number, item["offset"], part, num_frames))
    total = sum(one.part.num_bytes for one in found) + int(row["clip_bytes"])
    if total > shard.max_clip_bytes:
        raise IntegrityError(
            f"the index says that clip and media have {total} bytes, the shard's max_clip_bytes is "
            f"{shard.max_clip_bytes}; copy the dataset again"
        )
    return tuple(found)


def _check_item(item: Mapping[str, Any], medium: Medium, num_frames: int, shard: ShardInfo) -> None:
    bounds = {
        "num_bytes": (1, shard.max_clip_bytes),
        "offset": (0, shard.num_bytes - (item["num_bytes"] or 0)),
        "num_frames": (num_frames, num_frames),
    }
    for name, (least, most) in bounds.items():
        if not isinstance(item[name], int) or not least <= item[name] <= most:
            raise IntegrityError(
                f"the index says {name}={item[name]!r} of {medium.name}, allowed are {least} to {most}; copy the "
                "dataset again"
            )
    if not isinstance(item["sha256"], bytes) or len(item["sha256"]) != _SHA256_BYTES:
        raise IntegrityError(f"the index has no checksum of {medium.name}; copy the dataset again")


@dataclass(frozen=True, slots=True)
class MediaRoom:
    """Where media lie in a batch's memory, in bytes from its start."""

    media: tuple[Medium, ...]
    bucket: Bucket
    num_samples: int
    picture_bytes: int

    @property
    def num_bytes(self) -> int:
        """Of the video and all media."""
        return self.start(len(self.media))

    def start(self, number: int) -> int:
        """Where medium `number` begins."""
        before = sum(self._sample_bytes(medium) for medium in self.media[:number])
        return self.num_samples * (self.bucket.num_frames * self.picture_bytes + before)

    def place(self, medium: Medium, slot: int, item: int) -> tuple[int, int]:
        """(first byte, bytes) of an item of a slot's sample."""
        size = medium.num_pictures(self.bucket) * self.picture_bytes
        return self.start(self.media.index(medium)) + slot * self._sample_bytes(medium) + item * size, size

    def blank(self, memory: Any, first: int, slot: int, present: Collection[tuple[str, int]], pixels: str) -> None:
        """Make black what a slot's sample has not. first: the batch's place in `memory`; present: (medium, item)."""
        import numpy as np

        for medium in self.media:
            for item in range(medium.num_items):
                if (medium.name, item) not in present:
                    place, _ = self.place(medium, slot, item)
                    shape = (medium.num_pictures(self.bucket), self.picture_bytes)
                    pictures = np.ndarray(shape, np.uint8, memory, first + place)
                    pictures[:] = 0
                    if pixels == "yuv420p":
                        pictures[:, self.picture_bytes * 2 // 3 :] = 128

    def _sample_bytes(self, medium: Medium) -> int:
        return medium.num_items * medium.num_pictures(self.bucket) * self.picture_bytes


def media_bytes(media: Sequence[Medium], bucket: Bucket, picture_bytes: int) -> int:
    """What a sample's media take of a ring."""
    return sum(medium.num_items * medium.num_pictures(bucket) for medium in media) * picture_bytes


@dataclass(frozen=True, eq=False, slots=True)
class _Pictures:
    """value: of a medium, its items like samples of their own."""

    medium: Medium
    value: torch.Tensor | Planes
    layout: Layout

    def tensor(self) -> torch.Tensor:
        """As it is delivered."""
        from streamvid.loader.batch.batch import Planes

        pictures = self.value.rgb() if isinstance(self.value, Planes) else self.value
        if self.medium.is_mask:
            pictures = pictures.narrow(self.layout.index("C"), 0, 1)
        if not self.medium.is_list:
            return pictures
        return pictures.reshape(-1, self.medium.num_items, *pictures.shape[1:])


class BatchMedia(Mapping[str, "torch.Tensor"]):
    """`batch.media`: uint8 tensors by name, in the batch's layout and where it is; see Batch."""

    def __init__(self, pictures: Mapping[str, _Pictures]) -> None:
        self._pictures = dict(pictures)
        self._made: dict[str, torch.Tensor] = {}

    @staticmethod
    def of(values: Mapping[Medium, torch.Tensor | Planes], layout: Layout) -> BatchMedia:
        """values: (B x N, T, H, W, C) seen in `layout`, or planes of as many."""
        return BatchMedia({medium.name: _Pictures(medium, value, layout) for medium, value in values.items()})

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._made:
            self._made[name] = self._pictures[name].tensor()
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._pictures)

    def __len__(self) -> int:
        return len(self._pictures)

    def map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> BatchMedia:
        """The same with `function` of each tensor as it is held."""
        from streamvid.loader.batch.batch import Planes

        def mapped(value: torch.Tensor | Planes) -> torch.Tensor | Planes:
            return value.map_tensors(function) if isinstance(value, Planes) else function(value)

        return BatchMedia({name: replace(one, value=mapped(one.value)) for name, one in self._pictures.items()})

    def tensors(self) -> Iterator[torch.Tensor]:
        """All tensors as they are held."""
        from streamvid.loader.batch.batch import Planes

        for one in self._pictures.values():
            if isinstance(one.value, Planes):
                yield one.value.planes
                yield one.value.table
            else:
                yield one.value

    def __reduce__(self) -> Any:
        return BatchMedia, (self._pictures,)
