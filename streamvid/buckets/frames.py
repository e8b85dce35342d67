"""Rules for the frame counts that a model accepts, and for the frame rate at which clips are read."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Literal, TypeAlias, get_args

from streamvid.config import exact, from_fields, require_integer
from streamvid.errors import ConfigError

RateRule: TypeAlias = Literal["native", "cap", "resample", "fix_frame_rate"]

_RULE = re.compile(r"([1-9][0-9]{0,3})[kKnN](?:\+([0-9]{1,3}))?")
_MAX_FPS = 1000
NEAR_RATE = 0.99
"""Minimum ratio at which two frame rates count as equal, so that 23.976 counts as 24."""
_MAX_DENOMINATOR = 1001


@dataclass(frozen=True, slots=True)
class FrameRule:
    """Frame count rule, such as `4k+1`, for a causal video VAE: T = k * factor + remainder, with k = 0, 1, …"""

    factor: int
    remainder: int = 1

    def __post_init__(self) -> None:
        for name, value, least in (("factor", self.factor, 1), ("remainder", self.remainder, 0)):
            require_integer(f"frame rule {name}", value, least, 1024)
        if self.remainder > self.factor:
            raise ConfigError(f"frame rule {self}: the remainder must be at most the factor, as in 4k+1")

    @classmethod
    def of(cls, text: FrameRule | str) -> FrameRule:
        """Return a rule unchanged, or parse text such as `4k+1` or `4n+1`. Raises ConfigError for anything else."""
        if isinstance(text, FrameRule):
            return text
        match = _RULE.fullmatch(text.replace(" ", "").replace("*", "")) if isinstance(text, str) else None
        if match is None:
            raise ConfigError(
                f"frame_rule={text!r} is not a valid rule for frame counts; write a rule such as '4k+1' or '8k'"
            )
        return cls(int(match[1]), int(match[2] or 0))

    def __str__(self) -> str:
        return f"{self.factor}k+{self.remainder}" if self.remainder else f"{self.factor}k"

    def allows(self, num_frames: int) -> bool:
        """Return True if the rule allows this count. A rule with remainder 1 always allows one frame."""
        return num_frames >= 1 and num_frames % self.factor == self.remainder % self.factor

    def floor(self, num_frames: int) -> int:
        """Return the largest allowed count that is at most `num_frames`, or 1 if no such count exists."""
        return max(1, num_frames - (num_frames - self.remainder) % self.factor)

    def check(self, num_frames: int, where: str) -> None:
        """Raise ConfigError unless the rule allows the count.

        The message starts with `where` and suggests allowed counts.
        """
        if not self.allows(num_frames):
            below = num_frames - (num_frames - self.remainder) % self.factor
            nearest = f"{below} and {below + self.factor}" if below > 0 else str(below + self.factor)
            raise ConfigError(
                f"{where}: a count of {num_frames} frames does not follow the rule {self}; nearest allowed: {nearest}"
            )


@dataclass(frozen=True, slots=True)
class FrameRate:
    """Frame rate, and the rule that selects frames from a clip.

    native: every frame.
    cap: every nth frame, with n = ceil(the clip's rate / `fps`), so that the rate is at most `fps` (Open-Sora 2);
        every frame if the clip's rate is below `fps` or unknown.
    resample: the frame nearest to each of the times 0, 1/fps, 2/fps, … in the clip; on a tie, the earlier frame.
    fix_frame_rate: the frames with numbers round(i / fps * the clip's average rate), where i goes from 0 to
        floor(duration * fps) - 1 (DiffSynth-Studio); equal to resample only for clips with a constant rate.
    """

    rule: RateRule = "native"
    fps: Fraction | None = None

    def __post_init__(self) -> None:
        if self.rule not in get_args(RateRule):
            raise ConfigError(f"rule={self.rule!r}: must be one of {', '.join(get_args(RateRule))}")
        if (self.fps is None) != (self.rule == "native"):
            raise ConfigError(
                f"rule={self.rule!r} with fps={self.fps!s}: omit fps for the 'native' rule; set it for any other rule"
            )
        if self.fps is None:
            return
        rate = exact("fps", self.fps).limit_denominator(_MAX_DENOMINATOR)
        if not 0 < rate <= _MAX_FPS:
            raise ConfigError(
                f"fps={self.fps!s}: must be a number above 0 and at most {_MAX_FPS}, such as 24 or 30000/1001"
            )
        object.__setattr__(self, "fps", rate)

    @property
    def needs_timing(self) -> bool:
        """True if the rule depends on the time of each frame."""
        return self.rule == "resample"

    @property
    def repeats_below(self) -> float:
        """Frame rate below which frames of a clip are selected more than once, or 0 if this never happens."""
        return float(self.fps) * NEAR_RATE if self.fps is not None and self.rule != "cap" else 0.0

    @property
    def drops_above(self) -> float:
        """Frame rate above which some frames of a clip are never selected, or infinity for the "native" rule."""
        return math.inf if self.fps is None else float(self.fps) / NEAR_RATE

    def interval(self, fps: float | None) -> int:
        """Return the interval, in source frames, between selected frames for the "native" and "cap" rules.

        fps: average frame rate of the clip, or None if it is unknown.
        """
        if self.rule != "cap" or self.fps is None or fps is None or not math.isfinite(fps):
            return 1
        return _interval(self.fps.numerator, self.fps.denominator, fps)

    def num_frames(self, num_frames: int, fps: float | None, seconds: Fraction | float | None) -> int:
        """Return the number of frames selected from a clip of `num_frames` frames, or 0 if the clip is too short.

        fps: average frame rate of the clip, or None if it is unknown.
        seconds: time from the first frame to the end of the last frame; required only by resample and fix_frame_rate.
        """
        if self.fps is None or self.rule in ("native", "cap"):
            return num_frames // self.interval(fps)
        if seconds is None:
            raise ConfigError(
                f"frame rate rule {self.rule!r} requires the clip's duration, which is unknown; use the 'cap' rule"
            )
        if self.rule == "resample":
            return max(1, int(Fraction(seconds) * self.fps + Fraction(1, 2)))
        return math.floor(Fraction(seconds) * self.fps)

    def to_json(self) -> dict[str, str]:
        """Return the fields as JSON values; `from_json` reads them."""
        return {"rule": self.rule} if self.fps is None else {"rule": self.rule, "fps": str(self.fps)}

    @classmethod
    def from_json(cls, value: object) -> FrameRate:
        """Build a FrameRate from the result of `to_json`, or from None. Raises ConfigError for anything else."""
        return cls() if value is None else from_fields(cls, value, "frame_rate")


@lru_cache(1 << 14)  # most clips have one of a few rates, and exact fractions are slow
def _interval(numerator: int, denominator: int, fps: float) -> int:
    most = Fraction(numerator, denominator)
    return 1 if fps < most else math.ceil(Fraction(fps) / most)
