"""Tests of the frames that a delivery shows, against DiffSynth's own results and plain arithmetic."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from streamvid.buckets.frames import FrameRate, FrameRule
from streamvid.buckets.pick import Pick, exact_seconds, linspace, nearest_frames, num_places, time_base_of
from streamvid.errors import ConfigError

GOLDEN = json.loads((Path(__file__).parent.parent / "data" / "diffsynth_frames.json").read_text())["frames"]

WAYS: dict[str, Any] = {"cap": "step", "resample": "time", "fix_frame_rate": "number"}

steps = st.lists(st.integers(1, 2000), max_size=60)
rates = st.fractions(Fraction(1, 2), 120, max_denominator=1001)
bases = st.sampled_from([Fraction(1, 1000), Fraction(1, 12800), Fraction(1, 90000), Fraction(1001, 30000)])


def test_counts_and_numbers_equal_diffsynths() -> None:
    """PLAN: covers all 400 cases of DiffSynth's own operator: prefix, short clips by rule k*n+1, and fix_frame_rate."""
    assert len(GOLDEN) == 400
    for total, fps, seconds, asked, factor, target, is_fixed, count, numbers in GOLDEN:
        rate = FrameRate("fix_frame_rate", Fraction(target)) if is_fixed else FrameRate()
        duration = Fraction(str(seconds)) if seconds is not None else Fraction(total) / Fraction(str(fps))
        there = rate.num_frames(total, fps, duration)
        found = asked if there >= asked else FrameRule(factor).floor(there)
        pick = Pick(found, 0, 1, "number", rate.fps, fps) if is_fixed else Pick(found)
        assert (found, list(pick.numbers(total))) == (count, numbers), (total, fps, seconds, asked)


@given(steps, bases, rates, st.integers(0, 200), st.integers(1, 40), st.integers(1, 5))
def test_each_time_shows_the_nearest_frame_or_the_earlier_of_two(
    gaps: list[int], base: Fraction, fps: Fraction, start: int, count: int, stride: int
) -> None:
    """SAMPLE-2: for any rate and any distances between frames, the result equals a plain search in exact fractions."""
    times = [100, *(100 + sum(gaps[: i + 1]) for i in range(len(gaps)))]
    numbers = list(Pick(count, start, stride, "time", fps).numbers(len(times), times, base))
    for i, number in enumerate(numbers):
        wanted = Fraction(start + i * stride) / fps
        distances = [abs((time - times[0]) * base - wanted) for time in times]
        assert number == distances.index(min(distances))


@given(steps, st.integers(1, 40))
def test_an_even_spread_covers_the_first_to_the_last_frame(gaps: list[int], count: int) -> None:
    """The times are exact; a single frame is the one nearest to the middle."""
    times = [0, *(sum(gaps[: i + 1]) for i in range(len(gaps)))]
    numbers = list(Pick(count, way="spread").numbers(len(times), times))
    assert len(numbers) == count
    if count > 1:
        assert (numbers[0], numbers[-1]) == (0, len(times) - 1)
    for i, number in enumerate(numbers):
        wanted = Fraction(times[-1] * i, count - 1) if count > 1 else Fraction(times[-1], 2)
        distances = [abs(time - wanted) for time in times]
        assert number == distances.index(min(distances))


@given(st.integers(1, 500), st.integers(0, 500), st.integers(1, 9), st.integers(1, 40))
def test_steps_stay_within_the_clip_or_are_refused(num_frames: int, start: int, stride: int, count: int) -> None:
    """A clip that is too short is an error; its speed is never changed."""
    pick = Pick(count, start, stride)
    if start + (count - 1) * stride < num_frames:
        assert list(pick.numbers(num_frames)) == [start + i * stride for i in range(count)]
    else:
        with pytest.raises(ConfigError, match=f"the clip has {num_frames}"):
            pick.numbers(num_frames)


@given(st.integers(0, 1000), st.integers(1, 100), st.integers(1, 8))
def test_open_soras_window_equals_its_linspace(start: int, count: int, interval: int) -> None:
    """OPEN-SORA: the frames equal numpy.linspace over the window, truncated, as in its temporal_random_crop."""
    end = start + count * interval
    expected = np.linspace(start, end - 1, count, dtype=int).tolist()
    assert list(Pick(count, start, interval, "linspace").numbers(end)) == expected == linspace(start, end - 1, count)


@given(steps.filter(bool), bases)
def test_the_time_base_follows_from_the_average_rate(gaps: list[int], base: Fraction) -> None:
    """The fraction is exact, so an index needs to store only the fps."""
    times = [7, *(7 + sum(gaps[: i + 1]) for i in range(len(gaps)))]
    seconds = float((times[-1] - times[0]) * base)
    assert time_base_of(times, (len(times) - 1) / seconds) == base


@given(st.integers(1, 10**7), bases)
@example(8269361, Fraction(1001, 30000))  # 3.2 days
def test_the_fraction_of_a_duration_is_recovered(ticks: int, base: Fraction) -> None:
    """The fraction is exact for ticks as short as a microsecond, so frame counts are the same everywhere."""
    assert exact_seconds(float(ticks * base)) == ticks * base


@given(st.floats(0, exclude_min=True, allow_infinity=False), st.floats(0, 1e300), st.sampled_from(list(WAYS)))
def test_an_index_may_contain_any_rate_and_duration(fps: float, seconds: float, rule: Any) -> None:
    """SAFE-1: any rate and duration in an index gives frames within the clip, or too few of them."""
    rate = FrameRate(rule, Fraction(24))
    there = num_places(rate, 5, fps, seconds)
    if there < 3:
        return
    start, target = (0, None) if rule == "cap" else (there - 3, rate.fps)
    numbers = Pick(3, start, 1, WAYS[rule], target, fps).numbers(5, [0, 1, 2, 3, 1 << 60])
    assert all(0 <= number < 5 for number in numbers)


def test_images_have_one_frame_at_any_rate() -> None:
    for rule in ("cap", "resample", "fix_frame_rate"):
        assert num_places(FrameRate(rule, Fraction(16)), 1, 0.0, 0.0) == 1  # type: ignore[arg-type]


def test_numbers_far_beyond_the_clip_do_not_overflow() -> None:
    assert nearest_frames([0, 1 << 61], [Fraction(1 << 80)]) == [1]


@pytest.mark.parametrize(
    "pick", [(0,), (1, -1), (1, 0, 0), (1, 0, 1, "sideways"), (1, 0, 1, "time"), (1, 0, 1, "number")]
)
def test_invalid_picks_are_refused(pick: tuple[object, ...]) -> None:
    with pytest.raises(ConfigError):
        Pick(*pick)  # type: ignore[arg-type]


@given(st.integers(1, 99), st.integers(0, 99), st.integers(1, 9), rates)
def test_a_pick_round_trips_through_json(count: int, start: int, stride: int, fps: Fraction) -> None:
    pick = Pick(count, start, stride, "time", fps, 23.976)
    assert Pick.from_json(json.loads(json.dumps(pick.to_json()))) == pick
