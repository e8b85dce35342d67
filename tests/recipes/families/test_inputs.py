"""Tests of datasets with control videos and with audio: both commands of the tutorial, in one stage and in two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from streamvid.trainer import train
from streamvid.trainer.config import TrainConfig
from streamvid.trainer.encode import encode
from tests.recipes.families.datasets import with_audio, with_control
from tests.recipes.test_fine_tuning import resolved
from tests.recipes.tiny import make_model
from tests.trainer.configs import changed
from tests.trainer.runs import losses_in

pytestmark = [pytest.mark.filterwarnings("ignore:In CPU autocast"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


#: Three clips, the last of which has no control video or no audio.
DATASETS: dict[str, Callable[[Path], Path]] = {
    "wan-vace": lambda folder: with_control(folder, [(5, 64, 64)], 3, is_optional=True),
    "ltx-2-audio": lambda folder: with_audio(folder, [(9, 64, 64)], 3),
}
#: Layers that train only with these inputs or that read them.
READERS = {"wan-vace": "vace_blocks.0.", "ltx-2-audio": "transformer_blocks.0.audio_attn1."}


@pytest.mark.parametrize("recipe", DATASETS)
def test_inputs_of_a_dataset_train_in_one_stage_and_in_two(
    recipe: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = DATASETS[recipe](tmp_path / "videos")
    model = make_model(recipe, tmp_path / "model")
    words = ("--recipe", recipe, "--model", model, "--dataset", dataset, "--output", tmp_path / "one", "--lora")
    sets = ("max_steps=1", "data.num_workers=0", "eval.steps=null", "data.loader.preset=null", "data.batch_size=3")
    config = resolved(*words, *(part for one in (*sets, "logging.steps=1") for part in ("--set", one)))
    one = replace(config, accelerate=replace(config.accelerate, cpu=True))
    train(one)
    assert "trains as text to video" not in caplog.text
    (file,) = one.output.glob("*.safetensors")
    assert any(
        READERS[recipe] in name and "lora_B" in name and tensor.any() for name, tensor in load_file(file).items()
    )
    features = {"data.features.url": str(tmp_path / "features")}
    encode(changed(one, {**features, "task": "sft:data_process", "output": tmp_path / "encoding"}))
    two = changed(one, {**features, "task": "sft:train", "output": tmp_path / "two"})
    train(two)
    assert losses_in(two.output) == losses_in(one.output) and len(losses_in(one.output)) == 1
    assert weights(one) == weights(two)


def weights(config: TrainConfig) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in config.output.glob("*.safetensors")}
