"""Which bucket takes a clip.

Buckets compete in classes, one for a named resolution and one for explicit sizes of about one area, from the largest
area down. A class passes over a source much smaller than itself; else the ratio nearest to the source's wins, and of
that size the most frames that the clip can fill. With every frame count in every size this is the order of Open-Sora 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import lcm
from typing import Any, TypeAlias

from streamvid.buckets.bucket import Bucket
from streamvid.buckets.geometry import DEFAULT_MULTIPLE, aspect_table, ratio_fraction, resolution_pixels
from streamvid.errors import ConfigError, NoBucketError

_SharingKey: TypeAlias = tuple[str | None, tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class _Size:
    """One frame size under one nominal ratio, with the buckets that have it."""

    area: int  # nominal pixels of a frame: of the resolution, or of an explicit size
    ratio: int  # nominal height / width in units of 1 / _Class.ratio_unit
    buckets: tuple[Bucket, ...]  # most frames first

    def longest(self, num_frames: int, is_image: bool) -> Bucket | None:
        """The bucket of most frames that the clip can fill."""
        return next((bucket for bucket in self.buckets if _fits(bucket, num_frames, is_image)), None)


@dataclass(frozen=True, slots=True)
class _Class:
    """Sizes that compete by ratio."""

    ratio_unit: int
    sizes: tuple[_Size, ...]


@dataclass(frozen=True)
class BucketTable:
    """The buckets that a dataset is cut into, and the rule that assigns clips to them.

    `candidates` may name one (resolution, T, H, W) under several nominal ratios, as coarse aspect tables do: the first
    stands for all in `buckets`, and every ratio takes part in the assignment. ConfigError for none or a repeated one.
    """

    candidates: tuple[Bucket, ...]
    _classes: tuple[_Class, ...] = field(init=False, repr=False, compare=False)

    def __init__(self, buckets: Iterable[Bucket]) -> None:
        candidates = tuple(buckets)
        if not candidates:
            raise ConfigError("buckets is empty: give at least one, as '832x480@81'")
        ids = [bucket.id for bucket in candidates]
        repeated = sorted({name for name in ids if ids.count(name) > 1}) if len(set(ids)) < len(ids) else []
        if repeated:
            raise ConfigError(f"buckets names {', '.join(repeated)} more than once; keep one of each")
        object.__setattr__(self, "candidates", candidates)
        object.__setattr__(self, "_classes", _classes(candidates))

    @classmethod
    def from_resolutions(
        cls, resolutions: Sequence[str], num_frames: Sequence[int], multiple: int = DEFAULT_MULTIPLE
    ) -> BucketTable:
        """Every ratio of every resolution with every frame count; 1 among `num_frames` makes buckets for images."""
        return cls(
            Bucket(frames, height, width, resolution, ratio)
            for resolution in resolutions
            for ratio, (height, width) in aspect_table(resolution, multiple).items()
            for frames in num_frames
        )

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The distinct buckets, in the order given."""
        return tuple(_shared(self.candidates).values())

    def to_json(self) -> list[dict[str, Any]]:
        """Plain list of all candidates, from which `from_json` makes a table that assigns alike."""
        return [bucket.to_json() for bucket in self.candidates]

    @classmethod
    def from_json(cls, rows: Iterable[dict[str, Any]]) -> BucketTable:
        """Table of what `to_json` gave; ConfigError for anything unfit."""
        return cls(Bucket.from_json(row) for row in rows)

    def assign(self, num_frames: int, height: int, width: int, is_image: bool = False) -> Bucket:
        """The bucket for a clip of `num_frames` frames (at the target fps) of height x width pixels (after rotation).

        Images take one-frame buckets and nothing else does; an image's `num_frames` is not looked at. NoBucketError
        says why there is none; ConfigError if a number is less than 1.
        """
        for name, value in (("num_frames", num_frames), ("height", height), ("width", width)):
            if value < 1:
                raise ConfigError(f"{name}={value}: a clip has at least 1")
        for group in self._classes:
            fitting = [
                # |h/w - nominal| in integers: both sides are multiplied by width * ratio_unit.
                (abs(height * group.ratio_unit - size.ratio * width), -bucket.num_frames, -bucket.num_pixels, bucket)
                for size in group.sizes
                if _is_large_enough(height * width, size.area) and (bucket := size.longest(num_frames, is_image))
            ]
            if fitting:
                return min(fitting, key=lambda choice: choice[:3])[3]
        raise NoBucketError(_why_none(self.candidates, num_frames, height, width, is_image))


