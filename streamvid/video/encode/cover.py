"""Conversion of decoded frames to small upright pictures for an encoder, with one filter graph and without RGB.

The source's color tags (matrix, range, primaries and transfer; guessed if missing) are kept and written. Chroma samples
of 4:2:0 are at the left of their four pixels in video, and at the center in JPEG, WebP and MPEG-1. Clips
place them at the left, and JPEG pixel formats at the center.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from streamvid.video.cropping import NO_MARGINS, Margins
from streamvid.video.decode.mask import MaskReader
from streamvid.video.filters import FilterChain, Filters
from streamvid.video.frame_format import MATRIX_NUMBERS, RANGE_NUMBERS, read_frame_format
from streamvid.video.transform import Transform

if TYPE_CHECKING:
    from av.video.frame import VideoFrame

    from streamvid.video.container import VideoFile

#: Color space → default (matrix, primaries, transfer), as numbers of ITU-T H.273. RGB becomes BT.709.
_TAGS = {
    "rgb": (1, 1, 1),
    "bt709": (1, 1, 1),
    "bt601": (6, 6, 6),
    "fcc": (4, 4, 4),
    "smpte240m": (7, 7, 7),
    "bt2020": (9, 9, 14),
}
_FILTER_NAMES = {"bt709": "bt709", "bt601": "smpte170m", "fcc": "fcc", "smpte240m": "smpte240m", "bt2020": "bt2020ncl"}
#: bitexact: the same pixels on every processor. accurate_rnd: without it, pictures are darker by 0.05 levels.
#: The last two flags use all chroma samples of RGB, and interpolate them.
_SCALING = "area+accurate_rnd+bitexact+full_chroma_inp+full_chroma_int"
_LIMITED, _FULL = 1, 2
_UNSAID, _LAST_PRIMARIES = 2, 12

#: (flip, rotation) → (horizontal, vertical) position of the chroma sample, in 256ths of two pixels, before the rotation
#: that moves it to the left.
_LEFT_BEFORE_TURN = {
    (False, 0): (0, 128),
    (False, 90): (128, 256),
    (False, 180): (256, 128),
    (False, 270): (128, 0),
    (True, 0): (256, 128),
    (True, 90): (128, 256),
    (True, 180): (0, 128),
    (True, 270): (128, 0),
}


@dataclass(frozen=True, slots=True)
class ColorTags:
    """Color tags of a picture, as ITU-T H.273 numbers. color_range uses FFmpeg's values: 1 is limited, 2 is full."""

    matrix: int
    primaries: int
    transfer: int
    color_range: int


class Cover:
    """Converter that turns frames in the format of `frame` into (height, width) pictures, as `Transform.cover` does.

    bars: number of pixels to crop from the displayed frame before scaling, as (left, top, right, bottom).
    pixel_format: "yuv420p" keeps the source's matrix and range (RGB becomes limited-range BT.709); "yuvj420p" and
        "yuvj444p" are full-range BT.601 for JPEG; "rgb24" is RGB; "gray" stores a mask's values (MaskReader).
    tags: color tags of the output.
    Raises ProbeError if the source's colors or orientation are not supported.
    """

    def __init__(
        self,
        video: VideoFile,
        frame: VideoFrame,
        height: int,
        width: int,
        bars: Margins = NO_MARGINS,
        pixel_format: str = "yuv420p",
    ) -> None:
        self.format = read_frame_format(video, frame).without(bars)
        transform = Transform.cover(self.format, height, width)
        self._range = RANGE_NUMBERS[self.format.color_range]
        self._mask = MaskReader(frame, self.format, transform) if pixel_format == "gray" else None
        self.tags = self._tags(frame, pixel_format)
        if self._mask is not None:
            return
        filters = [*transform.crop_filters, *self._scaling(transform, pixel_format), *transform.turn_filters]
        filters += [("setsar", "1"), ("setfield", "prog"), ("sidedata", "mode=delete")]
        self._chain = FilterChain(
            frame, filters, matrix=MATRIX_NUMBERS[self.format.color_space], color_range=self._range
        )

    def picture(self, frame: VideoFrame) -> VideoFrame:
        """Return the converted picture. Raises DecodeError if the frame's size or pixel format has changed."""
        from av.video.frame import PictureType, VideoFrame

        if self._mask is None:
            self.format.check(frame)
            picture = self._chain.run(frame)
        else:
            picture = VideoFrame.from_ndarray(np.ascontiguousarray(self._mask.values(frame)), "gray")
        tags = self.tags
        picture.colorspace, picture.color_range = tags.matrix, tags.color_range
        picture.color_primaries, picture.color_trc = tags.primaries, tags.transfer
        # Otherwise, the encoder would keep the picture type of the source.
        picture.pict_type = PictureType.NONE
        return picture

    def _tags(self, frame: VideoFrame, pixel_format: str) -> ColorTags:
        if pixel_format == "gray":
            return ColorTags(1, 1, 1, _FULL)
        matrix, primaries, transfer = _TAGS[self.format.color_space]
        if self.format.color_space == "bt601" and frame.colorspace == 5:
            matrix, primaries = 5, 5  # the same coefficients, with the primaries of PAL
        # Encoders do not know primaries beyond 12, and write none for them.
        is_known = frame.color_primaries != _UNSAID and frame.color_primaries <= _LAST_PRIMARIES
        primaries = frame.color_primaries if is_known else primaries
        transfer = transfer if frame.color_trc == _UNSAID else frame.color_trc
        if pixel_format == "rgb24":
            return ColorTags(0, primaries, transfer, _FULL)
        if pixel_format.startswith("yuvj"):
            return ColorTags(5, primaries, transfer, _FULL)
        is_rgb = self.format.color_space == "rgb"
        return ColorTags(matrix, primaries, transfer, _LIMITED if is_rgb else self._range)

    def _scaling(self, transform: Transform, pixel_format: str) -> Filters:
        space, has_matrix = self.format.color_space, self.format.color_space != "rgb"
        wanted = "bt709" if not has_matrix else space
        color_range = "limited" if not has_matrix else self.format.color_range
        after: Filters = []
        if pixel_format.startswith("yuvj"):
            if space in ("rgb", "bt601"):
                wanted, color_range = "bt601", "full"
            else:
                # swscale converts matrices through RGB; this filter does not. Primaries stay equal.
                own = f"iall=bt709:ispace={_FILTER_NAMES[space]}:irange={'pc' if self._range == _FULL else 'tv'}"
                after = [("colorspace", f"all=bt709:space=bt470bg:range=pc:fast=1:{own}")]
        options = f"{transform.scale_width}:{transform.scale_height}:flags={_SCALING}"
        if has_matrix:
            options += f":in_color_matrix={space}:in_range={self.format.color_range}"
            options += f":in_chroma_loc={transform.chroma_siting}"
        if pixel_format == "rgb24":
            return [("scale", options), ("format", "rgb24")]
        options += f":out_color_matrix={wanted}:out_range={color_range}"
        if pixel_format != "yuvj444p":
            is_jpeg = pixel_format == "yuvj420p"
            across, down = (128, 128) if is_jpeg else _LEFT_BEFORE_TURN[transform.flip, transform.rotation]
            options += f":out_h_chr_pos={across}:out_v_chr_pos={down}"
        return [("scale", options), ("format", pixel_format.replace("yuvj", "yuv")), *after]
