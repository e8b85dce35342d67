from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streamvid.config import dump_config, load_config
from streamvid.errors import ConfigError
from streamvid.trainer.config import OptimizerConfig, TrainConfig

CONFIGS = Path(__file__).parents[2] / "configs"
REQUIRED = ("data.dataset=d", "output=o")


def test_shipped_train_configs_load_and_dump_back(tmp_path: Path) -> None:
    files = sorted((CONFIGS / "train").glob("*.yaml"))
    assert "tiny.yaml" in [file.name for file in files]
    for file in files:
        config = load_config(TrainConfig, file)
        copy = tmp_path / file.name
        copy.write_text(dump_config(config))
        assert load_config(TrainConfig, copy) == config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.factory=package.module"], "model: factory is 'package.module'; allowed: 'package.module:name'"),
        (["model.lora.rank=0"], "model.lora: rank=0: must be an integer of at least 1"),
        (
            ["model.lora.preset_path=x"],
            "model.lora: preset_path is x and preset_model is None; allowed: values for both",
        ),
        (["model.lora.checkpoint=x"], "model.lora: checkpoint is x; allowed: null, unless base_model"),
        (
            ["model.activation_checkpointing.offload=true"],
            "model.activation_checkpointing: offload is True; allowed: false, unless blocks",
        ),
        (["optimizer.min_lr=1"], "optimizer: min_lr is 1.0; allowed: from 0 to lr=0.0001"),
        (["optimizer.ema_decay=1"], "optimizer: ema_decay is 1.0; allowed: a number above 0 and below 1"),
        (
            ["task=sft:train"],
            "data.features.url is null; allowed: a folder or URL, such as data.features.url=latents/, for task 'sft:train'",
        ),
        (["optimizer.lr=0"], "optimizer: lr is 0.0; allowed: a finite number above 0"),
        (["optimizer.betas=[0.9, 1.0]"], "optimizer: betas is"),
        (["optimizer.grad_clip=0"], "optimizer: grad_clip=0.0: must be a number above 0, or None"),
        (["eval.steps=0"], "eval: steps=0: must be an integer of at least 1, or None"),
        (["max_steps=0"], "max_steps=0: must be an integer of at least 1, or None"),
        (["max_steps=3", "num_epochs=1"], "max_steps=3 and num_epochs=1 are both set"),
        (
            ["data.batch_size=2", "data.max_tokens_per_batch=9"],
            "data: batch_size=2 and max_tokens_per_batch=9 are both set",
        ),
        (["data.batch_size={a: 0}"], "data: batch_size is {'a': 0}; allowed: integers of at least 1"),
        (["seed=-1"], "seed=-1: must be an integer from 0 to 9223372036854775807"),
        (["data.dataset=''"], "data: dataset is empty"),
        (["accelerate.mixed_precision=fp8"], "accelerate.mixed_precision is \"fp8\"; allowed: 'no', 'fp16' or 'bf16'"),
    ],
)
def test_invalid_values_are_named(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(TrainConfig, None, [*REQUIRED, *overrides])


@pytest.mark.parametrize(
    ("text", "value"), [("latest", "latest"), ("null", None), ("o/state/step-3", "o/state/step-3")]
)
def test_resume_is_latest_a_path_or_none(text: str, value: Any) -> None:
    assert load_config(TrainConfig, None, [*REQUIRED, f"checkpoints.resume={text}"]).checkpoints.resume == value


def test_the_learning_rate_follows_its_schedule() -> None:
    constant = OptimizerConfig(lr=1.0, warmup_steps=4)
    assert [constant.lr_at(step, 8) for step in (1, 2, 4, 5, 8, 1000)] == [0.25, 0.5, 1.0, 1.0, 1.0, 1.0]
    assert OptimizerConfig(lr=1.0).lr_at(1, 8) == 1.0
    linear = OptimizerConfig(lr=1.0, warmup_steps=2, schedule="linear", min_lr=0.2)
    assert [linear.lr_at(step, 6) for step in (1, 2, 4, 6)] == pytest.approx([0.5, 1.0, 0.6, 0.2])
    cosine = OptimizerConfig(lr=1.0, schedule="cosine")
    assert [cosine.lr_at(step, 4) for step in (1, 2, 4)] == pytest.approx([(1 + 0.5**0.5) / 2, 0.5, 0.0])
