"""Windows (the parts of a source that become samples), computed exactly, and the clips that store them."""

from __future__ import annotations

import base64
import zlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar, cast

from streamvid.errors import Rejected
from streamvid.video.encode.timeline import end_ticks

if TYPE_CHECKING:
    from streamvid.buckets.frames import FrameRate
    from streamvid.sharder.source.time_ranges import TimeRange
    from streamvid.video.info import VideoInfo


_Made = TypeVar("_Made")
_SPARE_SECONDS = Fraction(1, 2)
TEXT_EXTENSION = "txt"
"""Extension of a text-only sample's clip, which is the member that holds the caption."""


def copied(cls: type[_Made], source: Any, /, **others: Any) -> _Made:
    """Create an instance of `cls`, and copy the fields that it shares with `source`.

    Values in `others` take precedence.
    """
    names = {field.name for field in fields(cast("Any", cls))} & {field.name for field in fields(source)}
    return cls(**{**{name: getattr(source, name) for name in names}, **others})


@dataclass(frozen=True, slots=True)
class Clip:
    """Stored form of a source file or a conditioning input.

    A clip is either an unchanged source file, or it is *made*: encoded, or cut from its source. Before a clip is made,
    num_bytes is 0 and path is empty.

    path: path or URL of the file that stores the bytes.
    sha256: checksum of a clip that was made; "" for a whole file.
    psnr_y: PSNR-Y in decibels; None for a copy.
    encode_seconds: CPU time for encoding.
    has_audio: True if a clip that was made has an audio track.
    """

    path: str
    num_bytes: int
    extension: str
    codec: str
    num_frames: int
    fps: float
    duration_seconds: float
    width: int
    height: int
    sha256: str = ""
    psnr_y: float | None = None
    encode_seconds: float = 0.0
    has_audio: bool = False

    @property
    def is_made(self) -> bool:
        """True if the clip is encoded or cut; False if it is a whole source file."""
        return not self.path or bool(self.sha256)


@dataclass(frozen=True, slots=True)
class Window:
    """Range of `num_frames` source frames, starting at index `start`.

    num_clip_frames: frame count that determines the bucket. It is the number of frames of a native clip, or the number
        of frames that are read from a copy.
    """

    start: int
    num_frames: int
    num_clip_frames: int


@dataclass(frozen=True)
class Timing:
    """Presentation times of a source's frames, in ascending order, in ticks of `time_base`.

    last_duration: duration of the last frame in ticks; 0 if unknown.
    usual_rate: average frame rate; None if unknown.
    """

    timestamps: Sequence[int]
    time_base: Fraction
    last_duration: int
    usual_rate: Fraction | None

    @staticmethod
    def of(info: VideoInfo) -> Timing:
        usual = Fraction(info.fps).limit_denominator(1001) or None
        return Timing(info.timestamps, info.time_base, info.last_duration, usual)

    def to_text(self) -> str:
        """Return the timing as text. Compressed time steps keep the text short if the frame rate is constant."""
        import numpy as np

        steps = np.diff(np.array(self.timestamps, "<i8"), prepend=0)
        packed = base64.b64encode(zlib.compress(steps.tobytes(), 9)).decode()
        return f"{self.time_base} {self.last_duration} {self.usual_rate or 0} {packed}"

    @staticmethod
    @lru_cache(4)  # the rows of a file often follow each other
    def from_text(text: str) -> Timing:
        import numpy as np

        time_base, last, usual, packed = text.split(" ")
        times = np.frombuffer(zlib.decompress(base64.b64decode(packed)), "<i8").cumsum().tolist()
        return Timing(times, Fraction(time_base), int(last), Fraction(usual) or None)

    def window(self, start: int, stop: int, rate: FrameRate) -> Window:
        """Return the window of frames `start` to `stop` (exclusive)."""
        count, seconds = stop - start, self.seconds(start, stop)
        span = (self.timestamps[stop - 1] - self.timestamps[start]) * self.time_base
        fps = float((count - 1) / span if span else 1 / seconds)
        return Window(start, count, rate.num_frames(count, fps, seconds))

    def frames_in(self, time_range: TimeRange) -> range:
        """Return the frames that begin in a time range.

        Raises Rejected if no frame begins in the range or the range extends beyond the video. A range may end up to
        `_SPARE_SECONDS` after the video ends, because times in metadata are often rounded.
        """
        total = self.seconds(0, len(self.timestamps))
        if time_range.start >= total or time_range.end > total + _SPARE_SECONDS:
            reason = f"the time range {time_range.text} extends beyond the video, which is {float(total):.3f} s long"
            raise Rejected(reason, kind="time-range")
        first, stop = (
            bisect_left(self.timestamps, self.timestamps[0] + seconds / self.time_base)
            for seconds in (time_range.start, time_range.end)
        )
        if first == stop:
            raise Rejected(f"no frame begins in the time range {time_range.text}", kind="time-range")
        return range(first, stop)

    def seconds(self, start: int, stop: int) -> Fraction:
        """Return the time in seconds from the start of frame `start` to the end of frame `stop - 1`."""
        end = self.timestamps[stop] if stop < len(self.timestamps) else self.end
        return (end - self.timestamps[start]) * self.time_base

    @cached_property
    def end(self) -> int:
        """End of the last frame, in ticks."""
        times = self.timestamps
        return end_ticks(times, self.time_base, self.last_duration, len(times), self.usual_rate)


def cut_windows(timing: Timing, frames: range, max_seconds: float | None, rate: FrameRate, least: int) -> list[Window]:
    """Return consecutive windows of about equal length that together cover each of the `frames` exactly once.

    A window is longer than `max_seconds` only if it is a single frame, or if shorter windows would have fewer than
    `least` clip frames, the smallest count that a bucket accepts. Windows have about equal durations if `rate` depends
    on times, and otherwise about equal frame counts.
    """
    whole = timing.window(frames.start, frames.stop, rate)
    if max_seconds is None:
        return [whole]
    most = Fraction(max_seconds)
    limit = max(1, min(whole.num_frames, whole.num_clip_frames // least))
    count = min(limit, max(1, -(-timing.seconds(frames.start, frames.stop) // most)))
    windows = _cut(timing, frames, count, rate)
    # With a variable frame rate, some windows are longer than others. The count changes in steps of a sixteenth, so
    # that even a long film needs few attempts.
    while count < limit and any(timing.seconds(w.start, w.start + w.num_frames) > most for w in windows):
        count = min(limit, count + max(1, count // 16))
        windows = _cut(timing, frames, count, rate)
    while count > 1 and min(window.num_clip_frames for window in windows) < least:
        count -= max(1, count // 16)
        windows = _cut(timing, frames, count, rate)
    return windows


def _cut(timing: Timing, frames: range, count: int, rate: FrameRate) -> list[Window]:
    times, first, last = timing.timestamps, frames.start, frames.stop
    if rate.rule in ("native", "cap"):
        bounds = [first + number * len(frames) // count for number in range(count + 1)]
    else:
        span = (times[last] if last < len(times) else timing.end) - times[first]
        inner = {bisect_left(times, times[first] + -(-number * span // count)) for number in range(1, count)}
        bounds = sorted({first, last, *inner})
    return [timing.window(start, stop, rate) for start, stop in pairwise(bounds)]
