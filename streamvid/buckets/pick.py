"""Selection of the frames to deliver from a clip, with exact integer arithmetic and without decoding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from streamvid.buckets.frames import FrameRate
from streamvid.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Times: TypeAlias = Sequence[int] | NDArray[np.int64]

Way: TypeAlias = Literal["step", "time", "number", "spread", "linspace"]

_WAYS = frozenset(get_args(Way))
_MAX_TICKS = (1 << 63) - 1
_MAX_DENOMINATOR_OF_SECONDS = 10**6
_MAX_ROUNDED = 1e8
_NEAR = 1e-6  # distance from a whole number of frames within which float64 may round to the wrong side
_MAX_DENOMINATOR = 10**9  # for time bases: the finest time base in containers is one nanosecond


@dataclass(frozen=True, slots=True)
class Pick:
    """Selection of `count` frames from a clip, at positions `start`, `start + stride`, … of a grid.

    The frames are in ascending order. `way` determines which frame belongs to each position:

    - step: position i is frame i.
    - time: position i is the frame nearest to the time i / fps after the first frame; on a tie, the earlier frame.
    - number: position i is frame round(i / fps * clip_fps), or the last frame.
    - spread: the frames nearest to `count` evenly spaced times from the first frame to the last (the midpoint if
      `count` is 1); `start` and `stride` are ignored.
    - linspace: evenly spaced frames from `start` to `start + count * stride - 1`, rounded down, as in Open-Sora.

    clip_fps: the clip's average frame rate.
    Raises ConfigError for invalid values.
    """

    count: int
    start: int = 0
    stride: int = 1
    way: Way = "step"
    fps: Fraction | None = None
    clip_fps: float = 0.0

    def __post_init__(self) -> None:
        if self.way not in _WAYS or self.count < 1 or self.start < 0 or self.stride < 1:
            raise ConfigError(
                f"{self} is invalid: way must be one of {', '.join(get_args(Way))}; count and stride must be at least "
                "1, and start at least 0"
            )
        if self.way in ("time", "number") and (self.fps is None or self.fps <= 0):
            raise ConfigError(f"fps={self.fps}: must be above 0 if way={self.way!r}")

    @property
    def needs_times(self) -> bool:
        """True if the choice depends on the time of each frame."""
        return self.way in ("time", "spread")

    def numbers(self, num_frames: int, times: Times | None = None, time_base: Fraction | None = None) -> Sequence[int]:
        """Return the chosen frame numbers. Some numbers are repeated if `fps` exceeds the clip's frame rate.

        num_frames: number of frames in the clip.
        times: ascending timestamps of all frames; required if `needs_times`.
        time_base: seconds per tick; None to derive it from `clip_fps`.
        Raises ConfigError if the clip does not contain the chosen frames, or if required `times` are missing.
        """
        is_step = self.way == "step"
        found = self._places if is_step else self._numbers(num_frames, times, time_base)
        if not 0 <= found[0] <= found[-1] < num_frames:
            raise ConfigError(f"frames {found[0]} to {found[-1]} were chosen, but the clip has {num_frames} frames")
        return found

    def _numbers(self, num_frames: int, times: Times | None, time_base: Fraction | None) -> Sequence[int]:
        if self.way == "linspace":
            return linspace(self.start, self.start + self.count * self.stride - 1, self.count)
        if self.way == "number":
            assert self.fps is not None
            fps, last = float(self.fps), num_frames - 1
            return [round(min(min(place, _MAX_TICKS) / fps * self.clip_fps, last)) for place in self._places]
        if times is None or len(times) != num_frames:
            raise ConfigError(f"way={self.way!r} requires the clip's timestamps, which are unknown")
        if self.way == "spread":
            span = int(times[-1]) - int(times[0])
            wanted = [Fraction(span * i, max(1, self.count - 1)) for i in range(self.count)]
            return nearest_frames(times, wanted if self.count > 1 else [Fraction(span, 2)])
        assert self.fps is not None
        base = time_base or time_base_of(times, self.clip_fps)
        return nearest_frames(times, [Fraction(place) / self.fps / base for place in self._places])

    @property
    def _places(self) -> range:
        return range(self.start, self.start + self.count * self.stride, self.stride)

    @property
    def delivered_fps(self) -> float:
        """Average frame rate of the delivered frames, or 0.0 for images."""
        if self.way in ("time", "number"):
            assert self.fps is not None
            return float(self.fps / self.stride)
        return self.clip_fps / self.stride

    def to_json(self) -> list[Any]:
        """Return the fields as JSON values; `from_json` reads them."""
        fps = None if self.fps is None else str(self.fps)
        return [self.count, self.start, self.stride, self.way, fps, self.clip_fps]

    @staticmethod
    def from_json(fields: Sequence[Any]) -> Pick:
        """Build a pick from the result of `to_json`."""
        count, start, stride, way, fps, clip_fps = fields
        return Pick(count, start, stride, way, None if fps is None else Fraction(fps), clip_fps)


def nearest_frames(times: Times, wanted: Sequence[Fraction]) -> list[int]:
    """Return the index of the frame nearest to each wanted time. On a tie, the earlier frame is used.

    times: ascending timestamps, in ticks.
    wanted: ascending times after the first frame, in ticks.
    """
    import numpy as np

    ticks = np.asarray(times, np.int64) - int(times[0])
    # The sum of the times of two neighboring frames is twice their midpoint; after the midpoint, the later is nearer.
    doubled = np.array([min(math.ceil(2 * time), _MAX_TICKS) for time in wanted], np.int64)
    found: list[int] = np.searchsorted(ticks[:-1] + ticks[1:], doubled).tolist()
    return found


def linspace(first: int, last: int, count: int) -> list[int]:
    """Return `count` evenly spaced integers from `first` to `last`, rounded down as in np.linspace with dtype=int64."""
    import numpy as np

    return [int(number) for number in np.linspace(first, last, count, dtype=np.int64)]


def time_base_of(times: Times, fps: float) -> Fraction:
    """Return the time base, in seconds per tick, of timestamps whose average frame rate is `fps`.

    The result is exact if `fps` was computed from these timestamps.
    """
    span = int(times[-1]) - int(times[0])
    if span <= 0 or not fps > 0:
        return Fraction(1)
    # An index may contain any number, and a product of floats could overflow.
    return Fraction(len(times) - 1, span * Fraction(fps)).limit_denominator(_MAX_DENOMINATOR) or Fraction(1)


def num_places(rate: FrameRate, num_frames: int, fps: float, duration_seconds: float) -> int:
    """Return the number of frames that `rate` selects from a clip, computed from the clip's values in the index.

    fps: average frame rate of the clip; 0.0 for images, which have one frame at any rate.
    """
    if not fps > 0:
        return num_frames
    if rate.fps is None or rate.rule in ("native", "cap"):
        return rate.num_frames(num_frames, fps, None)
    # Exact fractions are slow, and they are needed only if rounding could change the result.
    reached = duration_seconds * (rate.fps.numerator / rate.fps.denominator) + (0.5 if rate.rule == "resample" else 0.0)
    if reached < _MAX_ROUNDED and abs(reached - round(reached)) > _NEAR:
        return max(1 if rate.rule == "resample" else 0, int(reached))
    return rate.num_frames(num_frames, fps, exact_seconds(duration_seconds))


def exact_seconds(seconds: float) -> Fraction:
    """Recover the exact fraction from a duration that was converted to float64.

    The result is the simplest fraction that rounds to this float. The nearest fraction with a bounded denominator can
    be wrong for a long duration, because several such fractions then round to the same float.
    """
    exact = Fraction(seconds)
    half = Fraction(math.ulp(seconds)) / 2
    found = _simplest(exact - half, exact + half) if exact > half else exact
    is_found = found.denominator <= _MAX_DENOMINATOR_OF_SECONDS and float(found) == seconds
    return found if is_found else exact.limit_denominator(_MAX_DENOMINATOR_OF_SECONDS)


def _simplest(low: Fraction, high: Fraction) -> Fraction:
    """Return the fraction between two positive numbers that has the smallest denominator, using continued fractions."""
    whole = math.floor(low)
    if whole == low:
        return Fraction(whole)
    if whole + 1 <= high:
        return Fraction(whole + 1)
    return whole + 1 / _simplest(1 / (high - whole), 1 / (low - whole))
