"""Rules for the number of audio samples per bucket, in exact arithmetic, and the rules that published models use."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType

from streamvid.config import require_integer
from streamvid.errors import ConfigError

EXACT = "exact"
_RULE = re.compile(r"([1-9][0-9]{0,5})[kKnN](?:\+([0-9]{1,5}))?")
_MAX_FACTOR = 1 << 16


@dataclass(frozen=True, slots=True)
class SampleRule:
    """Rule for the number of audio samples in a window: k * factor + remainder, where k is a whole number.

    The allowed number whose duration is closest to that of the video frames is used; on a tie, the larger one is used.
    The `exact` rule (1k) allows every number. A rule such as `640k` ensures that a model's audio encoder returns a
    whole number of latents. Raises ConfigError for invalid values.
    """

    factor: int = 1
    remainder: int = 0

    def __post_init__(self) -> None:
        require_integer("audio rule factor", self.factor, 1, _MAX_FACTOR)
        require_integer("audio rule remainder", self.remainder, 0, self.factor)

    @classmethod
    def of(cls, text: SampleRule | str) -> SampleRule:
        """Return a rule unchanged, or parse text such as `exact` or `640k+1`. Raises ConfigError for invalid text."""
        if isinstance(text, SampleRule):
            return text
        if text == EXACT:
            return cls()
        match = _RULE.fullmatch(text.replace(" ", "").replace("*", "")) if isinstance(text, str) else None
        if match is None:
            raise ConfigError(
                f"rule={text!r} is not a valid rule for audio sample counts; write 'exact', a multiple "
                "such as '640k', or a multiple plus an offset such as '800k+1'"
            )
        return cls(int(match[1]), int(match[2] or 0))

    def __str__(self) -> str:
        if self == SampleRule():
            return EXACT
        return f"{self.factor}k+{self.remainder}" if self.remainder else f"{self.factor}k"

    def num_samples(self, num_frames: int, fps: Fraction, sample_rate: int) -> int:
        """Return the number of audio samples (at least 1) for `num_frames` frames at `fps` frames per second."""
        exact = num_frames / fps * sample_rate
        count = max(0, round_half_up((exact - self.remainder) / self.factor))
        return count * self.factor + self.remainder or self.factor


def round_half_up(value: Fraction) -> int:
    """Return the nearest integer; halves are rounded up."""
    return math.floor(value + Fraction(1, 2))


@dataclass(frozen=True, slots=True)
class AudioPreset:
    """Audio format that was used to train a published model.

    source: origin of these values.
    """

    sample_rate: int
    num_channels: int
    rule: SampleRule
    source: str


_LTX = AudioPreset(
    16000,
    2,
    SampleRule(640),
    "diffusers, pipelines/ltx2/pipeline_ltx2.py and autoencoder_kl_ltx2_audio.py: 16 kHz mel spectrograms with a "
    "hop of 160, compressed by a factor of 4 (25 latents per second); round(num_frames / fps * 25) latents",
)

#: Name of a model → its audio. Ovi is missing, because its 157 latents for 121 frames and 314 for 241 follow no rule.
AUDIO_PRESETS: Mapping[str, AudioPreset] = MappingProxyType(
    {
        "ltx-2": _LTX,
        "ltx-2.3": _LTX,
        "minimax-h3": AudioPreset(
            32000,
            2,
            SampleRule(800),
            "MiniMax-H3: an audio VAE with a hop of 800 at 32 kHz (40 latents per second) with 17n+5 frames at 24 "
            "fps; round(num_frames / 24 * 40) latents",
        ),
        "mova": AudioPreset(
            48000,
            1,
            SampleRule(),
            "MOVA: sample_rate * num_frames / fps samples at 48 kHz, mono; its VAE, with a hop of 960, pads the "
            "last latent",
        ),
    }
)
