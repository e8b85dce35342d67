"""Tests of transformers in a single safetensors file, with the names of the original code or of diffusers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from streamvid.errors import ConfigError
from streamvid.modules.adapters.names import FAMILIES
from streamvid.trainer.recipe_config import recipe_named
from tests.recipes.test_losses_of_families import built
from tests.recipes.tiny import make_model

#: Names of Wan's remaining layers in its original code (github.com/Wan-Video/Wan2.1, wan/modules/model.py).
WAN_OTHERS = {
    "scale_shift_table": "head.modulation",
    ".scale_shift_table": ".modulation",
    ".attn1.norm_": ".self_attn.norm_",
    ".attn2.norm_": ".cross_attn.norm_",
    ".norm2.": ".norm3.",
}


def original_wan(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of Wan under the names of its original code."""
    rules = {rule.ours[0]: rule.theirs for rule in FAMILIES["wan"].rules}
    found = {}
    for name, tensor in state.items():
        layer, _, part = name.rpartition(".")
        number = next((word for word in layer.split(".") if word.isdigit()), "")
        pattern = layer.replace(f".{number}.", ".*.", 1) if number and layer.startswith("blocks.") else layer
        if pattern in rules:
            name = f"{rules[pattern].replace('*', number)}.{part}"
        elif name == "scale_shift_table":
            name = WAN_OTHERS[name]
        else:
            for theirs, ours in list(WAN_OTHERS.items())[1:]:
                name = name.replace(theirs, ours)
        found[name] = tensor
    return found


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny Wan whose weights differ from those of each test's folder."""
    from diffusers import WanTransformer3DModel

    model = make_model("wan2.1", tmp_path_factory.mktemp("other") / "model", seed=1)
    return WanTransformer3DModel.from_pretrained(model / "transformer")


@pytest.mark.parametrize("form", ["original", "comfyui", "diffusers", "run"])
def test_a_transformer_is_read_from_one_file(form: str, other: Any, tmp_path: Path) -> None:
    state = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    if form in ("original", "comfyui"):
        state = original_wan(state)
        assert "blocks.0.self_attn.q.weight" in state and "blocks.0.attn1.to_q.weight" not in state
    prefix = {"comfyui": "model.diffusion_model.", "run": "transformer."}.get(form, "")
    save_file({f"{prefix}{name}": tensor for name, tensor in state.items()}, tmp_path / "file.safetensors")
    module = built("wan2.1", tmp_path, "sft:train", transformer=str(tmp_path / "file.safetensors"))
    assert all(torch.equal(module.transformer.state_dict()[name], one) for name, one in other.state_dict().items())
    half = built("wan2.1", tmp_path, "sft:train", transformer=str(tmp_path / "file.safetensors"), dtype="bfloat16")
    usual = built("wan2.1", tmp_path, "sft:train", dtype="bfloat16")
    kinds = {name: one.dtype for name, one in usual.transformer.named_parameters()}
    assert {name: one.dtype for name, one in half.transformer.named_parameters()} == kinds


def test_other_files_are_refused(other: Any, tmp_path: Path) -> None:
    state = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    torch.save(state, tmp_path / "file.pt")
    save_file(
        {**state, "proj_out.weight": state["proj_out.weight"].to(torch.float8_e4m3fn)}, tmp_path / "fp8.safetensors"
    )
    save_file({name: one for name, one in state.items() if "blocks.1." not in name}, tmp_path / "part.safetensors")
    save_file(
        {"transformer.blocks.0.attn1.to_q.lora_A.weight": state["proj_out.weight"]}, tmp_path / "lora.safetensors"
    )
    (tmp_path / "header.safetensors").write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    for name, said in (
        ("file.pt", "must be a .safetensors file; other formats can run code"),
        ("fp8.safetensors", r"is quantized \(it contains tensors of type float8_e4m3fn\)"),
        ("part.safetensors", "lacks blocks.1.|cannot load"),
        ("lora.safetensors", r"contains adapters \(LoRA\).*--set model\.lora\.checkpoint="),
        ("header.safetensors", "cannot be read as a safetensors file"),
        ("none.safetensors", "cannot read|cannot be read"),
    ):
        with pytest.raises(ConfigError, match=said):
            built("wan2.1", tmp_path, "sft:train", transformer=str(tmp_path / name))
    save_file(state, tmp_path / "file.safetensors")
    for recipe in (None, "wan2.1"):
        with pytest.raises(ConfigError, match=r"is a file; .*--set model\.args\.transformer="):
            recipe_named(recipe, str(tmp_path / "file.safetensors"))
    with pytest.raises(ConfigError, match="diffusers cannot read CogVideoXTransformer3DModel from a single file"):
        built("cogvideox", tmp_path, "sft:train", transformer=str(tmp_path / "file.safetensors"))
