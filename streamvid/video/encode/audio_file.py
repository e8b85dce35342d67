"""Encoding part of a file's audio into a separate file without pictures."""

from __future__ import annotations

import io
import time
from fractions import Fraction

from streamvid.errors import ProbeError
from streamvid.video.audio.file import own_zero
from streamvid.video.audio.stream import audio_stream
from streamvid.video.container import Source, open_audio
from streamvid.video.encode.audio import AudioTrack, AudioWindow, check_track, muxer_options, track_format
from streamvid.video.encode.audio_profiles import AUDIO_PROFILES, MadeAudioCodec
from streamvid.video.encode.made import MadeClip
from streamvid.video.limits import Limits


def encode_audio_file(
    source: Source, start: Fraction, seconds: Fraction, codec: MadeAudioCodec, limits: Limits
) -> MadeClip:
    """Encode `seconds` of a file's audio, beginning `start` seconds after the time that `own_zero` returns.

    The result is an MP4 file whose first sample is the source sample nearest to that time. The file is silent where the
    source has no audio, and is decoded as a check before it is returned. The same arguments give the same bytes. Raises
    ProbeError if the file has no audio that can be read, and DecodeError if the audio does not decode.
    """
    begin = time.process_time()
    zero = own_zero(source, limits)
    with open_audio(source, limits) as file:
        stream = audio_stream(file)
        if stream is None:
            raise ProbeError("the file has no audio", kind="no-audio")
        form = track_format(stream, codec)
    window = AudioWindow(source, zero + start, seconds, codec, form, limits)
    data = _written(window)
    check_track(data, window)
    return MadeClip(
        data=data,
        extension="m4a",
        codec=AUDIO_PROFILES[codec].codec,
        num_frames=0,
        fps=0.0,
        duration_seconds=float(seconds),
        width=0,
        height=0,
        encode_seconds=time.process_time() - begin,
        has_audio=True,
    )


def _written(window: AudioWindow) -> bytes:
    import av

    sink = io.BytesIO()
    with av.open(sink, "w", format="mp4", options=muxer_options(window)) as container:
        AudioTrack(container, window).write_until(None)
    return sink.getvalue()
