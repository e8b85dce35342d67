"""Conversion of decoded frames to pictures in the caller's memory: one filter graph and one copy, or only a copy.

PyAV's own reformatter can neither crop nor write into existing memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from streamvid.video.decode.mask import MaskReader
from streamvid.video.filters import FilterChain, Filters
from streamvid.video.frame_format import MATRIX_NUMBERS, RANGE_NUMBERS, FrameFormat
from streamvid.video.picture import PictureFormat
from streamvid.video.transform import Transform

if TYPE_CHECKING:
    from av.video.frame import VideoFrame
    from av.video.plane import VideoPlane

_YUV420P = ("yuv420p", "yuvj420p")
#: (plane of gbrp, channel of rgb24) of red, green and blue.
_PLANAR_RGB = ((2, 0), (0, 1), (1, 2))


@dataclass(frozen=True, slots=True)
class PictureColor:
    """Color properties of yuv420p pictures.

    - matrix, color_range: same as color_space and color_range in VideoInfo.
    - siting: position of chroma samples: "left" (aligned with every other column, midway between two rows) or "center"
      (midway between columns and between rows).
    """

    matrix: str
    color_range: str
    siting: str


class FrameConverter:
    """Converter that turns frames in the format of `frame` into the pictures that a Transform specifies.

    Alpha is dropped.

    color: matrix and range of the source, which yuv420p pictures keep.
    """

    def __init__(
        self, frame: VideoFrame, frame_format: FrameFormat, transform: Transform, picture: PictureFormat
    ) -> None:
        self._format = frame_format
        self._transform = transform
        self._picture = picture
        self._turns = transform.rotation != 0 or transform.flip
        self._is_planar = picture.pixels == "rgb24" and picture.accuracy == "exact"
        is_rgb = frame_format.color_space == "rgb"
        self._mask = MaskReader(frame, frame_format, transform) if picture.pixels == "mask" else None
        self.color = PictureColor(
            "bt709" if is_rgb else frame_format.color_space,
            "limited" if is_rgb else frame_format.color_range,
            # A rotation would move left-sited samples to another side.
            "center" if self._turns or frame_format.has_centered_chroma else "left",
        )
        self._chain = None
        if self._mask is None and not self._is_copy():
            matrix, color_range = MATRIX_NUMBERS[frame_format.color_space], RANGE_NUMBERS[frame_format.color_range]
            self._chain = FilterChain(frame, self._filters(), matrix=matrix, color_range=color_range)

    def _is_copy(self) -> bool:
        is_whole = not self._transform.crop_filters and not self._is_scaled and not self._turns
        return self._picture.pixels == "yuv420p" and self._format.pixel_format in _YUV420P and is_whole

    def _filters(self) -> Filters:
        transform, color, fast = self._transform, self.color, self._transform.scale_options("fast")
        filters = transform.crop_filters
        if self._is_planar:  # direct conversion to rgb24 takes longer
            return [*transform.exact_filters, ("format", "gbrp")]
        kept = f"{fast}:out_color_matrix={color.matrix}:out_range={color.color_range}"
        if self._picture.pixels == "yuv420p":
            # Nothing is summed over channels, so the fast conversion is accurate to a tenth of a level.
            sitings = f"in_chroma_loc={transform.chroma_siting}:out_chroma_loc={color.siting}"
            return [*filters, ("scale", f"{kept}:{sitings}"), ("format", "yuv420p")]
        if self._is_scaled and "420" in self._format.pixel_format and not self._has_odd_size:
            # Scaling and then converting takes half the time of doing both at once, and the picture is less dark.
            filters += [("scale", kept), ("format", "yuv420p")]
        return [*filters, ("scale", fast), ("format", "rgb24")]

    @property
    def _is_scaled(self) -> bool:
        transform = self._transform
        return (transform.crop_width, transform.crop_height) != (transform.scale_width, transform.scale_height)

    @property
    def _has_odd_size(self) -> bool:
        return bool(self._transform.scale_width % 2 or self._transform.scale_height % 2)

    def convert(self, frame: VideoFrame, memory: NDArray[np.uint8]) -> None:
        """Convert `frame` into the buffer `memory`.

        Raises DecodeError if the frame size or pixel format has changed.
        """
        height, width = self._picture.height, self._picture.width
        if self._mask is not None:
            np.copyto(memory.reshape(height, width), self._mask.values(frame))
            return
        self._format.check(frame)
        if self._chain is not None:
            frame = self._chain.run(frame)
        planes = frame.planes  # this call creates objects for all planes
        if self._picture.pixels == "yuv420p":
            luma = height * width
            np.copyto(memory[:luma].reshape(height, width), self._pixels(planes[0], 1))
            size = (height // 2, width // 2)
            np.copyto(memory[luma : luma + luma // 4].reshape(size), self._pixels(planes[1], 1, 2))
            np.copyto(memory[luma + luma // 4 :].reshape(size), self._pixels(planes[2], 1, 2))
        elif self._is_planar:
            pixels = memory.reshape(height, width, 3)
            for plane, channel in _PLANAR_RGB:
                np.copyto(pixels[:, :, channel], self._pixels(planes[plane], 1))
        else:
            np.copyto(memory.reshape(height, width, 3), self._pixels(planes[0], 3))

    def _pixels(self, plane: VideoPlane, depth: int, step: int = 1) -> NDArray[np.uint8]:
        """Return a plane as an upright array of shape (h, w), or (h, w, depth) if each pixel has several bytes."""
        height, width = self._transform.scale_height // step, self._transform.scale_width // step
        is_flat = depth == 1
        shape = (height, width) if is_flat else (height, width, depth)
        strides = (plane.line_size, 1) if is_flat else (plane.line_size, depth, 1)
        # One call instead of frombuffer, reshape and slicing; it also rejects memory beyond the plane.
        pixels: NDArray[np.uint8] = np.ndarray(shape, np.uint8, memoryview(plane), 0, strides)
        if self._transform.flip:
            pixels = pixels[:, ::-1]
        return np.rot90(pixels, k=-self._transform.rotation // 90) if self._turns else pixels
