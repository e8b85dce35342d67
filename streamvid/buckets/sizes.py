"""Sizes and frame counts that follow the clip instead of a list, as DiffSynth-Studio chooses them."""

from __future__ import annotations

from math import sqrt

from streamvid.buckets.frames import FrameRule


def dynamic_size(
    height: int, width: int, max_pixels: int, multiple: int, fixed_height: int | None, fixed_width: int | None
) -> tuple[int, int]:
    """(height, width) that DiffSynth-Studio gives a picture; a side is 0 where the picture is smaller than `multiple`.

    A fixed height and width are taken as they are. Where either is None the picture keeps its shape: scaled down to
    `max_pixels` where it has more, then each side rounded down to the multiple, even where it has fewer.
    """
    if fixed_height is not None and fixed_width is not None:
        return fixed_height, fixed_width
    if height * width > max_pixels:
        # In floats, as theirs: 1120x1120 at 921600 pixels is 959.99 and so 944, where exact numbers say 960. Square
        # roots and quotients of floats are the same on every machine.
        scale = sqrt(height * width / max_pixels)
        height, width = int(height / scale), int(width / scale)
    return height // multiple * multiple, width // multiple * multiple


def taken_frames(available: int, max_frames: int, rule: FrameRule) -> int:
    """How many of a clip's frames DiffSynth-Studio takes: `max_frames`, or of a shorter clip what the rule allows."""
    return max_frames if available >= max_frames else rule.floor(available)
