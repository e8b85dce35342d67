"""Windows of a source: the parts that become samples, in exact integers, and the clips that store them."""

from __future__ import annotations

import base64
import zlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar, cast

from streamvid.video.encode.timeline import end_ticks, num_frames_at

if TYPE_CHECKING:
    from streamvid.video.info import VideoInfo


_Made = TypeVar("_Made")
TEXT_EXTENSION = "txt"
"""Extension of a sample without pictures: its clip is the member of its caption."""


def copied(cls: type[_Made], source: Any, /, **others: Any) -> _Made:
    """Return a dataclass instance with the values of another one's equally named fields; `others` take precedence."""
    names = {field.name for field in fields(cast("Any", cls))} & {field.name for field in fields(source)}
    return cls(**{**{name: getattr(source, name) for name in names}, **others})


@dataclass(frozen=True, slots=True)
class Clip:
    """Stored form of a file: a clip, or a conditioning input. Before it is encoded, num_bytes is 0 and path empty.

    path: current place of its bytes.   sha256: of an encoded clip; "" for a copy of its source.
    psnr_y: in decibels, None for a copy.   encode_seconds: CPU time.
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


@dataclass(frozen=True, slots=True)
class Window:
    """Frames `start` to `start + num_frames` of a source, and the frame count of its clip."""

    start: int
    num_frames: int
    num_clip_frames: int


@dataclass(frozen=True)
class Timing:
    """Presentation times of a source's frames: ascending ticks of time_base.

    last_duration: duration of the last frame in ticks; 0 if unknown. usual_rate: frame rate according to the file.
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
        """Return compressed time steps, which are short if the frame rate is constant."""
        import numpy as np

        steps = np.diff(np.array(self.timestamps, "<i8"), prepend=0)
        packed = base64.b64encode(zlib.compress(steps.tobytes(), 9)).decode()
        return f"{self.time_base} {self.last_duration} {self.usual_rate or 0} {packed}"

    @staticmethod
    def from_text(text: str) -> Timing:
        import numpy as np

        time_base, last, usual, packed = text.split(" ")
        times = np.frombuffer(zlib.decompress(base64.b64decode(packed)), "<i8").cumsum().tolist()
        return Timing(times, Fraction(time_base), int(last), Fraction(usual) or None)

    def window(self, start: int, stop: int, fps: Fraction | None) -> Window:
        """Return frames `start` up to `stop` as a window."""
        count = stop - start
        return Window(start, count, count if fps is None else num_frames_at(self.seconds(start, stop), fps))

    def seconds(self, start: int, stop: int) -> Fraction:
        """Return the seconds from the start of frame `start` to the end of frame `stop - 1`."""
        end = self.timestamps[stop] if stop < len(self.timestamps) else self.end
        return (end - self.timestamps[start]) * self.time_base

    @cached_property
    def end(self) -> int:
        """End of the last frame, in ticks."""
        times = self.timestamps
        return end_ticks(times, self.time_base, self.last_duration, len(times), self.usual_rate)


def cut_windows(timing: Timing, max_seconds: float | None, fps: Fraction | None, least: int) -> list[Window]:
    """Return consecutive windows of about equal length that together contain every frame once.

    No window is longer than `max_seconds`, unless it is one frame or would have fewer clip frames than `least`, the
    fewest that a bucket takes. Equal length means equal frames, or with `fps` equal seconds and thus clip frames.
    """
    whole = timing.window(0, len(timing.timestamps), fps)
    if max_seconds is None:
        return [whole]
    most = Fraction(max_seconds)
    limit = max(1, min(whole.num_frames, whole.num_clip_frames // least))
    count = min(limit, max(1, -(-timing.seconds(0, whole.num_frames) // most)))
    windows = _cut(timing, count, fps)
    # Uneven frame rates make some windows longer than others. Steps of a sixteenth are few even for a film.
    while count < limit and any(timing.seconds(w.start, w.start + w.num_frames) > most for w in windows):
        count = min(limit, count + max(1, count // 16))
        windows = _cut(timing, count, fps)
    while count > 1 and min(window.num_clip_frames for window in windows) < least:
        count -= max(1, count // 16)
        windows = _cut(timing, count, fps)
    return windows


def _cut(timing: Timing, count: int, fps: Fraction | None) -> list[Window]:
    times, total = timing.timestamps, len(timing.timestamps)
    if fps is None:
        bounds = [number * total // count for number in range(count + 1)]
    else:
        span = timing.end - times[0]
        inner = {bisect_left(times, times[0] + -(-number * span // count)) for number in range(1, count)}
        bounds = sorted({0, total, *inner})
    return [timing.window(start, stop, fps) for start, stop in pairwise(bounds)]
