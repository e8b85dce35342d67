"""A container's description of a video stream: everything that decoders and converters need before the first packet.

With this description, a video's packets decode to the same frames as its file, without opening a container.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from streamvid.errors import DecodeError
from streamvid.video.bitstream import h264
from streamvid.video.cropping import NO_MARGINS, Margins
from streamvid.video.limits import Limits

if TYPE_CHECKING:
    from av.video.codeccontext import VideoCodecContext

MAX_EXTRADATA_BYTES = 16 * 2**10
_MAX_REORDER_DEPTH = 16
#: FFmpeg's own decoder with this name needs special hardware; containers use the first decoder that does not.
_SOFTWARE = {"av1": "libdav1d"}
_INTRA_CODECS = frozenset({"mjpeg", "png", "webp", "bmp"})


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """Description of a video stream. Decoders can be shared by streams with equal descriptions.

    - codec: FFmpeg's name for the codec.
    - extradata: the codec header as stored in the container.
    - coded_width, coded_height, sample_aspect_ratio, rotation, flip, pixel_format, margins: as in VideoInfo.
    - color: matrix, range, primaries and transfer that the container declares, as FFmpeg numbers.
    - reorder_depth, x264_core: as in PacketTable.

    Raises DecodeError for impossible values.
    """

    codec: str
    extradata: bytes
    coded_width: int
    coded_height: int
    pixel_format: str
    sample_aspect_ratio: tuple[int, int]
    rotation: int
    flip: bool
    color: tuple[int, int, int, int]
    reorder_depth: int
    margins: Margins = NO_MARGINS
    x264_core: int = 0

    def __post_init__(self) -> None:
        sizes = (self.coded_width, self.coded_height, *self.sample_aspect_ratio)
        numbers = (*sizes, *self.color, self.rotation, self.reorder_depth, self.x264_core, *self.margins)
        if (
            not all(isinstance(number, int) and 0 <= number < 1 << 31 for number in numbers)
            or (len(sizes), len(self.color), len(self.margins)) != (4, 4, 4)
            or min(sizes) < 1
            or self.x264_core > h264.LAST_DEVIATING_CORE
            or self.rotation not in (0, 90, 180, 270)
            or not all(isinstance(name, str) for name in (self.codec, self.pixel_format))
            or not isinstance(self.flip, bool)
            or len(self.extradata) > MAX_EXTRADATA_BYTES
        ):
            raise DecodeError(f"the index describes an impossible video: {str(self)[:200]}; copy the dataset again")

    def to_json(self) -> str:
        """Return the description as one line of JSON."""
        return _to_json(self)

    @staticmethod
    @lru_cache(256)
    def from_json(text: str) -> StreamInfo:
        """Build a description from the result of `to_json`. Raises DecodeError for any other text."""
        try:
            value = json.loads(text)
            lists = ("sample_aspect_ratio", "color", "margins")
            value |= {name: tuple(map(int, value[name])) for name in lists if name in value}
            value["extradata"] = bytes.fromhex(value["extradata"])
            return StreamInfo(**value)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise DecodeError(
                f"the index has an invalid stream description: {text[:200]!r}; copy the dataset again"
            ) from error


# The clips of a dataset have few distinct streams, and each delivery converts in both directions.
@lru_cache(256)
def _to_json(info: StreamInfo) -> str:
    fields = {**asdict(info), "extradata": info.extradata.hex()}
    for name, usual in (("margins", NO_MARGINS), ("x264_core", 0)):
        if getattr(info, name) == usual:
            del fields[name]
    return json.dumps(fields, sort_keys=True)


def set_up_decoder(decoder: VideoCodecContext, codec: str, limits: Limits, num_threads: int = 1) -> None:
    """Apply the settings that all decoders share."""
    from av.codec.context import ThreadType

    decoder.thread_count = num_threads
    decoder.thread_type = ThreadType.FRAME if num_threads > 1 else ThreadType(0)
    decoder.options = {"max_pixels": str(limits.max_pixels)}
    if codec in _INTRA_CODECS:
        # A truncated picture would decode half gray without an error.
        decoder.options["err_detect"] = "crccheck+explode"


def open_decoder(info: StreamInfo, limits: Limits, num_threads: int = 1) -> VideoCodecContext:
    """Return a decoder for packets without a container. Raises DecodeError if `limits` do not allow the stream."""
    from av.codec.context import CodecContext
    from av.video.codeccontext import VideoCodecContext

    if info.codec not in limits.codecs:
        raise DecodeError(f"the video codec {info.codec} is not allowed; allowed codecs: {', '.join(limits.codecs)}")
    if info.coded_width * info.coded_height > limits.max_pixels:
        raise DecodeError(
            f"a frame has {info.coded_width}x{info.coded_height} pixels; the limit is max_pixels={limits.max_pixels}"
        )
    decoder = CodecContext.create(_SOFTWARE.get(info.codec, info.codec), "r")
    assert isinstance(decoder, VideoCodecContext)
    set_up_decoder(decoder, info.codec, limits, num_threads)
    if info.extradata:
        decoder.extradata = info.extradata
    decoder.width, decoder.height = info.coded_width, info.coded_height
    declare_x264(decoder, info.x264_core)
    return decoder


def declare_x264(decoder: VideoCodecContext, core: int) -> None:
    """Declare to an H.264 decoder that version `core` of x264 wrote the stream. If `core` is 0, do nothing."""
    from av.packet import Packet

    if not core:
        return
    message = h264.x264_message(core, decoder.extradata or b"")
    packet = Packet(len(message))
    packet.update(message)
    decoder.skip_frame = "NONREF"  # so that a packet without a picture is not an error
    decoder.decode(packet)
    decoder.skip_frame = "DEFAULT"


def begin_decoding(decoder: VideoCodecContext, info: StreamInfo) -> None:
    """Prepare a decoder to start at a key frame of this stream.

    The color tags from the decoder's previous stream are replaced.
    """
    decoder.colorspace, decoder.color_range, decoder.color_primaries, decoder.color_trc = info.color
    set_reorder_depth(decoder, info.codec, info.reorder_depth)


def set_reorder_depth(decoder: VideoCodecContext, codec: str, depth: int) -> None:
    """Set the number of frames that an H.264 decoder holds back for reordering. Other decoders are not changed.

    An H.264 decoder that starts in the middle of a video would otherwise lose frames.
    """
    if codec == "h264":
        decoder.reorder_depth = min(depth, _MAX_REORDER_DEPTH)
