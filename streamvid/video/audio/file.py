"""Decoding a window of a file's audio through the container. This works for every file."""

from __future__ import annotations

from fractions import Fraction

from streamvid.errors import DecodeError, ProbeError
from streamvid.video.audio.canvas import NO_AUDIO, AudioResult, Canvas, check_out
from streamvid.video.audio.frames import Float32s
from streamvid.video.audio.grid import AudioFormat, round_half_up
from streamvid.video.audio.samples import audio_packets, decode_pieces
from streamvid.video.audio.stream import audio_stream
from streamvid.video.container import Source, open_audio
from streamvid.video.limits import LIMITS, Limits
from streamvid.video.packets import read_packets

_OVERLAP_SECONDS = 10


def own_zero(source: Source, limits: Limits = LIMITS) -> Fraction:
    """Return the time at which a separate audio or video file begins, in seconds on that file's timeline.

    This is the time of the first video frame or, in a file without pictures, of the first audio sample. In many
    containers, this time is not 0. For example, MP3 files begin with the encoder's delay, and transport streams begin
    at 1.4 s.
    Raises ProbeError if the file cannot be read, or has neither pictures nor audio.
    """
    with open_audio(source, limits) as video:
        if video.pictures is not None:
            table = read_packets(video)
            return table.timestamps[0] * table.time_base
        stream = audio_stream(video)
        pieces = () if stream is None else decode_pieces(stream, audio_packets(video, stream), is_exact=False)
        for piece in pieces:
            return Fraction(piece.position, piece.sample_rate)
    raise ProbeError("the file has no audio", kind="no-audio")


def decode_audio_file(
    source: Source,
    first_sample: int,
    out: Float32s,
    audio: AudioFormat,
    limits: Limits = LIMITS,
    zero: Fraction = Fraction(0),
) -> AudioResult:
    """Decode a window of a file's audio into `out`, a float32 array of shape (channels, samples).

    source: bytes or a buffer (read in place), a path, or a seekable binary file.
    first_sample: number of the window's first sample on the delivered grid, where sample k has the time
        k / audio.sample_rate on the timeline of the file's video frames (see `first_sample_at`). May be negative.
    zero: time on that timeline at which the grid begins, rounded to a sample of the file; for example, the result of
        `own_zero`.

    Decoding ends 10 s after the window, so later packets that claim an earlier time are not found.
    If the file has no audio in the window, `out` is silent. Raises DecodeError if the audio does not decode
    or is not allowed (the contents of `out` are then undefined), and ConfigError for an invalid `out`.
    """
    check_out(out, audio)
    try:
        with open_audio(source, limits) as video:
            stream = audio_stream(video)
            if stream is None:
                out[:] = 0
                return NO_AUDIO
            canvas = Canvas(first_sample, out, audio)
            packets = audio_packets(video, stream)
            last = Fraction(first_sample + out.shape[1], audio.sample_rate) + _OVERLAP_SECONDS
            for piece in decode_pieces(stream, packets, video.container_name == "mov"):
                position = piece.position - round_half_up(zero * piece.sample_rate)
                if position > last * piece.sample_rate:
                    break
                canvas.draw(position, piece.samples, piece.layout, piece.sample_rate)
            return canvas.render()
    except ProbeError as error:
        raise DecodeError(str(error)) from error
