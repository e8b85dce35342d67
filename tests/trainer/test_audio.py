"""Tests of training with audio: `encode` receives it, its results are stored, and a split run equals a one-stage
run."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from streamvid.buckets.bucket import Bucket
from streamvid.compat.diffsynth_data import NOTE
from streamvid.dataset.versions.open import open_dataset
from streamvid.errors import ConfigError
from streamvid.loader.loader import VideoLoader
from streamvid.loader.view.audio import AudioOptions
from streamvid.modules.config import ModelConfig
from streamvid.sharder import sharder
from streamvid.trainer import train
from streamvid.trainer.config import EvalConfig, FeaturesConfig, TrainConfig
from streamvid.trainer.encode import encode
from streamvid.trainer.preflight.check import check
from tests.files import tree_of
from tests.loader.sounds import FPS, Sound, make
from tests.shard_options import shard_options
from tests.trainer.configs import changed, combined
from tests.trainer.runs import config_of, losses_in, metrics_in, run, start
from tools.make_tones import make_tones

pytestmark = pytest.mark.timeout(240)

AUDIO = AudioOptions(sample_rate=16_000, num_channels=1)
HEARING = ModelConfig(
    factory="tests.trainer.encoders:build_hearing",
    args={"dim": 12, "depth": 1, "heads": 2, "patch": [1, 16, 16], "audio_window": 512},
)


@pytest.fixture(scope="module")
def tones(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 clips with tones in one bucket and at least six shards, some of them held out."""
    root = tmp_path_factory.mktemp("tones")
    options = shard_options(
        buckets=(Bucket(5, 48, 48),), val_fraction=0.2, shard_size_bytes=80_000, clips="native", workers=1
    )
    sharder.shard(make_tones(root / "clips", 24), root / "dataset", options)
    assert len(open_dataset(root / "dataset").shards) >= 6
    return root / "dataset"


def encoding(dataset: Path, features: Path, changes: Mapping[str, Any] | None = None) -> TrainConfig:
    """Return the configuration of a run that encodes with audio, two visits per sample."""
    usual = {
        "task": "sft:data_process",
        "data.features": FeaturesConfig(url=str(features), num_visits=2),
        "data.audio": AUDIO,
        "model": HEARING,
    }
    return config_of(dataset, features.parent / "out", combined(usual, changes))


