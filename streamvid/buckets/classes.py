"""Classes of sizes that compete for a clip, and the buckets to which a clip may be assigned.

Classes are tried from the largest area down. Within a class, the size with the nearest ratio wins.

class  "512px"   area 262144 ── size 16:9 ── 32 frames, 16 frames
  │                          └─ size 1:1  ── 32 frames, 16 frames
  ▼ too large for the clip, too many frames, a limit exceeded, or passed on by a draw
class  "256px"   area 65536 ── …
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import TypeAlias, assert_never

from streamvid.buckets.bucket import Bucket
from streamvid.buckets.geometry import ratio_fraction, resolution_pixels
from streamvid.buckets.policy import OPENSORA_MIN_AREA, Policy, cover_scale, cropped_share


@dataclass(frozen=True, slots=True)
class Keep:
    """Shares of clips that a bucket skips or accepts, relative to the clips that reach the bucket and can fill it.

    skip: share that moves on to the bucket with the next lower frame count in the class; if None, no clip moves on and
        no random number is drawn.
    accept: share of the remaining clips that the bucket accepts; all other clips move on to the next class.
    """

    accept: Fraction = Fraction(1)
    skip: Fraction | None = None


ALWAYS = Keep()

Sharing: TypeAlias = dict[tuple[str | None, tuple[int, int, int]], Bucket]
"""Maps (resolution, shape) to the bucket that represents all buckets with this resolution and shape, at any ratio."""


@dataclass(frozen=True, slots=True)
class Size:
    """Frame size with one nominal ratio, and the buckets of this size, sorted by frame count in descending order."""

    area: int  # nominal pixels of a frame, from the resolution or the explicit size
    ratio: int  # nominal height / width in units of 1 / SizeClass.ratio_unit
    buckets: tuple[Bucket, ...]

    def fitting(self, clip: Shape, num_frames: int | None = None) -> tuple[Bucket, ...]:
        """Return the buckets that the clip can fill. With `num_frames`, return only buckets with that frame count."""
        if clip.is_image:
            return tuple(bucket for bucket in self.buckets if bucket.is_image)
        return tuple(
            bucket
            for bucket in self.buckets
            if 1 < bucket.num_frames <= clip.num_frames - clip.spare and num_frames in (None, bucket.num_frames)
        )


@dataclass(frozen=True, slots=True)
class SizeClass:
    """Class of sizes. A clip's aspect ratio determines which size of the class is used.

    keep: maps a frame count to the shares of clips to keep. Buckets without an entry keep every clip.
    """

    sizes: tuple[Size, ...]
    ratio_unit: int
    keep: Mapping[int, Keep]

    @property
    def area(self) -> int:
        return max(size.area for size in self.sizes)


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of a clip: number of frames at the target rate, and size in pixels after rotation.

    The number of frames is ignored for images.

    spare: number of frames that a video must have in addition to its bucket's frame count.
    """

    num_frames: int
    height: int
    width: int
    is_image: bool
    spare: int = 0


@dataclass(frozen=True, slots=True)
class Candidates:
    """A clip's candidate buckets in one class, sorted by frame count in descending order.

    keep: maps a frame count to the shares of clips to keep.
    """

    buckets: tuple[Bucket, ...]
    keep: Mapping[int, Keep]

    def keep_of(self, bucket: Bucket) -> Keep:
        return self.keep.get(bucket.num_frames, ALWAYS)


def candidates(classes: Iterable[SizeClass], clip: Shape, policy: Policy) -> Iterator[Candidates]:
    """Yield the candidate buckets for a clip, in the order in which they are tried.

    `classes` must be sorted by area in descending order.
    """
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
    """Return the buckets that the clip can fill, considering only the size with the nearest ratio.

    On a tie, the size with the longest bucket wins; on a further tie, the size whose longest bucket has the most
    pixels wins.
    """
    best: tuple[Fraction | int, int, int] | None = None
    nearest: tuple[Bucket, ...] = ()
    for size in group.sizes:
        if not is_large_enough(clip, size.area, policy):
            continue
        distance = _distance(size, group.ratio_unit, clip, policy)
        if (best is None or distance <= best[0]) and (buckets := size.fitting(clip, num_frames)):
            rank = (distance, -buckets[0].num_frames, -buckets[0].num_pixels)
            if best is None or rank < best:
                best, nearest = rank, buckets
    return nearest


def _distance(size: Size, ratio_unit: int, clip: Shape, policy: Policy) -> Fraction | int:
    match policy.ratio:
        case "nominal":  # |h/w - nominal| in integers: both sides are multiplied by width * ratio_unit
            return abs(clip.height * ratio_unit - size.ratio * clip.width)
        case "log":  # the cropped share is exact, and grows with |log(ratio of the clip / ratio of the size)|
            return cropped_share(clip.height, clip.width, size.buckets[0].height, size.buckets[0].width)
    assert_never(policy.ratio)


def is_large_enough(clip: Shape, area: int, policy: Policy) -> bool:
    """Return True if the clip's area is at least `policy.min_area` (default 0.8) times `area`."""
    share = OPENSORA_MIN_AREA if policy.min_area is None else policy.min_area
    return share.denominator * clip.height * clip.width >= share.numerator * area


