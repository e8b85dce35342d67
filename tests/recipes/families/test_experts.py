"""Tests of runs that train both experts of Wan 2.2 A14B; diffusers loads the results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from streamvid.buckets.bucket import Bucket
from streamvid.cli.main import cli
from streamvid.errors import ConfigError
from streamvid.modules.config import LoraConfig
from streamvid.recipes.families.wan import build
from streamvid.trainer import train
from tests.loader.conftest import build_dataset
from tests.recipes.test_fine_tuning import resolved
from tests.recipes.tiny import make_model

EXPERTS = ("transformer", "transformer_2")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("wan2.2", tmp_path_factory.mktemp("experts") / "model")


def train_both(model: Path, folder: Path, *more: str) -> Path:
    """Train both experts for two steps, each with times on both sides of the boundary; return the output folder."""
    dataset = build_dataset(folder / "ds", {Bucket(5, 32, 32): [12]})
    sets = ("model.args.expert=both", "max_steps=2", "data.batch_size=4", "data.num_workers=0", "optimizer.lr=0.1")
    options = ("--model", model, "--dataset", dataset, "--output", folder / "run", *more)
    rest = ("data.loader.preset=null", "eval.steps=null", "model.args.time_shift=1", "model.args.encoder_dtype=float32")
    config = resolved(*options, *(part for one in (*sets, *rest) for part in ("--set", one)))
    train(replace(config, accelerate=replace(config.accelerate, cpu=True)))
    return config.output


def test_adapters_of_both_experts_train_and_load_into_them(model: Path, tmp_path: Path) -> None:
    from diffusers import WanPipeline

    output = train_both(model, tmp_path, "--lora")
    files = {name: output / f"step-2.{name}.safetensors" for name in EXPERTS}
    pipe = WanPipeline.from_pretrained(model)
    before = {name: outputs(getattr(pipe, name)) for name in EXPERTS}
    pipe.load_lora_weights(str(output), weight_name=files["transformer"].name)
    pipe.load_lora_weights(str(output), weight_name=files["transformer_2"].name, load_into_transformer_2=True)
    for name, file in files.items():
        assert all(one.any() for key, one in load_file(file).items() if ".lora_B." in key)
        assert not torch.allclose(outputs(getattr(pipe, name)), before[name], atol=1e-4)
    words = ["export", str(output), "--format", "comfyui", "-o", str(tmp_path / "x.safetensors")]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code != 0 and "use one of these files as SOURCE" in f"{result.output}{result.exception}"


def outputs(transformer: Any) -> torch.Tensor:
    """Return the output of an expert for fixed inputs."""
    generator = torch.Generator().manual_seed(0)
    latents, texts = torch.randn(1, 16, 2, 4, 4, generator=generator), torch.randn(1, 8, 16, generator=generator)
    with torch.no_grad():
        found: torch.Tensor = transformer(latents, torch.tensor([900.0]), texts, return_dict=False)[0]
    return found


def test_full_weights_of_both_experts_become_one_folder(model: Path, tmp_path: Path) -> None:
    from diffusers import WanPipeline

    output = train_both(model, tmp_path)
    words = ["export", str(output), "--format", "diffusers", "--model", str(model), "-o", str(tmp_path / "mine")]
    result = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert result.exit_code == 0 and "transformer, transformer_2" in result.output
    mine, base = (WanPipeline.from_pretrained(one) for one in (tmp_path / "mine", model))
    for name in EXPERTS:
        assert not torch.allclose(outputs(getattr(mine, name)), outputs(getattr(base, name)), atol=1e-4)


def test_adapters_to_start_from_belong_to_one_expert(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="null, unless base_model names exactly one child"):
        LoraConfig(base_model="transformer,transformer_2", checkpoint=tmp_path / "lora.safetensors")


def test_a_model_with_one_expert_refuses_the_option(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.args\.expert=low: .* has only one expert; omit model\.args\.expert"):
        build(model=str(make_model("wan2.1", tmp_path / "model")), expert="low")
