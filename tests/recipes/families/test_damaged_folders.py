"""Tests that incomplete or damaged model folders are refused with an error that names the file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from streamvid.errors import ConfigError
from streamvid.recipes.families.wan import build
from tests.recipes.tiny import make_model

TRANSFORMER = "transformer/diffusion_pytorch_model.safetensors"
TEXT_ENCODER = "text_encoder/model.safetensors"


@pytest.mark.parametrize("name", [TRANSFORMER, TEXT_ENCODER, "vae/diffusion_pytorch_model.safetensors"])
@pytest.mark.parametrize("kept", [0, 4, 5000])
def test_a_truncated_file_is_named(name: str, kept: int, tmp_path: Path) -> None:
    """SAFE-1: a truncated weight file is an error that names the file and the remedy."""
    model = make_model("wan2.1", tmp_path)
    os.truncate(model / name, kept)
    with pytest.raises(ConfigError, match=rf"{name}.* download or copy .*again"):
        build(model=str(model))


@pytest.mark.parametrize(("name", "part"), [(TRANSFORMER, "blocks.1."), (TEXT_ENCODER, "block.1.")])
def test_missing_tensors_are_named(name: str, part: str, tmp_path: Path) -> None:
    """Missing tensors are an error; the libraries would fill them with random numbers."""
    model = make_model("wan2.1", tmp_path)
    state = load_file(model / name)
    save_file({key: one for key, one in state.items() if part not in key}, model / name, {"format": "pt"})
    folder = name.partition("/")[0]
    with pytest.raises(ConfigError, match=rf"{folder} lacks the tensors .*{part}.* download the model again"):
        build(model=str(model))


def test_a_missing_configuration_and_missing_weights_are_named(tmp_path: Path) -> None:
    model = make_model("wan2.1", tmp_path)
    config = model / "transformer/config.json"
    text = config.read_text(encoding="utf-8")
    config.unlink()
    with pytest.raises(ConfigError, match=r"config\.json .*transformer; copy or download the model again"):
        build(model=str(model))
    config.write_text(json.dumps(json.loads(text)), encoding="utf-8")
    (model / TRANSFORMER).rename(model / "transformer/diffusion_pytorch_model.bin")
    with pytest.raises(ConfigError, match="transformer as WanTransformer3DModel: .* weights as safetensors"):
        build(model=str(model))
