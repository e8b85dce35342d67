"""Geometry of the conversion from frame to picture: cropping, scaling to cover, and rotation, all with integers.

The crop comes first (it only shifts pointers and copies nothing), then one scaling pass, then the rotation while the
small picture is copied. The crop box is centered, as large as the frame allows, and has the shape of the target in
display space, so that non-square pixels become square. Offsets and sizes are even, because most frames have one chroma
sample per 2 x 2 pixels; the shape is accurate to within one pixel of the box.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from streamvid.errors import ConfigError
from streamvid.video.filters import Filters
from streamvid.video.frame_format import FrameFormat
from streamvid.video.info import VideoInfo
from streamvid.video.picture import Accuracy

_DEEP_YUV = re.compile(r"(yuva?4[0-9]{2}p)(9|10|12|14|16)(le|be)")

_TURNS: dict[int, Filters] = {
    0: [],
    90: [("transpose", "clock")],
    180: [("hflip", ""), ("vflip", "")],
    270: [("transpose", "cclock")],
}


@dataclass(frozen=True, slots=True)
class Crop:
    """Part of a frame to keep. The part has the aspect ratio of the target picture.

    left, top: offset of the part in the displayed frame, as a share of the available margin, in units of 2**-32 (0 to
        2**32 - 1). A crop therefore selects the same part regardless of how a video is rotated.
    scale: ratio of the part's side lengths to the side lengths of the largest possible part, in units of 2**-16 (1 to
        2**16).
    """

    left: int
    top: int
    scale: int = 1 << 16

    def __post_init__(self) -> None:
        if not (0 <= self.left < 1 << 32 and 0 <= self.top < 1 << 32 and 0 < self.scale <= 1 << 16):
            raise ConfigError(
                f"invalid crop {self}: left and top must be from 0 to 2**32 - 1, and scale from 1 to 2**16"
            )


@dataclass(frozen=True, slots=True)
class Transform:
    """Conversion from decoded frames with one size and color format to RGB pictures. Created by `cover`.

    - source_width, source_height: size of the decoded frame.
    - crop_left, crop_top, crop_width, crop_height: crop box.
    - scale_width, scale_height: size of the scaled box before the rotation. For a quarter turn, these are the picture's
      height and width.
    - flip, rotation, color_space, color_range, has_centered_chroma: as in VideoInfo.
    - limited_format: pixel format of an intermediate limited-range frame. The exact conversion needs it for full-range
      frames with more than 8 bits, because swscale divides their values by 2 ** bits instead of by the largest value.
      For other frames, it is "".
    """

    source_width: int
    source_height: int
    crop_left: int
    crop_top: int
    crop_width: int
    crop_height: int
    scale_width: int
    scale_height: int
    rotation: int
    flip: bool
    color_space: str
    color_range: str
    has_centered_chroma: bool = False
    limited_format: str = ""

    def __post_init__(self) -> None:
        inside = (
            0 <= self.crop_left <= self.source_width - self.crop_width
            and 0 <= self.crop_top <= self.source_height - self.crop_height
        )
        if not inside or min(self.crop_width, self.crop_height, self.scale_width, self.scale_height) < 1:
            raise ConfigError(f"invalid transform {self}: the crop box must be inside the frame and at least 1x1")
        if self.rotation not in _TURNS:
            raise ConfigError(f"transform: rotation is {self.rotation}; it must be one of {sorted(_TURNS)}")

    @classmethod
    def cover(cls, source: FrameFormat | VideoInfo, height: int, width: int, crop: Crop | None = None) -> Transform:
        """Return the transform from frames in the format of `source` to upright pictures of (height, width) pixels.

        crop: the part to keep; None to keep the largest centered part.
        """
        if height < 1 or width < 1:
            raise ConfigError(f"transform: the target is {width}x{height}; both sides must be at least 1")
        scale_width, scale_height = (height, width) if source.rotation in (90, 270) else (width, height)
        aspect_width, aspect_height = source.sample_aspect_ratio
        # The box w x h with w * aspect_width / (h * aspect_height) = scale_width / scale_height.
        shape_width, shape_height = scale_width * aspect_height, scale_height * aspect_width
        margin_left, margin_top, margin_right, margin_bottom = source.margins
        full_width = source.coded_width - margin_left - margin_right
        full_height = source.coded_height - margin_top - margin_bottom
        box_width, box_height = full_width, full_height
        if full_width * shape_height >= full_height * shape_width:
            box_width = _even_quotient(full_height * shape_width, shape_height, full_width)
        else:
            box_height = _even_quotient(full_width * shape_height, shape_width, full_height)
        left, top = (full_width - box_width) // 4 * 2, (full_height - box_height) // 4 * 2
        if crop is not None:
            box_width, box_height = _scaled(box_width, crop.scale), _scaled(box_height, crop.scale)
            share_left, share_top = _as_stored(crop, source.rotation, source.flip)
            left = _even_place(full_width - box_width, share_left)
            top = _even_place(full_height - box_height, share_top)
        return cls(
            source_width=source.coded_width,
            source_height=source.coded_height,
            crop_left=margin_left + left,
            crop_top=margin_top + top,
            crop_width=box_width,
            crop_height=box_height,
            scale_width=scale_width,
            scale_height=scale_height,
            rotation=source.rotation,
            flip=source.flip,
            color_space=source.color_space,
            color_range=source.color_range,
            has_centered_chroma=source.has_centered_chroma,
            limited_format=_limited_format(source.pixel_format) if source.color_range == "full" else "",
        )

    @property
    def crop_filters(self) -> Filters:
        """FFmpeg's crop filter; empty if the whole frame is used."""
        if (self.crop_width, self.crop_height) == (self.source_width, self.source_height):
            return []
        return [("crop", f"{self.crop_width}:{self.crop_height}:{self.crop_left}:{self.crop_top}:exact=1")]

    @property
    def turn_filters(self) -> Filters:
        """FFmpeg filters that turn the scaled picture upright."""
        return [*([("hflip", "")] if self.flip else []), *_TURNS[self.rotation]]

    @property
    def chroma_siting(self) -> str:
        """FFmpeg's name for the siting of a frame's chroma samples."""
        return "center" if self.has_centered_chroma else "left"

    @property
    def exact_filters(self) -> Filters:
        """FFmpeg filters that crop and scale exactly, without a conversion to RGB."""
        limit: Filters = []
        if self.limited_format:
            matrices = f"in_color_matrix={self.color_space}:out_color_matrix={self.color_space}"
            limit = [("scale", f"flags=accurate_rnd:{matrices}:in_range=full:out_range=limited")]
            limit += [("format", self.limited_format)]
        return [*self.crop_filters, *limit, ("scale", self.scale_options("exact"))]

    def scale_options(self, accuracy: Accuracy) -> str:
        """Return the options for FFmpeg's scale filter: size, area averaging and input colors."""
        flags, color_range = "area", self.color_range
        if accuracy == "exact":
            color_range = "limited" if self.limited_format else color_range
            # Without in_chroma_loc, swscale assumes centered chroma, regardless of a frame's tag.
            flags = f"area+accurate_rnd+full_chroma_int:in_chroma_loc={self.chroma_siting}"
        colors = "" if self.color_space == "rgb" else f":in_color_matrix={self.color_space}:in_range={color_range}"
        return f"{self.scale_width}:{self.scale_height}:flags={flags}{colors}"

    @property
    def ffmpeg_filter(self) -> str:
        """Filter for the exact conversion by the ffmpeg program (7.1 or newer), for comparison with a tensor.

        `ffmpeg -noautorotate -i FILE -fps_mode passthrough -vf FILTER -f rawvideo -pix_fmt rgb24 OUT` writes bytes in
        the order (frame, height, width, RGB).
        """
        steps = [*self.exact_filters, ("format", "rgb24"), *self.turn_filters]
        return ",".join(f"{name}={options}" if options else name for name, options in [*steps, ("setsar", "1")])


