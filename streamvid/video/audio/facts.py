"""Facts about a file's audio, for filters and reports."""

from __future__ import annotations

from dataclasses import dataclass

from streamvid.video.container import Source
from streamvid.video.limits import LIMITS, Limits


@dataclass(frozen=True, slots=True)
class AudioFacts:
    """Facts about the default audio stream of a file.

    - codec: FFmpeg's name. sample_rate: of the first decoded samples, in Hz. num_channels: likewise.
    - offset_seconds: start of the audio minus start of the video.
    - duration_seconds: from the first to the end of the last sample, including gaps.
    - gap_seconds: sum of the gaps between samples.
    - silence_share: share of the duration that is silent (below -60 dBFS for at least 0.1 s, and gaps).
    - clipping_share: share of the samples at full scale, in runs of at least 3.
    - loudness_lufs: integrated loudness (EBU R128), or None if it is below the gate of -70 LUFS.
    """

    codec: str
    sample_rate: int
    num_channels: int
    offset_seconds: float
    duration_seconds: float
    gap_seconds: float
    silence_share: float
    clipping_share: float
    loudness_lufs: float | None


def read_audio_facts(source: Source, limits: Limits = LIMITS) -> AudioFacts | None:
    """Decode a file's audio once and return its facts, or None if it has no audio.

    Raises ProbeError if the file cannot be read, or its audio does not decode or is not allowed.
    """
    raise NotImplementedError
