"""Source frames of a native clip and their times, as exact fractions. Nothing is decoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from streamvid.errors import ConfigError, DecodeError


@dataclass(frozen=True, slots=True)
class Timeline:
    """Frames of a clip and their times.

    numbers: source frame number of each frame, ascending. Frames repeat if the requested rate is above the source's
        rate.
    ticks: time of each frame in units of `time_base`, ascending from 0.
    last_ticks: duration of the last frame, in the same units.
    """

    numbers: tuple[int, ...]
    ticks: tuple[int, ...]
    time_base: Fraction
    last_ticks: int

    @property
    def duration_seconds(self) -> Fraction:
        """Seconds from the start of the first frame to the end of the last frame."""
        return (self.ticks[-1] + self.last_ticks) * self.time_base

    @property
    def fps(self) -> float:
        """Average frame rate, as in VideoInfo: (frames - 1) divided by the time from the first frame to the last.

        For a single frame, the rate is the inverse of the frame's duration.
        """
        span = self.ticks[-1] * self.time_base
        return float((len(self.ticks) - 1) / span) if span else float(1 / (self.last_ticks * self.time_base))

    def ticks_shown(self, frame: int) -> int:
        """Return the duration of frame number `frame`, in ticks."""
        return self.ticks[frame + 1] - self.ticks[frame] if frame + 1 < len(self.ticks) else self.last_ticks


def make_timeline(
    timestamps: tuple[int, ...],
    time_base: Fraction,
    last_duration: int,
    *,
    start: int = 0,
    num_frames: int | None = None,
    fps: Fraction | None = None,
    usual_rate: Fraction | None = None,
) -> Timeline:
    """Return the timeline of frames `start` to `start + num_frames` (exclusive) of a source.

    If `num_frames` is None, the timeline contains all frames from `start` on.

    timestamps: ascending times of the source's frames.
    last_duration: duration of the source's last frame in ticks. If it is 0 (unknown), the duration of the preceding
        frame is used or, if there is no such frame, the duration of a frame at `usual_rate` (25 if unknown).
    fps: None keeps each frame and its time. A rate selects the frame nearest to each of the times 0, 1/fps, 2/fps, …;
        on a tie, the earlier frame.
    Raises ConfigError for invalid arguments, and DecodeError if the source has fewer frames.
    """
    if start < 0 or (num_frames is not None and num_frames < 1):
        raise ConfigError(
            f"start is {start} and num_frames is {num_frames}; start must be at least 0 and num_frames at least 1"
        )
    stop = len(timestamps) if num_frames is None else start + num_frames
    if stop > len(timestamps) or start >= stop:
        last = "the end" if num_frames is None else stop - 1
        raise DecodeError(f"frames {start} to {last} were requested, but the video has {len(timestamps)} frames")
    ticks = tuple(time - timestamps[start] for time in timestamps[start:stop])
    last_ticks = end_ticks(timestamps, time_base, last_duration, stop, usual_rate) - timestamps[stop - 1]
    kept = Timeline(tuple(range(start, stop)), ticks, time_base, last_ticks)
    return kept if fps is None else _resample(kept, exact_rate(fps))


def num_frames_at(seconds: Fraction, fps: Fraction) -> int:
    """Return the number of frames at the rate `fps` in a source that lasts `seconds`.

    The number is rounded to an integer, and is at least 1.
    """
    return max(1, int(seconds * fps + Fraction(1, 2)))


def exact_rate(fps: float | Fraction) -> Fraction:
    """Return a frame rate as a fraction. Raises ConfigError unless the rate is above 0 and at most 1000."""
    try:
        rate = Fraction(fps).limit_denominator(1001)
    except (TypeError, ValueError, OverflowError):
        rate = Fraction(0)
    if isinstance(fps, bool) or not 0 < rate <= 1000:
        raise ConfigError(f"fps is {fps!s}; it must be a number above 0 and at most 1000, such as 24 or 30000/1001")
    return rate


def end_ticks(
    timestamps: Sequence[int], time_base: Fraction, last_duration: int, stop: int, usual_rate: Fraction | None
) -> int:
    """Return the time at which frame `stop - 1` ends, in ticks."""
    if stop < len(timestamps):
        return timestamps[stop]
    if last_duration > 0:
        return timestamps[-1] + last_duration
    if len(timestamps) > 1:
        return 2 * timestamps[-1] - timestamps[-2]
    return timestamps[-1] + max(1, round(1 / (time_base * (usual_rate or 25))))


def _resample(kept: Timeline, fps: Fraction) -> Timeline:
    count = num_frames_at(kept.duration_seconds, fps)
    numbers, at = [], 0
    for frame in range(count):
        wanted = Fraction(frame) / fps / kept.time_base
        while at + 1 < len(kept.ticks) and abs(kept.ticks[at + 1] - wanted) < abs(kept.ticks[at] - wanted):
            at += 1
        numbers.append(kept.numbers[at])
    return Timeline(tuple(numbers), tuple(range(count)), 1 / fps, 1)
