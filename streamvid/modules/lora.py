"""Low-rank adapters (LoRA) through peft: choice of layers, sources of weights, and names in files.

A layer keeps its weight W and adds scale · B @ A to it, with scale = alpha / rank. Files are written in one of three
formats. For a layer `blocks.0.q`, their readers expect:

diffusers   transformer.blocks.0.q.lora_A.weight, and alpha in the header's `lora_adapter_metadata`
peft        base_model.model.blocks.0.q.lora_A.weight; alpha is in adapter_config.json in the same folder
diffsynth   blocks.0.q.lora_A.default.weight; there is no alpha, so B is multiplied by the scale

All of these formats can be read, including the place where each stores alpha. ComfyUI's `diffusion_model.` prefix,
`lora_down` and `lora_up`, and `alpha` tensors are also accepted, as are files of kohya's trainers and musubi-tuner,
which name this layer `lora_unet_blocks_0_q` and state alpha as `ss_network_alpha` in the header.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

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
_PEFT_MODEL = "base_model.model."  # where a PeftModel holds the model
_PEFT_FACTS = ("r", "lora_alpha", "lora_dropout", "target_modules", "alpha_pattern", "rank_pattern")
PEFT_CONFIG_FILE = "adapter_config.json"
#: Prefixes of keys in diffusers' files. The first one is the default. It also applies to a second transformer, which
#: diffusers selects by an argument of `load_lora_weights`.
_PIPELINE_PARTS = ("transformer", "unet", "text_encoder", "text_encoder_2")
_DIFFUSERS_FACTS = "lora_adapter_metadata"
#: Prefix of layers in files of kohya's trainers: lora_unet_, lora_transformer_, lora_te1_, …
_KOHYA_PREFIX = re.compile(r"lora_[a-z0-9]+_")


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
        raise ConfigError(
            f"model.lora.base_model requires the package peft, but importing it failed ({error}); run "
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
        _load_checkpoint(base, config)
    _log.info(
        "adapters of rank %d on %d layers of %s (%s): %s",
        config.rank,
        len(targets),
        config.base_model,
        "chosen automatically, because target_modules is empty"
        if config.target_modules in ("", ())
        else "target_modules",
        ", ".join(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in targets)),
    )
    return tuple(f"{config.base_model}.{name}" for name in targets)


def require_files(config: LoraConfig) -> None:
    """Raise ConfigError if a configured adapter file does not exist. Called before models are built."""
    named = {"checkpoint": config.checkpoint, "preset_path": config.preset_path}
    lacking = [
        f"model.lora.{field} is {path}" for field, path in named.items() if path is not None and not path.is_file()
    ]
    if lacking:
        raise ConfigError(
            f"{' and '.join(lacking)}: not an existing file; use a LoRA adapter file, such as "
            "adapter_model.safetensors in a peft folder"
        )


def choose_targets(base: nn.Module, wanted: str | Sequence[str]) -> tuple[str, ...]:
    """Return the dotted names of the layers of `base` that get adapters.

    wanted: suffixes of layer names, as a list or separated by commas, or "regex:…" for full names. If empty, the linear
        layers inside lists of blocks: those with at least 512 inputs and outputs or, if there are none, all of them.
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
            "except those of an nn.MultiheadAttention, which bypasses their forward method; list only supported layers"
        )
    return tuple(chosen)


