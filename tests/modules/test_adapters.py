"""Tests of adapter file conversion: keys of published files, effect on the model, and readers of other tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from streamvid.errors import ConfigError
from streamvid.modules import lora
from streamvid.modules.adapters.convert import convert_adapters, family_of
from streamvid.modules.adapters.formats import encode_adapters
from streamvid.modules.adapters.layers import Adapter
from streamvid.modules.adapters.names import FAMILIES, diffusers_names, dotted, original_names, require_known
from streamvid.modules.adapters.reading import read_adapters
from streamvid.modules.config import LoraConfig, LoraFormat
from streamvid.modules.export import export_adapters
from streamvid.recipes.registry import RECIPES, Recipe
from tests.modules.wan import wan, wan_output

FORMATS: tuple[LoraFormat, ...] = get_args(LoraFormat)
PUBLISHED = json.loads((Path(__file__).parents[1] / "data/adapter_keys.json").read_text())["lists"]
"""Keys and shapes of published files, with their sources."""


def write(path: Path, shapes: Mapping[str, list[int]], alpha: float = 0.0) -> Path:
    generator = torch.Generator().manual_seed(0)
    state = {
        key: torch.randn(*shape, generator=generator) if shape else torch.tensor(alpha) for key, shape in shapes.items()
    }
    save_file(state, path)
    return path


def delta(path: Path) -> dict[str, Tensor]:
    """Return what a file adds to each weight of the diffusers model, computed only from its peft export."""
    encoded = convert_adapters(path, "peft").encoded
    alpha = encoded.peft_config
    found = {}
    for key, down in encoded.tensors.items():
        if key.endswith(".lora_A.weight"):
            layer = key.removesuffix(".lora_A.weight").removeprefix("base_model.model.")
            rank = down.shape[0]
            scale = alpha["alpha_pattern"].get(layer, alpha["lora_alpha"]) / rank
            found[layer] = scale * encoded.tensors[key.replace("lora_A", "lora_B")] @ down
    return found


@pytest.mark.parametrize("listed", PUBLISHED, ids=lambda one: f"{one['format']}-{one['family']}-{len(one['keys'])}")
@pytest.mark.parametrize("format", FORMATS)
def test_published_keys_are_read_and_written_in_every_format(
    tmp_path: Path, listed: dict[str, Any], format: LoraFormat
) -> None:
    """Sizes are 1/32 of the published ones, so that computing the deltas is cheap."""
    small = {key: [max(1, size // 32) for size in shape] for key, shape in listed["keys"].items()}
    source = write(tmp_path / "published.safetensors", small, listed.get("alpha", 0.0))
    family = listed["family"] if listed["family"] in ("ltx-video", "hunyuanvideo") else None
    encoded = convert_adapters(source, format, family).encoded
    folder = tmp_path / "converted"
    folder.mkdir()
    save_file(encoded.tensors, folder / "adapter_model.safetensors", metadata=encoded.facts)
    if encoded.peft_config:
        (folder / "adapter_config.json").write_text(json.dumps(encoded.peft_config))
    again = delta(folder / "adapter_model.safetensors")
    expected = delta(source)
    assert again.keys() == expected.keys()
    assert all(torch.allclose(again[layer], expected[layer], rtol=1e-4, atol=1e-5) for layer in expected)


@pytest.mark.parametrize(
    "listed",
    [one for one in PUBLISHED if one["family"] == "wan" and one["format"] != "peft"],
    ids=lambda one: f"{one['format']}-{len(one['keys'])}",
)
def test_keys_and_shapes_are_those_of_published_files(tmp_path: Path, listed: dict[str, Any]) -> None:
    """Files in diffusers' format convert to the published keys and shapes, except for alphas, which ComfyUI can
    omit."""
    shapes: dict[str, list[int]] = listed["keys"]
    source = write(tmp_path / "published.safetensors", shapes, listed.get("alpha", 0.0))
    encoded = convert_adapters(source, "diffusers").encoded
    save_file(encoded.tensors, tmp_path / "diffusers.safetensors", metadata=encoded.facts)
    found = convert_adapters(tmp_path / "diffusers.safetensors", listed["format"]).encoded.tensors
    expected = {key: shape for key, shape in shapes.items() if listed["format"] == "kohya" or not key.endswith("alpha")}
    assert {key: list(tensor.shape) for key, tensor in found.items()} == expected


WAN_LAYERS = ("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0", "attn2.to_q", "attn2.to_k", "attn2.to_v")
WAN_LAYERS += ("attn2.to_out.0", "ffn.net.0.proj", "ffn.net.2")


def trained(path: Path, alpha: float = 16.0) -> Path:
    """Write adapters, in diffusers' format, on all layers that diffusers' reader of musubi-tuner files expects."""
    widths = {"ffn.net.0.proj": (24, 32), "ffn.net.2": (32, 24)}
    generator = torch.Generator().manual_seed(2)
    state = {}
    for layer in (f"blocks.{block}.{name}" for block in range(2) for name in WAN_LAYERS):
        inputs, outputs = widths.get(layer.split(".", 2)[2], (24, 24))
        state[f"transformer.{layer}.lora_A.weight"] = torch.randn(8, inputs, generator=generator) * 0.2
        state[f"transformer.{layer}.lora_B.weight"] = torch.randn(outputs, 8, generator=generator) * 0.2
    facts = {"transformer.r": 8, "transformer.lora_alpha": alpha, "transformer.target_modules": ["to_q"]}
    save_file(state, path, metadata={"lora_adapter_metadata": json.dumps(facts)})
    return path


def merged(path: Path) -> Tensor:
    """Return the output of the model after merging adapters in diffusers' format into its weights by hand."""
    model, state = wan(), load_file(path)
    for key, down in state.items():
        if key.endswith("lora_A.weight"):
            layer = model.get_submodule(key.removeprefix("transformer.").removesuffix(".lora_A.weight"))
            layer.weight.data += 2.0 * state[key.replace("lora_A", "lora_B")] @ down
    return wan_output(model)


