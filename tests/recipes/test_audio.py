"""Tests that the small model learns from audio, on clips in which the pitch of a tone is the height of a disc."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from streamvid.buckets.bucket import Bucket
from streamvid.config import load_config
from streamvid.errors import ConfigError
from streamvid.loader.loader import VideoLoader
from streamvid.recipes.small import build
from streamvid.recipes.small.audio_encoder import NUM_BANDS, BandEncoder
from streamvid.sharder import sharder
from streamvid.shipped import shipped
from streamvid.trainer import train
from streamvid.trainer.config import TrainConfig
from streamvid.trainer.encode import encode
from tests.recipes.small_batches import encoded, make_batch, wake
from tests.shard_options import shard_options
from tools.make_tones import make_tones

RATE = 16_000
HEARING = {"dim": 24, "depth": 1, "heads": 4, "patch": [1, 8, 8], "audio_window": 512}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    # Two threads synchronize at every small operation, which takes a hundred times as long on a busy machine.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The clips of tools/make_tones.py, a fifth of them held out."""
    root = tmp_path_factory.mktemp("tones")
    options = shard_options(buckets=(Bucket(5, 48, 48),), val_fraction=0.2, workers=1)
    assert sharder.shard(make_tones(root / "clips"), root / "dataset", options).num_samples == 120
    return root / "dataset"


def tones_config(dataset: Path, output: Path, *changes: str) -> TrainConfig:
    places = (f"data.dataset={dataset}", f"output={output}", "data.num_workers=0", "accelerate.cpu=true")
    return load_config(TrainConfig, shipped("configs/train/tones.yaml"), [*places, "eval.steps=1000", *changes])


def held_out(dataset: Path, output: Path, *changes: str) -> Mapping[str, float]:
    """Run configs/train/tones.yaml and return the metrics of its last evaluation."""
    train(tones_config(dataset, output, *changes))
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "eval_loss" in line][-1]  # type: ignore[no-any-return]


def test_a_short_run_on_stored_audio_uses_the_audio(dataset: Path, tmp_path: Path) -> None:
    """The held-out loss is a third higher with the audio of other clips, with the same captions and noise."""
    short = [f"data.features.url={tmp_path / 'features'}", "data.features.num_visits=4", "max_steps=180"]
    short += ["optimizer.schedule=constant"]
    assert encode(tones_config(dataset, tmp_path / "out", *short, "task=sft:data_process")).is_sealed
    found = held_out(dataset, tmp_path / "out", *short, "task=sft:train")
    print(found)
    assert 1.33 * found["eval_loss"] < found["eval_loss_with_other_audio"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_own_audio_lowers_the_held_out_loss_for_three_seeds(dataset: Path, tmp_path: Path) -> None:
    """The held-out loss is 70 % higher with other clips' audio, and 30 % higher for a model trained without audio."""
    for seed in range(3):
        seeds = (f"seed={seed}", f"model.args.seed={seed}")
        hearing = held_out(dataset, tmp_path / f"hearing-{seed}", *seeds)
        deaf = held_out(dataset, tmp_path / f"deaf-{seed}", *seeds, "model.args.audio_window=null", "data.audio=null")
        print(seed, hearing["eval_loss"], hearing["eval_loss_with_other_audio"], deaf["eval_loss"])
        assert 1.7 * hearing["eval_loss"] < hearing["eval_loss_with_other_audio"]
        assert 1.3 * hearing["eval_loss"] < deaf["eval_loss"]


def test_the_tone_of_a_clip_is_as_high_as_its_disc(dataset: Path) -> None:
    """In every delivered frame, the loudest frequency band rises with the disc, with a correlation above 0.95."""
    encoder, places = BandEncoder(512), []
    output = {"audio": {"sample_rate": RATE, "num_channels": 1}}
    with VideoLoader(dataset, batch_size=8, num_workers=0, output=output) as loader:
        for batch in loader:
            heard = torch.stack([encoder(part).mean(dim=1).argmax(dim=1) for part in batch.audio.chunk(5, dim=-1)], 1)
            light = (batch.video.float().mean(dim=1) - 40).clamp(min=0)  # (B, T, H, W)
            rows = torch.arange(48.0)[:, None]
            seen = (light * rows).sum(dim=(2, 3)) / light.sum(dim=(2, 3))
            places.append(torch.stack([heard.float(), -seen]).flatten(1))
    assert torch.corrcoef(torch.cat(places, dim=1))[0, 1] > 0.95


def test_audio_affects_the_loss_and_adds_weights_without_changing_others() -> None:
    hearing, deaf = build(**HEARING), build(**{**HEARING, "audio_window": None})
    weights = hearing.transformer.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in deaf.transformer.state_dict().items())
    assert all(name.startswith("audio.") for name in weights.keys() - deaf.transformer.state_dict().keys())
    wake(hearing.transformer)
    audio = torch.rand(2, 2, 3333, generator=torch.Generator().manual_seed(0)) - 0.5
    batch = make_batch().with_fields({"audio": audio})
    states = hearing.encode(batch)["audio_states"]
    assert states.shape == (2, 1 + 3333 // 256, NUM_BANDS)  # type: ignore[union-attr]
    ready = encoded(hearing, batch).with_fields({"audio_states": states})
    swapped = ready.with_fields({"audio_states": states.flip(0)})  # type: ignore[union-attr]
    assert not torch.equal(hearing(ready)["loss"], hearing(swapped)["loss"])
    found = hearing.validate(ready)
    assert torch.equal(found["loss"], hearing(ready)["loss"])
    assert torch.equal(found["loss_with_other_audio"], hearing(swapped)["loss"])
    assert not torch.equal(hearing.sample(ready), hearing.sample(swapped))
    assert torch.equal(hearing.sample(ready), hearing.sample(batch))


def test_silence_is_a_state_of_zeros_and_a_tone_is_in_its_band() -> None:
    encoder = BandEncoder(512)
    assert not encoder(torch.zeros(1, 2, 4000)).any()
    times = torch.arange(4000) / RATE
    bands = [
        int(encoder(torch.sin(6.2832 * hertz * times)[None, None])[0, 8].argmax()) for hertz in range(25, 7976, 25)
    ]
    assert bands == sorted(bands) and set(bands) == set(range(NUM_BANDS))


def test_a_model_with_audio_says_what_to_set_if_batches_have_none() -> None:
    with pytest.raises(ConfigError, match=r"audio_window is 512, but the batches have no audio; set data.audio"):
        build(**HEARING).encode(make_batch())
    with pytest.raises(ConfigError, match="audio_window is 513; allowed: an even number"):
        build(**{**HEARING, "audio_window": 513})
