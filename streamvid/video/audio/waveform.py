"""Loudness of a video's audio over time, for display. The loader delivers no audio."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from streamvid.video.audio.codecs import AUDIO_CODECS
from streamvid.video.container import Source, ffmpeg_errors, open_video
from streamvid.video.limits import STORED_LIMITS, Limits


@dataclass(frozen=True, slots=True)
class Waveform:
    """Largest amplitude (0 to 1) of the mono audio in each of several equal parts of a clip's duration."""

    codec: str
    sample_rate: int
    num_channels: int
    peaks: tuple[float, ...]


def read_waveform(
    source: Source, num_parts: int, duration_seconds: float, limits: Limits = STORED_LIMITS
) -> Waveform | None:
    """Return the waveform of the first audio stream of a video, from the video's first frame on, or None without one.

    duration_seconds: duration of the video, which the parts divide.
    Raises ProbeError if the file cannot be read.
    """
    import av

    with open_video(source, limits) as video, ffmpeg_errors("the audio does not decode"):
        if not video.has_audio or duration_seconds <= 0:
            return None
        stream = video.container.streams.audio[0]
        context = stream.codec_context
        if context is None or context.codec.canonical_name not in AUDIO_CODECS:
            return None
        from av.stream import Discard

        stream.discard = Discard.default
        begin = float((video.stream.start_time or 0) * (video.stream.time_base or 0))
        peaks = np.zeros(num_parts, np.float32)
        mono = av.AudioResampler(format="flt", layout="mono")
        for frame in video.container.decode(stream):
            start = (frame.time or 0.0) - begin
            if start > duration_seconds:
                break
            for part in mono.resample(frame):
                values = np.abs(part.to_ndarray().reshape(-1))
                places = (start + np.arange(len(values)) / part.sample_rate) * (num_parts / duration_seconds)
                inside = (places >= 0) & (places < num_parts)
                np.maximum.at(peaks, places[inside].astype(np.int64), values[inside])
        found = tuple(min(1.0, round(float(peak), 4)) for peak in peaks)
        return Waveform(context.codec.canonical_name, context.sample_rate, context.layout.nb_channels, found)
