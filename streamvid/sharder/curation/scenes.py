"""Detection of hard cuts from the changes between consecutive frames, in integers.

A cut changes the whole picture from one frame to the next, and the frames around it change little in comparison. Fast
motion and fades change several frames in a row. A frame therefore begins a scene if its change is large in absolute
terms and in comparison with the changes of its neighbors. The mean of luma is removed first, so that changes of
brightness alone count little.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from streamvid.video.survey.frames import FrameView

_SIDE = 64
_REACH = 2  # frames before and after a frame that count as its neighbors
_LEAST_CHANGE = 10  # mean over all pixels of luma plus both chroma planes, in levels of 0 to 255
_OF_MEAN, _OF_LARGEST = (9, 4), (5, 4)  # least multiples of the mean and of the largest change of the neighbors
_LEAST_FRAMES = 4


class CutDetector:
    """Detects hard cuts in a video. Pictures are scaled so that the longer side is 64 pixels."""

    def __init__(self) -> None:
        self._changes: dict[int, int] = {}  # frame number → change from the previous frame, as a sum over all pixels
        self._last: tuple[int, tuple[npt.NDArray[np.int64], ...]] | None = None
        self._num_pixels = 1

    def see(self, frame: FrameView) -> None:
        """Measure the next frame. Frames must be in ascending order, without gaps in ranges passed to `cuts`."""
        planes = tuple(plane.astype(np.int64) for plane in frame.picture(_SIDE))
        self._num_pixels = planes[0].size
        if self._last is not None and self._last[0] == frame.number - 1:
            self._changes[frame.number] = _change(self._last[1], planes)
        self._last = frame.number, planes

    def cuts(self, start: int, stop: int) -> list[int]:
        """Return the numbers of the frames between `start` and `stop` that begin a new scene.

        There are at least four frames before the first cut, between any two cuts, and after the last cut.
        """
        found: list[int] = []
        last = start
        for number in range(start + _LEAST_FRAMES, stop - _LEAST_FRAMES + 1):
            if number - last >= _LEAST_FRAMES and self._is_cut(number, start, stop):
                found.append(number)
                last = number
        return found

    def _is_cut(self, number: int, start: int, stop: int) -> bool:
        change = self._changes[number]
        around = range(max(start + 1, number - _REACH), min(stop, number + _REACH + 1))
        neighbors = [self._changes[other] for other in around if other != number]
        is_large = change >= _LEAST_CHANGE * self._num_pixels
        is_above_mean = change * len(neighbors) * _OF_MEAN[1] >= sum(neighbors) * _OF_MEAN[0]
        return is_large and is_above_mean and change * _OF_LARGEST[1] >= max(neighbors) * _OF_LARGEST[0]


def _change(before: Sequence[npt.NDArray[np.int64]], after: Sequence[npt.NDArray[np.int64]]) -> int:
    """Return the sum of absolute changes over luma and chroma. Chroma is weighted by the number of pixels it covers."""
    luma, *chroma = (own - other for own, other in zip(after, before, strict=True))
    change = int(np.abs(luma * luma.size - luma.sum()).sum()) // luma.size
    return change + sum(int(np.abs(plane).sum()) * (luma.size // plane.size) for plane in chroma)
