"""Recipes by name: which factory builds a training module, which layers get adapters, and what is supported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from types import MappingProxyType
from typing import Literal, TypeAlias

from streamvid.errors import ConfigError

RecipeKind: TypeAlias = Literal["T2V", "I2V", "control"]
_NONE: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Recipe for a model family.

    name: name on the command line.
    title: name in the documentation.
    factory: import path of the function that builds the training module.
    pipelines: class names (from model_index.json) of the diffusers pipelines that the recipe trains.
    kinds: kinds of models that the recipe trains; the model's folder determines the kind.
    presets: bucket presets for the model; the first one is the default.
    lora_targets: layers that get adapters, in the format of `model.lora.target_modules`.
    base_model: child module that is trained.
    base_models: for models with two experts, maps each value of the `expert` option to the child modules that are
        trained, separated by commas.
    inputs: conditioning inputs that the model uses, in the format of `data.extra_inputs`.
    example: id of a model of this family on the Hugging Face Hub.
    options: additional options of TrainConfig, by dotted name.
    """

    name: str
    title: str
    factory: str
    pipelines: tuple[str, ...]
    kinds: tuple[RecipeKind, ...]
    presets: tuple[str, ...]
    lora_targets: tuple[str, ...]
    example: str
    inputs: tuple[str, ...] = ()
    base_model: str = "transformer"
    base_models: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    options: Mapping[str, object] = field(default_factory=lambda: _NONE)


