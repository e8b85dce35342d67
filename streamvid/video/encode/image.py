"""A still image ─► a bucket-sized still image.

JPEG keeps all its colour samples (4:4:4): an image is one picture, so that a third more work to decode costs nothing
beside a clip's sixteen or more, and letters and edges in colour are what images are added to a video data set for.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, cast

from streamvid.errors import DecodeError, ProbeError
from streamvid.video.container import VideoFile, ffmpeg_errors, open_video
from streamvid.video.encode.check import LOSSLESS_PSNR, QualityMeter, picture_checksum
from streamvid.video.encode.cover import Cover
from streamvid.video.encode.profiles import Encoding
from streamvid.video.encode.source import frames_between
from streamvid.video.limits import Limits
from streamvid.video.packets import PacketTable, each_packet, read_packets

if TYPE_CHECKING:
    from av.video.codeccontext import VideoCodecContext


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """An image's file, its usual extension ("jpg" or "png"), FFmpeg's name of its codec, and its luma's PSNR."""

    data: bytes
    extension: str
    codec: str
    psnr_y: float


def encode_image(
    video: VideoFile, table: PacketTable, height: int, width: int, encoding: Encoding, limits: Limits
) -> EncodedImage:
    """JPEG of quantiser 2, BT.601 and full range as JPEG is defined; PNG, without any loss, where `encoding` is ffv1.

    Raises what `encode_clip` does.
    """
    import av
    from av.codec.context import Flags

    is_png = encoding.codec == "ffv1"
    codec, pixel_format = ("png", "rgb24") if is_png else ("mjpeg", "yuvj444p")
    _, frame = next(frames_between(video, table, table.keys[0], 0, 0))
    cover = Cover(video, frame, height, width, pixel_format)
    picture = cover.picture(frame)
    encoder = cast("VideoCodecContext", av.CodecContext.create(codec, "w"))
    encoder.width, encoder.height, encoder.pix_fmt = width, height, pixel_format
    encoder.time_base, encoder.thread_count = Fraction(1, 25), 1
    encoder.color_range, encoder.colorspace = cover.tags.color_range, cover.tags.matrix
    encoder.flags |= Flags.bitexact
    encoder.options = {"pred": "mixed"} if is_png else {"qmin": "2", "qmax": "2", "huffman": "optimal"}
    picture.pts, picture.time_base = 0, encoder.time_base
    data = b"".join(bytes(packet) for packet in [*encoder.encode(picture), *encoder.encode(None)])
    if is_png:
        psnr_y, checksum = LOSSLESS_PSNR, picture_checksum(picture)
    else:
        meter = QualityMeter(codec, b"", height, width)
        meter.expect(0, picture)
        meter.take(0, data)
        psnr_y, checksum = meter.finish(), meter.checksums[0]
    _check_image(data, codec, checksum, limits)
    return EncodedImage(data, "png" if is_png else "jpg", codec, psnr_y)


def _check_image(data: bytes, codec: str, checksum: int, limits: Limits) -> None:
    """DecodeError unless the file `data` is one image of this codec that decodes to this picture."""
    try:
        with open_video(data, limits) as video:
            is_right = video.is_image and video.codec_name == codec and len(read_packets(video).timestamps) == 1
            video.reopen()
            with ffmpeg_errors("it does not decode"):
                frames = [f for packet in [*each_packet(video), None] for f in video.decoder.decode(packet)]
            if not is_right or [picture_checksum(frame) for frame in frames] != [checksum]:
                raise DecodeError("it is another picture")
    except (DecodeError, ProbeError) as error:
        raise DecodeError(f"the image that was written is not what was encoded: {error}") from error
