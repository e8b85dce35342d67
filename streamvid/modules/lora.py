"""Low-rank adapters (LoRA) through peft: choice of layers, sources of weights, and names in files.

A layer keeps its weight W and adds scale · B @ A to it, with scale = alpha / rank. Keys in files are those of plain
peft without a prefix, relative to the model that has the adapters: `blocks.0.q.lora_A.weight`.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from streamvid.errors import ConfigError
from streamvid.modules.config import LoraConfig
from streamvid.modules.parts import LAYERS, child_names, part_of, some
from streamvid.modules.weight_files import read_metadata, read_state

_log = logging.getLogger(__name__)

REGEX = "regex:"
LARGE = 512
_ADAPTER = ".default."  # peft's name for an unnamed adapter


def inject(module: nn.Module, config: LoraConfig) -> tuple[str, ...]:
    """Add adapters to layers of the child `config.base_model`; return the layers' dotted names in `module`.

    All other parameters of that child are frozen. Adapters are float32. They start without effect, or from
    `config.checkpoint`. Raises ConfigError if the child or a layer does not exist, if a layer does not support
    adapters, or if the checkpoint has different layers, rank or alpha.
    """
    base = _child(module, "base_model", config.base_model)
    targets = choose_targets(base, config.target_modules)
    try:
        from peft import LoraConfig as PeftConfig
        from peft import inject_adapter_in_model
    except ImportError as error:
        raise ConfigError("lora.base_model requires the package peft; run pip install 'streamvid[lora]'") from error

    settings = PeftConfig(
        r=config.rank,
        lora_alpha=_alpha(config),  # type: ignore[arg-type]  # peft divides by the rank
        lora_dropout=config.dropout,
        # A regular expression, because peft matches a list by suffixes, which other layers may share.
        target_modules="|".join(map(re.escape, targets)),
    )
    inject_adapter_in_model(settings, base)
    for parameter in base.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    if config.checkpoint is not None:
        _load_checkpoint(base, config)
    _log.info(
        "adapters of rank %d on %d layers of %s (%s): %s",
        config.rank,
        len(targets),
        config.base_model,
        "chosen by size, because target_modules is empty" if config.target_modules in ("", ()) else "target_modules",
        ", ".join(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in targets)),
    )
    return tuple(f"{config.base_model}.{name}" for name in targets)


def require_files(config: LoraConfig) -> None:
    """Raise ConfigError if a configured adapter file does not exist. Called before models are built."""
    named = {"checkpoint": config.checkpoint, "preset_path": config.preset_path}
    lacking = [f"{field} is {path}" for field, path in named.items() if path is not None and not path.is_file()]
    if lacking:
        raise ConfigError(f"{' and '.join(lacking)}: no such file; use a .safetensors file of adapters")


def choose_targets(base: nn.Module, wanted: str | Sequence[str]) -> tuple[str, ...]:
    """Return the dotted names of the layers of `base` that get adapters.

    wanted: suffixes of layer names, as a list or separated by commas, or "regex:…" for full names. If empty, linear
        layers in lists of blocks that have at least 512 inputs and outputs, or all such layers if none is that large.
    """
    names = [part.strip() for part in wanted.split(",")] if isinstance(wanted, str) else list(wanted)
    modules = {name: part for name, part in base.named_modules() if name}
    if isinstance(wanted, str) and wanted.startswith(REGEX):
        chosen = _by_regex(modules, wanted.removeprefix(REGEX))
    elif not any(names):
        chosen = _automatic(modules)
    else:
        chosen = _by_ends(modules, names)
    refused = [f"{name} ({type(modules[name]).__name__})" for name in chosen if not _can_have(modules, name)]
    if refused:
        raise ConfigError(
            f"target_modules matches {some(refused)}; adapters support linear and convolution layers, except inside "
            "an nn.MultiheadAttention, which bypasses their forward; name only supported layers"
        )
    return tuple(chosen)


def fuse_preset(module: nn.Module, config: LoraConfig) -> int:
    """Add the adapters of `config.preset_path` to the weights of `config.preset_model`; return the number of layers.

    W += alpha / rank · B @ A, computed in float32. If the file does not record alpha and rank, the scale is 1.
    """
    base, path = _child(module, "preset_model", config.preset_model), config.preset_path
    state, known = _read(path, "preset_path", config.preset_model)
    scale = float(known["alpha"]) / float(known["rank"]) if {"alpha", "rank"} <= known.keys() else 1.0
    pairs: dict[str, dict[str, Tensor]] = {}
    for key, tensor in state.items():
        name, _, part = key.removesuffix(".weight").rpartition(".")
        pairs.setdefault(name, {})[part] = tensor
    for name, pair in pairs.items():
        layer = part_of(base, name)
        if pair.keys() != {"lora_A", "lora_B"} or not isinstance(layer, LAYERS):
            raise ConfigError(
                f"preset_path {path} has {name}.{min(pair)}, which matches no layer of {config.preset_model} or "
                "lacks its counterpart; allowed: NAME.lora_A.weight and NAME.lora_B.weight of linear and convolution "
                "layers"
            )
        delta = pair["lora_B"].float().flatten(1) @ pair["lora_A"].float().flatten(1)
        if delta.numel() != layer.weight.numel() or delta.shape[0] != layer.weight.shape[0]:
            raise ConfigError(
                f"preset_path {path}: the adapters of {name} have shape {tuple(delta.shape)}, but the layer has "
                f"{tuple(layer.weight.shape)}; use adapters for this model"
            )
        with torch.no_grad():
            layer.weight.copy_(layer.weight.float() + scale * delta.reshape(layer.weight.shape))
    _log.info("fused the adapters of %s into %d layers of %s", path, len(pairs), config.preset_model)
    return len(pairs)


def plain_name(name: str) -> str:
    """Return a parameter's name without the components that peft adds for the adapter and the wrapped layer."""
    return name.replace(_ADAPTER, ".").replace(".base_layer.", ".")


