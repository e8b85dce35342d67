"""Positions of decoded audio frames on the timeline, in samples of the stream's own rate.

Sample n of a stream with rate r has the time n / r. Within a contiguous run, positions are found by counting samples,
because most time bases are too coarse for samples (1 ms in Matroska and FLV) or have other ticks (90 kHz in transport
streams). A new run begins where timestamps deviate permanently from the count, by more than rounding can explain.
Timestamps that fluctuate around the count by up to 10 ms, as many recorders write them, do not split the audio.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from streamvid.errors import ProbeError
from streamvid.video.audio.grid import round_half_up

if TYPE_CHECKING:
    from av.audio.frame import AudioFrame

_MAX_WAITING = 1 << 20
_MAX_POSITION = 1 << 48
_NUM_FOLLOWING = 8  # frames that decide whether a deviation is for good
_JITTER_SECONDS = Fraction(1, 100)
#: Matroska and Ogg files often store where a Vorbis packet ends, which fluctuates by parts of its blocks.
_SLACK_SECONDS = {"vorbis": Fraction(1, 40)}


@dataclass(frozen=True, eq=False, slots=True)
class DecodedFrame:
    """Decoded frame, and the range of its samples that is audio rather than priming or padding.

    - packet: ordinal of the packet after which the decoder returned the frame.
    - timestamp: timestamp of the first sample, in ticks; None if unknown.
    - head: number of samples to cut from the start of the frame (priming).
    - stop: number of samples in the frame before the padding.
    """

    frame: AudioFrame
    packet: int
    timestamp: int | None
    head: int
    stop: int

    @property
    def rate(self) -> int:
        return self.frame.sample_rate


def place_frames(frames: Iterable[DecodedFrame], time_base: Fraction, codec: str) -> Iterator[tuple[int, DecodedFrame]]:
    """Yield each frame with the position of its first sample, counting priming samples.

    time_base: seconds per tick of timestamps. Frames at the start that have no timestamps are placed before the first
        frame that has one.
    Raises ProbeError if no frame has a timestamp.
    """
    positions, waiting, num_waiting = _Positions(time_base, codec), list[DecodedFrame](), 0
    for frame, following in _with_following(frames):
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


def _with_following(frames: Iterable[DecodedFrame]) -> Iterator[tuple[DecodedFrame, Collection[DecodedFrame]]]:
    """Yield each frame with up to `_NUM_FOLLOWING` frames that follow it."""
    ahead = deque[DecodedFrame]()
    for frame in frames:
        ahead.append(frame)
        if len(ahead) > _NUM_FOLLOWING:
            yield ahead.popleft(), ahead
    while ahead:
        yield ahead.popleft(), ahead


class _Positions:
    """State for computing the positions of one stream's frames.

    Times are compared as integers. Their unit is chosen so that a tick lasts `_tick` units and a sample lasts `_sample`
    units.
    """

    def __init__(self, time_base: Fraction, codec: str) -> None:
        self._time_base = time_base
        self._slack = _SLACK_SECONDS.get(codec, Fraction(0))
        self._rate = 0
        self._next: int | None = None
        self._is_counted = False

    @property
    def is_unknown(self) -> bool:
        return self._next is None

    def place(self, frame: DecodedFrame, following: Collection[DecodedFrame]) -> int:
        """Return the position of the first sample in `frame`. `following` contains the next frames."""
        if frame.rate != self._rate:
            self._change_rate(frame.rate)
        position = self._next
        if position is None or (frame.timestamp is not None and not self._continues(frame, position, following)):
            position = self._start(frame, following)
            if abs(position) > _MAX_POSITION:
                raise ProbeError(
                    f"an audio frame has an implausible timestamp ({frame.timestamp}); re-encode the file "
                    "(ffmpeg -i IN OUT.mp4)",
                    kind="timestamps",
                )
        self._next = position + frame.frame.samples
        # The time of a frame without audio was never rounded as that of audio, so the next time counts.
        self._is_counted = frame.head < frame.stop
        return position

    def _change_rate(self, rate: int) -> None:
        if self._next is not None:
            self._next = round_half_up(Fraction(self._next * rate, self._rate))
        self._rate, self._is_counted = rate, False
        self._tick, self._sample = (self._time_base * rate).as_integer_ratio()
        self._jitter = int(_JITTER_SECONDS * rate * self._sample)
        # The largest deviation that the rounding of a timestamp can explain.
        if self._slack:
            self._tolerance = int(self._slack * rate * self._sample)
        elif self._tick == 1:
            self._tolerance = self._sample // 2  # every sample has a timestamp of its own
        else:
            self._tolerance = max(self._sample, self._tick * 3 // 2)

    def _continues(self, frame: DecodedFrame, position: int, following: Collection[DecodedFrame]) -> bool:
        """Return whether a frame's counted position is correct, even if the frame's timestamp deviates from it."""
        if not self._is_counted:
            return False
        step = self._deviation(frame, position)
        if abs(step) <= self._tolerance:
            return True
        deviations = self._deviations(frame, position, following)
        if any(abs(deviation) <= self._tolerance for deviation in deviations):
            return True  # only some timestamps are wrong
        is_lasting = deviations and all(abs(deviation - step) <= self._tolerance for deviation in deviations)
        return abs(step) <= self._jitter and not is_lasting

    def _start(self, frame: DecodedFrame, following: Collection[DecodedFrame]) -> int:
        """Return the position of a frame that does not continue the previous frames.

        The position is computed from the frame's own timestamp, and corrected by the median deviation of the following
        frames if that deviation is at most 1.5 ticks but larger than the rounding of two timestamps can explain.
        """
        position = round_half_up(Fraction(self._units(frame), self._sample)) - frame.head
        deviations = sorted(self._deviations(frame, position, following))
        if len(deviations) == _NUM_FOLLOWING:
            median = deviations[len(deviations) // 2]
            if max(self._tick, self._sample) < abs(median) <= self._tick * 3 // 2:
                position += round_half_up(Fraction(median, self._sample))
        return position

    def _deviations(self, frame: DecodedFrame, position: int, following: Collection[DecodedFrame]) -> list[int]:
        """Return the deviation, in units, of each following frame's timestamp from the sample count.

        position: position of `frame`, from which the samples are counted.
        """
        found, count = list[int](), position + frame.frame.samples
        for later in following:
            if later.rate != self._rate:
                break
            if later.timestamp is not None:
                found.append(self._deviation(later, count))
            count += later.frame.samples
        return found

    def _deviation(self, frame: DecodedFrame, position: int) -> int:
        """Return the deviation, in units, of a frame's timestamp from `position`, the position of the first sample."""
        return self._units(frame) - (position + frame.head) * self._sample

    def _units(self, frame: DecodedFrame) -> int:
        """Return the time of the first sample after the priming, in units, rounded to ticks as FFmpeg does."""
        assert frame.timestamp is not None
        head = (2 * frame.head * self._sample + self._tick) // (2 * self._tick)
        return (frame.timestamp + head) * self._tick
