"""Tests of the frame counts, sides, rates and token counts that a model accepts."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamvid.buckets.batch_size import batch_sizes, host_bytes
from streamvid.buckets.bucket import Bucket, parse_bucket
from streamvid.buckets.frames import FrameRate, FrameRule
from streamvid.buckets.geometry import aspect_table
from streamvid.buckets.model import ModelRule
from streamvid.errors import ConfigError
from streamvid.plan.cost import default_costs, fit_costs
from streamvid.video.picture import PictureFormat

WAN = ModelRule("wan2.1", FrameRule(4), 16, Fraction(16))
OPENSORA = ModelRule("opensora2", FrameRule(4), 16, max_fps=Fraction(24))
MOCHI = ModelRule("mochi", FrameRule(6), 16, Fraction(30), vae_time=6)


@pytest.mark.parametrize(
    ("model", "bucket", "message"),
    [
        (
            WAN,
            "832x480@80",
            r"bucket 832x480-80f for wan2.1: a count of 80 frames does not follow the rule 4k\+1.*77 and 81",
        ),
        (WAN, "832x472@81", "height=472 is not a multiple of 16; nearest allowed: 464 and 480"),
        (MOCHI, "848x480@81", r"the rule 6k\+1; nearest allowed: 79 and 85"),
        (
            ModelRule("cogvideox", FrameRule(8), max_num_frames=49),
            "720x480@57",
            "720x480-57f for cogvideox has 57 frames; at most 49 are allowed",
        ),
    ],
)
def test_an_unsupported_bucket_is_refused_with_the_nearest_supported_one(
    model: ModelRule, bucket: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        model.check(parse_bucket(bucket, multiple=2))


def test_every_model_accepts_single_frame_images() -> None:
    for model in (WAN, MOCHI, OPENSORA):
        model.check_all([parse_bucket("832x480@1")], FrameRate())


def test_the_rate_must_match_the_model() -> None:
    """A model accepts exactly one rate or any rate up to a limit; clips at their native rates satisfy neither."""
    bucket = [parse_bucket("832x480@81")]
    WAN.check_all(bucket, FrameRate("resample", Fraction(16)))
    WAN.check_all(bucket, FrameRate("fix_frame_rate", Fraction(16)))
    for rate in (FrameRate(), FrameRate("cap", Fraction(16)), FrameRate("resample", Fraction(24))):
        with pytest.raises(ConfigError, match="wan2.1 requires 16 frames per second; shard with --fps 16"):
            WAN.check_all(bucket, rate)
    OPENSORA.check_all(bucket, FrameRate("cap", Fraction(24)))
    OPENSORA.check_all(bucket, FrameRate("resample", Fraction(16)))
    for rate in (FrameRate(), FrameRate("cap", Fraction(30))):
        with pytest.raises(ConfigError, match="opensora2 accepts at most 24 frames per second"):
            OPENSORA.check_all(bucket, rate)
    ModelRule("any", FrameRule(4)).check_all(bucket, FrameRate())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": ""}, "name=''"),
        ({"frame_rule": "4k!"}, "frame_rule='4k!' is not a valid rule"),
        ({"multiple": 0}, "multiple=0"),
        ({"vae_time": 0}, "vae_time=0: must be an integer from 1 to 256"),
        ({"patch_space": True}, "patch_space=True"),
        ({"max_num_frames": 0}, "max_num_frames=0"),
        ({"fps": Fraction(0)}, "fps=0: must be a number above 0"),
        ({"fps": Fraction(16), "max_fps": Fraction(24)}, "fps=16 with max_fps=24: set only one"),
    ],
)
def test_invalid_model_rules_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelRule(**({"name": "x", "frame_rule": FrameRule(4)} | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("model", [WAN, OPENSORA, MOCHI])
def test_a_rule_survives_json(model: ModelRule) -> None:
    assert ModelRule.from_json({**model.to_json(), "of a later version": 1}) == model
    with pytest.raises(ConfigError, match="model is missing required fields; add frame_rule"):
        ModelRule.from_json({"name": "x"})


@pytest.mark.parametrize(
    ("factors", "bucket", "tokens"),
    [
        ({}, "832x480@81", 32_760),
        ({"vae_space": 16}, "1280x704@121", 27_280),
        ({"vae_space": 16, "patch_space": 1}, "848x480@121", 49_290),
        ({"patch_time": 2}, "1360x768@81", 44_880),
        ({"vae_time": 8, "vae_space": 32, "patch_space": 1}, "768x448@89", 4_032),
        ({"vae_time": 6}, "848x480@163", 44_520),
    ],
)
def test_token_counts_match_the_sources(factors: dict[str, int], bucket: str, tokens: int) -> None:
    """The values come from Wan, LTX-2's guide (4,032) and Mochi's README (44,520), each with its VAE and patch size."""
    assert ModelRule("m", FrameRule(1, 0), 2, **factors).tokens(parse_bucket(bucket, multiple=2)) == tokens  # type: ignore[arg-type]


def test_without_a_model_tokens_assume_a_4x8x8_vae_with_2x2_patches() -> None:
    for text in ("832x480@81", "1280x720@1", "256px-129f-16x9"):
        assert WAN.tokens(parse_bucket(text)) == parse_bucket(text).tokens


SEARCHED = {33: 12, 65: 6, 97: 4, 129: 3}
"""Open-Sora's batch sizes at the largest frame count of each tier at 256px, searched on an H200 (its stage1.py)."""


