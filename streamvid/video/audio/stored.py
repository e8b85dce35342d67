"""Decoding windows of audio from the packets of indexed clips."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from streamvid.errors import DecodeError, ProbeError
from streamvid.video.audio.canvas import AudioResult, Canvas, check_out
from streamvid.video.audio.frames import Float32s, samples_of
from streamvid.video.audio.grid import AudioFormat
from streamvid.video.audio.index import Int64s
from streamvid.video.audio.samples import check_frames, decode_packet, packet_of
from streamvid.video.audio.stream import AudioStreamInfo, open_audio_decoder
from streamvid.video.container import ffmpeg_errors

if TYPE_CHECKING:
    from av.audio.codeccontext import AudioCodecContext
    from av.audio.frame import AudioFrame
    from av.audio.layout import AudioLayout
    from av.packet import Packet

_DAMAGED = "the data is damaged: an audio packet does not decode to the expected samples"
_MAX_RUN = 1 << 12  # samples, which stay in the processor's caches
_MAX_USUAL = 1 << 16  # samples of a frame of any number of channels that is within all limits


def decode_audio_packets(
    info: AudioStreamInfo, packets: Int64s, data: memoryview, first_sample: int, out: Float32s, audio: AudioFormat
) -> AudioResult:
    """Decode the packets from `AudioIndex.window` into `out`, a float32 array of shape (channels, samples).

    packets: the `packets` field of an AudioPackets object.
    data: the clip's bytes in the byte range that the AudioPackets object specifies.
    first_sample: position of the window's first sample, as passed to `window`.

    The result depends only on the arguments. Some decoders replace noise with random numbers, and continue the random
    sequence even after a flush. Each call therefore opens a new decoder, which takes 0.02 to 0.4 ms.
    Raises DecodeError if a packet does not decode (the contents of `out` are then undefined).
    """
    check_out(out, audio)
    canvas = Canvas(first_sample, out, audio)
    if len(packets):
        try:
            _draw(open_audio_decoder(info), info, packets, data, canvas)
        except ProbeError as error:
            raise DecodeError(str(error)) from error
    return canvas.render()


def _draw(decoder: AudioCodecContext, info: AudioStreamInfo, packets: Int64s, data: memoryview, canvas: Canvas) -> None:
    run = _Run(info, canvas)
    with ffmpeg_errors("the audio cannot be decoded"):
        for position, offset, size, head, count in packets.tolist():
            packet = packet_of(data[offset : offset + size])
            if count:
                run.add(decoder.decode(packet), position, head, count)
            else:
                _warm_up(decoder, packet)
    run.draw()


def _warm_up(decoder: AudioCodecContext, packet: Packet[Any]) -> None:
    """Decode a packet that precedes the window.

    Errors are ignored, because the packet may depend on missing packets.
    """
    with suppress(ProbeError):
        decode_packet(decoder, packet)


class _Run:
    """Decoded frames from adjacent packets.

    All frames are drawn in one call, because one call per frame would be slow.
    """

    def __init__(self, info: AudioStreamInfo, canvas: Canvas) -> None:
        from av.audio.fifo import AudioFifo

        self._rate, self._canvas, self._new_fifo = info.sample_rate, canvas, AudioFifo
        self._fifo, self._layout, self._name, self._form = AudioFifo(), cast("AudioLayout | None", None), "", ""
        self._position = self._end = self._head = 0

    def add(self, frames: list[AudioFrame], position: int, head: int, count: int) -> None:
        """Add the frames from a packet.

        Their first `head` samples are dropped, and the next `count` samples are kept.
        """
        num_decoded = 0
        for frame in frames:
            if frame.layout != self._layout or frame.format.name != self._form or frame.samples > _MAX_USUAL:
                self._change_form(frames)
            if frame.sample_rate != self._rate:
                raise DecodeError(_DAMAGED)
            num_decoded += frame.samples
        if num_decoded < head + count:
            raise DecodeError(_DAMAGED)
        if position != self._end or head or position - self._position > _MAX_RUN:
            self.draw()
            self._position, self._head = position, head
        for frame in frames:
            self._fifo.write(frame)
        self._end = position + count
        if num_decoded > head + count:
            self.draw()

    def _change_form(self, frames: list[AudioFrame]) -> None:
        """Check that all frames from a packet have the same layout and sample format, and begin a run of this form."""
        self.draw()
        check_frames(frames)
        self._fifo, self._layout, self._form = self._new_fifo(), frames[0].layout, frames[0].format.name
        self._name = frames[0].layout.name
        if any(frame.layout != self._layout or frame.format.name != self._form for frame in frames):
            raise DecodeError(_DAMAGED)

    def draw(self) -> None:
        """Draw the collected frames, and begin an empty run after them."""
        frame = self._fifo.read()
        if frame is not None:
            samples = samples_of(frame)[:, self._head : self._head + self._end - self._position]
            self._canvas.draw(self._position, samples, self._name, self._rate)
        self._position, self._head = self._end, 0
