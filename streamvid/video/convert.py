"""From decoded frames to RGB pictures in the caller's memory: one FFmpeg filter graph, one copy.

PyAV's own reformatter can neither crop nor write into memory that exists already.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from streamvid.errors import DecodeError
from streamvid.video.filters import FilterChain
from streamvid.video.frame_format import FrameFormat
from streamvid.video.transform import Transform

if TYPE_CHECKING:
    from av.video.frame import VideoFrame

_MATRIX_NUMBERS = {"rgb": 0, "bt709": 1, "fcc": 4, "bt601": 6, "smpte240m": 7, "bt2020": 9}
_RANGE_NUMBERS = {"limited": 1, "full": 2}


class FrameConverter:
    """Turns frames like `frame` into (H, W, 3) uint8 RGB, by a Transform. Alpha is dropped, as FFmpeg does."""

    def __init__(self, frame: VideoFrame, frame_format: FrameFormat, transform: Transform) -> None:
        self._format, self._transform = frame_format, transform
        self._matrix = _MATRIX_NUMBERS[frame_format.color_space]
        self._range = _RANGE_NUMBERS[frame_format.color_range]
        filters = [("crop", transform.crop_options)] if transform.crop_options else []
        filters += [("scale", transform.scale_options), ("format", "rgb24")]
        self._chain = FilterChain(frame, filters, matrix=self._matrix, color_range=self._range)

    def convert(self, frame: VideoFrame, picture: NDArray[np.uint8]) -> None:
        """Write `frame` into `picture`, (H, W, 3). DecodeError if its size or pixel format is not the first one's."""
        expected = self._format
        found = (frame.width, frame.height, frame.format.name)
        if found != (expected.coded_width, expected.coded_height, expected.pixel_format):
            raise DecodeError(
                f"the video changes from {expected.coded_width}x{expected.coded_height} {expected.pixel_format} to "
                f"{found[0]}x{found[1]} {found[2]} at timestamp {frame.pts}: re-encode it to one size"
            )
        # The graph was told what the tags mean; a frame that says otherwise would not be let in.
        frame.colorspace, frame.color_range = self._matrix, self._range
        plane = self._chain.run(frame).planes[0]
        width, height = self._transform.scale_width, self._transform.scale_height
        rows = np.frombuffer(memoryview(plane), dtype=np.uint8).reshape(-1, plane.line_size)
        pixels = rows[:height, : width * 3].reshape(height, width, 3)
        if self._transform.flip:
            pixels = pixels[:, ::-1]
        np.copyto(picture, np.rot90(pixels, k=-self._transform.rotation // 90))
