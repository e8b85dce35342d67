"""Tests of the arithmetic that splits long sources into windows."""

from __future__ import annotations

from fractions import Fraction
from itertools import accumulate, pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from streamvid.buckets.frames import FrameRate
from streamvid.errors import Rejected
from streamvid.sharder.source.time_ranges import TimeRange
from streamvid.sharder.windows import Timing, cut_windows
from streamvid.video.encode.timeline import make_timeline

BASE = Fraction(1, 1000)
STEPS = st.one_of(
    st.tuples(st.integers(1, 90), st.integers(1, 400)).map(lambda steady: [steady[0]] * steady[1]),
    st.lists(st.integers(1, 2000), min_size=1, max_size=300),
)
SECONDS = st.floats(0.02, 20)
EVERY = FrameRate()
RATES = st.sampled_from([EVERY, *(FrameRate("resample", Fraction(fps)) for fps in ("8", "24", "30000/1001"))])


def timing_of(steps: list[int], last: int = 40) -> Timing:
    return Timing([5, *accumulate(steps, initial=5)][1:], BASE, last, Fraction(25))


@given(STEPS, SECONDS, RATES, st.integers(1, 40), st.data())
def test_windows_contain_every_frame_once_and_have_valid_lengths(
    steps: list[int], most: float, rate: FrameRate, least: int, data: st.DataObject
) -> None:
    """SHARD-3: no frame is lost; a window is too long only if shorter ones would be too short for any bucket."""
    timing = timing_of(steps)
    first = data.draw(st.integers(0, len(timing.timestamps) - 1))
    frames = range(first, data.draw(st.integers(first + 1, len(timing.timestamps))))
    windows = cut_windows(timing, frames, most, rate, least)
    assert windows[0].start == frames.start and windows[-1].start + windows[-1].num_frames == frames.stop
    assert all(a.start + a.num_frames == b.start for a, b in pairwise(windows))
    whole = timing.window(frames.start, frames.stop, rate)
    if whole.num_clip_frames >= least:
        assert min(window.num_clip_frames for window in windows) >= least
    if rate.fps is None:
        assert max(w.num_frames for w in windows) - min(w.num_frames for w in windows) <= 1
    too_long = [w for w in windows if w.num_frames > 1 and timing.seconds(w.start, w.start + w.num_frames) > most]
    if too_long and len(set(steps)) == 1:  # at an even rate, one more window would have been too short for the bucket
        assert whole.num_clip_frames // (len(windows) + 1 + len(windows) // 16) <= least + 1


@given(STEPS, st.integers(0, 100), RATES)
def test_the_plan_predicts_the_encoder_output(steps: list[int], last: int, rate: FrameRate) -> None:
    timing = timing_of(steps, last)
    for window in cut_windows(timing, range(len(timing.timestamps)), 1.0, rate, 1):
        line = make_timeline(
            tuple(timing.timestamps),
            BASE,
            last,
            start=window.start,
            num_frames=window.num_frames,
            fps=rate.fps,
            usual_rate=timing.usual_rate,
        )
        assert len(line.numbers) == window.num_clip_frames
        assert timing.seconds(window.start, window.start + window.num_frames) == (
            line.duration_seconds
            if rate.fps is None
            else timing.seconds(window.start, window.start + window.num_frames)
        )


TIMES = st.decimals(0, 30, places=3).map(Fraction)


@given(STEPS, TIMES, TIMES)
@example([1], Fraction(1, 500), Fraction(21, 500))
def test_a_time_range_holds_the_frames_that_begin_in_it(steps: list[int], start: Fraction, end: Fraction) -> None:
    timing = timing_of(steps)
    seconds = [(ticks - timing.timestamps[0]) * BASE for ticks in timing.timestamps]
    inside = [number for number, second in enumerate(seconds) if start <= second < end]
    total = timing.seconds(0, len(seconds))
    if inside and end <= total + Fraction(1, 2):
        assert list(timing.frames_in(TimeRange(start, end))) == inside
    elif start < end:
        is_beyond = start >= total or end > total + Fraction(1, 2)
        with pytest.raises(Rejected, match="extends beyond" if is_beyond else "no frame begins"):
            timing.frames_in(TimeRange(start, end))


@given(STEPS, st.integers(0, 100))
def test_timing_round_trips_as_text(steps: list[int], last: int) -> None:
    timing = timing_of(steps, last)
    assert Timing.from_text(timing.to_text()) == timing


def test_a_steady_rate_is_short_in_the_journal() -> None:
    assert len(timing_of([33, 33, 34] * 10_000).to_text()) < 1000


def test_equal_windows_of_a_steady_source() -> None:
    windows = cut_windows(timing_of([40] * 99), range(100), 1.0, EVERY, 17)
    assert [(w.start, w.num_frames) for w in windows] == [(0, 25), (25, 25), (50, 25), (75, 25)]
    halves = cut_windows(timing_of([40] * 99), range(100), 0.5, EVERY, 17)
    assert len(halves) == 5, "windows of 12 frames would fill no bucket"
    assert len(cut_windows(timing_of([40] * 99), range(100), None, EVERY, 17)) == 1
