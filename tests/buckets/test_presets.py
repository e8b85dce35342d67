"""Tests of the shipped presets: each loads, follows its model's rule, names its source and marks our choices."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from streamvid.buckets import presets
from streamvid.buckets.bucket import match_buckets
from streamvid.buckets.document import bucket_config_from_json, bucket_config_to_json
from streamvid.buckets.frames import FrameRate, FrameRule
from streamvid.buckets.geometry import aspect_table
from streamvid.errors import ConfigError

FACTS = {
    # fps, frame rule, multiple, the source's buckets that the preset includes, and tokens of the first of them
    "cogvideox": ("8", "8k+1", 16, ["720x480@49"], 17_550),
    "cogvideox1.5": ("16", "16k+1", 16, ["1360x768@81"], 44_880),
    "hunyuanvideo-540p": ("24", "4k+1", 16, ["960x544@129", "544x960@129", "832x624@129", "720x720@129"], 67_320),
    "hunyuanvideo-720p": ("24", "4k+1", 16, ["1280x720@129", "720x1280@129", "832x1104@129", "960x960@129"], 118_800),
    "hunyuanvideo1.5-480p": ("24", "4k+1", 16, ["848x480@121", "720x544@121", "640x640@121"], 49_290),
    "ltx": ("24", "8k+1", 32, ["1216x704@121", "960x544@49", "768x448@89", "512x512@121", "512x512@49"], 13_376),
    "mochi": ("30", "6k+1", 16, ["848x480@37", "848x480@85"], 11_130),
    "opensora2-256": ("up to 24", "4k+1", 16, ["256x256@129", "256x256@1", "400x160@33"], 8_448),
    "opensora2-768": ("up to 24", "4k+1", 16, ["768x768@129", "1184x496@5"], 76_032),
    "wan2.1-480p": ("16", "4k+1", 16, ["832x480@81", "480x832@81"], 32_760),
    "wan2.1-720p": ("16", "4k+1", 16, ["1280x720@81", "720x1280@81"], 75_600),
    "wan2.2-a14b-480p": ("16", "4k+1", 16, ["832x480@81", "480x832@81"], 32_760),
    "wan2.2-a14b-720p": ("16", "4k+1", 16, ["1280x720@81", "720x1280@81"], 75_600),
    "wan2.2-ti2v-5b": ("24", "4k+1", 32, ["1280x704@121", "704x1280@121"], 27_280),
}


def test_the_list_of_presets_is_complete() -> None:
    assert presets.preset_names() == tuple(sorted(FACTS))


@pytest.mark.parametrize("name", FACTS)
def test_a_preset_matches_its_source(name: str) -> None:
    fps, rule, multiple, of_source, tokens = FACTS[name]
    config = presets.load_preset(name)
    assert config.about.name == name
    assert config.model is not None
    assert presets.rate_text(config) == fps
    assert (str(config.model.frame_rule), config.model.multiple) == (rule, multiple)
    costs = {cost.bucket.size_at_frames: cost for cost in presets.bucket_costs(config)}
    assert not any(costs[bucket].is_own_choice for bucket in of_source)
    assert costs[of_source[0]].tokens == tokens


@pytest.mark.parametrize("name", FACTS)
def test_a_preset_follows_its_models_rule_and_names_its_source(name: str) -> None:
    config = presets.load_preset(name)
    assert config.model is not None
    config.model.check_all(config.table.buckets, config.frame_rate)
    assert "/" in config.about.source
    assert len(config.about.source) > 60
    for pattern in config.about.own_choice:
        assert match_buckets(pattern, config.table.buckets)
    assert bucket_config_from_json(bucket_config_to_json(config)) == config


@pytest.mark.parametrize("name", FACTS)
def test_portrait_and_landscape_mirror_each_other_unless_the_model_has_one_size(name: str) -> None:
    shapes = {bucket.shape for bucket in presets.load_preset(name).table.buckets}
    if name != "cogvideox":
        assert shapes == {(t, w, h) for t, h, w in shapes}


@pytest.mark.parametrize("name", [name for name in FACTS if not name.startswith(("opensora2", "ltx"))])
def test_our_own_sizes_need_no_more_memory_than_the_sources(name: str) -> None:
    """If the source's largest bucket fits, all buckets fit (HunyuanVideo 1.5's square bucket comes from its source)."""
    costs = presets.bucket_costs(presets.load_preset(name))
    of_source = max(cost.tokens for cost in costs if not cost.is_own_choice)
    assert max(cost.tokens for cost in costs) == of_source


def test_open_soras_presets_have_its_table_frame_counts_and_searched_batch_sizes() -> None:
    """Open-Sora checklist, rows 3, 4 and 15."""
    searched = {"opensora2-256": (45, 12, 6, 4, 3), "opensora2-768": (38, 6, 4, 3, 2)}
    for name, (image, *tiers) in searched.items():
        config = presets.load_preset(name)
        table = aspect_table(f"{name[-3:]}px")
        assert len(table) == {"opensora2-256": 11, "opensora2-768": 15}[name]
        assert {(b.height, b.width) for b in config.table.buckets} == set(table.values())
        assert {b.num_frames for b in config.table.buckets} == {1, *range(5, 130, 4)}
        sizes = config.batch_sizes
        for bucket in config.table.buckets:
            t = bucket.num_frames
            assert sizes[bucket.id] == (image if t == 1 else tiers[next(i for i in range(4) if t <= 33 + 32 * i)])
        assert config.frame_rate == FrameRate("cap", Fraction(24))


def test_max_tokens_gives_batch_sizes_with_the_models_own_tokens() -> None:
    costs = presets.bucket_costs(presets.load_preset("ltx"), max_tokens_per_batch=30_000)
    largest = max(costs, key=lambda cost: cost.tokens)
    assert (largest.tokens, largest.batch_size, largest.batch_bytes) == (13_376, 2, 2 * 121 * 704 * 1216 * 3)
    with pytest.raises(ConfigError, match="one sample of bucket 1216x704-121f has 13376 tokens for ltx"):
        presets.bucket_costs(presets.load_preset("ltx"), max_tokens_per_batch=13_000)
    assert all(cost.batch_size is None for cost in presets.bucket_costs(presets.load_preset("mochi")))


def test_a_configuration_that_its_model_does_not_support_is_refused(tmp_path: Path) -> None:
    text = presets.preset_text("wan2.1-480p").replace("832x480@81,\n", "832x480@80,\n")
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(
        ConfigError, match=r"832x480-80f for wan2.1: a count of 80 frames does not follow the rule 4k\+1.*77 and 81"
    ):
        presets.load_preset(tmp_path / "mine.yaml")
    (tmp_path / "mine.yaml").write_text(presets.preset_text("wan2.1-480p").replace("624x624@81]", "640x640@81]"))
    with pytest.raises(ConfigError, match="no bucket matches '640x640@81'"):
        presets.load_preset(tmp_path / "mine.yaml")
    with pytest.raises(ConfigError, match="'wan' is neither a file nor a preset; presets: cogvideox, cogvideox1.5"):
        presets.load_preset("wan")


def test_preset_rules_are_shown_in_common_notation() -> None:
    config = presets.load_preset("ltx")
    assert presets.rule_text(config) == "8k+1, sides of 32"
    assert presets.sizes_text(config) == "1216x704 and 6 more"
    assert presets.frames_text(config) == "25 49 89 121"
    assert presets.sizes_text(presets.load_preset("opensora2-256")) == "256px, 11 ratios"
    assert config.model is not None
    assert config.model.frame_rule == FrameRule(8)