@pytest.fixture(scope="module")
def features(tones: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Features encoded by one uninterrupted process."""
    root = tmp_path_factory.mktemp("whole") / "features"
    assert encode(encoding(tones, root)).is_sealed
    return root


def test_a_split_run_has_the_losses_of_one_stage(tones: Path, features: Path, tmp_path: Path) -> None:
    """All losses are equal over two epochs of two visits, including held-out losses with own and with other audio."""
    # One held-out batch, because repeated samples would use another stored crop.
    changes = {"num_epochs": 2, "max_steps": None, "eval": EvalConfig(steps=5, num_batches=1)}
    config = changed(encoding(tones, features), changes)
    one, split = tmp_path / "one", tmp_path / "split"
    train(changed(config, {"task": "sft", "output": one, "data.features.url": None}))
    train(changed(config, {"task": "sft:train", "output": split}))
    assert len(losses_in(one)) > 15 and losses_in(split) == losses_in(one)
    names = ("eval_loss", "eval_loss_with_other_audio")
    judged = [
        [[line[name] for name in names] for line in metrics_in(run) if "eval_loss" in line] for run in (one, split)
    ]
    assert judged[0] == judged[1]
    own, other = judged[0][-1]
    assert own != other


def test_audio_states_arrive_with_the_latents(tones: Path, features: Path) -> None:
    """A user's own loop receives the states that `encode` computes from the audio of the same visit."""
    from tests.trainer.encoders import build_hearing

    module = build_hearing(**HEARING.args)
    options: dict[str, Any] = {"batch_size": 2, "num_workers": 0}
    output = {"audio": AUDIO}
    with (
        VideoLoader(tones, output=output, **options) as now,
        VideoLoader(tones, features=features, **options) as before,
    ):
        for made, read in zip(now, before, strict=True):
            assert made.sample_keys == read.sample_keys and "audio" not in read
            states = module.encode(made)["audio_states"]
            assert torch.equal(states, read.audio_states)  # type: ignore[arg-type]
            assert not torch.equal(read.audio_states[0], read.audio_states[1])


def test_two_ranks_killed_and_run_again_end_with_the_same_bytes(tones: Path, features: Path, tmp_path: Path) -> None:
    """SHARD-1: after kill -9 at a seeded moment following the first shard, two ranks finish with the same bytes."""
    root, slow = tmp_path / "features", {"model.args": {**HEARING.args, "pause": 0.3}}
    processes = start(encoding(tones, root, slow), ranks=2)
    while processes.is_alive() and not list((root / ".staging").glob("*.json")):
        time.sleep(0.01)
    time.sleep(random.Random(1).random() * 0.3)
    for process in processes.processes:
        process.kill()
    processes.wait()
    assert not (root / "manifest.json").exists(), processes.stderr()
    run(encoding(tones, root), ranks=2)
    assert {name: data for name, data in tree_of(root).items() if name != NOTE} == tree_of(features)


def test_features_of_other_audio_are_refused(tones: Path, features: Path, tmp_path: Path) -> None:
    config = changed(encoding(tones, features), {"task": "sft:train", "output": tmp_path / "out"})
    same = AudioOptions(sample_rate=16_000, num_channels=1, rule="exact")
    train(changed(config, {"data.audio": same, "max_steps": 1}))
    faster = changed(config, {"data.audio": AudioOptions(sample_rate=32_000, num_channels=1)})
    with pytest.raises(ConfigError, match=r"data.audio.sample_rate is 16000 in the features, but 32000 here"):
        train(faster)
    with pytest.raises(
        ConfigError, match=r"data.audio.sample_rate is 16000 in the features, but not set here"
    ) as caught:
        train(changed(config, {"data.audio": None}))
    assert "null" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"audio.sample_rate"):
        encode(changed(faster, {"task": "sft:data_process"}))


def test_shards_of_nearly_equal_rates_have_equally_many_states(tmp_path: Path) -> None:
    """With clips at 24 and 23.976 frames per second, the number of audio samples follows the first clip of the bucket,
    not the first one of each shard."""
    clips = tmp_path / "clips"
    clips.mkdir()
    for number in range(4):
        fps = Fraction(FPS) if number % 2 else Fraction(24_000, 1001)
        make(clips, Sound(f"{number}.mp4", "aac", fps=fps, num_frames=48), seed=number)
    options = shard_options(buckets=(Bucket(17, 64, 96),), shard_size_bytes=1000, workers=1)
    sharder.shard(clips, tmp_path / "dataset", options)
    assert len(open_dataset(tmp_path / "dataset").shards) == 4
    config = encoding(tmp_path / "dataset", tmp_path / "features", {"max_steps": 2, "data.audio": AUDIO})
    assert encode(config).is_sealed
    train(changed(config, {"task": "sft", "output": tmp_path / "one", "data.features.url": None}))
    train(changed(config, {"task": "sft:train", "output": tmp_path / "split"}))
    assert losses_in(tmp_path / "split") == losses_in(tmp_path / "one")


def test_the_audio_of_a_run_is_set_in_one_place(tones: Path, tmp_path: Path) -> None:
    config = config_of(tones, tmp_path / "out", {"model": HEARING, "data.audio": AUDIO})
    assert check(config).largest == "48x48-5f"
    with pytest.raises(ConfigError, match=r"data.loader.output.audio cannot be set; set data.audio"):
        train(changed(config, {"data.loader": {"output": {"audio": {"sample_rate": 16_000}}}}))
    with pytest.raises(ConfigError, match=r"the batches have no audio; set data.audio"):
        train(changed(config, {"data.audio": None}))
