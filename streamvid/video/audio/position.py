"""Positions of decoded audio frames on the timeline, in samples of the stream's own rate.

Sample n of a stream with rate r has the time n / r. Within a contiguous run, positions are counted, because most time
bases are too coarse for samples (1 ms in Matroska and FLV) or have other ticks (90 kHz in transport streams). A new run
begins where a timestamp deviates from the count by more than its rounding can explain.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, pairwise
from typing import TYPE_CHECKING

from streamvid.errors import ProbeError
from streamvid.video.audio.grid import round_half_up

if TYPE_CHECKING:
    from av.audio.frame import AudioFrame

_MAX_WAITING = 1 << 20


@dataclass(frozen=True, eq=False, slots=True)
class DecodedFrame:
    """A decoded frame, and which of its samples are audio.

    - packet: ordinal of the packet that returned it.
    - timestamp: of its first sample, in ticks; None if unknown.
    - head: number of samples to cut from its start (priming). stop: number of its samples before the padding.
    """

    frame: AudioFrame
    packet: int
    timestamp: int | None
    head: int
    stop: int

    @property
    def rate(self) -> int:
        return self.frame.sample_rate


def place_frames(frames: Iterable[DecodedFrame], time_base: Fraction) -> Iterator[tuple[int, DecodedFrame]]:
    """Yield each frame with the position of its first sample, including priming.

    time_base: seconds per tick of timestamps. Frames before the first timestamp are placed before it.
    Raises ProbeError if there are no timestamps.
    """
    positions, waiting, num_waiting = _Positions(time_base), list[DecodedFrame](), 0
    for frame, following in pairwise(chain(frames, [None])):
        assert frame is not None
        if frame.timestamp is None and positions.is_unknown:
            waiting.append(frame)
            num_waiting += frame.frame.samples
            if num_waiting > _MAX_WAITING:
                break
            continue
        position = positions.place(frame, following)
        at = position - num_waiting
        for earlier in waiting:
            yield at, earlier
            at += earlier.frame.samples
        waiting, num_waiting = [], 0
        yield position, frame
    if waiting:
        raise ProbeError("the audio has no timestamps; re-encode the file (ffmpeg -i IN OUT.mp4)", kind="timestamps")


class _Positions:
    def __init__(self, time_base: Fraction) -> None:
        self._time_base = time_base
        self._rate = 0
        self._next: int | None = None
        self._is_counted = False

    @property
    def is_unknown(self) -> bool:
        return self._next is None

    def place(self, frame: DecodedFrame, following: DecodedFrame | None) -> int:
        """Return the position of the first sample of the next frame. following: the one after it."""
        rate, count = frame.rate, frame.frame.samples
        if rate != self._rate:
            if self._next is not None:
                self._next = round_half_up(Fraction(self._next * rate, self._rate))
            self._rate, self._is_counted = rate, False
        position = self._next
        if position is None or not self._continues(frame, position):
            # Ogg's demuxer gives single Vorbis packets wrong times; the next time shows that nothing is missing.
            is_glitch = (
                position is not None
                and self._is_counted
                and following is not None
                and following.timestamp is not None
                and following.rate == rate
                and self._continues(following, position + count)
            )
            if position is None or not is_glitch:
                position = self._stamped(frame)
        self._next = position + count
        # The time of a frame without audio was never rounded as that of audio, so the next time counts.
        self._is_counted = frame.head < frame.stop
        return position

    def _continues(self, frame: DecodedFrame, position: int) -> bool:
        """Return whether the frame's timestamp agrees with a position that was counted."""
        if frame.timestamp is None:
            return True
        deviation = abs(self._time_of(frame) - position - frame.head)
        return self._is_counted and deviation <= _tolerance(self._time_base * frame.rate)

    def _stamped(self, frame: DecodedFrame) -> int:
        return round_half_up(self._time_of(frame)) - frame.head

    def _time_of(self, frame: DecodedFrame) -> Fraction:
        """Return the time of the first sample after the priming, in samples. FFmpeg rounds it to ticks too."""
        assert frame.timestamp is not None
        tick = self._time_base * frame.rate
        return (frame.timestamp + round_half_up(frame.head / tick)) * tick


def _tolerance(tick: Fraction) -> Fraction:
    """Return the largest deviation, in samples, that rounding to ticks can explain. tick: samples per tick."""
    if tick.numerator == 1:
        return Fraction(1, 2)  # every sample has a timestamp of its own
    return max(Fraction(1), tick * 3 / 2)
