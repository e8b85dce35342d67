"""Loudness of a video's audio over time, for display."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from streamvid.video.audio.file import own_zero
from streamvid.video.audio.samples import audio_packets, decode_pieces
from streamvid.video.audio.stream import audio_stream
from streamvid.video.container import Source, open_audio
from streamvid.video.limits import STORED_LIMITS, Limits


@dataclass(frozen=True, slots=True)
class Waveform:
    """Peak amplitude (0 to 1) across all channels, for each of several equal parts of a clip's duration."""

    codec: str
    sample_rate: int
    num_channels: int
    peaks: tuple[float, ...]


def read_waveform(
    source: Source, num_parts: int, duration_seconds: float, limits: Limits = STORED_LIMITS
) -> Waveform | None:
    """Return the waveform of a file's default audio stream, starting at `own_zero`, or None if the file has no audio.

    duration_seconds: duration of the video, or of the audio if there is no video. It is divided into `num_parts` equal
        parts.
    Raises ProbeError if the file cannot be read, or if the audio is not allowed or does not decode.
    """
    with open_audio(source, limits) as video:
        if not video.has_audio or duration_seconds <= 0:
            return None
        begin = float(own_zero(source, limits))
        stream = audio_stream(video)
        if stream is None:
            return None
        context, peaks = stream.codec_context, np.zeros(num_parts, np.float32)
        for piece in decode_pieces(stream, audio_packets(video, stream), video.container_name == "mov"):
            start = piece.position / piece.sample_rate - begin
            if start > duration_seconds:
                break
            values = np.abs(piece.samples).max(axis=0)
            places = (start + np.arange(len(values)) / piece.sample_rate) * (num_parts / duration_seconds)
            inside = (places >= 0) & (places < num_parts)
            np.maximum.at(peaks, places[inside].astype(np.int64), values[inside])
        found = tuple(min(1.0, round(float(peak), 4)) for peak in peaks)
        return Waveform(context.codec.canonical_name, context.sample_rate, context.layout.nb_channels, found)
