"""Low-rank adapters (LoRA) through peft: choice of layers, sources of weights, and names in files.

A layer keeps its weight W and adds scale · B @ A to it, with scale = alpha / rank. Files are written in one of three
formats, whose readers expect for a layer `blocks.0.q`:

diffusers   transformer.blocks.0.q.lora_A.weight, and alpha in the header's `lora_adapter_metadata`
peft        blocks.0.q.lora_A.weight; alpha is in a configuration of its own
diffsynth   blocks.0.q.lora_A.default.weight; there is no alpha, so B is multiplied by the scale

All of them are read, with alpha from wherever the format states it, and also ComfyUI's `diffusion_model.` prefix,
`lora_down` and `lora_up`, and `alpha` tensors.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from streamvid.errors import ConfigError
from streamvid.modules.config import LoraConfig, LoraFormat
from streamvid.modules.parts import LAYERS, child_names, part_of, some
from streamvid.modules.weight_files import read_metadata, read_state

_log = logging.getLogger(__name__)

REGEX = "regex:"
LARGE = 512
_ADAPTER = ".default."  # peft's name for an unnamed adapter
#: Prefixes of keys in diffusers' files: names of pipeline components. The first one is the default.
_PIPELINE_PARTS = ("transformer", "transformer_2", "unet", "text_encoder", "text_encoder_2")
_DIFFUSERS_FACTS = "lora_adapter_metadata"


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
        raise ConfigError("lora.base_model requires the package peft; run pip install 'peft>=0.14'") from error

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

    W += alpha / rank · B @ A, computed in float32. If the file does not state alpha, the scale is 1.
    """
    base, path = _child(module, "preset_model", config.preset_model), config.preset_path
    found = _read(path, "preset_path", base, config.preset_model)
    pairs: dict[str, dict[str, Tensor]] = {}
    for key, tensor in found.tensors.items():
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
            layer.weight.copy_(layer.weight.float() + found.scale(name) * delta.reshape(layer.weight.shape))
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


