"""Black bars: borders of a video that stay black in all of its frames."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from streamvid.video.cropping import NO_MARGINS, Margins
from streamvid.video.survey.frames import MIN_SIDE, FrameView

_WHOLE = 1 << 15  # a longer side than that of any video, so that pictures are not scaled
_MAX_MEAN, _MAX_LEVEL = 8, 64  # luma of a row or column of a bar: compression blurs edges and adds noise
_MIN_SHARE = (1, 3)  # of each side that must remain


class BlackBars:
    """Margins that are black in all samples, in pixels of the displayed frame.

    Each margin is rounded up to an even number. Samples that are completely black, as in a fade, are ignored. The value
    is None if all samples are black, or if less than a third of the width or height would remain.
    """

    def __init__(self) -> None:
        self._found: list[Margins | None] = []
        self._size = (0, 0)

    def see(self, frame: FrameView, step: int) -> None:
        """Measure the next sample."""
        luma = frame.picture(_WHOLE).luma
        # Smaller pictures are enlarged, so that their pixels are not those of the frame.
        self._found.append(_bars(luma) if min(luma.shape) > MIN_SIDE else NO_MARGINS)
        self._size = luma.shape[1], luma.shape[0]

    def value(self, start: int, stop: int) -> list[int] | None:
        """Return the bars (left, top, right, bottom) for samples `start` to `stop` (exclusive), or None if unknown."""
        found = [bars for bars in self._found[start:stop] if bars is not None]
        if not found:
            return None
        left, top, right, bottom = (min(sides) + min(sides) % 2 for sides in zip(*found, strict=True))
        share, divisor = _MIN_SHARE
        for side, cut in zip(self._size, (left + right, top + bottom), strict=True):
            if (side - cut) * divisor < side * share:
                return None
        return [left, top, right, bottom]


def _bars(luma: npt.NDArray[np.uint8]) -> Margins | None:
    """Return the black margins of one picture, or None if the whole picture is black."""
    if all(edge.max() > _MAX_LEVEL for edge in (luma[0], luma[-1], luma[:, 0], luma[:, -1])):
        return NO_MARGINS
    vertical = _ends(luma)
    if vertical is None:
        return None
    top, bottom = vertical
    horizontal = _ends(luma[top : len(luma) - bottom].T)
    return None if horizontal is None else (horizontal[0], top, horizontal[1], bottom)


def _ends(luma: npt.NDArray[np.uint8]) -> tuple[int, int] | None:
    """Return how many rows are black at the start and at the end, or None if all rows are black."""
    is_black = (luma.sum(axis=1, dtype=np.int64) <= _MAX_MEAN * luma.shape[1]) & (luma.max(axis=1) <= _MAX_LEVEL)
    if is_black.all():
        return None
    return int(is_black.argmin()), int(is_black[::-1].argmin())
