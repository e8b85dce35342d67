"""Positions of decoded audio frames on the timeline, in samples of the stream's own rate.

Sample n of a stream with rate r has the time n / r. Within a contiguous run, positions are counted, because most time
bases are too coarse for samples (1 ms in Matroska and FLV) or have other ticks (90 kHz in transport streams). A new run
begins where a timestamp deviates from the count by more than its rounding can explain.
"""

from __future__ import annotations

from fractions import Fraction

from streamvid.video.audio.grid import round_half_up


class Positions:
    """Positions of the frames of one stream, in decode order. time_base: seconds per tick of timestamps."""

    def __init__(self, time_base: Fraction) -> None:
        self._time_base = time_base
        self._rate = 0
        self._next: int | None = None
        self._is_counted = False

    def place(self, timestamp: int | None, rate: int, num_samples: int, head: int) -> int | None:
        """Return the position of the first kept sample of the next frame, or None if no timestamp was seen so far.

        timestamp: of the whole frame, in ticks; None if unknown.
        num_samples: of the whole frame. head: number of samples that are cut from its start.
        """
        if rate != self._rate:
            if self._next is not None:
                self._next = round_half_up(Fraction(self._next * rate, self._rate))
            self._rate, self._is_counted = rate, False
        position = None if self._next is None else self._next + head
        if timestamp is not None:
            tick = self._time_base * rate
            # FFmpeg rounds the time of the first kept sample to ticks too.
            stamped = (timestamp + round_half_up(head / tick)) * tick
            if position is None or not self._is_counted or abs(stamped - position) > _tolerance(tick):
                position = round_half_up(stamped)
        if position is None:
            return None
        self._next = position - head + num_samples
        self._is_counted = head < num_samples
        return position


def _tolerance(tick: Fraction) -> Fraction:
    """Return the largest deviation, in samples, that rounding to ticks can explain. tick: samples per tick."""
    if tick.numerator == 1:
        return Fraction(1, 2)  # every sample has a timestamp of its own
    return max(Fraction(1), tick * 3 / 2)
