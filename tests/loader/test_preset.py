"""Tests of model presets: a dataset is checked against the model's rule, and the model's VAE determines tokens."""

from __future__ import annotations

import logging
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from streamvid import DatasetConfig, ModelRule, VideoLoader, World, shard
from streamvid.buckets.bucket import Bucket, parse_buckets
from streamvid.buckets.config import BucketConfig
from streamvid.buckets.document import bucket_config_from_json
from streamvid.buckets.frames import FrameRate, FrameRule
from streamvid.dataset.manifest import read_manifest
from streamvid.errors import ConfigError
from streamvid.loader.view.model_rule import common_rule
from streamvid.plan.mix import MixBy
from streamvid.storage import LocalStore
from tests.clips import encode, frames_of
from tests.loader.conftest import SMALL, build_dataset, open_loader
from tests.shard_options import shard_options

RULE = ModelRule("ours", FrameRule(4), 16, Fraction(12))
ONE = World(0, 1)


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dataset of copied clips at 24 fps for a model that requires 12 fps, with 5 and 9 frames of 96x64."""
    root = tmp_path_factory.mktemp("model")
    source = root / "videos"
    source.mkdir()
    for number, length in enumerate((12, 20, 24, 30)):
        (source / f"{number}.mp4").write_bytes(encode(frames_of("bikes", 192, 128, length), fps=24))
    config = BucketConfig(
        buckets=parse_buckets("96x64@5,96x64@9"), frame_rate=FrameRate("resample", Fraction(12)), model=RULE
    )
    shard(source, root / "ds", shard_options(bucket_config=config, workers=1))
    return root / "ds"


def delivered(root: Path, **arguments: object) -> dict[str, int]:
    """Return the number of samples per batch, by bucket id."""
    with VideoLoader(root, world=ONE, num_workers=0, tail="pad", **arguments) as loader:  # type: ignore[arg-type]
        return {batch.bucket.id: len(batch.sample_keys) for batch in loader}


def test_the_models_rule_is_stored_with_the_dataset_and_counts_its_tokens(sealed: Path) -> None:
    """The rule is sealed in the manifest, and max_tokens_per_batch uses the model's VAE and patches by default."""
    manifest = read_manifest(LocalStore(sealed))
    assert manifest.model == RULE
    assert manifest.frame_rate == FrameRate("resample", Fraction(12))
    tokens = {bucket.id: RULE.tokens(bucket) for bucket in manifest.buckets}
    assert tokens == {"96x64-5f": 2 * 24, "96x64-9f": 3 * 24}
    assert delivered(sealed, max_tokens_per_batch=150) == {"96x64-5f": 3, "96x64-9f": 2}
    finer = replace(RULE, name="finer", patch_space=1)
    assert delivered(sealed, max_tokens_per_batch=300, preset=finer) == {"96x64-5f": 1, "96x64-9f": 1}


@pytest.mark.parametrize("view", [{"view": {"temporal": "uniform"}}, {"view": {"max_interval": 2}}])
def test_frames_at_other_rates_than_the_models_are_refused(sealed: Path, view: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="at rates that differ from the 12 fps"):
        delivered(sealed, batch_size=1, preset=RULE, **view)
    assert delivered(sealed, batch_size=1, preset=replace(RULE, fps=None), **view)


def test_one_set_of_shards_serves_every_model_whose_rule_it_follows(sealed: Path) -> None:
    for other in (
        RULE,
        replace(RULE, name="another", vae_space=16, multiple=32, frame_rule=FrameRule(2)),
        ModelRule("any rate", FrameRule(4)),
        ModelRule("up to 24", FrameRule(4), max_fps=Fraction(24)),
    ):
        assert set(delivered(sealed, batch_size=2, preset=other)) == {"96x64-5f", "96x64-9f"}


