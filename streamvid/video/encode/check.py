"""Verification of an encoded clip: its quality, and the contents of the finished file.

Quality is measured as the encoder returns packets, so that only the pictures in progress are kept in memory. The
finished file is then read like any other file, and must contain the same pictures at the exact times, with the expected
key frames and colors.
"""

from __future__ import annotations

import math
import zlib
from fractions import Fraction
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from streamvid.errors import DecodeError, ProbeError
from streamvid.video.container import ffmpeg_errors, open_video
from streamvid.video.encode.cover import ColorTags
from streamvid.video.encode.profiles import Encoding
from streamvid.video.encode.timeline import Timeline
from streamvid.video.limits import Limits
from streamvid.video.packets import PacketTable, decoded, read_packets

if TYPE_CHECKING:
    from av.packet import Packet
    from av.video.codeccontext import VideoCodecContext
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

#: PSNR reported for a clip without any error, in decibels.
LOSSLESS_PSNR = 100.0


def psnr(square_error: int, num_values: int) -> float:
    """Return the PSNR in decibels (at most LOSSLESS_PSNR) for a sum of squared errors over 8-bit values."""
    if not square_error:
        return LOSSLESS_PSNR
    return min(LOSSLESS_PSNR, 10 * math.log10(255**2 * num_values / square_error))


class QualityMeter:
    """Meter that decodes packets as they arrive and compares the luma of each picture with the encoder's input."""

    def __init__(self, decoder_name: str, header: bytes, height: int, width: int) -> None:
        self._decoder = _make_decoder(decoder_name, header, height, width)
        self._pending: dict[int, NDArray[np.uint8]] = {}
        self._square_error = self._num_values = 0
        self.checksums: list[int] = []

    def expect(self, number: int, picture: VideoFrame) -> None:
        """Register the picture that frame `number` must show."""
        self._pending[number] = _rows(picture, 0).copy()

    def take(self, number: int, packet: bytes) -> None:
        """Measure the quality of the packet for frame `number`.

        Raises DecodeError if the packet decodes to a damaged frame or to a different frame.
        """
        import av

        data = cast("Packet[VideoStream]", av.Packet(packet))
        data.pts = data.dts = number
        self._compare(data)

    def finish(self) -> float:
        """Flush the decoder, and return the luma PSNR over all frames, in decibels.

        Raises DecodeError if frames are missing.
        """
        self._compare(None)
        if self._pending:
            raise DecodeError(f"the encoder lost frames {sorted(self._pending)[:8]} of the clip; report this as a bug")
        return psnr(self._square_error, self._num_values)

    def _compare(self, packet: Packet[VideoStream] | None) -> None:
        try:
            with ffmpeg_errors("the encoded clip cannot be decoded"):
                frames = self._decoder.decode(packet)
        except ProbeError as error:
            raise DecodeError(str(error)) from error
        for frame in frames:
            wanted = self._pending.pop(len(self.checksums), None)
            if frame.is_corrupt or frame.pts != len(self.checksums) or wanted is None:
                raise DecodeError(
                    f"frame {len(self.checksums)} of the encoded clip is damaged or out of order; report this as a bug"
                )
            differences = np.subtract(_rows(frame, 0), wanted, dtype=np.int16)
            self._square_error += int(np.square(differences, dtype=np.int32).sum(dtype=np.int64))
            self._num_values += differences.size
            self.checksums.append(picture_checksum(frame))


def check_clip(
    data: bytes, encoding: Encoding, timeline: Timeline, tags: ColorTags, checksums: list[int], limits: Limits
) -> None:
    """Raise DecodeError unless the file `data` contains exactly the expected pictures, times, key frames and colors."""
    try:
        with open_video(data, limits) as video:
            table = read_packets(video)
            _check_table(table, encoding, timeline)
            number = 0
            for frame in decoded(video, "the clip cannot be decoded"):
                _check_frame(frame, number, table, tags, checksums)
                number += 1
            if number != len(checksums):
                raise DecodeError(f"only {number} of the clip's {len(checksums)} frames can be decoded")
    except (DecodeError, ProbeError) as error:
        raise DecodeError(f"the written clip differs from what was encoded: {error}") from error


def picture_checksum(frame: VideoFrame) -> int:
    """Return the CRC-32 of a picture's planes, excluding row padding."""
    checksum = 0
    for number in range(len(frame.planes)):
        checksum = zlib.crc32(_rows(frame, number).tobytes(), checksum)
    return checksum


def _check_table(table: PacketTable, encoding: Encoding, timeline: Timeline) -> None:
    times = [Fraction(time) * table.time_base for time in table.timestamps]
    if times != [tick * timeline.time_base for tick in timeline.ticks]:
        raise DecodeError(f"the {len(times)} timestamps differ from the {len(timeline.ticks)} expected timestamps")
    wanted = tuple(range(0, len(times), encoding.gop))
    if table.keyframes != wanted:
        raise DecodeError(
            f"the key frames are {table.keyframes[:8]}, but there must be one every {encoding.gop} frames"
        )


def _check_frame(frame: VideoFrame, number: int, table: PacketTable, tags: ColorTags, checksums: list[int]) -> None:
    if number >= len(checksums) or frame.is_corrupt or picture_checksum(frame) != checksums[number]:
        raise DecodeError(f"frame {number} differs from the picture that was encoded")
    if frame.pts != table.timestamps[number]:
        raise DecodeError(f"frame {number} has timestamp {frame.pts}, but its packet has {table.timestamps[number]}")
    found = ColorTags(frame.colorspace, frame.color_primaries, frame.color_trc, frame.color_range)
    if found != tags:
        raise DecodeError(f"frame {number} has the color tags {found}, but should have {tags}")


def _make_decoder(name: str, header: bytes, height: int, width: int) -> VideoCodecContext:
    import av
    from av.codec.context import ThreadType

    decoder = cast("VideoCodecContext", av.CodecContext.create(name, "r"))
    decoder.thread_count, decoder.thread_type = 1, ThreadType(0)
    decoder.width, decoder.height = width, height
    if header:
        decoder.extradata = header
    return decoder


def _rows(frame: VideoFrame, number: int) -> NDArray[np.uint8]:
    """Return a plane of an 8-bit picture as an array of shape (rows, bytes)."""
    plane = frame.planes[number]
    num_bytes = plane.width * (frame.format.padded_bits_per_pixel // 8 if len(frame.planes) == 1 else 1)
    return np.frombuffer(memoryview(plane), np.uint8).reshape(-1, plane.line_size)[: plane.height, :num_bytes]
