"""Tests of views as arithmetic: bounds, spacing, and choices that depend only on seed, key and visit (SAMPLE-1)."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any, get_args

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from streamvid.buckets.bucket import Bucket
from streamvid.buckets.frames import FrameRate
from streamvid.buckets.pick import num_places
from streamvid.errors import ConfigError
from streamvid.loader.view.index_row import IndexRow, SampleFile
from streamvid.loader.view.view import RandomChoices, Temporal, View, ViewOptions, view_of

RULES = ("native", "cap", "resample", "fix_frame_rate")
TEMPORAL = get_args(Temporal)


def row_of(num_frames: int, fps: float = 25.0, key: str = "clip") -> IndexRow:
    return IndexRow(key, SampleFile(0, 1, b"", num_frames), fps=fps, duration_seconds=num_frames / fps)


def shown(options: ViewOptions, rate: FrameRate, row: IndexRow, count: int, *, seed: int, visit: int) -> View:
    return view_of(options, rate, row, count, RandomChoices.of(seed, row.key, visit))


def numbers_of(options: ViewOptions, num_frames: int, count: int, visit: int, **changes: Any) -> list[int]:
    view = shown(options, FrameRate(), row_of(num_frames, **changes), count, seed=1, visit=visit)
    return list(view.pick.numbers(num_frames, range(num_frames)))


@given(
    st.sampled_from(RULES), st.sampled_from(TEMPORAL), st.integers(1, 400), st.floats(1, 120), st.integers(1, 60),
    st.integers(1, 9), st.integers(-(1 << 63), 1 << 63), st.integers(1, 60),
)  # fmt: skip
def test_frames_are_within_the_clip_and_at_the_rate(
    rule: str, temporal: str, num_frames: int, fps: float, count: int, interval: int, visit: int, target: int
) -> None:
    """For every rule and view, the frames are within the clip, in ascending order, and as many as the bucket needs.

    A clip that is too short is an error; its speed is never changed.
    """
    rate = FrameRate(rule, None if rule == "native" else Fraction(target))  # type: ignore[arg-type]
    options = ViewOptions(temporal, interval if temporal in ("random", "opensora") else 1)  # type: ignore[arg-type]
    row = row_of(num_frames, fps)
    there = num_places(rate, num_frames, fps, row.duration_seconds)
    if there < count or (temporal == "full" and there != count):
        with pytest.raises(ConfigError, match="shard"):
            shown(options, rate, row, count, seed=3, visit=visit)
        return
    view = shown(options, rate, row, count, seed=3, visit=visit)
    assert view == shown(options, rate, replace(row), count, seed=3, visit=visit)
    times = [i * 1000 for i in range(num_frames)]
    numbers = list(view.pick.numbers(num_frames, times, Fraction(1, round(1000 * fps))))
    assert len(numbers) == count
    assert 0 <= numbers[0] <= numbers[-1] < num_frames
    assert numbers == sorted(numbers)
    if rule in ("native", "cap") and temporal not in ("uniform", "opensora"):
        gaps = {later - earlier for earlier, later in pairwise(numbers)}
        least = 1 if rule == "native" else max(1, math.ceil(Fraction(fps) / target)) if fps >= target else 1
        assert len(gaps) <= 1
        assert all(gap % least == 0 and gap // least <= max(1, interval) for gap in gaps)
        if gaps:
            assert view.pick.delivered_fps == pytest.approx(fps / gaps.pop())


@given(st.integers(1, 20), st.integers(1, 20))
def test_every_start_is_drawn_including_the_last(count: int, more: int) -> None:
    """OPEN-SORA never draws the last valid start. Here, every window that fits is drawn, and no other window."""
    starts = {numbers_of(ViewOptions(), count + more, count, visit)[0] for visit in range(400)}
    assert starts == set(range(more + 1))


def test_starts_are_uniform() -> None:
    """SAMPLE-1: chi-squared test of 20,000 draws over 17 starts, at alpha = 1e-6 (16 degrees of freedom: 60.4)."""
    counts = Counter(numbers_of(ViewOptions(), 33, 17, visit)[0] for visit in range(20000))
    expected = 20000 / 17
    assert sum((counts[start] - expected) ** 2 / expected for start in range(17)) < 60.4


@given(st.integers(1, 12), st.integers(0, 11), st.integers(1, 12), st.integers(0, 5), st.text(max_size=8))
def test_each_chunk_is_delivered_once_before_any_repeats(
    count: int, rest: int, chunks: int, round_: int, key: str
) -> None:
    """Each round of visits delivers each of the adjacent windows once, as a whole."""
    assume(rest < count)
    visits = range(round_ * chunks, (round_ + 1) * chunks)
    windows = [numbers_of(ViewOptions("chunk"), count * chunks + rest, count, visit, key=key) for visit in visits]
    assert sorted(windows) == [list(range(i * count, (i + 1) * count)) for i in range(chunks)]


def test_orders_of_chunks_differ_between_rounds_and_clips() -> None:
    def order(key: str, round_: int) -> tuple[int, ...]:
        return tuple(numbers_of(ViewOptions("chunk"), 80, 10, round_ * 8 + i, key=key)[0] for i in range(8))

    assert len({order(key, round_) for key in ("a", "b", "c") for round_ in range(3)}) > 6


@given(st.integers(2, 30), st.integers(2, 10), st.integers(0, 60))
def test_intervals_are_drawn_up_to_what_fits(count: int, most: int, more: int) -> None:
    """OPEN-SORA: as with rand_sample_interval, intervals are uniform in 1 … min(n, frames // T), and all occur."""
    num_frames = count + more
    found = set()
    for visit in range(300):
        numbers = numbers_of(ViewOptions(max_interval=most), num_frames, count, visit)
        found.add(numbers[1] - numbers[0])
    assert found == set(range(1, min(most, num_frames // count) + 1))


def test_a_middle_window_is_centered() -> None:
    assert numbers_of(ViewOptions("middle"), 20, 5, 0) == [7, 8, 9, 10, 11]
    assert numbers_of(ViewOptions("head"), 20, 5, 9) == [0, 1, 2, 3, 4]
    assert numbers_of(ViewOptions("full"), 20, 20, 9) == list(range(20))


@pytest.mark.parametrize("given_", [
    {"temporal": "sometimes"}, {"spatial": "flip"}, {"max_interval": 0}, {"max_interval": True},
    {"temporal": "head", "max_interval": 2}, {"spatial": "rand_size_crop"}, {"spatial_scale": (0.5, 1.0)},
    {"spatial": "rand_size_crop", "spatial_scale": (0.0, 1.0)},
    {"spatial": "rand_size_crop", "spatial_scale": (0.5, 1.5)},
    {"spatial": "rand_size_crop", "spatial_scale": (0.5,)},
])  # fmt: skip
def test_invalid_options_are_refused(given_: dict[str, Any]) -> None:
    """The error names the option, its value and what is allowed."""
    with pytest.raises(ConfigError, match=next(iter(given_))):
        ViewOptions(**given_)


def test_crop_positions_and_sizes_are_drawn_independently() -> None:
    """SAMPLE-1: left, top and size depend on the key and the visit, each through its own random number."""
    options = ViewOptions(spatial="rand_size_crop", spatial_scale=(0.5, 0.75))
    crops = [shown(options, FrameRate(), row_of(9), 9, seed=1, visit=visit).crop for visit in range(200)]
    assert len(set(crops)) == 200
    scales = [crop.scale / 65536 for crop in crops if crop]
    assert min(scales) >= 0.5
    assert max(scales) <= 0.75
    assert max(scales) - min(scales) > 0.2
    assert len({round(crop.left / 2**32, 1) for crop in crops if crop}) == 11
    assert all(crop and crop.left != crop.top for crop in crops)
    assert shown(ViewOptions(), FrameRate(), row_of(9), 9, seed=1, visit=0).crop is None


def test_a_native_dataset_has_its_crop_and_a_square_its_center() -> None:
    """Choices that are fixed when sharding are refused by name, with the remedy."""
    wide, square = Bucket(num_frames=5, height=64, width=96), Bucket(num_frames=5, height=64, width=64)
    for spatial in ("center", "random_crop"):
        with pytest.raises(ConfigError, match="contains native clips.*clips='copy'"):
            ViewOptions(spatial=spatial).check("native", [square], "ds")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="96x64-5f is 96x64"):
        ViewOptions(spatial="center").check("copy", [square, wide], "ds")
    ViewOptions(spatial="center").check("copy", [square], "ds")
    ViewOptions("uniform").check("native", [wide], "ds")