def broken_limit(bucket: Bucket, clip: Shape, policy: Policy) -> str | None:
    """Return the limit that the clip would exceed in the bucket ("max-upscale" or "max-crop"), or None."""
    shapes = (clip.height, clip.width, bucket.height, bucket.width)
    if policy.max_upscale is not None and cover_scale(*shapes) > policy.max_upscale:
        return "max-upscale"
    if policy.max_crop is not None and cropped_share(*shapes) > policy.max_crop:
        return "max-crop"
    return None


def classes_of(buckets: Sequence[Bucket]) -> tuple[SizeClass, ...]:
    """Group buckets into classes: one per named resolution, and one per group of explicit sizes with similar areas."""
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
    """Return the classes, sorted by area in descending order. Classes of equal area keep their order."""
    return tuple(sorted(groups, key=lambda group: group.area, reverse=True))


def size_class(
    buckets: Sequence[Bucket], shared: Sharing, area: int | None = None, keep: Mapping[int, Keep] | None = None
) -> SizeClass:
    """Build a size class from `buckets`.

    area: nominal area of the class in pixels; None to derive it from the resolution or the size of the buckets.
    shared: maps (resolution, shape) to the bucket that represents all buckets with this resolution and shape. This
        function adds missing entries.
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
    """Return the nominal height / width of the bucket."""
    if bucket.aspect_ratio is None:
        return Fraction(bucket.height, bucket.width)
    return 1 / ratio_fraction(bucket.aspect_ratio)


def area_of(bucket: Bucket) -> int:
    """Return the nominal number of pixels per frame in the bucket."""
    return bucket.height * bucket.width if bucket.resolution is None else resolution_pixels(bucket.resolution)


# Choices of a clip among the candidates of all classes.


@dataclass(frozen=True, slots=True)
class ClipFacts:
    """Properties that determine the bucket of a source, or of one window of a source.

    num_frames: number of stored frames, before a frame rate rule selects some of them.
    height, width: size in pixels, after rotation.
    fps: average frame rate; None if unknown.
    seconds: time from the start of the first frame to the end of the last frame; None if unknown.
    """

    num_frames: int
    height: int
    width: int
    fps: float | None = None
    seconds: Fraction | None = None
    is_image: bool = False


@dataclass(frozen=True, slots=True)
class Choices:
    """Buckets to which a clip may be assigned, with their probabilities, in the order in which they are tried.

    The probabilities sum to at most 1; the remainder is the probability that no bucket is chosen. `reason` explains the
    remainder, and `kind` is one of too-few-frames, too-small, too-short-for-its-size, no-image-bucket, no-video-bucket,
    max-upscale, max-crop, unknown-duration or probability. Both are empty if the probabilities sum to 1.
    """

    options: tuple[tuple[Bucket, Fraction], ...]
    reason: str = ""
    kind: str = ""

    def draw(self, u: Fraction | float) -> Bucket | None:
        """Return the bucket for a uniform random number `u` in [0, 1), or None if the clip gets no bucket."""
        end = Fraction(0)
        for bucket, probability in self.options:
            end += probability
            if u < end:
                return bucket
        return None

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """All buckets with a probability above 0."""
        return tuple(bucket for bucket, _ in self.options)

    @property
    def rest(self) -> Fraction:
        """Probability that the clip gets no bucket."""
        return 1 - sum((probability for _, probability in self.options), Fraction(0))


def exact_choices(groups: Iterable[Candidates]) -> dict[Bucket, Fraction]:
    """Return the probability with which a clip is assigned to each bucket, omitting buckets with probability 0.

    groups: candidates, in the order in which they are tried. Once the probabilities sum to 1, the remaining groups
        are ignored.
    """
    found: dict[Bucket, Fraction] = {}
    arriving = Fraction(1)
    for group in groups:
        here, leaving = arriving, Fraction(0)
        for bucket in group.buckets:
            keep = group.keep_of(bucket)
            tried = here * (1 - (keep.skip or 0))
            here -= tried
            if taken := tried * keep.accept:
                found[bucket] = found.get(bucket, Fraction(0)) + taken
            leaving += tried - taken
            if not here:  # nothing remains for shorter buckets
                break
        arriving = here + leaving
        if not arriving:
            break
    return found


def walk(groups: Iterable[Candidates], uniforms: Iterator[float], is_image: bool) -> Bucket | None:
    """Return the bucket that Open-Sora 2 would assign if it drew the numbers in `uniforms`.

    This function consumes as many numbers as Open-Sora would draw.
    """
    for group in groups:
        for bucket in group.buckets:
            keep = group.keep_of(bucket)
            if keep.skip is not None and (keep.skip >= 1 or next(uniforms) <= float(keep.skip)):
                continue
            # An image consumes a draw even if every image is accepted.
            if (keep.accept >= 1 and not is_image) or next(uniforms) <= float(keep.accept):
                return bucket
            break
    return None
