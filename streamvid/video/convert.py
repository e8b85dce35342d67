"""From decoded frames to pictures in the caller's memory: one FFmpeg filter graph and one copy, or a copy alone.

PyAV's own reformatter can neither crop nor write into memory that exists already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from streamvid.errors import DecodeError
from streamvid.video.filters import FilterChain
from streamvid.video.frame_format import FrameFormat
from streamvid.video.picture import PictureFormat
from streamvid.video.transform import Transform

if TYPE_CHECKING:
    from av.video.frame import VideoFrame

MATRIX_NUMBERS = {"rgb": 0, "bt709": 1, "fcc": 4, "bt601": 6, "smpte240m": 7, "bt2020": 9}
RANGE_NUMBERS = {"limited": 1, "full": 2}

_YUV420P = ("yuv420p", "yuvj420p")
_EXACT_FLAGS = "area+accurate_rnd+full_chroma_int"


@dataclass(frozen=True, slots=True)
class PictureColor:
    """How yuv420p pictures become RGB: VideoInfo's color_space and color_range, and where colour samples lie.

    siting: "left": level with every other column, between two rows; "center": between columns and rows.
    """

    matrix: str
    color_range: str
    siting: str


class FrameConverter:
    """Turns frames like `frame` into pictures, by a Transform. Alpha is dropped, as FFmpeg does.

    color: of yuv420p pictures, whose colours stay those of the source.
    """

    def __init__(
        self, frame: VideoFrame, frame_format: FrameFormat, transform: Transform, picture: PictureFormat
    ) -> None:
        self._format, self._transform, self._picture = frame_format, transform, picture
        self._matrix = MATRIX_NUMBERS[frame_format.color_space]
        self._range = RANGE_NUMBERS[frame_format.color_range]
        self._turns = transform.rotation != 0 or transform.flip
        is_rgb = frame_format.color_space == "rgb"
        self.color = PictureColor(
            "bt709" if is_rgb else frame_format.color_space,
            "limited" if is_rgb else frame_format.color_range,
            # A turn would take samples that lie left to another side.
            "center" if self._turns or frame_format.has_centered_chroma else "left",
        )
        self._chain = None if self._is_copy() else FilterChain(
            frame, self._filters(), matrix=self._matrix, color_range=self._range
        )  # fmt: skip

    def _is_copy(self) -> bool:
        found, transform = self._format, self._transform
        size = (found.coded_width, found.coded_height)
        return (
            self._picture.pixels == "yuv420p"
            and found.pixel_format in _YUV420P
            and not self._turns
            and (transform.crop_width, transform.crop_height) == size
            and (transform.scale_width, transform.scale_height) == size
        )

    def _filters(self) -> list[tuple[str, str]]:
        transform, picture = self._transform, self._picture
        scale = transform.scale_options
        if picture.pixels == "yuv420p":
            color = self.color
            scale += f":out_color_matrix={color.matrix}:out_range={color.color_range}:out_chroma_loc={color.siting}"
        elif picture.accuracy == "exact":
            scale = scale.replace("flags=area", f"flags={_EXACT_FLAGS}")
        crop = [("crop", transform.crop_options)] if transform.crop_options else []
        return [*crop, ("scale", scale), ("format", picture.pixels)]

    def convert(self, frame: VideoFrame, memory: NDArray[np.uint8]) -> None:
        """Write `frame` into `memory`, one picture's bytes. DecodeError if its size or pixel format changed."""
        expected = self._format
        found = (frame.width, frame.height, frame.format.name)
        if found != (expected.coded_width, expected.coded_height, expected.pixel_format):
            raise DecodeError(
                f"the video changes from {expected.coded_width}x{expected.coded_height} {expected.pixel_format} to "
                f"{found[0]}x{found[1]} {found[2]} at timestamp {frame.pts}: re-encode it to one size"
            )
        if self._chain is not None:
            # The graph was told what the tags mean; a frame that says otherwise would not be let in.
            frame.colorspace, frame.color_range = self._matrix, self._range
            frame = self._chain.run(frame)
        if self._picture.pixels == "rgb24":
            self._copy_plane(frame, 0, memory, 1, 3)
            return
        luma = self._picture.height * self._picture.width
        self._copy_plane(frame, 0, memory[:luma], 1, 1)
        self._copy_plane(frame, 1, memory[luma : luma + luma // 4], 2, 1)
        self._copy_plane(frame, 2, memory[luma + luma // 4 :], 2, 1)

    def _copy_plane(self, frame: VideoFrame, number: int, memory: NDArray[np.uint8], step: int, depth: int) -> None:
        plane = frame.planes[number]
        width, height = self._transform.scale_width // step, self._transform.scale_height // step
        rows = np.frombuffer(memoryview(plane), dtype=np.uint8).reshape(-1, plane.line_size)[:height, : width * depth]
        if not self._turns:
            np.copyto(memory.reshape(height, width * depth), rows)
            return
        pixels = rows.reshape(height, width, depth)
        if self._transform.flip:
            pixels = pixels[:, ::-1]
        turned = np.rot90(pixels, k=-self._transform.rotation // 90)
        np.copyto(memory.reshape(turned.shape), turned)
