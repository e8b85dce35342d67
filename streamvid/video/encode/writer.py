"""An encoder and the container that its packets go to, in memory.

The encoder sees frames at one constant rate, so that neither its choices nor its header depend on the source's timing:
clips of one size have equal headers, and one open decoder serves them all. True times are written with the packets.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, cast

from streamvid.video.encode.cover import ColorTags
from streamvid.video.encode.profiles import Encoding
from streamvid.video.encode.timeline import Timeline

if TYPE_CHECKING:
    from av.bitstream import BitStreamFilterContext
    from av.packet import Packet
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

_RATE = 25


class ClipWriter:
    """Pictures of (height, width) in, an MP4 with one track out. Bytes are a function of the arguments and pictures."""

    def __init__(self, encoding: Encoding, timeline: Timeline, height: int, width: int, tags: ColorTags) -> None:
        import av
        from av.codec.context import Flags

        # SVT-AV1 writes to standard error on its own, whatever FFmpeg's log level is.
        os.environ.setdefault("SVT_LOG", "0")
        self._timeline, self._sink = timeline, io.BytesIO()
        # bitexact: no clock and no versions. Time begins at 0, nothing is reordered: no edit list is needed.
        self._container = av.open(self._sink, "w", format="mp4", options={"fflags": "+bitexact", "use_editlist": "0"})
        self._stream = cast(
            "VideoStream",
            self._container.add_stream(encoding.profile.encoder, rate=_RATE, options=encoding.encoder_options()),
        )
        encoder = self._stream.codec_context
        encoder.width, encoder.height, encoder.pix_fmt = width, height, "yuv420p"
        encoder.sample_aspect_ratio = Fraction(1)
        encoder.time_base = Fraction(1, _RATE)
        encoder.colorspace, encoder.color_range = tags.matrix, tags.color_range
        encoder.color_primaries, encoder.color_trc = tags.primaries, tags.transfer
        encoder.thread_count, encoder.gop_size, encoder.max_b_frames = 1, encoding.gop, 0
        encoder.flags |= Flags.bitexact
        self._stream.time_base = timeline.time_base
        self._container.start_encoding()
        self._filter = _no_messages(self._stream) if encoding.codec == "h264" else None

    @property
    def header(self) -> bytes:
        """The decoder's extradata."""
        return bytes(self._stream.codec_context.extradata or b"")

    def write(self, picture: VideoFrame, number: int) -> list[tuple[int, bytes]]:
        """Encode a picture as frame `number`; (frame number, packet) of what came out, written already."""
        picture.pts, picture.time_base = number, Fraction(1, _RATE)
        return list(self._mux(self._stream.codec_context.encode(picture)))

    def finish(self) -> list[tuple[int, bytes]]:
        """The packets that were held back. `data` is whole then."""
        packets = list(self._mux(self._stream.codec_context.encode(None)))
        self.close()
        return packets

    @property
    def data(self) -> bytes:
        return self._sink.getvalue()

    def close(self) -> None:
        self._container.close()

    def _mux(self, packets: list[Packet[VideoStream]]) -> Iterator[tuple[int, bytes]]:
        for packet in packets:
            for kept in self._filter.filter(packet) if self._filter else [packet]:
                number = cast("int", kept.pts)
                yield number, bytes(kept)
                kept.stream, kept.time_base = self._stream, self._timeline.time_base
                kept.pts = kept.dts = self._timeline.ticks[number]
                kept.duration = self._timeline.ticks_shown(number)
                self._container.mux_one(kept)


def _no_messages(stream: VideoStream) -> BitStreamFilterContext:
    """Without SEI units: x264 puts its version and settings into each clip, some 700 bytes."""
    from av.bitstream import BitStreamFilterContext

    return BitStreamFilterContext("filter_units=remove_types=6", stream)
