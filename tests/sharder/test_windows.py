"""Windows of long sources, as arithmetic."""

from __future__ import annotations

from fractions import Fraction
from itertools import accumulate, pairwise

from hypothesis import given
from hypothesis import strategies as st

from streamvid.sharder.windows import Timing, cut_windows
from streamvid.video.encode.timeline import make_timeline

BASE = Fraction(1, 1000)
STEPS = st.one_of(
    st.tuples(st.integers(1, 90), st.integers(1, 400)).map(lambda steady: [steady[0]] * steady[1]),
    st.lists(st.integers(1, 2000), min_size=1, max_size=300),
)
SECONDS = st.floats(0.02, 20)
RATES = st.sampled_from([None, Fraction(8), Fraction(24), Fraction(30000, 1001)])


def timing_of(steps: list[int], last: int = 40) -> Timing:
    return Timing([5, *accumulate(steps, initial=5)][1:], BASE, last, Fraction(25))


@given(STEPS, SECONDS, RATES, st.integers(1, 40))
def test_windows_hold_every_frame_once_and_only_wanted_lengths(
    steps: list[int], most: float, rate: Fraction | None, least: int
) -> None:
    """SHARD-3: no rest is lost; a window is too long only where shorter ones would be too short for any bucket."""
    timing = timing_of(steps)
    windows = cut_windows(timing, most, rate, least)
    assert windows[0].start == 0 and windows[-1].start + windows[-1].num_frames == len(timing.timestamps)
    assert all(a.start + a.num_frames == b.start for a, b in pairwise(windows))
    whole = timing.window(0, len(timing.timestamps), rate)
    if whole.num_clip_frames >= least:
        assert min(window.num_clip_frames for window in windows) >= least
    if rate is None:
        assert max(w.num_frames for w in windows) - min(w.num_frames for w in windows) <= 1
    too_long = [w for w in windows if w.num_frames > 1 and timing.seconds(w.start, w.start + w.num_frames) > most]
    if too_long and len(set(steps)) == 1:  # at an even rate a window more would have been too short for the bucket
        assert whole.num_clip_frames // (len(windows) + 1 + len(windows) // 16) <= least + 1


@given(STEPS, st.integers(0, 100), RATES)
def test_the_plan_foretells_what_the_encoder_makes(steps: list[int], last: int, rate: Fraction | None) -> None:
    timing = timing_of(steps, last)
    for window in cut_windows(timing, 1.0, rate, 1):
        line = make_timeline(
            tuple(timing.timestamps),
            BASE,
            last,
            start=window.start,
            num_frames=window.num_frames,
            fps=rate,
            usual_rate=timing.usual_rate,
        )
        assert len(line.numbers) == window.num_clip_frames
        assert timing.seconds(window.start, window.start + window.num_frames) == (
            line.duration_seconds if rate is None else timing.seconds(window.start, window.start + window.num_frames)
        )


@given(STEPS, st.integers(0, 100))
def test_timing_comes_back_from_its_text(steps: list[int], last: int) -> None:
    timing = timing_of(steps, last)
    assert Timing.from_text(timing.to_text()) == timing


def test_a_steady_rate_is_short_in_the_journal() -> None:
    assert len(timing_of([33, 33, 34] * 10_000).to_text()) < 1000


def test_equal_windows_of_a_steady_source() -> None:
    windows = cut_windows(timing_of([40] * 99), 1.0, None, 17)
    assert [(w.start, w.num_frames) for w in windows] == [(0, 25), (25, 25), (50, 25), (75, 25)]
    assert len(cut_windows(timing_of([40] * 99), 0.5, None, 17)) == 5, "windows of 12 frames would fill no bucket"
    assert len(cut_windows(timing_of([40] * 99), None, None, 17)) == 1
