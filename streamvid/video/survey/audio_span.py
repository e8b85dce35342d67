"""Time that a file's audio covers, determined from the audio packets without decoding them."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from streamvid.video.audio.samples import audio_packets, declared_cut
from streamvid.video.audio.stream import audio_stream
from streamvid.video.container import Source, open_audio
from streamvid.video.limits import LIMITS, Limits


@dataclass(frozen=True, slots=True)
class AudioSpan:
    """Time range that a file's default audio stream covers, and the stream's format.

    - codec: FFmpeg's name for the codec.
    - sample_rate, num_channels: sample rate in Hz and number of channels, as the container declares them.
    - begin_seconds, end_seconds: presentation times of the start of the first sample and of the end of the last sample,
      on the timeline of the video's frames. Priming and padding are included unless the container marks them in its
      packets.
    """

    codec: str
    sample_rate: int
    num_channels: int
    begin_seconds: Fraction
    end_seconds: Fraction


def read_audio_span(source: Source, limits: Limits = LIMITS) -> AudioSpan | None:
    """Return the time range that a file's audio covers, or None if the file has no audio.

    For a remote MP4, only the index is read. Raises ProbeError if the packets cannot be read or the codec is not
    allowed.
    """
    with open_audio(source, limits) as video, video.bodies_left_out():
        stream = audio_stream(video)
        if stream is None or stream.time_base is None:
            return None
        context, time_base = stream.codec_context, stream.time_base
        rate = context.sample_rate
        spans = []
        for packet in audio_packets(video, stream):
            if packet.pts is not None and not packet.is_discard:
                head, tail = declared_cut(packet) or (0, 0)
                begin, length = packet.pts * time_base, (packet.duration or 0) * time_base
                spans.append((begin + Fraction(head, rate), begin + length - Fraction(tail, rate)))
        codec, num_channels = context.codec.canonical_name, context.layout.nb_channels
    if not spans:
        return None
    begin = min(start for start, _ in spans)
    return AudioSpan(codec, rate, num_channels, begin, max(begin, *(end for _, end in spans)))
