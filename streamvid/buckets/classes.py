"""Sizes that compete for a clip: by area from the largest down, and within an area by ratio.

class  "512px"   area 262144 ── size 16:9 ── 32 frames, 16 frames
  │                          └─ size 1:1  ── 32 frames, 16 frames
  ▼ too large for the clip, too many frames, a limit broken, or drawn to go on
class  "256px"   area 65536 ── …
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import TypeAlias

from streamvid.buckets.bucket import Bucket
from streamvid.buckets.geometry import ratio_fraction, resolution_pixels
from streamvid.buckets.policy import OPENSORA_MIN_AREA, Policy, cover_scale, cropped_share


@dataclass(frozen=True, slots=True)
class Keep:
    """Of the clips that could fill a bucket: `skip` of them go on to the next shorter one of its class (None: no such
    draw is made), and of the others `accept` are taken, the rest going on to the next class."""

    accept: Fraction = Fraction(1)
    skip: Fraction | None = None


ALWAYS = Keep()

Sharing: TypeAlias = dict[tuple[str | None, tuple[int, int, int]], Bucket]
"""(resolution, shape) → the bucket that stands for all such, under whichever ratio they are named."""


@dataclass(frozen=True, slots=True)
class Size:
    """One frame size under one nominal ratio, with the buckets that have it, most frames first."""

    area: int  # nominal pixels of a frame: of the resolution, or of an explicit size
    ratio: int  # nominal height / width in units of 1 / SizeClass.ratio_unit
    buckets: tuple[Bucket, ...]

    def fitting(self, clip: Shape, num_frames: int | None = None) -> tuple[Bucket, ...]:
        """The buckets that the clip can fill; with `num_frames` only those of so many."""
        if clip.is_image:
            return tuple(bucket for bucket in self.buckets if bucket.is_image)
        return tuple(
            bucket
            for bucket in self.buckets
            if 1 < bucket.num_frames <= clip.num_frames and num_frames in (None, bucket.num_frames)
        )


@dataclass(frozen=True, slots=True)
class SizeClass:
    """Sizes that compete by ratio. keep: of buckets, by frame count; those that are not there take every clip."""

    sizes: tuple[Size, ...]
    ratio_unit: int
    keep: Mapping[int, Keep]

    @property
    def area(self) -> int:
        return max(size.area for size in self.sizes)


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a clip decides: frames at the target rate, pixels after rotation. An image's `num_frames` is not used."""

    num_frames: int
    height: int
    width: int
    is_image: bool


@dataclass(frozen=True, slots=True)
class Candidates:
    """The buckets of one class that a clip can fill, most frames first, and what the class takes of such clips."""

    buckets: tuple[Bucket, ...]
    keep: Mapping[int, Keep]

    def keep_of(self, bucket: Bucket) -> Keep:
        return self.keep.get(bucket.num_frames, ALWAYS)


def candidates(classes: Iterable[SizeClass], clip: Shape, policy: Policy) -> Iterator[Candidates]:
    """In the order in which they are asked. `classes` are given from the largest area down."""
    classes = tuple(classes)
    if policy.frames == "resolution-first" or clip.is_image:
        yield from _by_class(classes, clip, policy, None)
        return
    counts = {bucket.num_frames for group in classes for size in group.sizes for bucket in size.buckets}
    for count in sorted(counts, reverse=True):
        yield from _by_class(classes, clip, policy, count)


def _by_class(
    classes: Iterable[SizeClass], clip: Shape, policy: Policy, num_frames: int | None
) -> Iterator[Candidates]:
    for group in classes:
        nearest = _nearest(group, clip, policy, num_frames)
        if nearest and broken_limit(nearest[0], clip, policy) is None:
            yield Candidates(nearest, group.keep)


def _nearest(group: SizeClass, clip: Shape, policy: Policy, num_frames: int | None) -> tuple[Bucket, ...]:
    """What the clip can fill of the size of the nearest ratio; of equally near ones the most frames, then pixels."""
    fitting = [
        (
            _distance(size, group.ratio_unit, clip, policy),
            -buckets[0].num_frames,
            -buckets[0].num_pixels,
            number,
            buckets,
        )
        for number, size in enumerate(group.sizes)
        if is_large_enough(clip, size.area, policy) and (buckets := size.fitting(clip, num_frames))
    ]
    return min(fitting, key=lambda found: found[:4])[4] if fitting else ()