def test_one_token_limit_gives_open_soras_searched_sizes_for_every_ratio() -> None:
    """Open-Sora checklist, rows 15 and 37: 28,080 to 29,249 tokens per batch give its searched sizes at 256px."""
    table = aspect_table("256px")
    buckets = [Bucket(t, h, w, "256px", ratio) for ratio, (h, w) in table.items() for t in SEARCHED]
    for max_tokens in (28_080, 29_249):
        sizes = batch_sizes(buckets, None, max_tokens, OPENSORA)
        assert {bucket.id: sizes[bucket.id] for bucket in buckets} == {b.id: SEARCHED[b.num_frames] for b in buckets}
    for max_tokens in (28_079, 29_250):
        assert batch_sizes(buckets, None, max_tokens, OPENSORA) != sizes


@given(
    st.integers(1, 40), st.integers(1, 40), st.integers(0, 30), st.integers(1, 9), st.sampled_from(["rgb24", "yuv420p"])
)
def test_host_bytes_equal_the_size_of_the_frames(height: int, width: int, k: int, size: int, pixels: str) -> None:
    bucket = Bucket(4 * k + 1, 2 * height, 2 * width)
    of_picture = PictureFormat(2 * height, 2 * width, pixels).num_bytes  # type: ignore[arg-type]
    assert host_bytes(bucket, size, pixels) == size * bucket.num_frames * of_picture  # type: ignore[arg-type]


def test_host_bytes_of_the_large_models() -> None:
    """93, 214 and 340 MiB per sample, as in the trainers' tables."""
    mebibytes = [round(host_bytes(parse_bucket(b)) / 2**20) for b in ("832x480@81", "1280x720@81", "1280x720@129")]
    assert mebibytes == [93, 214, 340]


def test_costs_use_the_models_own_tokens() -> None:
    """A plan's default costs and costs fitted to measurements count the model's own tokens."""
    buckets = [parse_bucket("1216x704@121"), parse_bucket("512x512@49")]
    ltx = ModelRule("ltx", FrameRule(8), 32, vae_time=8, vae_space=32, patch_space=1)
    tokens = {"1216x704-121f": 13_376, "512x512-49f": 1_792}
    assert default_costs(buckets, ltx).tokens == tokens
    assert fit_costs([("1216x704-121f", 1, 2.0)], buckets, ltx).tokens == tokens
    assert default_costs(buckets).tokens == {bucket.id: bucket.tokens for bucket in buckets}
