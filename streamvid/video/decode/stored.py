"""Decoding selected frames from the packets of an indexed clip, with decoders that stay open between clips.

No container is opened or searched, because the index contains the container's description of the stream. Decoders,
scalers and their pictures are kept per stream, so that no new memory is allocated in steady state.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from streamvid.errors import DecodeError, ProbeError
from streamvid.video.decode.convert import FrameConverter, PictureColor
from streamvid.video.decode.window import can_skip, decode_window, repeat_frames
from streamvid.video.frame_format import FrameFormat, frame_format_of
from streamvid.video.limits import STORED_LIMITS, Limits
from streamvid.video.picture import PictureFormat
from streamvid.video.stream_info import StreamInfo, begin_decoding, open_decoder
from streamvid.video.transform import Crop, Transform

if TYPE_CHECKING:
    from av.packet import Packet
    from av.video.codeccontext import VideoCodecContext
    from av.video.frame import VideoFrame

# Maximum sum of the frame sizes of all kept decoders, in pixels: one 1080p decoder holds about 40 MiB of pictures, and
# reopening it costs a hundredth of decoding a window.
_KEPT_PIXELS = 1920 * 1088
_KEPT_DECODERS = 32


class StoredDecoder:
    """Decoder for windows of indexed clips.

    The decoder keeps the most recently used codecs open, and is not thread-safe.
    """

    def __init__(self, limits: Limits = STORED_LIMITS) -> None:
        self._limits = limits
        self._open: OrderedDict[tuple[StreamInfo, int], _OpenDecoder] = OrderedDict()

    def decode(
        self,
        info: StreamInfo,
        packets: NDArray[np.int64],
        data: memoryview,
        key_time: int,
        out: NDArray[np.uint8],
        picture: PictureFormat,
        *,
        numbers: Sequence[int] | None = None,
        crop: Crop | None = None,
        num_threads: int = 1,
    ) -> PictureColor:
        """Decode the frames of a PacketWindow into `out`, and return the color of the pictures.

        `out` has shape (T, picture.num_bytes). Each row receives one picture. A row to which no packet is assigned
        repeats the previous picture.

        packets, key_time: fields of the PacketWindow.
        data: the clip's bytes in the byte range that the PacketWindow specifies.
        numbers: frame numbers within the clip, used in error messages.
        crop: part of each frame to keep; None to keep the largest centered part.

        Raises DecodeError if a frame does not decode.
        """
        decoder = self._open.pop((info, num_threads), None)
        if decoder is None:
            num_pixels = info.coded_width * info.coded_height * num_threads
            self._make_room(num_pixels)  # before the new decoder allocates memory
            decoder = _OpenDecoder(info, num_threads, num_pixels, self._limits)
        try:
            color = decoder.decode(packets, data, key_time, out, picture, numbers, crop)
        except ProbeError as error:
            raise DecodeError(str(error)) from error
        # After an error, the state of the decoder is unknown, so it is not kept.
        self._open[info, num_threads] = decoder
        return color

    def _make_room(self, num_pixels: int) -> None:
        kept = self._open
        while kept and (
            len(kept) >= _KEPT_DECODERS or num_pixels + sum(one.num_pixels for one in kept.values()) > _KEPT_PIXELS
        ):
            kept.popitem(last=False)


class _OpenDecoder:
    def __init__(self, info: StreamInfo, num_threads: int, num_pixels: int, limits: Limits) -> None:
        self.num_pixels, self._info = num_pixels, info
        self._decoder: VideoCodecContext = open_decoder(info, limits, num_threads)
        self._may_skip = can_skip(info.codec, info.extradata)
        self._converters: dict[tuple[FrameFormat, PictureFormat], FrameConverter] = {}

    def decode(
        self,
        packets: NDArray[np.int64],
        data: memoryview,
        key_time: int,
        out: NDArray[np.uint8],
        picture: PictureFormat,
        numbers: Sequence[int] | None,
        crop: Crop | None,
    ) -> PictureColor:
        begin_decoding(self._decoder, self._info)
        found: list[FrameConverter] = []

        def take(frame: VideoFrame, slot: int) -> None:
            if not found:
                found.append(self._converter(frame, picture, crop))
            found[0].convert(frame, out[slot])

        wanted = packets[packets[:, 3] >= 0]
        decode_window(
            self._decoder,
            _packets(packets, data),
            dict(zip(wanted[:, 0].tolist(), wanted[:, 3].tolist(), strict=True)),
            take,
            key_time=key_time,
            numbers=numbers,
            may_skip=self._may_skip,
        )
        self._decoder.flush_buffers()
        if len(wanted) < len(out):
            repeat_frames(out, sorted(wanted[:, 3].tolist()))
        return found[0].color

    def _converter(self, frame: VideoFrame, picture: PictureFormat, crop: Crop | None) -> FrameConverter:
        found = frame_format_of(self._info, frame)
        if crop is not None:  # rarely used again
            return FrameConverter(frame, found, Transform.cover(found, picture.height, picture.width, crop), picture)
        converter = self._converters.get((found, picture))
        if converter is None:
            if len(self._converters) >= _KEPT_DECODERS:
                self._converters.clear()
            transform = Transform.cover(found, picture.height, picture.width)
            converter = self._converters[found, picture] = FrameConverter(frame, found, transform, picture)
        return converter


def _packets(packets: NDArray[np.int64], data: memoryview) -> Iterator[tuple[Packet[Any], bool]]:
    from av.packet import Packet

    for time, offset, size, slot in packets.tolist():
        # Copy the data, which Packet(data) would not do: decoders read slightly beyond a packet's end, and their
        # threads may hold it for longer.
        packet: Packet[Any] = Packet(size)
        packet.update(cast("bytes", data[offset : offset + size]))
        packet.pts = time
        yield packet, slot >= 0
