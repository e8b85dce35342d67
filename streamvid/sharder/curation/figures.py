"""Figures of a part of a video, computed from its samples: the frames shown at multiples of 1/8 second.

All sums are integers, and each figure is rounded once, so that it is the same on every machine.

To add a figure, write a class like those below and add it to FIGURES. `CurationOptions.figures` determines when it is
computed, and `CurationOptions.columns` whether it becomes a column. `see` is called for every sample of the file in
order, and then `value` for each part of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from streamvid.sharder.curation.bars import BlackBars
from streamvid.sharder.curation.options import BARS, SIGNATURE
from streamvid.sharder.curation.signature import signature_of, spectrum, to_text
from streamvid.video.survey.frames import FrameView

SAMPLES_PER_SECOND = 8
_MOTION_SIDE, _BLUR_SIDE = 64, 512
_BLUR_REACH = 4
_MILLIONTHS = 1_000_000
_DECIMALS = 10_000

Value: TypeAlias = float | int | str | list[int] | None


class Figure(Protocol):
    """Measurement of a video's pictures, computed sample by sample."""

    def see(self, frame: FrameView, step: int) -> None:
        """Measure the file's next sample.

        step: number of the first multiple of 1/8 second at which the sample is shown.
        """

    def value(self, start: int, stop: int) -> Value:
        """Return the figure for samples `start` to `stop` (exclusive), or None if it is not defined for these samples.

        Samples are numbered in the order in which they were seen.
        """


class Motion:
    """Mean absolute change in luma within 1/8 second, in levels from 0 to 255.

    Pictures are scaled so that the longer side is 64 pixels. The value is None for fewer than two samples. The first
    sample of a part is not compared with the sample before the part.
    """

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._changes: list[int] = []  # from the previous sample, as a sum over all pixels
        self._last: npt.NDArray[np.int16] | None = None

    def see(self, frame: FrameView, step: int) -> None:
        luma = frame.picture(_MOTION_SIDE).luma.astype(np.int16)
        self._changes.append(0 if self._last is None else int(np.abs(luma - self._last).sum(dtype=np.int64)))
        self._steps.append(step)
        self._last = luma

    def value(self, start: int, stop: int) -> Value:
        if stop - start < 2 or self._last is None:
            return None
        num_steps = self._steps[stop - 1] - self._steps[start]
        return _rounded(sum(self._changes[start + 1 : stop]), num_steps * self._last.size)


class Blur:
    """Perceptual blur (Crete et al., "The blur effect", 2007), from 0 (sharp) to 1 (blurred).

    Blurring changes a sharp picture more than a picture that is already blurred. The figure for a sample is the
    share of the differences between neighboring pixels that remains after a 9-pixel box filter. It is computed
    horizontally and vertically, and the larger share is used. The longer side of the picture is at most 512 pixels.
    The value is the mean over all samples, or None if all samples are flat or too small.
    """

    def __init__(self) -> None:
        self._blurs: list[int | None] = []

    def see(self, frame: FrameView, step: int) -> None:
        luma = frame.picture(_BLUR_SIDE).luma.astype(np.int32)
        shares = [share for share in (_kept_share(luma), _kept_share(luma.T)) if share is not None]
        self._blurs.append(max(shares, default=None))

    def value(self, start: int, stop: int) -> Value:
        found = [blur for blur in self._blurs[start:stop] if blur is not None]
        return _rounded(sum(found), len(found) * _MILLIONTHS) if found else None


def _kept_share(luma: npt.NDArray[np.int32]) -> int | None:
    """Return the share (in millionths) of the differences between neighboring rows that remains after a box filter.

    Return None if there are no differences or too few rows.
    """
    size, length = 2 * _BLUR_REACH + 1, len(luma)
    if length <= size:
        return None
    at = slice(_BLUR_REACH + 1, length - _BLUR_REACH)
    # All differences are multiplied by the size of the box, so that they stay integers.
    own = size * np.abs(luma[at] - luma[_BLUR_REACH : length - _BLUR_REACH - 1])
    filtered = np.abs(luma[size:] - luma[: length - size])
    total, lost = int(own.sum(dtype=np.int64)), int(np.maximum(own - filtered, 0).sum(dtype=np.int64))
    return (total - lost) * _MILLIONTHS // total if total else None


class Signature:
    """Signature of part of a video, for finding copies; see signature.py.

    The value is None if most samples are flat.
    """

    def __init__(self) -> None:
        self._spectra: list[npt.NDArray[np.int32]] = []

    def see(self, frame: FrameView, step: int) -> None:
        self._spectra.append(spectrum(frame.picture(_MOTION_SIDE).luma).astype(np.int32))

    def value(self, start: int, stop: int) -> Value:
        words = signature_of(np.array(self._spectra[start:stop], np.int64).reshape(stop - start, -1))
        return None if words is None else to_text(words)


FIGURES: Mapping[str, Callable[[], Figure]] = {
    "motion": Motion,
    "blur": Blur,
    BARS: BlackBars,
    SIGNATURE: Signature,
}


def _rounded(total: int, count: int) -> float:
    return int(total * _DECIMALS / count + 0.5) / _DECIMALS


def sample_steps(timestamps: Sequence[int], time_base: Fraction) -> dict[int, int]:
    """Map the frame number of each sample to its step: the first multiple of 1/8 second at which the frame is shown.

    Multiples are numbered from 0. Frames that are not shown at any multiple are not samples. The last frame is assumed
    to last as long as the frame before it.
    """
    rate = time_base * SAMPLES_PER_SECOND
    end = timestamps[-1] + max(1, timestamps[-1] - timestamps[-2] if len(timestamps) > 1 else 1)
    steps = [-((timestamps[0] - time) * rate.numerator // rate.denominator) for time in (*timestamps, end)]
    return {number: step for number, (step, following) in enumerate(pairwise(steps)) if step < following}
