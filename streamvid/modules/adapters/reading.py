"""Reader for adapter files in all formats. Each format stores alpha in a different place."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from streamvid.errors import ConfigError
from streamvid.modules.adapters.layers import paired, unpaired
from streamvid.modules.adapters.names import diffusers_names, dotted
from streamvid.modules.weight_files import read_metadata, read_state

ADAPTER = ".default."  # peft's name for an unnamed adapter
PEFT_MODEL = "base_model.model."  # where a PeftModel holds the model
PEFT_CONFIG_FILE = "adapter_config.json"
#: Prefixes of keys in diffusers' files. The first one is the default. It also applies to a second transformer, which
#: diffusers selects by an argument of `load_lora_weights`.
PIPELINE_PARTS = ("transformer", "unet", "text_encoder", "text_encoder_2")
DIFFUSERS_FACTS = "lora_adapter_metadata"
_PIPE_PARTS = ("dit.", "dit2.")  # names of models in DiffSynth-Studio's pipelines, which its files may contain
#: Prefix of layers in files of kohya's trainers: lora_unet_, lora_transformer_, lora_te1_, …
_KOHYA_PREFIX = re.compile(r"lora_[a-z0-9]+_")


@dataclass(frozen=True)
class AdapterFile:
    """Adapters read from a file.

    tensors: maps names in the model to adapter tensors.
    scales: maps each layer name to the factor that multiplies the layer's B @ A: alpha / rank, or 1 if the file does
        not contain alpha.
    """

    tensors: dict[str, Tensor]
    scales: Mapping[str, float]


def read_adapters(path: Path, field: str, layers: Collection[str] = (), name: str | None = None) -> AdapterFile:
    """Read an adapter file.

    field: option that names the file, used in error messages.
    layers: names of all parts of the model, if the model is available. Original names in the file are converted if
        the model uses diffusers names.
    name: dotted name of the model in the training module; keys in the file may begin with this name.
    Raises ConfigError if the file contains no adapters or its metadata is damaged.
    """
    state = {_theirs(key): tensor for key, tensor in read_state([path]).items()}
    if not any(map(is_adapter, state)):
        raise ConfigError(f"{field} {path} contains no lora_A or lora_B tensors; use a LoRA adapter file")
    layers, removed = set(layers), ""
    if all(map(_KOHYA_PREFIX.match, state)):
        state = _dotted(state, layers)
    own = () if name is None else (f"{name}.",)
    for prefix in (PEFT_MODEL, "pipe.", *own, *_PIPE_PARTS, "diffusion_model.", *(f"{p}." for p in PIPELINE_PARTS)):
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
            f"{field} {path}: the adapter metadata (in the file's header or in {PEFT_CONFIG_FILE} next to the file) is "
            f"damaged ({error}); copy the files again"
        ) from None
    return _renamed(AdapterFile(tensors, scales), layers, f"{field} {path}")


def plain_name(name: str) -> str:
    """Return a parameter's name without the components that peft adds for the adapter and the wrapped layer."""
    return name.replace(ADAPTER, ".").replace(".base_layer.", ".")


def is_adapter(name: str) -> bool:
    """Return whether a parameter with this name, in a module or a file, belongs to an adapter."""
    return bool({"lora_A", "lora_B"} & set(name.split(".")))


def _renamed(found: AdapterFile, layers: Collection[str], where: str) -> AdapterFile:
    """Convert original names to diffusers names if the model uses diffusers names."""
    if not layers or all(_layer(key) in layers for key in found.tensors) or not all(map(is_adapter, found.tensors)):
        return found
    adapters = diffusers_names(paired(found.tensors, found.scales, where))
    if not adapters.keys() <= set(layers):
        return found
    return AdapterFile(unpaired(adapters), {layer: one.scale for layer, one in adapters.items()})


def _scales(
    facts: Mapping[str, Mapping[str, Any]], ranks: Mapping[str, int], alphas: Mapping[str, float], removed: str
) -> dict[str, float]:
    """Return a mapping from each layer name to the factor that multiplies the layer's B @ A.

    facts: adapter metadata, as returned by `_facts`.
    ranks: maps each layer name to its rank.
    alphas: maps layer names to alphas, for layers with a separate alpha in the file.
    removed: prefix that was removed from all layer names in the file.
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
    """Return the value of the first key that matches the layer's name under peft's rules, or None if no key matches."""
    if not isinstance(pattern, Mapping):
        return None
    return next((value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", layer)), None)


def _theirs(key: str) -> str:
    """Return peft's name for a key in an adapter file."""
    return plain_name(key).replace(".lora_down.", ".lora_A.").replace(".lora_up.", ".lora_B.")


def _dotted(state: Mapping[str, Tensor], layers: Collection[str]) -> dict[str, Tensor]:
    """Rename kohya's tensors to use the layers' dotted names. Names that match no layer stay unchanged."""
    keys = {key: key.partition(".") for key in state}
    plain = {theirs: _KOHYA_PREFIX.sub("", theirs, count=1) for theirs, _, _ in keys.values()}
    names = dotted(plain.values(), layers)
    # A model with diffusers' names gets those of an original file later, which first needs its dots.
    others = dotted(plain.values()) if layers else names
    found = {}
    for key, tensor in state.items():
        theirs, _, part = keys[key]
        own = plain[theirs]
        layer = names[own] if names[own] != own else others[own]
        found[f"{theirs if layer == own and '.' not in layer else layer}.{part}"] = tensor
    return found


def _layer(key: str) -> str:
    return key.removesuffix(".alpha") if key.endswith(".alpha") else re.split(r"\.lora_[AB]\.", key)[0]


def _facts(path: Path) -> dict[str, Mapping[str, Any]]:
    """Return the adapter metadata from the file's header or from peft's adapter_config.json next to the file.

    The metadata is grouped by pipeline component, or under the key "" if it applies to the whole file.
    """
    known, beside = read_metadata(path), path.with_name(PEFT_CONFIG_FILE)
    if DIFFUSERS_FACTS in known:
        facts: dict[str, dict[str, Any]] = {}
        for key, value in json.loads(known[DIFFUSERS_FACTS]).items():
            component, _, fact = key.rpartition(".")
            facts.setdefault(component, {})[fact] = value
        return {**facts}
    if "alpha" in known:
        return {"": {"lora_alpha": float(known["alpha"])}}
    if known.get("ss_network_alpha", "None") != "None":
        return {"": {"lora_alpha": float(known["ss_network_alpha"]) or None}}  # in kohya's trainers, 0 means the rank
    config = json.loads(beside.read_bytes()) if beside.is_file() else {}
    return {"": config if isinstance(config, Mapping) else {}}