@pytest.mark.parametrize(
    ("preset", "message"),
    [
        (
            replace(RULE, fps=Fraction(16)),
            "clips are read at 12 frames per second, but ours requires 16 frames per second",
        ),
        (replace(RULE, fps=None, max_fps=Fraction(8)), "ours accepts at most 8 frames per second; shard with --fps 8"),
        (
            replace(RULE, frame_rule=FrameRule(8)),
            r"bucket 96x64-5f for ours: a count of 5 frames.* 8k\+1; nearest allowed: 1 and 9",
        ),
        (replace(RULE, multiple=64), "width=96 is not a multiple of 64; nearest allowed: 64 and 128"),
        (replace(RULE, max_num_frames=5), "bucket 96x64-9f for ours has 9 frames; at most 5 are allowed"),
        ("wan2.1-480p", "but wan2.1 requires 16 frames per second; shard with --fps 16 --fps-rule resample"),
        ("wan2.1", "'wan2.1' is neither a file nor a preset"),
        (3, "preset=3: must be a preset name"),
    ],
)
def test_a_dataset_that_does_not_fit_the_model_is_refused_with_a_remedy(
    sealed: Path, preset: object, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_loader(sealed, world=ONE, preset=preset)  # type: ignore[arg-type]


def test_only_buckets_with_samples_are_checked(sealed: Path) -> None:
    """The dataset fits if a condition excludes the bucket."""
    rule = replace(RULE, max_num_frames=5)
    assert delivered(sealed, batch_size=1, preset=rule, where="window_num_frames < 17").keys() == {"96x64-5f"}


def test_copies_at_native_rates_are_refused_by_a_model_with_one_rate(tmp_path: Path) -> None:
    root = build_dataset(tmp_path / "ds", {SMALL: [4]})
    with pytest.raises(ConfigError, match=r"ds: clips are read at their own rates \(native\), but ours requires 12"):
        open_loader(root, world=ONE, preset=RULE)
    assert delivered(root, batch_size=2, preset=replace(RULE, fps=None)) == {SMALL.id: 2}


def test_a_file_is_a_preset_too(sealed: Path, tmp_path: Path) -> None:
    text = "buckets: [96x64@5]\nmodel: {name: mine, frame_rule: 4k+1, fps: 12}\n"
    (tmp_path / "mine.yaml").write_text(text)
    assert delivered(sealed, batch_size=1, preset=tmp_path / "mine.yaml")
    (tmp_path / "none.yaml").write_text("buckets: [96x64@5]\n")
    with pytest.raises(ConfigError, match="has no model; add a model rule to it"):
        open_loader(sealed, world=ONE, preset=tmp_path / "none.yaml")


def test_datasets_of_models_that_count_differently_are_mixed_but_not_counted(sealed: Path, tmp_path: Path) -> None:
    manifest = read_manifest(LocalStore(sealed))
    other = replace(manifest, model=replace(RULE, name="theirs", vae_space=16))
    alike = replace(manifest, model=replace(RULE, name="alike"))
    plain = replace(manifest, model=None)
    assert common_rule([manifest, alike, plain]) in (RULE, replace(RULE, name="alike"))
    assert common_rule([plain]) is None
    with pytest.raises(ConfigError, match="sealed for ours and theirs, which count a clip's tokens in different ways"):
        common_rule([manifest, other])


def test_the_log_reports_the_host_memory_of_a_batch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    long = Bucket(9, 96, 64)
    root = build_dataset(tmp_path / "ds", {SMALL: [4], long: [4]})
    with caplog.at_level(logging.INFO, logger="streamvid.loader"):
        open_loader(root, batch_size=2, world=ONE).close()
    of_batch = 2 * 9 * 96 * 64 * 3
    text = f"the largest batch in host memory has 2 samples from bucket {long.id} and takes {of_batch} bytes as rgb24"
    assert text in caplog.text
    assert "for the ring and the clips read ahead" in caplog.text


def test_a_rule_is_checked_when_the_dataset_is_created(tmp_path: Path) -> None:
    """The rate and the buckets are checked before any file is read."""
    with pytest.raises(ConfigError, match="but wan2.1 requires 16 frames per second; shard with --fps 16"):
        shard_options(bucket_config="wan2.1-480p", fps=24)
    with pytest.raises(ConfigError, match="their own rates"):
        shard_options(bucket_config=BucketConfig(buckets=parse_buckets("96x64@5"), model=RULE))
    with pytest.raises(ConfigError, match=r"96x64-8f for ours: a count of 8 frames does not follow the rule 4k\+1"):
        BucketConfig(buckets=parse_buckets("96x64@8"), model=RULE)
    assert shard_options(bucket_config="opensora2-256", fps=16).frame_rate.fps == 16
    assert shard_options(bucket_config="wan2.1-480p", clips="native").rate == 16


FORM = {"ratios": {"64px": {"3:2": "96x64"}}, "bucket_config": {"64px": {5: [1.0, 3], 9: [0.5, 2]}}}


def test_batch_sizes_come_from_open_soras_format(sealed: Path) -> None:
    """A bucket with another name gets the batch size of its shape. The error names a bucket without a batch size."""
    assert delivered(sealed, batch_size=bucket_config_from_json(FORM)) == {"96x64-5f": 3, "96x64-9f": 2}
    lacking = FORM | {"bucket_config": {"64px": {5: [1.0, 3], 9: [0.5, None]}}}
    for config in (lacking, FORM | {"bucket_config": {"64px": {5: [1.0, 3], 9: [0.0, 2]}}}):
        with pytest.raises(
            ConfigError, match=r"the configuration sets no batch size for bucket 96x64-9f \(96x64@9\); add"
        ):
            open_loader(sealed, batch_size=bucket_config_from_json(config), world=ONE)
    with pytest.raises(ConfigError, match="sets no batch size for bucket 96x64-5f"):
        open_loader(sealed, batch_size=BucketConfig(buckets=parse_buckets("96x64@5")), world=ONE)


def test_batch_sizes_of_a_dataset_sharded_with_the_format(sealed: Path, tmp_path: Path) -> None:
    """Open-Sora's row 15: one configuration gives the sharder its buckets and the loader its batch sizes, by id."""
    config = bucket_config_from_json(FORM)
    options = shard_options(bucket_config=config, workers=1, clips="native")
    shard(sealed.parent / "videos", tmp_path / "ds", options)
    assert set(delivered(tmp_path / "ds", batch_size=config).items()) <= {("64px-5f-3x2", 3), ("64px-9f-3x2", 2)}


def test_weights_count_tokens_of_the_trained_model(sealed: Path) -> None:
    """With mix_by="tokens", the datasets' own model or the preset counts tokens, as for max_tokens_per_batch."""
    images = DatasetConfig(sealed, weight=1, where="window_num_frames < 17", name="short")
    longer = DatasetConfig(sealed, weight=1, name="all")

    def repeats(preset: ModelRule | None, by: MixBy) -> Fraction:
        with open_loader(
            [images, longer], world=ONE, schedule={"mix_by": by, "samples_per_epoch": 100}, preset=preset
        ) as loader:
            told = loader.state_dict()["datasets"]
        first, second = (Fraction(one["num_repeats"]) for one in told)
        return first / second

    in_short, in_all = buckets_of(sealed, "window_num_frames < 17"), buckets_of(sealed, None)
    for model in (None, replace(RULE, name="flat", vae_time=8, frame_rule=FrameRule(4))):
        rule = model or RULE
        tokens = [sum(rule.tokens(bucket) for bucket in several) for several in (in_short, in_all)]
        assert repeats(model, "tokens") == Fraction(tokens[1], tokens[0])
    assert repeats(None, "samples") == Fraction(len(in_all), len(in_short))


def buckets_of(root: Path, where: str | None) -> list[Bucket]:
    """Return the bucket of each matching sample."""
    with open_loader(root, world=ONE, where=where, tail="uneven") as loader:
        return [batch.bucket for batch in loader]
