"""Grid of delivered samples: sample k has the time k / sample_rate on the clip's presentation timeline.

All windows of a clip share the grid, so adjacent windows concatenate to the whole track.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from streamvid.errors import ConfigError

MIN_RATE, MAX_RATE = 1000, 768_000
"""Allowed sample rates, in Hz. libswresample is exact up to the maximum."""

MIN_SPEED, MAX_SPEED = 0.5, 32
"""Minimum and maximum speed factors for stretching audio."""

MAX_CHANNELS = 64
"""Maximum number of channels in a stream."""

#: Channels of the delivered audio → FFmpeg's name of their layout.
LAYOUTS = {1: "mono", 2: "stereo", 6: "5.1", 8: "7.1"}


@dataclass(frozen=True, slots=True)
class AudioFormat:
    """Format of delivered audio.

    - sample_rate: sample rate in Hz, from 1000 to 768000.
    - num_channels: 1 (mono), 2 (stereo), 6 (5.1) or 8 (7.1), in FFmpeg's channel order.
    """

    sample_rate: int
    num_channels: int = 2

    def __post_init__(self) -> None:
        rate = self.sample_rate
        if not isinstance(rate, int) or not MIN_RATE <= rate <= MAX_RATE:
            raise ConfigError(f"sample_rate is {rate!r}; it must be an integer from {MIN_RATE} to {MAX_RATE}")
        if self.num_channels not in LAYOUTS:
            raise ConfigError(f"num_channels is {self.num_channels!r}; it must be one of {sorted(LAYOUTS)}")


def round_half_up(value: Fraction) -> int:
    """Return the nearest integer; halves are rounded up."""
    return math.floor(value + Fraction(1, 2))


def first_sample_at(seconds: Fraction, sample_rate: int) -> int:
    """Return the position of the first sample in a window that begins at `seconds` on the presentation timeline."""
    return round_half_up(seconds * sample_rate)


def offset_seconds(seconds: Fraction, first_sample: int, sample_rate: int) -> float:
    """Return the time from the start of a window to its first sample, in seconds; negative if the sample is earlier.

    The result is at most half a sample's duration in either direction if `first_sample` is the result of
    `first_sample_at`.
    """
    return float(Fraction(first_sample, sample_rate) - seconds)