@pytest.mark.parametrize("format", ["diffusers", "kohya", "comfyui"])
def test_diffusers_loads_exported_files_at_their_scale(tmp_path: Path, format: LoraFormat) -> None:
    """The pipeline's own readers accept its format, musubi-tuner's and ComfyUI's."""
    from diffusers import UniPCMultistepScheduler, WanPipeline

    source = trained(tmp_path / "trained.safetensors")
    export_adapters(source, format, tmp_path / "out" / "lora.safetensors")
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
    pipe = WanPipeline(None, None, None, scheduler, transformer=wan())
    pipe.load_lora_weights(str(tmp_path / "out"), weight_name="lora.safetensors")
    assert torch.allclose(wan_output(pipe.transformer), merged(source), atol=1e-4)
    assert not torch.allclose(wan_output(wan()), merged(source), atol=1e-2)


def test_peft_loads_an_exported_folder(tmp_path: Path) -> None:
    from peft import PeftModel

    source = trained(tmp_path / "trained.safetensors")
    export_adapters(source, "peft", tmp_path / "folder")
    theirs = PeftModel.from_pretrained(wan(), str(tmp_path / "folder"))
    assert torch.allclose(wan_output(theirs.base_model.model), merged(source), atol=1e-4)
    export_adapters(tmp_path / "folder/adapter_model.safetensors", "diffusers", tmp_path / "again.safetensors")
    assert load_file(tmp_path / "again.safetensors").keys() == load_file(source).keys()


@pytest.mark.parametrize("format", FORMATS)
def test_a_model_of_diffusers_starts_from_adapters_of_every_format(tmp_path: Path, format: LoraFormat) -> None:
    """Files may have the original names while the model has diffusers' names."""
    source = trained(tmp_path / "trained.safetensors")
    target = tmp_path / ("folder" if format == "peft" else "lora.safetensors")
    export_adapters(source, format, target)
    file = target / "adapter_model.safetensors" if format == "peft" else target
    holder = nn.ModuleDict({"transformer": wan()})
    lora.fuse_preset(holder, LoraConfig(preset_path=file, preset_model="transformer"))
    assert torch.allclose(wan_output(holder["transformer"]), merged(source), atol=1e-4)


