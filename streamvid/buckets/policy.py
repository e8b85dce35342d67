"""Options for choosing a clip's size, and exact calculation of the scaling and cropping that a size requires.

The module classes.py applies the options.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from streamvid.config import check_options, option

RatioPolicy = Literal["nominal", "log"]
FramesPolicy = Literal["resolution-first", "longest"]
OPENSORA_MIN_AREA = Fraction(4, 5)


def cover_scale(height: int, width: int, to_height: int, to_width: int) -> Fraction:
    """Return the factor by which a picture must be scaled to cover another size.

    A factor above 1 enlarges the picture.
    """
    return max(Fraction(to_height, height), Fraction(to_width, width))


def cropped_share(height: int, width: int, to_height: int, to_width: int) -> Fraction:
    """Return the share of a picture that is cropped when the picture is scaled to cover another size.

    The share is at least 0 and less than 1.
    """
    ours, theirs = height * to_width, width * to_height
    return 1 - Fraction(min(ours, theirs), max(ours, theirs))


@dataclass(frozen=True, slots=True)
class Policy:
    """Rules for choosing a clip's bucket from the buckets that the clip can fill. The defaults follow Open-Sora 2.

    ratio: "nominal" chooses the size whose nominal height/width differs least from the clip's (Open-Sora 2); "log"
        chooses the size whose actual height/width is nearest on a logarithmic scale, which minimizes cropping.
    frames: "resolution-first" chooses the largest area that the clip is large enough for, then the most frames at that
        area; "longest" chooses the most frames that the clip can fill at any area, then the largest area with that many
        frames.
    max_upscale: exclude sizes that require upscaling the clip by more than this factor; 1 excludes all upscaling.
    max_crop: exclude sizes that require cropping more than this share of the picture.
    min_area: minimum share of a resolution's area that a clip must have; None means 0.8, or 0 if the bucket
        configuration sets a single size or max_pixels.
    Only the nearest ratio of a resolution is tried; if its size exceeds a limit, the next smaller resolution is tried.
    """

    ratio: RatioPolicy = option(
        "nominal",
        help="How to choose a size: nearest nominal aspect ratio (as in Open-Sora) or least cropping.",
        flag="--ratio-policy",
    )
    frames: FramesPolicy = option(
        "resolution-first",
        help="What to maximize first for each clip: its resolution or its frame count.",
        flag="--frames-policy",
    )
    max_upscale: Fraction | None = option(None, help="Maximum upscaling factor.", metavar="X", above=0, maximum=1000)
    max_crop: Fraction | None = option(
        None, help="Maximum share of the picture to crop.", metavar="SHARE", minimum=0, maximum=1
    )
    min_area: Fraction | None = option(
        None,
        help="Minimum area of a clip, as a share of the resolution's area.",
        metavar="SHARE",
        shown_default="0.8",
        minimum=0,
        maximum=1,
    )

    def __post_init__(self) -> None:
        check_options(self)
