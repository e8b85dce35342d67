"""Values of masks: class IDs, or 0 and 255. Resampling picks the nearest pixel, so that no new value appears."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from streamvid.errors import ProbeError
from streamvid.video.filters import FilterChain, Filters
from streamvid.video.frame_format import MATRIX_NUMBERS, RANGE_NUMBERS, FrameFormat
from streamvid.video.transform import Transform

if TYPE_CHECKING:
    from av.video.frame import VideoFrame

#: Luma of limited range → value from 0 to 255.
_EXPANDED = np.clip(np.rint((np.arange(256) - 16) * (255 / 219)), 0, 255).astype(np.uint8)


def check_mask_format(pixel_format: str) -> None:
    """Raise ProbeError if frames with this pixel format have more than 8 bits per value."""
    from av.video.format import VideoFormat

    bits = max(part.bits for part in VideoFormat(pixel_format).components)
    if bits > 8:
        raise ProbeError(
            f"the mask has {bits} bits per value ({pixel_format}), but at most 8 are supported; store values from 0 to "
            "255 with 8 bits each",
            kind="picture",
        )


class MaskReader:
    """Reader that resamples the values in mask frames according to a Transform.

    All frames must have the format of `frame`.

    A pixel's value is its palette index in frames with a palette, its red channel in RGB frames, and its luma (0 to
    255) in all other frames. Raises ProbeError for frames with more than 8 bits per value.
    """

    def __init__(self, frame: VideoFrame, frame_format: FrameFormat, transform: Transform) -> None:
        check_mask_format(frame_format.pixel_format)
        self._format, self._turns, self._flip = frame_format, -transform.rotation // 90, transform.flip
        self._rows = _nearest(transform.crop_top, transform.crop_height, transform.scale_height)
        self._columns = _nearest(transform.crop_left, transform.crop_width, transform.scale_width)
        filters, self._plane = _value_plane(frame_format.pixel_format, frame.format.is_rgb)
        self._is_limited = frame_format.color_range == "limited" and frame_format.color_space != "rgb"
        self._chain = None
        if filters:
            matrix, color_range = MATRIX_NUMBERS[frame_format.color_space], RANGE_NUMBERS[frame_format.color_range]
            self._chain = FilterChain(frame, filters, matrix=matrix, color_range=color_range)

    def values(self, frame: VideoFrame) -> NDArray[np.uint8]:
        """Return a frame's values as an upright array of shape (H, W).

        Raises DecodeError if the frame size or pixel format has changed.
        """
        self._format.check(frame)
        if self._chain is not None:
            frame = self._chain.run(frame)
        plane = frame.planes[self._plane]
        stored: NDArray[np.uint8] = np.ndarray((plane.height, plane.line_size), np.uint8, memoryview(plane))
        found = stored.take(self._rows, 0).take(self._columns, 1)
        if self._is_limited:
            found = _EXPANDED[found]
        return np.rot90(found[:, ::-1] if self._flip else found, self._turns)


def _nearest(first: int, size: int, num_values: int) -> NDArray[np.intp]:
    """Split `size` pixels, starting at `first`, into `num_values` equal parts.

    Return the pixel nearest to each part's center.
    """
    return first + (2 * np.arange(num_values) + 1) * size // (2 * num_values)


def _value_plane(pixel_format: str, is_rgb: bool) -> tuple[Filters, int]:
    """Return the filters that put the values into a separate plane, and the number of that plane."""
    if is_rgb:
        return [("format", "gbrp")], 2
    if pixel_format.startswith(("mono", "ya")):
        return [("format", "gray")], 0
    if pixel_format in ("yuyv422", "uyvy422", "yvyu422"):
        return [("format", "yuv422p")], 0
    return [], 0