def adapter_file(
    module: nn.Module, tensors: Mapping[str, Tensor], format: LoraFormat
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return (tensors, metadata) of a file with the adapters among `tensors`; both empty if `module` has no adapters.

    Every format's metadata contains rank, alpha, dropout, base_model and target_modules (JSON).
    """
    state, base = adapter_state(module, tensors), base_of(module)
    if not state or base is None:
        return {}, {}
    config = _peft_config(module.get_submodule(base))
    layers = sorted({name.rpartition(".lora_A.")[0] for name in state if ".lora_A." in name})
    alpha = config.lora_alpha
    if format == "diffsynth":  # has no place for alpha
        scale = alpha / config.r
        state = {name: tensor * scale if ".lora_B." in name else tensor for name, tensor in state.items()}
        state = {name.replace(".weight", ".default.weight"): tensor for name, tensor in state.items()}
        alpha = config.r
    facts = {
        "base_model": base,
        "rank": str(config.r),
        "alpha": str(alpha),
        "dropout": str(config.lora_dropout),
        "target_modules": json.dumps(layers),
    }
    if format == "diffusers":
        name = base.rpartition(".")[2]
        prefix = name if name in _PIPELINE_PARTS else _PIPELINE_PARTS[0]
        theirs = {"r": config.r, "lora_alpha": alpha, "lora_dropout": config.lora_dropout, "target_modules": layers}
        facts["format"] = "pt"
        facts[_DIFFUSERS_FACTS] = json.dumps({f"{prefix}.{key}": theirs[key] for key in sorted(theirs)})
        state = {f"{prefix}.{key}": tensor for key, tensor in state.items()}
    return state, facts


def _peft_config(part: nn.Module) -> Any:
    configs = part.__dict__.get("peft_config")
    return configs.get("default") if isinstance(configs, dict) else None


def _load_checkpoint(base: nn.Module, config: LoraConfig) -> None:
    path = config.checkpoint
    found = _read(path, "checkpoint", base, config.base_model)
    state = found.tensors
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
        scale = found.scale(name.rpartition(".lora_")[0])
        if scale != _alpha(config) / config.rank:
            alpha = scale * config.rank
            raise ConfigError(f"alpha is {_alpha(config)}, but {path} has {alpha}; set lora.alpha={alpha} to use it")
        with torch.no_grad():
            parameter.copy_(state[name])
    _log.info("adapters of %s start from %s", config.base_model, path)


@dataclass(frozen=True)
class _Adapters:
    """Adapters of a file, by their names in the model. facts: peft's description of them, as far as it is known.

    alphas: alpha of single layers.
    """

    tensors: dict[str, Tensor]
    facts: Mapping[str, Any]
    alphas: Mapping[str, float]

    def scale(self, layer: str) -> float:
        """Return the factor of a layer's B @ A: alpha / rank, or 1 if the file does not state alpha."""
        rank = self.tensors[f"{layer}.lora_A.weight"].shape[0]
        alpha = (
            self.alphas.get(layer) or _matching(self.facts.get("alpha_pattern"), layer) or self.facts.get("lora_alpha")
        )
        return 1.0 if alpha is None else float(alpha) / (math.sqrt(rank) if self.facts.get("use_rslora") else rank)


def _matching(pattern: object, layer: str) -> Any:
    """Return the value of the pattern that matches a layer's name, as peft looks it up."""
    if not isinstance(pattern, Mapping):
        return None
    return next((value for key, value in pattern.items() if re.search(rf"(.*\.)?({key})$", layer)), None)


def _read(path: Path | None, field: str, base: nn.Module, name: str | None) -> _Adapters:
    """Read an adapter file of streamvid, peft, diffusers or DiffSynth-Studio for the model `base`."""
    assert path is not None
    state = {_theirs(key): tensor for key, tensor in read_state([path]).items()}
    if not any(map(is_adapter, state)):
        raise ConfigError(f"{field} {path} contains neither lora_A nor lora_B; use a file of adapters")
    layers = {layer for layer, _ in base.named_modules()}
    for prefix in ("base_model.model.", "pipe.", f"{name}.", "diffusion_model.", *(f"{p}." for p in _PIPELINE_PARTS)):
        # Removed only if all names have the prefix and are not those of layers, because a layer may have this name.
        if all(key.startswith(prefix) for key in state) and not all(_layer(key) in layers for key in state):
            state = {key.removeprefix(prefix): tensor for key, tensor in state.items()}
    alphas = {_layer(key): float(tensor) for key, tensor in state.items() if key.endswith(".alpha")}
    tensors = {key: tensor for key, tensor in state.items() if not key.endswith(".alpha")}
    return _Adapters(tensors, _facts(path, field), alphas)


def _theirs(key: str) -> str:
    """Return peft's name for a key of an adapter file."""
    return plain_name(key).replace(".lora_down.", ".lora_A.").replace(".lora_up.", ".lora_B.")


def _layer(key: str) -> str:
    return key.removesuffix(".alpha") if key.endswith(".alpha") else re.split(r"\.lora_[AB]\.", key)[0]


def _facts(path: Path, field: str) -> Mapping[str, Any]:
    """Return what the file's header, or peft's adapter_config.json next to it, states about the adapters."""
    known, beside = read_metadata(path), path.with_name("adapter_config.json")
    try:
        if _DIFFUSERS_FACTS in known:
            theirs = json.loads(known[_DIFFUSERS_FACTS])
            return {key.partition(".")[2] or key: theirs[key] for key in theirs}
        if "alpha" in known:
            return {"lora_alpha": float(known["alpha"])}
        facts = json.loads(beside.read_bytes()) if beside.is_file() else {}
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{field} {path}: the description of the adapters is damaged ({error})") from None
    return facts if isinstance(facts, Mapping) else {}


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
