"""Low-rank adapters (LoRA) through peft: choice of layers, sources of weights, and names in files.

A layer keeps its weight W and adds scale · B @ A to it, with scale = alpha / rank. The file formats are implemented in
`adapters/`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from streamvid.errors import ConfigError
from streamvid.modules.adapters.formats import EncodedAdapters, encode_adapters
from streamvid.modules.adapters.layers import paired
from streamvid.modules.adapters.reading import is_adapter, plain_name, read_adapters
from streamvid.modules.config import LoraConfig, LoraFormat
from streamvid.modules.parts import LAYERS, child_names, part_of, some

_log = logging.getLogger(__name__)

REGEX = "regex:"
LARGE = 512


def inject(module: nn.Module, config: LoraConfig) -> tuple[str, ...]:
    """Add adapters to layers of the children in `config.base_model`. Return the layers' dotted names in `module`.

    All other parameters of these children are frozen. Adapters are float32. They initially have no effect, or are
    loaded from `config.checkpoint`. Raises ConfigError if a child or a layer does not exist, if a layer does not
    support adapters, or if the checkpoint has different layers, rank or alpha.
    """
    return tuple(layer for name in config.base_models for layer in _inject(module, name, config))


def _inject(module: nn.Module, name: str, config: LoraConfig) -> tuple[str, ...]:
    base = _child(module, "base_model", name)
    targets = choose_targets(base, config.target_modules)
    try:
        from peft import LoraConfig as PeftConfig
        from peft import inject_adapter_in_model
    except ImportError as error:
        raise ConfigError(
            f"model.lora.base_model requires the peft package, but importing it failed ({error}); run "
            "pip install 'peft>=0.14'"
        ) from error

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
        _load_checkpoint(base, name, config)
    _log.info(
        "added rank-%d adapters to %d layers of %s (%s): %s",
        config.rank,
        len(targets),
        name,
        "chosen automatically, because target_modules is empty"
        if config.target_modules in ("", ())
        else "target_modules",
        ", ".join(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", layer) for layer in targets)),
    )
    return tuple(f"{name}.{layer}" for layer in targets)


def require_files(config: LoraConfig) -> None:
    """Raise ConfigError if a configured adapter file does not exist. This check runs before any model is built."""
    named = {"checkpoint": config.checkpoint, "preset_path": config.preset_path}
    lacking = [
        f"model.lora.{field} is {path}, which does not exist"
        for field, path in named.items()
        if path is not None and not path.is_file()
    ]
    if lacking:
        raise ConfigError(
            f"{', and '.join(lacking)}; use a LoRA adapter file, such as adapter_model.safetensors in a peft folder"
        )


def choose_targets(base: nn.Module, wanted: str | Sequence[str]) -> tuple[str, ...]:
    """Return the dotted names of the layers in `base` that get adapters.

    wanted: suffixes of layer names, as a list or separated by commas, or "regex:…" for full names. If empty, linear
        layers inside lists of blocks are chosen: those with at least 512 inputs and outputs or, if no layer is that
        large, all of them.
    """
    names = [part for part in (wanted.split(",") if isinstance(wanted, str) else wanted) if part.strip()]
    names = [part.strip() for part in names]
    modules = {name: part for name, part in base.named_modules() if name}
    if isinstance(wanted, str) and wanted.startswith(REGEX):
        chosen = _by_regex(modules, wanted.removeprefix(REGEX))
    elif not names:
        chosen = _automatic(modules)
    else:
        chosen = _by_ends(modules, names)
    refused = [f"{name} ({type(modules[name]).__name__})" for name in chosen if not _can_have(modules, name)]
    if refused:
        raise ConfigError(
            f"model.lora.target_modules matches {some(refused)}; adapters support linear and convolution layers, "
            "except those inside an nn.MultiheadAttention, which bypasses their forward method; list only supported "
            "layers"
        )
    return tuple(chosen)


def fuse_preset(module: nn.Module, config: LoraConfig) -> int:
    """Add the adapters in `config.preset_path` to the weights of `config.preset_model`.

    Return the number of changed layers. Each weight W becomes W + scale · B @ A, computed in float32. The scale is
    alpha / rank, or 1 if the file does not contain alpha.
    """
    base, path = _child(module, "preset_model", config.preset_model), config.preset_path
    assert path is not None
    found = read_adapters(
        path, "model.lora.preset_path", [name for name, _ in base.named_modules()], config.preset_model
    )
    pairs: dict[str, dict[str, Tensor]] = {}
    for key, tensor in found.tensors.items():
        name, _, part = key.removesuffix(".weight").rpartition(".")
        pairs.setdefault(name, {})[part] = tensor
    for name, pair in pairs.items():
        layer = part_of(base, name)
        if pair.keys() != {"lora_A", "lora_B"} or not isinstance(layer, LAYERS):
            raise ConfigError(
                f"model.lora.preset_path {path} contains {name}.{min(pair)}, which matches no layer of "
                f"{config.preset_model} or has no counterpart; allowed: pairs of NAME.lora_A.weight and "
                "NAME.lora_B.weight for linear and convolution layers"
            )
        down, up = (pair[part].float().flatten(1) for part in ("lora_A", "lora_B"))
        if up.shape[1] != down.shape[0] or (up.shape[0], down.shape[1]) != layer.weight.flatten(1).shape:
            raise ConfigError(
                f"model.lora.preset_path {path}: the adapters of {name} have shapes {tuple(pair['lora_A'].shape)} and "
                f"{tuple(pair['lora_B'].shape)}, which do not fit the layer's weight of shape "
                f"{tuple(layer.weight.shape)}; use adapters for this model"
            )
        delta = (up @ down).reshape(layer.weight.shape)
        with torch.no_grad():
            layer.weight.copy_(layer.weight.float() + found.scales[name] * delta)
    _log.info("fused the adapters from %s into %d layers of %s", path, len(pairs), config.preset_model)
    return len(pairs)


def adapter_state(tensors: Mapping[str, Tensor], base: str = "") -> dict[str, Tensor]:
    """Return the adapter tensors of the model `base`, renamed as in adapter files.

    tensors: maps names in the training module to tensors.
    """
    prefix = f"{base}." if base else ""
    return {
        plain_name(name).removeprefix(prefix): tensor.detach()
        for name, tensor in tensors.items()
        if is_adapter(name) and name.startswith(prefix)
    }


def bases_of(module: nn.Module) -> tuple[str, ...]:
    """Return the dotted names of the models that have adapters."""
    return tuple(name for name, part in module.named_modules() if _peft_config(part) is not None)


def adapter_files(module: nn.Module, tensors: Mapping[str, Tensor], format: LoraFormat) -> dict[str, EncodedAdapters]:
    """Return the contents of the adapter files, keyed by the dotted names of the models that have adapters.

    In every format, the metadata contains rank, alpha, dropout, base_model and target_modules (JSON).
    """
    found = {}
    for base in bases_of(module):
        state = adapter_state(tensors, base)
        if not state:
            continue
        config = _peft_config(module.get_submodule(base))
        layers = dict.fromkeys(name.rpartition(".lora_")[0] for name in state)
        adapters = paired(state, dict.fromkeys(layers, config.lora_alpha / config.r), "the module")
        found[base] = encode_adapters(adapters, format, base=base, dropout=config.lora_dropout)
    return found


def _peft_config(part: nn.Module) -> Any:
    configs = part.__dict__.get("peft_config")
    return configs.get("default") if isinstance(configs, dict) else None


def _load_checkpoint(base: nn.Module, name_of_base: str, config: LoraConfig) -> None:
    path = config.checkpoint
    assert path is not None
    found = read_adapters(path, "model.lora.checkpoint", [name for name, _ in base.named_modules()], name_of_base)
    state = found.tensors
    here = {plain_name(name): value for name, value in base.named_parameters() if is_adapter(name)}
    missing, unexpected = [n for n in here if n not in state], [n for n in state if n not in here]
    if missing or unexpected:
        raise ConfigError(
            f"model.lora.checkpoint {path} does not match the layers with adapters; missing adapters: "
            f"{some(missing) or 'none'}; unexpected adapters: {some(unexpected) or 'none'}. Set "
            "model.lora.target_modules to the layers of the checkpoint"
        )
    for name, parameter in here.items():
        if state[name].shape != parameter.shape:
            raise ConfigError(
                f"model.lora.checkpoint {path}: {name} has shape {tuple(state[name].shape)}, but "
                f"model.lora.rank={config.rank} requires {tuple(parameter.shape)}; set model.lora.rank to "
                "the rank of the checkpoint, or use a checkpoint for this model"
            )
    if set(found.scales.values()) != {_alpha(config) / config.rank}:
        _refuse_alphas(path, config, sorted({scale * config.rank for scale in found.scales.values()}))
    with torch.no_grad():
        for name, parameter in here.items():
            parameter.copy_(state[name])
    _log.info("loaded the initial adapters for %s from %s", name_of_base, path)


def _refuse_alphas(path: Path | None, config: LoraConfig, alphas: Sequence[float]) -> NoReturn:
    if len(alphas) == 1 and alphas[0] > 0:
        raise ConfigError(
            f"model.lora.alpha is {_alpha(config)}, but the adapters in {path} have alpha {alphas[0]}; set "
            f"model.lora.alpha={alphas[0]} to use them"
        )
    raise ConfigError(
        f"model.lora.checkpoint {path} has alphas {some([str(alpha) for alpha in alphas])}, but training uses one "
        "positive alpha for all layers; to fuse the checkpoint into the model instead, set model.lora.preset_path and "
        "model.lora.preset_model"
    )


def _alpha(config: LoraConfig) -> float:
    return float(config.rank) if config.alpha is None else config.alpha


def _child(module: nn.Module, field: str, name: str | None) -> nn.Module:
    part = part_of(module, name) if name else None
    if part is None:
        raise ConfigError(
            f"model.lora.{field} is {name!r}, which the training module does not have; allowed: {child_names(module)}, "
            "or a dotted name below one of these"
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
        raise ConfigError(
            "model.lora.target_modules is empty, and no ModuleList of the model has a linear layer that supports "
            "adapters; set model.lora.target_modules to layer names"
        )
    return large or list(linear)


def _by_regex(modules: Mapping[str, nn.Module], expression: str) -> list[str]:
    try:
        pattern = re.compile(expression)
    except re.error as error:
        raise ConfigError(
            f"model.lora.target_modules: {expression!r} is not a valid regular expression ({error}); "
            "correct the expression"
        ) from None
    chosen = [name for name in modules if pattern.fullmatch(name)]
    if not chosen:
        layers = [name for name, part in modules.items() if isinstance(part, LAYERS)]
        raise ConfigError(
            f"model.lora.target_modules: {expression!r} matches no full name; available layers: {some(layers)}"
        )
    return chosen


def _by_ends(modules: Mapping[str, nn.Module], ends: Iterable[str]) -> list[str]:
    chosen: dict[str, None] = {}
    for end in ends:
        found = [name for name in modules if name == end or name.endswith(f".{end}")]
        if not found:
            layers = sorted({name.rpartition(".")[2] for name, part in modules.items() if isinstance(part, LAYERS)})
            raise ConfigError(
                f"model.lora.target_modules contains {end!r}, but no layer has this name or a name that ends with "
                f"'.{end}'; use suffixes such as {some(layers)} or '{REGEX}EXPRESSION', or leave "
                "model.lora.target_modules empty to choose layers automatically"
            )
        chosen.update(dict.fromkeys(found))
    return [name for name in modules if name in chosen]


def _can_have(modules: Mapping[str, nn.Module], name: str) -> bool:
    above = name.rpartition(".")[0]
    return isinstance(modules[name], LAYERS) and not isinstance(modules.get(above), nn.MultiheadAttention)
