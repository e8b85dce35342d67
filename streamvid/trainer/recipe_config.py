"""Configuration of a run that uses a recipe: options that follow from the recipe's name, the model and the kind of
training.

All values here are defaults for TrainConfig options. A file, flags and --set override them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from streamvid.errors import ConfigError
from streamvid.recipes.diffusion.single_file import single_file_remedy
from streamvid.recipes.registry import RECIPES, Recipe, find_recipe

#: Learning rates that the trainers of these models use in their examples: for adapters, and for all weights.
_LORA_LR, _FULL_LR = 1e-4, 1e-5


def recipe_named(name: str | None, model: str | None) -> Recipe:
    """Return the recipe with this name or, if `name` is None, the recipe for the model in the folder `model`.

    Raises ConfigError for an unknown name, for a model from another family, and if the recipe cannot be determined.
    """
    pipeline = None if model is None else _pipeline_of(Path(model).expanduser())
    fitting = [recipe.name for recipe in RECIPES.values() if pipeline in recipe.pipelines]
    if name is None:
        if not fitting:
            raise ConfigError(_unknown_model(str(model), pipeline))
        return RECIPES[fitting[0] if len(fitting) == 1 else _decided(Path(str(model)).expanduser(), fitting)]
    recipe = find_recipe(name)
    if model is not None and Path(model).expanduser().is_file():
        raise ConfigError(_unknown_model(model, None))
    if pipeline is not None and pipeline not in recipe.pipelines:
        remedy = f"use --recipe {' or '.join(fitting)}" if fitting else f"use {' or '.join(recipe.pipelines)}"
        raise ConfigError(f"--model {model} is a {pipeline}, which recipe {name!r} does not train; {remedy}")
    return recipe


def recipe_options(
    recipe: Recipe, *, model: str | None, is_lora: bool, expert: str | None = None, has_gpu: bool | None = None
) -> dict[str, object]:
    """Return the TrainConfig options for a run of the recipe, as a mapping from dotted name to value.

    model: folder with a diffusers pipeline, or the pipeline's id on the Hugging Face Hub.
    is_lora: True to train adapters, False to train all weights of the model.
    expert: value of the recipe's option `expert`, if it is set.
    has_gpu: True to compute in bfloat16 and to checkpoint activations; None means True if this machine has an
    accelerator.
    """
    base = recipe.base_models.get(expert or "high", recipe.base_model)
    found: dict[str, object] = {
        "model.factory": recipe.factory,
        **recipe.options,
        "data.batch_size": 1,
        "data.loader.preset": recipe.presets[0],
        "optimizer.lr": _LORA_LR if is_lora else _FULL_LR,
        "model.trainable": [] if is_lora else base.split(","),
    }
    if recipe.inputs:
        found["data.extra_inputs"] = list(recipe.inputs)
    if model is not None:
        found["model.args.model"] = model
    if is_lora:
        found |= {"model.lora.base_model": base, "model.lora.target_modules": list(recipe.lora_targets)}
    if torch.accelerator.is_available() if has_gpu is None else has_gpu:
        found |= {"accelerate.mixed_precision": "bf16", "model.activation_checkpointing.blocks": ["auto"]}
        if is_lora:
            found["model.args.dtype"] = "bfloat16"
    return found


def _unknown_model(model: str, pipeline: str | None) -> str:
    if Path(model).expanduser().is_file():
        return f"--model {model} is a file; {single_file_remedy(model)}"
    if pipeline is None:
        return (
            f"--model {model} is not a folder with model_index.json; use the folder of a diffusers pipeline or, for an "
            f"id on the Hugging Face Hub, add --set model.args.download=true and --recipe {', '.join(RECIPES)}"
        )
    return f"--model {model}: no recipe trains {pipeline}; allowed: pipelines of the recipes {', '.join(RECIPES)}"


def _decided(folder: Path, fitting: list[str]) -> str:
    """Choose among the recipes for one pipeline class, based on how their model folders differ."""
    index, transformer = _read(folder / "model_index.json"), _read(folder / "transformer" / "config.json")
    has_expert = bool((index.get("transformer_2") or [None])[0])
    name = {
        "wan2.1": "wan2.2" if has_expert else "wan2.2-5b" if index.get("expand_timesteps") else "wan2.1",
        "ltx-2": "ltx-2",
        "cogvideox": "cogvideox" if transformer.get("patch_size_t") is None else "cogvideox1.5",
    }.get(fitting[0])
    if name not in fitting:
        raise ConfigError(
            f"--model {folder}: several recipes can train this model; add --recipe {' or '.join(fitting)}"
        )
    return name


def _pipeline_of(folder: Path) -> str | None:
    """Return the class of the pipeline in a local folder, or None if `folder` is not a local folder."""
    index = folder / "model_index.json"
    return str(_read(index).get("_class_name")) if index.is_file() else None


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file} ({error}); copy the model again") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} does not contain a JSON object; copy the model again")
    return found
