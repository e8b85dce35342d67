from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streamvid.config import dump_config, load_config
from streamvid.errors import ConfigError
from streamvid.trainer.config import OptimizerConfig, TrainConfig

CONFIGS = Path(__file__).parents[2] / "configs"
REQUIRED = ("dataset=d", "output=o")


def test_shipped_train_configs_load_and_dump_back(tmp_path: Path) -> None:
    files = sorted((CONFIGS / "train").glob("*.yaml"))
    assert "tiny.yaml" in [file.name for file in files]
    for file in files:
        config = load_config(TrainConfig, file)
        copy = tmp_path / file.name
        copy.write_text(dump_config(config))
        assert load_config(TrainConfig, copy) == config


@pytest.mark.parametrize("name", ["cpu_2ranks", "single_gpu", "ddp_8gpu", "fsdp"])
def test_shipped_accelerate_configs_are_accelerates(name: str) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    loaded = load_config_from_file(str(CONFIGS / "accelerate" / f"{name}.yaml"))
    assert loaded.num_processes == {"cpu_2ranks": 2, "single_gpu": 1, "ddp_8gpu": 8, "fsdp": 8}[name]


def test_fsdp_wraps_a_layer_that_the_model_has() -> None:
    import yaml

    from streamvid.trainer import model

    settings = yaml.safe_load((CONFIGS / "accelerate" / "fsdp.yaml").read_text())["fsdp_config"]
    assert hasattr(model, settings["fsdp_transformer_layer_cls_to_wrap"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.dim=30"], "model: dim is 30; allowed: an even number of 6 and up that heads=4 divides"),
        (["model.patch=[1, 0, 8]"], r"model: patch is \(1, 0, 8\); allowed: three sizes"),
        (["optimizer.lr=0"], "optimizer: lr is 0.0; allowed: a finite number above 0"),
        (["optimizer.betas=[0.9, 1.0]"], "optimizer: betas is"),
        (["optimizer.grad_clip=0"], "optimizer: grad_clip is 0.0; allowed: above 0, or null for none"),
        (["eval.every_steps=0"], "eval: every_steps is 0; allowed: 1 and up"),
        (["num_steps=0"], "num_steps is 0; allowed: 1 and up"),
        (["num_steps=3", "num_epochs=1"], "num_steps=3 and num_epochs=1 are both set"),
        (["batch_size=2", "max_tokens_per_batch=9"], "batch_size=2 and max_tokens_per_batch=9 are both set"),
        (["batch_size={a: 0}"], "batch_size is {'a': 0}; allowed: 1 and up"),
        (["seed=-1"], "seed is -1; allowed: 0 up to"),
        (["dataset=''"], "dataset is empty"),
        (["mixed_precision=fp8"], "mixed_precision is \"fp8\"; allowed: 'no', 'fp16' or 'bf16'"),
    ],
)
def test_what_cannot_be_is_named(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(TrainConfig, None, [*REQUIRED, *overrides])


@pytest.mark.parametrize(
    ("text", "value"), [("latest", "latest"), ("null", None), ("o/state/step-3", Path("o/state/step-3"))]
)
def test_resume_is_latest_a_path_or_none(text: str, value: Any) -> None:
    assert load_config(TrainConfig, None, [*REQUIRED, f"resume={text}"]).resume == value


def test_the_learning_rate_warms_up_and_stays() -> None:
    options = OptimizerConfig(lr=1.0, warmup_steps=4)
    assert [options.lr_at(step) for step in (1, 2, 4, 5, 1000)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    assert OptimizerConfig(lr=1.0, warmup_steps=0).lr_at(1) == 1.0
