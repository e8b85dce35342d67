"""Tests of sizes and frame counts that follow the clip, against DiffSynth-Studio's own results."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamvid.buckets.bucket import Bucket
from streamvid.buckets.classes import ClipFacts
from streamvid.buckets.config import BucketConfig, SizeRule
from streamvid.buckets.frames import FrameRate, FrameRule
from streamvid.buckets.geometry import dynamic_size
from streamvid.buckets.ratios import Ratios

DATA = Path(__file__).parents[1] / "data"
SIZES = json.loads((DATA / "diffsynth_sizes.json").read_text())["sizes"]
FRAMES = json.loads((DATA / "diffsynth_frames.json").read_text())["frames"]


def taken_frames(available: int, max_frames: int, rule: FrameRule) -> int:
    """Return the frame count of DiffSynth-Studio: `max_frames`, or what the rule allows for a shorter clip."""
    return max_frames if available >= max_frames else rule.floor(available)


def test_sizes_equal_diffsynth_studios() -> None:
    """DiffSynth-Studio checklist, rows 9 and 10: of its own code's 400 results, all that choose at least one side."""
    assert len(SIZES) == 400
    differing = [
        case
        for case in SIZES
        if None in (case[2], case[3]) and dynamic_size(case[1], case[0], case[4], case[5]) != (case[6], case[7])
    ]
    assert differing == []


@pytest.mark.parametrize("side", [1618, 2524, 3069, 3236])
def test_squares_that_an_exact_square_root_would_round_down(side: int) -> None:
    """The expected sizes come from DiffSynth-Studio's expression with `** 0.5`."""
    assert dynamic_size(side, side, 921600, 16) == (960, 960)


def test_frame_counts_equal_diffsynth_studios() -> None:
    """DiffSynth-Studio checklist, rows 12 and 13: frame counts of 400 clips; short clips follow the rule k * n + 1."""
    differing = []
    for num_frames, fps, seconds, asked, factor, rate, is_fixed, taken, _ in FRAMES:
        rule = FrameRate("fix_frame_rate", Fraction(str(rate))) if is_fixed else FrameRate()
        lasts = Fraction(str(seconds)) if seconds is not None else num_frames / Fraction(str(fps))
        got = taken_frames(rule.num_frames(num_frames, fps, lasts), asked, FrameRule(factor))
        if got != taken:
            differing.append((num_frames, fps, seconds, asked, factor, rate, is_fixed, taken, got))
    assert len(FRAMES) == 400
    assert differing == []


@pytest.mark.parametrize("multiple", sorted({case[5] for case in SIZES}))
def test_max_pixels_buckets_have_the_dynamic_size(multiple: int) -> None:
    """DiffSynth-Studio checklist, row 10: the bucket has the expected size, and a side of 0 is rejected."""
    cases = [case for case in SIZES if case[5] == multiple and case[2] is None and case[3] is None]
    assert cases
    for width, height, _, _, max_pixels, _, to_height, to_width in cases:
        config = BucketConfig(size=SizeRule(max_pixels=max_pixels, max_frames=81), ratios=Ratios(multiple))
        choices = config.choices(ClipFacts(100, height, width))
        if min(to_height, to_width):
            assert choices.options == ((Bucket(81, to_height, to_width), Fraction(1)),)
        else:
            assert (choices.kind, choices.options) == ("too-small", ())


@given(
    available=st.integers(2, 300),
    most=st.integers(1, 30),
    factor=st.sampled_from([4, 8, 16]),
    height=st.integers(32, 3000),
    width=st.integers(32, 3000),
)
def test_short_clips_have_the_frame_count_that_the_rule_allows(
    available: int, most: int, factor: int, height: int, width: int
) -> None:
    """As in DiffSynth; but a video with only one frame left is rejected instead of becoming an image."""
    max_frames = most * factor + 1
    config = BucketConfig(size=SizeRule(max_pixels=65536, max_frames=max_frames), frame_rule=FrameRule(factor))
    choices = config.choices(ClipFacts(available, height, width))
    size = dynamic_size(height, width, 65536, 16)
    expected = taken_frames(available, max_frames, FrameRule(factor))
    if not min(size):
        assert choices.kind == "too-small"
    elif expected == 1:
        assert choices.kind == "too-few-frames"
    else:
        assert choices.buckets == (Bucket(expected, *size),)
        # The rounded size is never larger than the clip, so no clip is upscaled.
        assert size[0] <= height and size[1] <= width
    image = config.choices(ClipFacts(1, height, width, is_image=True))
    assert image.buckets == ((Bucket(1, *size),) if min(size) else ())


def test_a_fixed_size_accepts_every_clip() -> None:
    """DiffSynth-Studio checklist, row 9: the size is exact, whatever the clip's shape and area."""
    config = BucketConfig(size=SizeRule(height=480, width=832, max_frames=81))
    assert {bucket.num_frames for bucket in config.table.buckets} == set(range(1, 82, 4))
    for height, width in ((31, 40), (4000, 100), (480, 832)):
        assert config.choices(ClipFacts(50, height, width)).buckets == (Bucket(49, 480, 832),)
        assert config.choices(ClipFacts(500, height, width)).buckets == (Bucket(81, 480, 832),)