def is_adapter(name: str) -> bool:
    """Return whether a parameter with this name, in a module or a file, belongs to an adapter."""
    return bool({"lora_A", "lora_B"} & set(name.split(".")))


def adapter_state(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the adapters among `tensors` under their names in files; empty if `module` has no adapters."""
    base = base_of(module)
    if base is None:
        return {}
    prefix = f"{base}." if base else ""
    return {
        plain_name(name).removeprefix(prefix): tensor.detach() for name, tensor in tensors.items() if is_adapter(name)
    }


def base_of(module: nn.Module) -> str | None:
    """Return the dotted name of the model that has adapters, or None if no model has any."""
    return next((name for name, part in module.named_modules() if _peft_config(part) is not None), None)


def metadata(module: nn.Module) -> dict[str, str]:
    """Return the metadata of an adapter file: rank, alpha, dropout, base_model and target_modules (JSON)."""
    base = base_of(module)
    if base is None:
        return {}
    config = _peft_config(module.get_submodule(base))
    adapters = adapter_state(module, dict(module.named_parameters()))
    layers = {name.rpartition(".lora_A.")[0] for name in adapters if ".lora_A." in name}
    return {
        "base_model": base,
        "rank": str(config.r),
        "alpha": str(config.lora_alpha),
        "dropout": str(config.lora_dropout),
        "target_modules": json.dumps(sorted(layers)),
    }


def _peft_config(part: nn.Module) -> Any:
    configs = part.__dict__.get("peft_config")
    return configs.get("default") if isinstance(configs, dict) else None


def _load_checkpoint(base: nn.Module, config: LoraConfig) -> None:
    path = config.checkpoint
    state, known = _read(path, "checkpoint", config.base_model)
    alpha = known.get("alpha")
    if alpha is not None and float(alpha) != _alpha(config):
        raise ConfigError(f"alpha is {_alpha(config)}, but {path} has {alpha}; set lora.alpha={alpha} to use it")
    here = {plain_name(name): value for name, value in base.named_parameters() if is_adapter(name)}
    missing, unexpected = [n for n in here if n not in state], [n for n in state if n not in here]
    if missing or unexpected:
        raise ConfigError(
            f"checkpoint {path} does not fit; missing adapters: {some(missing) or 'none'}; unexpected adapters: "
            f"{some(unexpected) or 'none'}; set lora.target_modules to the layers of the checkpoint"
        )
    for name, parameter in here.items():
        if state[name].shape != parameter.shape:
            raise ConfigError(
                f"checkpoint {path}: {name} has shape {tuple(state[name].shape)}, not {tuple(parameter.shape)}; "
                f"rank is {config.rank}: set lora.rank to the rank of the checkpoint"
            )
        with torch.no_grad():
            parameter.copy_(state[name])
    _log.info("adapters of %s start from %s", config.base_model, path)


def _read(path: Path | None, field: str, base: str | None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of an adapter file, by their names in the model `base`, and the file's metadata."""
    assert path is not None
    state = {plain_name(key): tensor for key, tensor in read_state([path]).items()}
    if not any(map(is_adapter, state)):
        raise ConfigError(f"{field} {path} contains neither lora_A nor lora_B; use a file of adapters")
    for prefix in ("base_model.model.", "pipe.", f"{base}."):
        # Removed only if all names have the prefix, because a layer may have the same name.
        if all(name.startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    return state, read_metadata(path)


def _alpha(config: LoraConfig) -> float:
    return float(config.rank) if config.alpha is None else config.alpha


def _child(module: nn.Module, field: str, name: str | None) -> nn.Module:
    part = part_of(module, name) if name else None
    if part is None:
        raise ConfigError(
            f"{field} is {name!r}, which the training module does not have; allowed: {child_names(module)}, or a "
            "dotted name below them"
        )
    return part


def _automatic(modules: Mapping[str, nn.Module]) -> list[str]:
    lists = [name for name, part in modules.items() if isinstance(part, nn.ModuleList) and len(part) > 1]
    linear = {
        name: part
        for name, part in modules.items()
        if isinstance(part, nn.Linear) and _can_have(modules, name) and any(name.startswith(f"{o}.") for o in lists)
    }
    large = [name for name, part in linear.items() if min(part.in_features, part.out_features) >= LARGE]
    if not linear:
        raise ConfigError("target_modules is empty, and no list of blocks has a linear layer; set it to layer names")
    return large or list(linear)


def _by_regex(modules: Mapping[str, nn.Module], expression: str) -> list[str]:
    try:
        pattern = re.compile(expression)
    except re.error as error:
        raise ConfigError(f"target_modules: {expression!r} is not a regular expression: {error}") from None
    chosen = [name for name in modules if pattern.fullmatch(name)]
    if not chosen:
        layers = [name for name, part in modules.items() if isinstance(part, LAYERS)]
        raise ConfigError(f"target_modules: {expression!r} matches no full name; available layers: {some(layers)}")
    return chosen


def _by_ends(modules: Mapping[str, nn.Module], ends: Iterable[str]) -> list[str]:
    chosen: dict[str, None] = {}
    for end in ends:
        found = [name for name in modules if end and (name == end or name.endswith(f".{end}"))]
        if not found:
            layers = sorted({name.rpartition(".")[2] for name, part in modules.items() if isinstance(part, LAYERS)})
            raise ConfigError(
                f"target_modules contains {end!r}, but no layer name ends with it; use suffixes such as {some(layers)} "
                f"or '{REGEX}EXPRESSION', or leave target_modules empty to choose layers by size"
            )
        chosen.update(dict.fromkeys(found))
    return [name for name in modules if name in chosen]


def _can_have(modules: Mapping[str, nn.Module], name: str) -> bool:
    above = name.rpartition(".")[0]
    return isinstance(modules[name], LAYERS) and not isinstance(modules.get(above), nn.MultiheadAttention)