def _distance(size: Size, ratio_unit: int, clip: Shape, policy: Policy) -> Fraction | int:
    if policy.ratio == "nominal":
        # |h/w - nominal| in integers: both sides are multiplied by width * ratio_unit.
        return abs(clip.height * ratio_unit - size.ratio * clip.width)
    # The share that is cut away grows with |log(one ratio / the other)|, and is exact.
    return cropped_share(clip.height, clip.width, size.buckets[0].height, size.buckets[0].width)


def is_large_enough(clip: Shape, area: int, policy: Policy) -> bool:
    """Whether the clip has `min_area` of an area: one slightly smaller than a bucket may be scaled up to it."""
    share = OPENSORA_MIN_AREA if policy.min_area is None else policy.min_area
    return share.denominator * clip.height * clip.width >= share.numerator * area


def broken_limit(bucket: Bucket, clip: Shape, policy: Policy) -> str | None:
    """Which of the policy's limits a clip would break in the bucket: max-upscale, max-crop or None."""
    shapes = (clip.height, clip.width, bucket.height, bucket.width)
    if policy.max_upscale is not None and cover_scale(*shapes) > policy.max_upscale:
        return "max-upscale"
    if policy.max_crop is not None and cropped_share(*shapes) > policy.max_crop:
        return "max-crop"
    return None


def classes_of(buckets: Sequence[Bucket]) -> tuple[SizeClass, ...]:
    """Classes of listed buckets: one a named resolution, one for explicit sizes of about one area."""
    named: dict[str, list[Bucket]] = {}
    for bucket in buckets:
        if bucket.resolution is not None:
            named.setdefault(bucket.resolution, []).append(bucket)
    groups = list(named.values())
    explicit = [bucket for bucket in buckets if bucket.resolution is None]
    while explicit:
        largest = max(map(area_of, explicit))
        groups.append([bucket for bucket in explicit if 5 * area_of(bucket) >= 4 * largest])
        explicit = [bucket for bucket in explicit if 5 * area_of(bucket) < 4 * largest]
    shared: Sharing = {}
    return by_area(size_class(group, shared) for group in groups)


def by_area(groups: Iterable[SizeClass]) -> tuple[SizeClass, ...]:
    """From the largest area down; of equal areas the one listed first."""
    return tuple(sorted(groups, key=lambda group: group.area, reverse=True))


def size_class(
    buckets: Sequence[Bucket], shared: Sharing, area: int | None = None, keep: Mapping[int, Keep] | None = None
) -> SizeClass:
    """The class of some buckets; `area` in place of what their resolution's name, or their size, stands for.

    Of buckets of one shape, under several ratios, the first in `shared`, which it adds to, stands for all.
    """
    unit = lcm(*(nominal_ratio(bucket).denominator for bucket in buckets))
    by_size: dict[tuple[str | None, int, int], list[Bucket]] = {}
    for bucket in buckets:
        shared.setdefault((bucket.resolution, bucket.shape), bucket)
        by_size.setdefault((bucket.aspect_ratio, bucket.height, bucket.width), []).append(bucket)
    sizes = []
    for group in by_size.values():
        group.sort(key=lambda bucket: bucket.num_frames, reverse=True)
        own_area = area_of(group[0]) if area is None else area
        own = tuple(shared[bucket.resolution, bucket.shape] for bucket in group)
        sizes.append(Size(own_area, int(nominal_ratio(group[0]) * unit), own))
    return SizeClass(tuple(sizes), unit, keep or {})


def nominal_ratio(bucket: Bucket) -> Fraction:
    """Height over width that the bucket stands for."""
    if bucket.aspect_ratio is None:
        return Fraction(bucket.height, bucket.width)
    return 1 / ratio_fraction(bucket.aspect_ratio)


def area_of(bucket: Bucket) -> int:
    """Nominal pixels of a frame of it."""
    return bucket.height * bucket.width if bucket.resolution is None else resolution_pixels(bucket.resolution)