def _classes(buckets: Sequence[Bucket]) -> tuple[_Class, ...]:
    """Classes by area descending; of equal areas the one listed first."""
    named: dict[str, list[Bucket]] = {}
    for bucket in buckets:
        if bucket.resolution is not None:
            named.setdefault(bucket.resolution, []).append(bucket)
    groups = list(named.values())
    explicit = [bucket for bucket in buckets if bucket.resolution is None]
    while explicit:
        largest = max(map(_area, explicit))
        groups.append([bucket for bucket in explicit if _is_large_enough(_area(bucket), largest)])
        explicit = [bucket for bucket in explicit if not _is_large_enough(_area(bucket), largest)]
    groups.sort(key=lambda group: max(map(_area, group)), reverse=True)
    shared = _shared(buckets)
    return tuple(_class(group, shared) for group in groups)


def _class(buckets: Sequence[Bucket], shared: Mapping[_SharingKey, Bucket]) -> _Class:
    unit = lcm(*(_nominal_ratio(bucket).denominator for bucket in buckets))
    by_size: dict[tuple[str | None, int, int], list[Bucket]] = {}
    for bucket in buckets:
        by_size.setdefault((bucket.aspect_ratio, bucket.height, bucket.width), []).append(bucket)
    sizes = []
    for group in by_size.values():
        group.sort(key=lambda bucket: bucket.num_frames, reverse=True)
        ratio = int(_nominal_ratio(group[0]) * unit)
        sizes.append(_Size(_area(group[0]), ratio, tuple(shared[_sharing_key(bucket)] for bucket in group)))
    return _Class(unit, tuple(sizes))


def _nominal_ratio(bucket: Bucket) -> Fraction:
    """Height over width that the bucket stands for."""
    if bucket.aspect_ratio is None:
        return Fraction(bucket.height, bucket.width)
    return 1 / ratio_fraction(bucket.aspect_ratio)


def _area(bucket: Bucket) -> int:
    return bucket.height * bucket.width if bucket.resolution is None else resolution_pixels(bucket.resolution)


def _is_large_enough(area: int, nominal_area: int) -> bool:
    """Whether `area` is at least 0.8 of the other: a source slightly smaller than a bucket may be scaled up to it."""
    return 5 * area >= 4 * nominal_area


def _fits(bucket: Bucket, num_frames: int, is_image: bool) -> bool:
    return bucket.is_image if is_image else 1 < bucket.num_frames <= num_frames


def _sharing_key(bucket: Bucket) -> _SharingKey:
    return (bucket.resolution, bucket.shape)


def _shared(buckets: Iterable[Bucket]) -> dict[_SharingKey, Bucket]:
    first: dict[_SharingKey, Bucket] = {}
    for bucket in buckets:
        first.setdefault(_sharing_key(bucket), bucket)
    return first


def _why_none(buckets: Sequence[Bucket], num_frames: int, height: int, width: int, is_image: bool) -> str:
    of_kind = [bucket for bucket in buckets if bucket.is_image == is_image]
    if not of_kind and is_image:
        return "is an image, and no bucket takes 1 frame; add 1 to the frame counts to keep images"
    if not of_kind:
        return "is a video, and every bucket takes 1 frame; add longer frame counts to keep videos"
    size = f"{width}x{height}"
    large_enough = [bucket for bucket in of_kind if _is_large_enough(height * width, _area(bucket))]
    if not large_enough:
        smallest = min(of_kind, key=_area)
        named = f"{_area(smallest)} pixels of {_class_name(smallest)}"
        return f"{size} is under 0.8 of the smallest bucket area that could take it, {named}"
    shortest = min(bucket.num_frames for bucket in of_kind)
    frames = "1 frame" if num_frames == 1 else f"{num_frames} frames"
    if num_frames < shortest:
        return f"has {frames}, the shortest bucket takes {shortest}"
    shortest = min(bucket.num_frames for bucket in large_enough)
    return (
        f"has {frames} of {size}: buckets short enough for it are too large (a source must have 0.8 of their area), "
        f"and the shortest bucket that is small enough takes {shortest} frames"
    )


def _class_name(bucket: Bucket) -> str:
    return bucket.resolution or f"{bucket.width}x{bucket.height}"
