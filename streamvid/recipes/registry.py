"""Recipes by name: which factory trains a model, which layers get adapters, and what is supported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, TypeAlias

from streamvid.errors import ConfigError

Kind: TypeAlias = Literal["T2V", "I2V"]
_NONE: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Recipe of a model family.

    name: name on the command line.
    title: name in documents.
    factory: import path of the function that builds the training module.
    pipelines: classes of diffusers pipelines, as model_index.json names them, that the recipe trains.
    kinds: what the recipe trains: text to video, image to video. A model's folder decides which.
    presets: bucket presets of the model, the first one by default.
    lora_targets: layers that get adapters, as `model.lora.target_modules`.
    base_model: child that trains.
    base_models: child that trains by the value of the option `expert`, for models with two experts.
    example: id of such a model on the Hugging Face Hub.
    args: arguments of the factory that differ from its defaults.
    """

    name: str
    title: str
    factory: str
    pipelines: tuple[str, ...]
    kinds: tuple[Kind, ...]
    presets: tuple[str, ...]
    lora_targets: tuple[str, ...]
    example: str
    base_model: str = "transformer"
    base_models: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    args: Mapping[str, object] = field(default_factory=lambda: _NONE)


_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")

_ALL = (
    Recipe(
        name="wan2.1",
        title="Wan 2.1",
        factory="streamvid.recipes.families.wan:build",
        pipelines=("WanPipeline", "WanImageToVideoPipeline"),
        kinds=("T2V", "I2V"),
        presets=("wan2.1-480p", "wan2.1-720p"),
        lora_targets=(*_ATTENTION, "ffn.net.0.proj", "ffn.net.2"),
        example="Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    ),
)

RECIPES: Mapping[str, Recipe] = MappingProxyType({recipe.name: recipe for recipe in _ALL})


def find_recipe(name: str) -> Recipe:
    """Return a recipe by name. Raises ConfigError for an unknown name."""
    if name not in RECIPES:
        raise ConfigError(f"recipe {name!r} does not exist; allowed: {', '.join(RECIPES)}")
    return RECIPES[name]