def hunyuan(path: Path) -> Path:
    """Write separate adapters on three of the four parts of a fused layer."""
    generator = torch.Generator().manual_seed(3)
    state = {}
    for layer in ("attn.to_q", "attn.to_v", "proj_mlp"):
        rows = 32 if layer == "proj_mlp" else 8
        name = f"transformer.single_transformer_blocks.0.{layer}"
        state[f"{name}.lora_A.weight"] = torch.randn(2, 8, generator=generator)
        state[f"{name}.lora_B.weight"] = torch.randn(rows, 2, generator=generator)
    save_file(state, path)
    return path


def test_layers_that_the_original_code_fuses_are_fused_and_split(tmp_path: Path) -> None:
    source = hunyuan(tmp_path / "lora.safetensors")
    fused = convert_adapters(source, "comfyui").encoded.tensors
    down, up = (fused[f"diffusion_model.single_blocks.0.linear1.lora_{half}.weight"] for half in "AB")
    assert len(fused) == 2
    expected = delta(source)
    nothing = torch.zeros(8, 8)
    names = ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
    parts = [expected.get(f"single_transformer_blocks.0.{name}", nothing) for name in names]
    assert torch.allclose(up @ down, torch.cat(parts), atol=1e-6)
    save_file(fused, tmp_path / "fused.safetensors")
    again = delta(tmp_path / "fused.safetensors")
    assert all(torch.allclose(again[layer], expected[layer], atol=1e-6) for layer in expected)
    assert torch.equal(again["single_transformer_blocks.0.attn.to_k"], nothing)


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        (
            ["transformer.transformer_blocks.0.attn.to_q"],
            "exist in several families .hunyuanvideo, hunyuanvideo1.5. .* --family",
        ),
        (["transformer.blocks.0.attn3.to_q"], r"attn3.to_q, whose names in other formats are not known"),
    ],
)
def test_names_that_are_unknown_or_ambiguous_are_refused(tmp_path: Path, layers: list[str], said: str) -> None:
    shapes = {f"{layer}.lora_{half}.weight": [4, 4] for layer in layers for half in "AB"}
    source = write(tmp_path / "lora.safetensors", shapes)
    with pytest.raises(ConfigError, match=said):
        convert_adapters(source, "comfyui")
    assert convert_adapters(source, "peft").num_layers == 1


def test_tensors_without_a_pair_are_refused(tmp_path: Path) -> None:
    shapes = {"diffusion_model.blocks.0.self_attn.q.lora_A.weight": [4, 4]}
    shapes["diffusion_model.blocks.0.self_attn.q.lora_B.weight"] = [4, 4]
    source = write(tmp_path / "lora.safetensors", shapes | {"diffusion_model.blocks.0.self_attn.q.diff_b": [4]})
    with pytest.raises(ConfigError, match="diff_b, which does not belong to a pair"):
        convert_adapters(source, "diffusers")


TRANSFORMERS: dict[str, tuple[str, dict[str, int]]] = {
    "wan": ("WanTransformer3DModel", {"num_layers": 2}),
    "ltx-video": ("LTXVideoTransformer3DModel", {"num_layers": 2}),
    "ltx-2": ("LTX2VideoTransformer3DModel", {"num_layers": 2}),
    "cogvideox": ("CogVideoXTransformer3DModel", {"num_layers": 2}),
    "hunyuanvideo": ("HunyuanVideoTransformer3DModel", {"num_layers": 1, "num_single_layers": 1}),
    "hunyuanvideo1.5": ("HunyuanVideo15Transformer3DModel", {"num_layers": 2}),
    "mochi": ("MochiTransformer3DModel", {"num_layers": 2}),
}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_every_layer_that_a_recipe_adapts_has_a_name_in_every_format(tmp_path: Path, recipe: Recipe) -> None:
    """The published classes have their real widths, without memory for weights, and adapters of rank 2."""
    import diffusers

    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": recipe.pipelines[0]}))
    family = family_of(tmp_path)
    assert family is not None
    name, sizes = TRANSFORMERS[family]
    with torch.device("meta"):
        model = getattr(diffusers, name)(**sizes)
    layers = lora.choose_targets(model, recipe.lora_targets)
    generator = torch.Generator().manual_seed(0)
    adapters = {}
    for layer in layers:
        outputs, inputs = model.get_submodule(layer).weight.shape
        down, up = torch.randn(2, inputs, generator=generator), torch.randn(outputs, 2, generator=generator)
        adapters[layer] = Adapter(down, up, 2.0)
    require_known(adapters, family, "the file")
    original = original_names(adapters, family)
    again = diffusers_names(original, family)
    assert adapters.keys() <= again.keys()
    first = layers[0]
    assert torch.allclose(again[first].up[:8] @ again[first].down, adapters[first].up[:8] @ adapters[first].down)
    dots = {layer.replace(".", "_"): layer for layer in original}
    assert dotted(dots) == dots