def _limited_format(pixel_format: str) -> str:
    found = _DEEP_YUV.fullmatch(pixel_format)
    # Measured for 10 bits: the bias is 0.38 without an intermediate format, 0.12 with one of 10 or 16 bits, and 0.05
    # with one of 12 bits.
    return f"{found[1]}12le".replace("yuva", "yuv") if found else ""


def _as_stored(crop: Crop, rotation: int, flip: bool) -> tuple[int, int]:
    """Return (left, top) of a crop in the stored frame, before it is mirrored and then rotated for display."""
    most = (1 << 32) - 1
    left, top = {
        0: (crop.left, crop.top),
        90: (crop.top, most - crop.left),
        180: (most - crop.left, most - crop.top),
        270: (most - crop.top, crop.left),
    }[rotation]
    return (most - left if flip else left), top


def _scaled(side: int, scale: int) -> int:
    return side if scale == 1 << 16 else _even_quotient(side * scale, 1 << 16, side)


def _even_place(room: int, share: int) -> int:
    """Map `share`, in units of 2**-32, to an even offset up to `room`. Each offset gets an equal range of shares."""
    return (share * (room // 2 + 1) >> 32) * 2


def _even_quotient(numerator: int, denominator: int, limit: int) -> int:
    """Return numerator / denominator, rounded to an even number from 2 to `limit`; `limit` itself may be odd."""
    nearest = (numerator + denominator) // (2 * denominator) * 2
    return min(limit, max(2, nearest))