def fuse_preset(module: nn.Module, config: LoraConfig) -> int:
    """Add the adapters of `config.preset_path` to the weights of `config.preset_model`; return the number of layers.

    W += alpha / rank · B @ A, computed in float32. If the file does not state alpha, the scale is 1.
    """
    base, path = _child(module, "preset_model", config.preset_model), config.preset_path
    found = _read(path, "model.lora.preset_path", base, config.preset_model)
    pairs: dict[str, dict[str, Tensor]] = {}
    for key, tensor in found.tensors.items():
        name, _, part = key.removesuffix(".weight").rpartition(".")
        pairs.setdefault(name, {})[part] = tensor
    for name, pair in pairs.items():
        layer = part_of(base, name)
        if pair.keys() != {"lora_A", "lora_B"} or not isinstance(layer, LAYERS):
            raise ConfigError(
                f"model.lora.preset_path {path} contains {name}.{min(pair)}, which matches no layer of "
                f"{config.preset_model} or lacks its counterpart; allowed: pairs NAME.lora_A.weight and "
                "NAME.lora_B.weight of linear and convolution layers"
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
    """Return (tensors, metadata) for a file with the adapters among `tensors`; both are empty if there are none.

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
    if format == "peft":
        state = {f"{_PEFT_MODEL}{key}": tensor for key, tensor in state.items()}
    return state, facts


def peft_config(module: nn.Module) -> dict[str, Any]:
    """Return the content of peft's adapter_config.json for the adapters of `module`; empty if it has none."""
    base = base_of(module)
    if base is None:
        return {}
    config = _peft_config(module.get_submodule(base))
    return {"peft_type": "LORA", **{name: getattr(config, name) for name in _PEFT_FACTS}}


def _peft_config(part: nn.Module) -> Any:
    configs = part.__dict__.get("peft_config")
    return configs.get("default") if isinstance(configs, dict) else None


def _load_checkpoint(base: nn.Module, config: LoraConfig) -> None:
    path = config.checkpoint
    found = _read(path, "model.lora.checkpoint", base, config.base_model)
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
                f"{tuple(parameter.shape)} is required with model.lora.rank={config.rank}; set it to the rank of the "
                "checkpoint, or use a checkpoint for this model"
            )
    if set(found.scales.values()) != {_alpha(config) / config.rank}:
        _refuse_alphas(path, config, sorted({scale * config.rank for scale in found.scales.values()}))
    with torch.no_grad():
        for name, parameter in here.items():
            parameter.copy_(state[name])
    _log.info("adapters of %s start from %s", config.base_model, path)


def _refuse_alphas(path: Path | None, config: LoraConfig, alphas: Sequence[float]) -> NoReturn:
    if len(alphas) == 1 and alphas[0] > 0:
        raise ConfigError(
            f"model.lora.alpha is {_alpha(config)}, but the adapters in {path} have alpha {alphas[0]}; set "
            f"model.lora.alpha={alphas[0]} to use them"
        )
    raise ConfigError(
        f"model.lora.checkpoint {path} has alphas {some([str(alpha) for alpha in alphas])}, but training uses one "
        "positive alpha for all layers; fuse it with model.lora.preset_path and model.lora.preset_model instead"
    )


@dataclass(frozen=True)
class _Adapters:
    """Adapters read from a file.

    tensors: adapter tensors by their names in the model.
    scales: layer name → factor of its B @ A, which is alpha / rank, or 1 if the file does not state alpha.
    """

    tensors: dict[str, Tensor]
    scales: Mapping[str, float]


def _scales(
    facts: Mapping[str, Mapping[str, Any]], ranks: Mapping[str, int], alphas: Mapping[str, float], removed: str
) -> dict[str, float]:
    """Return the factor of each layer's B @ A.

    facts: result of `_facts`.
    ranks: layer name → rank.
    alphas: layer name → alpha, for layers with a separate alpha in the file.
    removed: prefix of all of these names in the file.
    """
    components = {layer: f"{removed}{layer}".partition(".")[0] for layer in ranks}
    # Files whose keys lack the component, such as those of peft, have one description for all layers.
    is_shared = len(facts) == 1 and facts.keys().isdisjoint(components.values())
    shared: Mapping[str, Any] = next(iter(facts.values())) if is_shared else {}
    found = {}
    for layer, rank in ranks.items():
        component, own = components[layer], facts.get(components[layer], shared)
        name = f"{removed}{layer}".removeprefix(f"{component}.") if component in facts else layer
        stated = (alphas.get(layer), _matching(own.get("alpha_pattern"), name), own.get("lora_alpha"))
        alpha = next((value for value in stated if value is not None), None)
        found[layer] = 1.0 if alpha is None else float(alpha) / (math.sqrt(rank) if own.get("use_rslora") else rank)
    return found