def test_every_family_of_the_table_has_a_class() -> None:
    assert FAMILIES.keys() == TRANSFORMERS.keys()


MODELS = json.loads((Path(__file__).parents[1] / "data/adapter_keys.json").read_text())["models"]
#: Format → keys of the tensors of layer LAYER in its files.
KEYS: Mapping[str, tuple[str, ...]] = {
    "diffusers": ("transformer.LAYER.lora_A.weight", "transformer.LAYER.lora_B.weight"),
    "peft": ("base_model.model.LAYER.lora_A.weight", "base_model.model.LAYER.lora_B.weight"),
    "comfyui": ("diffusion_model.LAYER.lora_A.weight", "diffusion_model.LAYER.lora_B.weight"),
    "diffsynth": ("LAYER.lora_A.default.weight", "LAYER.lora_B.default.weight"),
    "kohya": ("lora_unet_LAYER.lora_down.weight", "lora_unet_LAYER.lora_up.weight", "lora_unet_LAYER.alpha"),
}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("listed", MODELS, ids=lambda one: f"{one['recipe']}-{one['model'].partition('/')[2]}")
def test_files_for_published_models_have_their_layers_and_sizes(listed: dict[str, Any], format: LoraFormat) -> None:
    """With the real configurations and no memory for weights, every format has exactly the expected names and
    shapes."""
    import diffusers

    with torch.device("meta"):
        model = getattr(diffusers, listed["class"]).from_config(listed["config"])
    adapters = {}
    for number, layer in enumerate(lora.choose_targets(model, RECIPES[listed["recipe"]].lora_targets)):
        outputs, inputs = model.get_submodule(layer).weight.shape
        down = torch.tensor(float(number)).expand(32, inputs)  # all different, so that the ranks of fused layers add up
        adapters[layer] = Adapter(down, torch.zeros(()).expand(outputs, 32), 32.0)
    found = encode_adapters(adapters, format, family=listed["family"]).tensors
    is_renamed = format not in ("diffusers", "peft")
    assert len(found) == len(KEYS[format]) * listed["num_layers"][is_renamed]
    for layer, (inputs, outputs, *parts) in listed["original" if is_renamed else "diffusers"].items():
        name = layer.replace(".", "_") if format == "kohya" else layer
        rank = 32 * (parts[0] if parts else 1)
        shapes = ([rank, inputs], [outputs, rank], [])
        for key, shape in zip(KEYS[format], shapes, strict=False):
            assert list(found[key.replace("LAYER", name)].shape) == shape


def test_a_layer_of_another_rank_keeps_its_scale_in_files_without_alpha(tmp_path: Path) -> None:
    """The format of DiffSynth-Studio multiplies alpha into B, so each layer is read with scale 1."""
    ranks = {"blocks.0.to_q": 7, "blocks.1.to_q": 4, "blocks.2.to_q": 4}
    encoded = encode_adapters(
        {layer: Adapter(torch.ones(rank, 8), torch.ones(8, rank), 2.0) for layer, rank in ranks.items()}, "diffsynth"
    )
    save_file(encoded.tensors, tmp_path / "a.safetensors", metadata=encoded.facts)
    found = read_adapters(tmp_path / "a.safetensors", "checkpoint")
    assert dict(found.scales) == dict.fromkeys(ranks, 1.0)
