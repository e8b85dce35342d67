"""Codecs for the audio tracks of clips that are encoded or cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

AudioCodec: TypeAlias = Literal["opus", "aac", "flac"]
"""Audio codec for native clips."""
MadeAudioCodec: TypeAlias = Literal["opus", "aac", "flac", "pcm_s16le"]
"""Audio codec for any clip that is encoded or cut. QuickTime files contain PCM instead of FLAC."""
DEFAULT_AUDIO_CODEC: AudioCodec = "aac"


@dataclass(frozen=True, slots=True)
class AudioProfile:
    """FFmpeg's names for a codec and its encoder, and the audio that the encoder accepts.

    sample_format: FFmpeg's name for the encoder's sample format.
    bits_per_second: bit rate per channel; None for a lossless codec.
    max_channels: maximum number of channels; sources with more channels are mixed down.
    sample_rates: allowed sample rates in Hz, in descending order; () for all rates up to 192 kHz.
    options: (name, value) pairs for the encoder.
    """

    codec: str
    encoder: str
    sample_format: str
    bits_per_second: int | None
    max_channels: int = 2
    sample_rates: tuple[int, ...] = ()
    options: tuple[tuple[str, str], ...] = ()

    def sample_rate(self, of_source: int) -> int:
        """Return the sample rate of a track in Hz: the source's rate if the codec allows it, otherwise 48000."""
        is_allowed = of_source in self.sample_rates if self.sample_rates else 8000 <= of_source <= 192_000
        return of_source if is_allowed else 48_000


_AAC_RATES = (96_000, 88_200, 64_000, 48_000, 44_100, 32_000, 24_000, 22_050, 16_000, 12_000, 11_025, 8000)
#: Opus packets of 60 ms without prediction from earlier frames, which the encoder leaves out if packets may get lost:
#: windows need fewer packets, and only 120 ms before their start.
_OPUS_OPTIONS = (("frame_duration", "60"), ("packet_loss", "100"))
#: Substituted noise would have other random values in each window.
_AAC_OPTIONS = (("aac_pns", "0"),)
#: Opus has one clock, of 48 kHz.
AUDIO_PROFILES: dict[MadeAudioCodec, AudioProfile] = {
    "opus": AudioProfile("opus", "libopus", "flt", 72_000, sample_rates=(48_000,), options=_OPUS_OPTIONS),
    "aac": AudioProfile("aac", "aac", "fltp", 96_000, sample_rates=_AAC_RATES, options=_AAC_OPTIONS),
    "flac": AudioProfile("flac", "flac", "s16", None, max_channels=8),
    "pcm_s16le": AudioProfile("pcm_s16le", "pcm_s16le", "s16", None, max_channels=8),
}
