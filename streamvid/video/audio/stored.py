"""Decoding of windows of audio from the packets of indexed clips."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from streamvid.errors import DecodeError, ProbeError
from streamvid.video.audio.canvas import AudioResult, Canvas, check_out
from streamvid.video.audio.frames import Float32s, samples_of
from streamvid.video.audio.grid import AudioFormat
from streamvid.video.audio.index import Int64s
from streamvid.video.audio.samples import decode_packet, packet_of
from streamvid.video.audio.stream import AudioStreamInfo, open_audio_decoder

if TYPE_CHECKING:
    from av.audio.codeccontext import AudioCodecContext
    from av.audio.frame import AudioFrame


def decode_audio_packets(
    info: AudioStreamInfo, packets: Int64s, data: memoryview, first_sample: int, out: Float32s, audio: AudioFormat
) -> AudioResult:
    """Decode the packets of `AudioIndex.window` into `out` (channels, samples), float32.

    packets: field of the AudioPackets. data: the bytes of its range.
    first_sample: the window's first sample on the delivered grid, as passed to `window`.

    The result depends on the arguments alone, because each call opens a decoder (0.02 to 0.4 ms): some decoders replace
    noise by random numbers, and continue their sequence even after a flush.
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
    for position, offset, size, head, count in packets.tolist():
        frames = _decode(decoder, data[offset : offset + size], is_wanted=count > 0)
        if not count:
            continue
        is_right = sum(frame.samples for frame in frames) >= head + count
        if not is_right or any(frame.sample_rate != info.sample_rate for frame in frames):
            raise DecodeError("the data is damaged: a packet of the audio does not decode to its samples")
        parts = [samples_of(frame) for frame in frames]
        samples = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        canvas.draw(position, samples[:, head : head + count], frames[0].layout.name, info.sample_rate)


def _decode(decoder: AudioCodecContext, data: memoryview, is_wanted: bool) -> list[AudioFrame]:
    try:
        return decode_packet(decoder, packet_of(data))
    except ProbeError:
        if is_wanted:
            raise
        return []  # the packet may refer to packets before the first one
