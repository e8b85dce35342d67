"""Decoding of a window of a file's audio through its container. This works for every file."""

from __future__ import annotations

from fractions import Fraction

from streamvid.errors import DecodeError, ProbeError
from streamvid.video.audio.canvas import NO_AUDIO, AudioResult, Canvas, check_out
from streamvid.video.audio.frames import Float32s
from streamvid.video.audio.grid import AudioFormat
from streamvid.video.audio.samples import audio_packets, decode_pieces
from streamvid.video.audio.stream import audio_stream
from streamvid.video.container import Source, open_video
from streamvid.video.limits import LIMITS, Limits

_OVERLAP_SECONDS = 10


def decode_audio_file(
    source: Source, first_sample: int, out: Float32s, audio: AudioFormat, limits: Limits = LIMITS
) -> AudioResult:
    """Decode a window of a file's audio into `out` (channels, samples), float32.

    source: bytes or a buffer (read in place), a path, or a seekable binary file.
    first_sample: the window's first sample on the delivered grid: sample k has the time k / audio.sample_rate on the
        timeline of the file's video frames (see `first_sample_at`). It may be negative.

    Decoding ends 10 s after the window, so later packets that claim an earlier time are not found.
    A file without audio, or without audio in the window, gives silence. Raises DecodeError if the audio does not decode
    or is not allowed (the contents of `out` are then undefined), and ConfigError for an invalid `out`.
    """
    check_out(out, audio)
    try:
        with open_video(source, limits) as video:
            stream = audio_stream(video)
            if stream is None:
                out[:] = 0
                return NO_AUDIO
            canvas = Canvas(first_sample, out, audio)
            packets = audio_packets(video, stream)
            last = Fraction(first_sample + out.shape[1], audio.sample_rate) + _OVERLAP_SECONDS
            for piece in decode_pieces(stream, packets, video.container_name == "mov"):
                if piece.position > last * piece.sample_rate:
                    break
                canvas.draw(piece.position, piece.samples, piece.layout, piece.sample_rate)
            return canvas.render()
    except ProbeError as error:
        raise DecodeError(str(error)) from error
