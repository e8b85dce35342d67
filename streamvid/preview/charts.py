"""Geometry of charts. Templates draw them as SVG, using classes for colors and no inline styles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streamvid.forecast.contents import BucketContents
from streamvid.forecast.histograms import Histogram
from streamvid.preview.render import number
from streamvid.video.frame_format import FrameFormat
from streamvid.video.transform import Crop, Transform

BAR_WIDTH, BAR_HEIGHT = 240.0, 72.0
_LABEL_PERCENT = 0.62  # of the width, per character
_FULL_SCALE = 1 << 16


@dataclass(frozen=True, slots=True)
class Box:
    """Rectangle with a description."""

    x: float
    y: float
    width: float
    height: float
    title: str = ""
    label: str = ""
    link: str = ""


def bars(histogram: Histogram) -> tuple[Box, ...]:
    """Return the bars of a histogram, for a box of BAR_WIDTH x BAR_HEIGHT."""
    most, count = max(histogram.counts, default=0), len(histogram.counts)
    found = []
    for place, (low, high, value) in enumerate(
        zip(histogram.edges, histogram.edges[1:], histogram.counts, strict=False)
    ):
        height = BAR_HEIGHT * value / most if most else 0.0
        height = max(height, 1.5) if value else 0.0
        title = f"{number(low, 3)} to {number(high, 3)}: {number(value)}"
        found.append(Box(place * BAR_WIDTH / count, BAR_HEIGHT - height, BAR_WIDTH / count, height, title))
    return tuple(found)


def bucket_areas(buckets: Sequence[BucketContents]) -> tuple[Box, ...]:
    """Return one box per bucket. Positions and sizes are percentages of the chart's size.

    The width of a box is the bucket's share of the samples. Its area is proportional to the bucket's number of pixels.
    """
    of_bucket: dict[str, list[BucketContents]] = {}
    for one in buckets:
        of_bucket.setdefault(one.bucket_id, []).append(one)
    total = sum(one.num_samples for one in buckets)
    most = max((one.pixels_per_sample for one in buckets), default=0) or 1
    found, x = [], 0.0
    for bucket_id, parts in of_bucket.items():
        count, pixels = sum(one.num_samples for one in parts), parts[0].pixels_per_sample
        width, height = 100 * count / (total or 1), max(1.0, 100 * pixels / most)
        frames, high, wide = parts[0].shape
        title = f"{bucket_id}: {number(count)} samples of {frames} x {high} x {wide}, {number(count * pixels / 1e6)} MP"
        label = bucket_id if width > _LABEL_PERCENT * len(bucket_id) and height > 15 else ""
        found.append(Box(x, 100 - height, width, height, title, label, bucket_id))
        x += width
    return tuple(found)


def crop_box(width: int, height: int, target: tuple[int, int], crop: Crop | None) -> Box:
    """Return the part of a displayed frame (width x height) that a delivery keeps.

    target: (height, width) of the delivered frames.
    """
    frame = FrameFormat(width, height, (1, 1), 0, False, "yuv420p", "bt709", "limited", False)
    made = Transform.cover(frame, *target, crop)
    return Box(made.crop_left, made.crop_top, made.crop_width, made.crop_height)


def kept_box(width: int, height: int, target: tuple[int, int], smallest: float) -> Box | None:
    """Return the part of a displayed frame that every random crop keeps, or None if no such part exists.

    smallest: minimum side length of the crop, as a fraction of the side length of the largest crop.
    """
    scale = max(1, round(smallest * _FULL_SCALE))
    first = crop_box(width, height, target, Crop(0, 0, scale))
    last = crop_box(width, height, target, Crop((1 << 32) - 1, (1 << 32) - 1, scale))
    right, bottom = first.x + first.width, first.y + first.height
    if last.x >= right or last.y >= bottom:
        return None
    return Box(last.x, last.y, right - last.x, bottom - last.y)
