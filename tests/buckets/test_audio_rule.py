"""Tests of the number of audio samples per bucket: exact fractions and the results of the models' own code."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamvid.buckets.audio.rule import AUDIO_PRESETS, SampleRule
from streamvid.errors import ConfigError

RATES = st.sampled_from([Fraction(24), Fraction(25), Fraction(30000, 1001), Fraction(24000, 1001), Fraction(50)])


@given(st.integers(1, 2000), RATES, st.sampled_from([16000, 24000, 32000, 44100, 48000]))
def test_an_exact_count_is_at_most_half_a_sample_off(num_frames: int, fps: Fraction, rate: int) -> None:
    count = SampleRule().num_samples(num_frames, fps, rate)
    assert abs(count - num_frames / fps * rate) <= Fraction(1, 2)


def test_halves_are_rounded_up() -> None:
    assert SampleRule().num_samples(1, Fraction(24), 44100) == 1838
    assert SampleRule().num_samples(3, Fraction(24), 44100) == 5513


@given(st.integers(1, 2000), RATES, st.integers(1, 4000), st.data())
def test_a_grid_gives_the_nearest_count(num_frames: int, fps: Fraction, factor: int, data: st.DataObject) -> None:
    rule = SampleRule(factor, data.draw(st.integers(0, factor)))
    exact, count = num_frames / fps * 16000, rule.num_samples(num_frames, fps, 16000)
    assert count >= 1 and (count - rule.remainder) % factor == 0
    assert abs(count - exact) <= Fraction(factor, 2) or count <= factor + rule.remainder


@pytest.mark.parametrize("num_frames", [9, 97, 121, 249])
@pytest.mark.parametrize("fps", [24, 25, 30])
def test_ltx_gets_whole_latents(num_frames: int, fps: int) -> None:
    """There are 25 latents per second. At 50 fps there are ties, which floating-point numbers break either way."""
    audio = AUDIO_PRESETS["ltx-2.3"]
    count = audio.rule.num_samples(num_frames, Fraction(fps), audio.sample_rate)
    assert count == round(num_frames / fps * 25) * 640


def test_minimax_gets_whole_latents_for_its_frame_counts() -> None:
    audio = AUDIO_PRESETS["minimax-h3"]
    for n in range(1, 22):
        num_frames = 17 * n + 5
        count = audio.rule.num_samples(num_frames, Fraction(24), audio.sample_rate)
        assert count == round(num_frames / 24 * 40) * 800


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("exact", SampleRule()),
        ("640k", SampleRule(640)),
        ("800n + 1", SampleRule(800, 1)),
        ("17n+5", SampleRule(17, 5)),
    ],
)
def test_rules_are_read_and_shown(text: str, rule: SampleRule) -> None:
    assert SampleRule.of(text) == rule == SampleRule.of(str(rule))


@pytest.mark.parametrize("text", ["", "k", "0k", "640", "10k+11", "1e9k", "9999999k", 7, None])
def test_other_rules_are_refused(text: object) -> None:
    with pytest.raises(ConfigError, match="rule"):
        SampleRule.of(text)  # type: ignore[arg-type]
