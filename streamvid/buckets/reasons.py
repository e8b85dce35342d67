"""Why a clip has no bucket, in a word and in a sentence that names what would have let it in."""

from __future__ import annotations

from collections.abc import Sequence

from streamvid.buckets.bucket import Bucket
from streamvid.buckets.classes import Shape, SizeClass, broken_limit, candidates, is_large_enough
from streamvid.buckets.policy import OPENSORA_MIN_AREA, Policy, cover_scale, cropped_share


def why_none(classes: Sequence[SizeClass], clip: Shape, policy: Policy) -> tuple[str, str]:
    """(kind, reason) for a clip that no class has a bucket for."""
    of_kind = [
        (size.area, bucket)
        for group in classes
        for size in group.sizes
        for bucket in size.buckets
        if bucket.is_image == clip.is_image
    ]
    if not of_kind and clip.is_image:
        return "no-image-bucket", "is an image, and no bucket takes 1 frame; add 1 to the frame counts to keep images"
    if not of_kind:
        return "no-video-bucket", "is a video, and every bucket takes 1 frame; add longer frame counts to keep videos"
    size = f"{clip.width}x{clip.height}"
    share = OPENSORA_MIN_AREA if policy.min_area is None else policy.min_area
    large_enough = [bucket for area, bucket in of_kind if is_large_enough(clip, area, policy)]
    if not large_enough:
        area, smallest = min(of_kind, key=lambda found: found[0])
        named = f"{area} pixels of {smallest.resolution or f'{smallest.width}x{smallest.height}'}"
        return "too-small", f"{size} is under {float(share):g} of the smallest bucket area that could take it, {named}"
    shortest = min(bucket.num_frames for _, bucket in of_kind)
    frames = "1 frame" if clip.num_frames == 1 else f"{clip.num_frames} frames"
    if clip.num_frames < shortest and not clip.is_image:
        return "too-few-frames", f"has {frames}, the shortest bucket takes {shortest}"
    # Without limits it has candidates, unless those that are short enough are too large.
    loose = Policy(policy.ratio, policy.frames, min_area=policy.min_area)
    refused = [found.buckets[0] for found in candidates(classes, clip, loose)]
    if refused:
        return _limit(refused, clip, policy)
    shortest = min(bucket.num_frames for bucket in large_enough)
    return "too-short-for-its-size", (
        f"has {frames} of {size}: buckets short enough for it are too large (a source must have {float(share):g} of "
        f"their area), and the shortest bucket that is small enough takes {shortest} frames"
    )


def _limit(refused: Sequence[Bucket], clip: Shape, policy: Policy) -> tuple[str, str]:
    """Told of the bucket that comes nearest to keeping the limit."""
    size = f"{clip.width}x{clip.height}"
    scales = {bucket: cover_scale(clip.height, clip.width, bucket.height, bucket.width) for bucket in refused}
    crops = {bucket: cropped_share(clip.height, clip.width, bucket.height, bucket.width) for bucket in refused}
    scaled = [bucket for bucket in refused if broken_limit(bucket, clip, policy) == "max-upscale"]
    if scaled:
        nearest = min(scaled, key=lambda bucket: scales[bucket])
        return "max-upscale", (
            f"{size} would be scaled up {float(scales[nearest]):.3g} times for {nearest.id}, "
            f"max_upscale={float(policy.max_upscale or 0):g} is allowed"
        )
    nearest = min(refused, key=lambda bucket: crops[bucket])
    return "max-crop", (
        f"{size} would lose {float(crops[nearest]):.3g} of its picture in {nearest.id}, "
        f"max_crop={float(policy.max_crop or 0):g} is allowed"
    )
