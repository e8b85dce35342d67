"""Format of a decoded frame: size, pixel aspect ratio, orientation and color.

Numbers of color matrices and ranges are FFmpeg's (AVColorSpace, AVColorRange). ITU-T H.273 has the same matrix numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from streamvid.errors import DecodeError, ProbeError
from streamvid.video.cropping import NO_MARGINS, Margins
from streamvid.video.filters import FilterChain
from streamvid.video.limits import Limits

if TYPE_CHECKING:
    from collections.abc import Iterable
    from enum import Enum

    from av.video.format import VideoFormat
    from av.video.frame import VideoFrame

    from streamvid.video.container import VideoFile
    from streamvid.video.stream_info import StreamInfo

_MATRICES = {0: "rgb", 1: "bt709", 4: "fcc", 5: "bt601", 6: "bt601", 7: "smpte240m", 9: "bt2020"}
_UNSPECIFIED = {2, 3}
#: The inverse, as FFmpeg's filters expect it.
MATRIX_NUMBERS = {"rgb": 0, "bt709": 1, "fcc": 4, "bt601": 6, "smpte240m": 7, "bt2020": 9}
RANGE_NUMBERS = {"limited": 1, "full": 2}
_RANGES = {1: "limited", 2: "full"}
_HDR_TRANSFERS = {16: "PQ (HDR10, Dolby Vision)", 18: "HLG"}
_BT601_CODECS = {"mjpeg", "webp", "vp8"}
_MAX_PIXEL_ASPECT = 16
#: PyAV does not report the siting of chroma samples. These codecs center them; most others align them at the left.
_CENTERED_CODECS = {"mjpeg", "webp", "mpeg1video", "h263", "flv1"}

#: (a, b, c, d) of the display matrix → (flip, clockwise degrees): the point (x, y) of a decoded frame is shown at
#: (a·x + c·y, b·x + d·y), and a flip precedes the rotation.
_ORIENTATIONS = {
    (1, 0, 0, 1): (False, 0),
    (0, 1, -1, 0): (False, 90),
    (-1, 0, 0, -1): (False, 180),
    (0, -1, 1, 0): (False, 270),
    (-1, 0, 0, 1): (True, 0),
    (0, -1, -1, 0): (True, 90),
    (1, 0, 0, -1): (True, 180),
    (0, 1, 1, 0): (True, 270),
}


@dataclass(frozen=True, slots=True)
class FrameFormat:
    """Format of one decoded frame. The fields have the same meaning as in VideoInfo."""

    coded_width: int
    coded_height: int
    sample_aspect_ratio: tuple[int, int]
    rotation: int
    flip: bool
    pixel_format: str
    color_space: str
    color_range: str
    is_color_guessed: bool
    has_centered_chroma: bool = False
    margins: Margins = NO_MARGINS

    def check(self, frame: VideoFrame) -> None:
        """Raise DecodeError if a frame does not have the expected size and pixel format."""
        found = (frame.width, frame.height, frame.format.name)
        if found != (self.coded_width, self.coded_height, self.pixel_format):
            raise DecodeError(
                f"the video changes from {self.coded_width}x{self.coded_height} {self.pixel_format} to "
                f"{found[0]}x{found[1]} {found[2]} at timestamp {frame.pts}; re-encode it to a single size and pixel "
                "format"
            )

    def without(self, bars: Margins) -> FrameFormat:
        """Return the format with additional margins.

        bars: margins to add to the displayed frame: (left, top, right, bottom), in pixels. Each resulting margin is
            rounded up to an even number of pixels in the decoded frame.
        """
        if not any(bars):
            return self
        # `turns` counts the quarter turns that move the displayed frame back to the decoded one.
        turns = self.rotation // 90
        left, top, right, bottom = (*bars[turns:], *bars[:turns])
        if self.flip:
            left, right = right, left
        horizontal, vertical = self.sample_aspect_ratio
        left, right = (-(-side * vertical // horizontal) for side in (left, right))
        added = zip(self.margins, (left, top, right, bottom), strict=True)
        left, top, right, bottom = (side + more + (side + more) % 2 for side, more in added)
        return replace(self, margins=(left, top, right, bottom))

    @property
    def display_size(self) -> tuple[int, int]:
        """Display size (width, height), with square pixels and after rotation."""
        horizontal, vertical = self.sample_aspect_ratio
        left, top, right, bottom = self.margins
        width = max(1, (2 * (self.coded_width - left - right) * horizontal + vertical) // (2 * vertical))
        size = (width, self.coded_height - top - bottom)
        return size[::-1] if self.rotation in (90, 270) else size


def read_frame_format(video: VideoFile, frame: VideoFrame) -> FrameFormat:
    """Return the format of `frame`, decoded from `video`.

    Raises ProbeError for unsupported colors, an unsupported orientation or an extreme pixel aspect ratio.
    """
    _check_transfer(frame, video.limits)
    flip, rotation = _orientation(frame)
    return _make_format(frame, video.codec_name, _pixel_aspect(video), rotation, flip, video.margins)


def frame_format_of(info: StreamInfo, frame: VideoFrame) -> FrameFormat:
    """Return the format of a frame that was decoded without a container. Raises ProbeError for unsupported colors."""
    return _make_format(frame, info.codec, info.sample_aspect_ratio, info.rotation, info.flip, info.margins)


def _make_format(
    frame: VideoFrame,
    codec: str,
    sample_aspect_ratio: tuple[int, int],
    rotation: int,
    flip: bool,
    margins: Margins,
) -> FrameFormat:
    color_space, is_guessed = _color_space(codec, frame)
    return FrameFormat(
        coded_width=frame.width,
        coded_height=frame.height,
        sample_aspect_ratio=sample_aspect_ratio,
        rotation=rotation,
        flip=flip,
        pixel_format=frame.format.name,
        color_space=color_space,
        color_range=_RANGES.get(frame.color_range) or ("full" if _is_full_by_definition(frame.format) else "limited"),
        is_color_guessed=is_guessed,
        has_centered_chroma=codec in _CENTERED_CODECS,
        margins=_even(margins, frame.width, frame.height),
    )


def _even(margins: Margins, width: int, height: int) -> Margins:
    """Return the margins with offsets and sizes rounded down to even numbers, as the ffmpeg program does for 4:2:0.

    The result is NO_MARGINS if the margins are impossible.
    """
    left, top, right, bottom = margins
    wide, high = (width - left - right) // 2 * 2, (height - top - bottom) // 2 * 2
    if not any(margins) or min(wide, high) < 2:
        return NO_MARGINS
    left, top = left // 2 * 2, top // 2 * 2
    return left, top, width - left - wide, height - top - high


def _check_transfer(frame: VideoFrame, limits: Limits) -> None:
    if frame.color_trc in _HDR_TRANSFERS and not limits.allow_hdr:
        raise ProbeError(
            f"the video is HDR ({_HDR_TRANSFERS[frame.color_trc]}); tone-map it to SDR first, for example with "
            "FFmpeg's zscale and tonemap filters, or accept it with --hdr allow (the frames then look washed out)",
            kind="hdr",
        )


def _color_space(codec: str, frame: VideoFrame) -> tuple[str, bool]:
    if frame.format.is_rgb or "pal8" in frame.format.name:
        return "rgb", False
    matrix = frame.colorspace
    if matrix in _UNSPECIFIED or (matrix == 0 and not frame.format.is_rgb):
        if codec in _BT601_CODECS:
            return "bt601", True
        longer, shorter = max(frame.width, frame.height), min(frame.width, frame.height)
        return ("bt709" if longer >= 1280 or shorter >= 720 else "bt601"), True
    if matrix not in _MATRICES:
        raise ProbeError(
            f"the video's color matrix (ITU-T H.273 MatrixCoefficients {matrix}) is not supported; convert the video "
            "to BT.709, for example with FFmpeg's zscale filter",
            kind="color",
        )
    return _MATRICES[matrix], False


def _is_full_by_definition(pixel_format: VideoFormat) -> bool:
    return pixel_format.is_rgb or pixel_format.name.startswith(("yuvj", "pal8", "gray", "ya", "mono"))


def _pixel_aspect(video: VideoFile) -> tuple[int, int]:
    ratio = video.stream.sample_aspect_ratio or video.decoder.sample_aspect_ratio
    if not ratio or ratio <= 0:
        return (1, 1)
    if not 1 / _MAX_PIXEL_ASPECT <= ratio <= _MAX_PIXEL_ASPECT:
        raise ProbeError(
            f"the video's pixel aspect ratio is {ratio}; it must be from 1/{_MAX_PIXEL_ASPECT} to {_MAX_PIXEL_ASPECT}; "
            "re-encode the video with square pixels",
            kind="picture",
        )
    return ratio.numerator, ratio.denominator


def _orientation(frame: VideoFrame) -> tuple[bool, int]:
    matrix = _display_matrix(frame)
    if matrix is None:
        return False, 0
    numbers = memoryview(matrix).cast("i")
    a, b, c, d = numbers[0], numbers[1], numbers[3], numbers[4]
    scale = max(map(abs, (a, b, c, d))) or 1
    signs = tuple(math.floor(value / scale + 0.5) for value in (a, b, c, d))
    if signs not in _ORIENTATIONS or any(
        abs(value / scale - sign) > 0.01 for value, sign in zip((a, b, c, d), signs, strict=True)
    ):
        degrees = round(math.degrees(math.atan2(b, a)))
        raise ProbeError(
            f"the video's display matrix rotates the picture by {degrees} degrees or distorts it; only rotations by "
            "multiples of 90 degrees and flips are supported; re-encode the video upright",
            kind="picture",
        )
    return _ORIENTATIONS[signs]


def _display_matrix(frame: VideoFrame) -> bytes | None:
    from av.sidedata.sidedata import SideDataContainer, Type

    # PyAV frees the metadata of side data that FFmpeg frees again. Only ICC profiles have metadata: their name in PNG.
    frame = _without(frame, ["ICC_PROFILE"])
    try:
        # `frame.side_data` is such a container too, but it and the frame reference each other: the picture would stay
        # in memory until the garbage collector runs, hundreds of clips later.
        container = SideDataContainer(frame)  # type: ignore[call-arg]
    except ValueError:
        # PyAV before 19 raises if it has no name for a kind of side data, such as a photo's EXIF block: drop these.
        known = max(int(kind.value) for kind in cast("Iterable[Enum]", Type))
        container = SideDataContainer(_without(frame, range(known + 1, known + 20)))  # type: ignore[call-arg]
    try:
        return bytes(container["DISPLAYMATRIX"])
    except KeyError:
        return None


def _without(frame: VideoFrame, kinds: Iterable[object]) -> VideoFrame:
    """Return a new reference to `frame` without side data of the given kinds. The call takes 0.06 ms."""
    drop = [("sidedata", f"mode=delete:type={kind}") for kind in kinds]
    matrix = frame.colorspace
    # A file may declare any number as its matrix, but filters refuse unknown ones. 2 is "unspecified".
    found = FilterChain(frame, drop, matrix=min(matrix, 2), color_range=frame.color_range).run(frame)
    frame.colorspace = matrix
    return found
