"""Assignment of clips to a list of buckets, and the reasons why no bucket accepts a clip.

Buckets compete in classes (one per named resolution, one per group of explicit sizes with similar areas), from the
largest area down. A class skips clips that are much smaller than its area. In the first class that does not skip
the clip, the size with the nearest aspect ratio wins, with the largest frame count that the clip can fill. If every
size has every frame count, this is the order of Open-Sora 2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from streamvid.buckets.bucket import Bucket
from streamvid.buckets.classes import Shape, SizeClass, broken_limit, candidates, classes_of, is_large_enough
from streamvid.buckets.policy import OPENSORA_MIN_AREA, Policy, cover_scale, cropped_share
from streamvid.errors import ConfigError, NoBucketError

_DEFAULT_POLICY = Policy()


@dataclass(frozen=True)
class BucketTable:
    """Buckets of a dataset, and the rule that assigns clips to them.

    `candidates` may contain the same (resolution, T, H, W) under several nominal ratios, as coarse aspect tables do.
    In `buckets`, the first of these entries represents all of them, but every ratio takes part in the assignment.
    Raises ConfigError if there are no buckets, or if a bucket is listed more than once.
    """

    candidates: tuple[Bucket, ...]

    def __init__(self, buckets: Iterable[Bucket]) -> None:
        object.__setattr__(self, "candidates", tuple(buckets))
        if not self.candidates:
            raise ConfigError("buckets is empty; add at least one bucket, such as '832x480@81'")
        counts = Counter(bucket.id for bucket in self.candidates)
        repeated = sorted(name for name, count in counts.items() if count > 1)
        if repeated:
            raise ConfigError(f"buckets contains {', '.join(repeated)} more than once; list each bucket only once")

    @cached_property
    def classes(self) -> tuple[SizeClass, ...]:
        """Size classes that compete for a clip, sorted by area in descending order."""
        return classes_of([bucket for bucket in self.candidates if bucket.has_pictures])

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """Distinct buckets, in the order of `candidates`."""
        first: dict[tuple[str | None, tuple[int, int, int]], Bucket] = {}
        for bucket in self.candidates:
            first.setdefault((bucket.resolution, bucket.shape), bucket)
        return tuple(first.values())

    def assign(self, num_frames: int, height: int, width: int, is_image: bool = False) -> Bucket:
        """Return the bucket for a clip.

        num_frames: number of frames at the target rate; ignored for images.
        height, width: size in pixels after rotation.

        One-frame buckets accept only images. Raises NoBucketError, with the reason, if no bucket accepts the clip, and
        ConfigError if a number is less than 1.
        """
        for name, value in (("num_frames", num_frames), ("height", height), ("width", width)):
            if value < 1:
                raise ConfigError(f"{name}={value}: must be at least 1")
        clip = Shape(num_frames, height, width, is_image)
        for found in candidates(self.classes, clip, _DEFAULT_POLICY):
            return found.buckets[0]
        kind, reason = why_none(self.classes, clip, _DEFAULT_POLICY)
        raise NoBucketError(reason, kind=kind)


# Reasons why no bucket accepts a clip.


def why_none(classes: Sequence[SizeClass], clip: Shape, policy: Policy) -> tuple[str, str]:
    """Return (kind, reason) for a clip that no bucket accepts."""
    of_kind = [
        (size.area, bucket)
        for group in classes
        for size in group.sizes
        for bucket in size.buckets
        if bucket.is_image == clip.is_image
    ]
    if not of_kind and clip.is_image:
        return "no-image-bucket", "the clip is an image, but no bucket has 1 frame; add frame count 1 to keep images"
    if not of_kind:
        return "no-video-bucket", "the clip is a video, but all buckets have 1 frame; add larger frame counts"
    size = f"{clip.width}x{clip.height}"
    share = OPENSORA_MIN_AREA if policy.min_area is None else policy.min_area
    large_enough = [bucket for area, bucket in of_kind if is_large_enough(clip, area, policy)]
    if not large_enough:
        area, smallest = min(of_kind, key=lambda found: found[0])
        smallest_area = f"{area} pixels ({smallest.resolution or f'{smallest.width}x{smallest.height}'})"
        which = "image" if clip.is_image else "video"
        return "too-small", (
            f"{size} has less than {float(share):g} of the area of the smallest {which} bucket, {smallest_area}"
        )
    shortest = min(bucket.num_frames for _, bucket in of_kind)
    frames = "1 frame" if clip.num_frames == 1 else f"{clip.num_frames} frames"
    needs = f" and needs {clip.spare} more, as in Open-Sora 1" if clip.spare else ""
    if clip.num_frames - clip.spare < shortest and not clip.is_image:
        return "too-few-frames", f"the clip has {frames}, but the shortest bucket has {shortest}{needs}"
    # Without the limits of the policy there are candidates, unless all buckets that are short enough are too large.
    loose = Policy(policy.ratio, policy.frames, min_area=policy.min_area)
    refused = [found.buckets[0] for found in candidates(classes, clip, loose)]
    if refused:
        return _limit(refused, clip, policy)
    shortest = min(bucket.num_frames for bucket in large_enough)
    return "too-short-for-its-size", (
        f"the clip has {frames} at {size}: buckets that are short enough are too large (a clip must have "
        f"{float(share):g} of their area), and the shortest bucket that is small enough has {shortest} frames{needs}"
    )


def _limit(refused: Sequence[Bucket], clip: Shape, policy: Policy) -> tuple[str, str]:
    """Return (kind, reason) for the bucket whose limit the clip exceeds by the smallest margin."""
    size = f"{clip.width}x{clip.height}"
    scales = {bucket: cover_scale(clip.height, clip.width, bucket.height, bucket.width) for bucket in refused}
    crops = {bucket: cropped_share(clip.height, clip.width, bucket.height, bucket.width) for bucket in refused}
    scaled = [bucket for bucket in refused if broken_limit(bucket, clip, policy) == "max-upscale"]
    if scaled:
        nearest = min(scaled, key=lambda bucket: scales[bucket])
        return "max-upscale", (
            f"{size} would be scaled up by a factor of {float(scales[nearest]):.3g} for {nearest.id}; "
            f"at most max_upscale={float(policy.max_upscale or 0):g} is allowed"
        )
    nearest = min(refused, key=lambda bucket: crops[bucket])
    return "max-crop", (
        f"{size} would lose {float(crops[nearest]):.3g} of its picture in {nearest.id}; "
        f"at most max_crop={float(policy.max_crop or 0):g} is allowed"
    )