def _matching(pattern: object, layer: str) -> Any:
    """Return the value of the first key that matches a layer's name, as in peft, or None if no key matches."""
    if not isinstance(pattern, Mapping):
        return None
    return next((value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", layer)), None)


def _read(path: Path | None, field: str, base: nn.Module, name: str | None) -> _Adapters:
    """Read an adapter file for the model `base`. field: option that names the file, for messages."""
    assert path is not None
    state = {_theirs(key): tensor for key, tensor in read_state([path]).items()}
    if not any(map(is_adapter, state)):
        raise ConfigError(f"{field} {path} contains no lora_A or lora_B tensors; use a LoRA adapter file")
    layers, removed = {layer for layer, _ in base.named_modules()}, ""
    if all(map(_KOHYA_PREFIX.match, state)):
        state = _dotted(state, layers)
    for prefix in (_PEFT_MODEL, "pipe.", f"{name}.", "diffusion_model.", *(f"{p}." for p in _PIPELINE_PARTS)):
        # Removed only if all names have the prefix and are not those of layers, because a layer may have this name.
        if all(key.startswith(prefix) for key in state) and not all(_layer(key) in layers for key in state):
            state = {key.removeprefix(prefix): tensor for key, tensor in state.items()}
            removed += prefix
    alphas = {_layer(key): float(tensor) for key, tensor in state.items() if key.endswith(".alpha")}
    tensors = {key: tensor for key, tensor in state.items() if not key.endswith(".alpha")}
    ranks = {_layer(key): tensor.shape[0] for key, tensor in tensors.items() if key.endswith(".lora_A.weight")}
    try:
        scales = _scales(_facts(path), ranks, alphas, removed)
    except (ValueError, TypeError, AttributeError, ArithmeticError, re.error) as error:
        raise ConfigError(
            f"{field} {path}: the adapter metadata (in its header or in {PEFT_CONFIG_FILE} next to it) is damaged "
            f"({error}); copy the files again"
        ) from None
    return _Adapters(tensors, scales)


def _theirs(key: str) -> str:
    """Return peft's name for a key of an adapter file."""
    return plain_name(key).replace(".lora_down.", ".lora_A.").replace(".lora_up.", ".lora_B.")


def _dotted(state: Mapping[str, Tensor], layers: Iterable[str]) -> dict[str, Tensor]:
    """Return kohya's tensors under the layers' dotted names. Names that match no layer stay as they are."""
    names = {layer.replace(".", "_"): layer for layer in layers}
    found = {}
    for key, tensor in state.items():
        theirs, _, part = key.partition(".")
        found[f"{names.get(_KOHYA_PREFIX.sub('', theirs, count=1), theirs)}.{part}"] = tensor
    return found


def _layer(key: str) -> str:
    return key.removesuffix(".alpha") if key.endswith(".alpha") else re.split(r"\.lora_[AB]\.", key)[0]


def _facts(path: Path) -> dict[str, Mapping[str, Any]]:
    """Return what the file's header, or peft's adapter_config.json next to it, states about the adapters.

    The keys are pipeline components, or only "" if the statements apply to the whole file.
    """
    known, beside = read_metadata(path), path.with_name(PEFT_CONFIG_FILE)
    if _DIFFUSERS_FACTS in known:
        facts: dict[str, dict[str, Any]] = {}
        for key, value in json.loads(known[_DIFFUSERS_FACTS]).items():
            component, _, fact = key.rpartition(".")
            facts.setdefault(component, {})[fact] = value
        return {**facts}
    if "alpha" in known:
        return {"": {"lora_alpha": float(known["alpha"])}}
    if known.get("ss_network_alpha", "None") != "None":
        return {"": {"lora_alpha": float(known["ss_network_alpha"]) or None}}  # in kohya's trainers, 0 means the rank
    config = json.loads(beside.read_bytes()) if beside.is_file() else {}
    return {"": config if isinstance(config, Mapping) else {}}


def _alpha(config: LoraConfig) -> float:
    return float(config.rank) if config.alpha is None else config.alpha


def _child(module: nn.Module, field: str, name: str | None) -> nn.Module:
    part = part_of(module, name) if name else None
    if part is None:
        raise ConfigError(
            f"model.lora.{field} is {name!r}, which the training module does not have; allowed: {child_names(module)}, "
            "or a dotted name below them"
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
            "model.lora.target_modules is empty, and no list of blocks has a linear layer that supports adapters; set "
            "it to layer names"
        )
    return large or list(linear)


def _by_regex(modules: Mapping[str, nn.Module], expression: str) -> list[str]:
    try:
        pattern = re.compile(expression)
    except re.error as error:
        raise ConfigError(
            f"model.lora.target_modules: {expression!r} is not a valid regular expression ({error}); correct it"
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
                f"'.{end}'; use suffixes such as {some(layers)} or '{REGEX}EXPRESSION', or leave it empty to choose "
                "layers automatically"
            )
        chosen.update(dict.fromkeys(found))
    return [name for name in modules if name in chosen]


def _can_have(modules: Mapping[str, nn.Module], name: str) -> bool:
    above = name.rpartition(".")[0]
    return isinstance(modules[name], LAYERS) and not isinstance(modules.get(above), nn.MultiheadAttention)