_LTX2_PIPELINES = ("LTX2Pipeline", "LTX2ImageToVideoPipeline")
_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
# Joint attention also projects the text states.
_JOINT_ATTENTION = (*_ATTENTION, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
_FAMILIES = "streamvid.recipes.families"
_WAN_TARGETS = (*_ATTENTION, "ffn.net.0.proj", "ffn.net.2")

# One expert trains per run, unless both are asked for. A model without experts has only the first one.
_EXPERTS = MappingProxyType({"high": "transformer", "low": "transformer_2", "both": "transformer,transformer_2"})

_ALL = (
    Recipe(
        name="wan2.1",
        title="Wan 2.1",
        factory=f"{_FAMILIES}.wan:build",
        pipelines=("WanPipeline", "WanImageToVideoPipeline"),
        kinds=("T2V", "I2V"),
        presets=("wan2.1-480p", "wan2.1-720p"),
        lora_targets=_WAN_TARGETS,
        example="Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    ),
    Recipe(
        name="wan2.2",
        title="Wan 2.2 A14B",
        factory=f"{_FAMILIES}.wan:build",
        pipelines=("WanPipeline", "WanImageToVideoPipeline"),
        kinds=("T2V", "I2V"),
        presets=("wan2.2-a14b-480p", "wan2.2-a14b-720p"),
        lora_targets=_WAN_TARGETS,
        example="Wan-AI/Wan2.2-T2V-A14B-Diffusers",
        base_models=_EXPERTS,
    ),
    Recipe(
        name="wan2.2-5b",
        title="Wan 2.2 TI2V-5B",
        factory=f"{_FAMILIES}.wan:build",
        pipelines=("WanPipeline",),
        kinds=("T2V", "I2V"),
        presets=("wan2.2-ti2v-5b",),
        lora_targets=_WAN_TARGETS,
        example="Wan-AI/Wan2.2-TI2V-5B-Diffusers",
    ),
    Recipe(
        name="wan-vace",
        title="Wan 2.1 and 2.2 VACE",
        factory=f"{_FAMILIES}.wan_vace:build",
        pipelines=("WanVACEPipeline",),
        kinds=("T2V", "control"),
        presets=("wan2.1-480p", "wan2.1-720p", "wan2.2-a14b-480p", "wan2.2-a14b-720p"),
        lora_targets=_WAN_TARGETS,
        inputs=("control?", "mask?", "reference?"),
        example="Wan-AI/Wan2.1-VACE-1.3B-diffusers",
        base_models=_EXPERTS,
    ),
    Recipe(
        name="ltx-video",
        title="LTX-Video",
        factory=f"{_FAMILIES}.ltx:build",
        pipelines=("LTXPipeline", "LTXImageToVideoPipeline", "LTXConditionPipeline"),
        kinds=("T2V", "I2V"),
        presets=("ltx",),
        lora_targets=_ATTENTION,
        example="Lightricks/LTX-Video",
    ),
    Recipe(
        name="ltx-2",
        title="LTX-2 (video only)",
        factory=f"{_FAMILIES}.ltx2:build",
        pipelines=_LTX2_PIPELINES,
        kinds=("T2V", "I2V"),
        presets=("ltx",),
        lora_targets=tuple(f"{layer}.{name}" for layer in ("attn1", "attn2") for name in _ATTENTION),
        example="Lightricks/LTX-2",
    ),
    Recipe(
        name="ltx-2-audio",
        title="LTX-2 (video and audio)",
        factory=f"{_FAMILIES}.ltx2:build",
        pipelines=_LTX2_PIPELINES,
        kinds=("T2V", "I2V"),
        presets=("ltx",),
        lora_targets=_ATTENTION,
        example="Lightricks/LTX-2",
        options=MappingProxyType({"data.audio": {"preset": "ltx-2"}}),
    ),
    Recipe(
        name="cogvideox",
        title="CogVideoX",
        factory=f"{_FAMILIES}.cogvideox:build",
        pipelines=("CogVideoXPipeline", "CogVideoXImageToVideoPipeline"),
        kinds=("T2V", "I2V"),
        presets=("cogvideox",),
        lora_targets=_ATTENTION,
        example="THUDM/CogVideoX-5b",
    ),
    Recipe(
        name="cogvideox-fun",
        title="CogVideoX-Fun Control",
        factory=f"{_FAMILIES}.cogvideox_fun:build",
        pipelines=("CogVideoXFunControlPipeline",),
        kinds=("control",),
        presets=("cogvideox",),
        lora_targets=_ATTENTION,
        inputs=("control",),
        example="alibaba-pai/CogVideoX-Fun-V1.1-5b-Pose",
    ),
    Recipe(
        name="cogvideox1.5",
        title="CogVideoX 1.5",
        factory=f"{_FAMILIES}.cogvideox:build",
        pipelines=("CogVideoXPipeline", "CogVideoXImageToVideoPipeline"),
        kinds=("T2V", "I2V"),
        presets=("cogvideox1.5",),
        lora_targets=_ATTENTION,
        example="THUDM/CogVideoX1.5-5B",
    ),
    Recipe(
        name="hunyuanvideo",
        title="HunyuanVideo",
        factory=f"{_FAMILIES}.hunyuanvideo:build",
        pipelines=("HunyuanVideoPipeline", "HunyuanVideoImageToVideoPipeline"),
        kinds=("T2V", "I2V"),
        presets=("hunyuanvideo-540p", "hunyuanvideo-720p"),
        lora_targets=_JOINT_ATTENTION,
        example="hunyuanvideo-community/HunyuanVideo",
    ),
    Recipe(
        name="hunyuanvideo1.5",
        title="HunyuanVideo 1.5",
        factory=f"{_FAMILIES}.hunyuanvideo15:build",
        pipelines=("HunyuanVideo15Pipeline", "HunyuanVideo15ImageToVideoPipeline"),
        kinds=("T2V", "I2V"),
        presets=("hunyuanvideo1.5-480p",),
        lora_targets=_JOINT_ATTENTION,
        example="hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v",
    ),
    Recipe(
        name="mochi",
        title="Mochi 1",
        factory=f"{_FAMILIES}.mochi:build",
        pipelines=("MochiPipeline",),
        kinds=("T2V",),
        presets=("mochi",),
        lora_targets=_JOINT_ATTENTION,
        example="genmo/mochi-1-preview",
    ),
)

RECIPES: Mapping[str, Recipe] = MappingProxyType({recipe.name: recipe for recipe in _ALL})


def find_recipe(name: str) -> Recipe:
    """Return the recipe with this name. Raises ConfigError for an unknown name."""
    if name not in RECIPES:
        near = get_close_matches(name, RECIPES, n=1, cutoff=0.4)
        meant = f"; did you mean {near[0]!r}?" if near else ";"
        raise ConfigError(f"recipe {name!r} does not exist{meant} allowed: {', '.join(RECIPES)}")
    return RECIPES[name]
