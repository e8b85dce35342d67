"""Adapter file formats: how each format names a layer's tensors, and where it stores alpha.

For the layer `blocks.0.attn1.to_q` of diffusers' Wan, whose original name is `blocks.0.self_attn.q`, readers expect:

diffusers   transformer.blocks.0.attn1.to_q.lora_A.weight, and alpha in the header's `lora_adapter_metadata`
peft        base_model.model.blocks.0.attn1.to_q.lora_A.weight; alpha is in adapter_config.json in the same folder
diffsynth   blocks.0.self_attn.q.lora_A.default.weight; the format has no alpha, so B is multiplied by the scale
comfyui     diffusion_model.blocks.0.self_attn.q.lora_A.weight; B is multiplied by the scale too
kohya       lora_unet_blocks_0_self_attn_q.lora_down.weight, and the tensor lora_unet_blocks_0_self_attn_q.alpha

ComfyUI would read alpha tensors too, but other readers of its keys, such as diffusers for LTX-Video, do not.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, assert_never

import torch
from torch import Tensor

from streamvid.modules.adapters.layers import Adapter, unpaired
from streamvid.modules.adapters.names import diffusers_names, original_names
from streamvid.modules.adapters.reading import DIFFUSERS_FACTS, PEFT_MODEL, PIPELINE_PARTS
from streamvid.modules.config import LoraFormat


@dataclass(frozen=True)
class EncodedAdapters:
    """Content of an adapter file.

    facts: header metadata.
    peft_config: content of adapter_config.json, which peft expects next to the file; empty for other formats.
    """

    tensors: dict[str, Tensor]
    facts: dict[str, str]
    peft_config: dict[str, Any] = field(default_factory=dict)


def encode_adapters(
    adapters: Mapping[str, Adapter],
    format: LoraFormat,
    *,
    base: str = "transformer",
    dropout: float = 0.0,
    family: str | None = None,
) -> EncodedAdapters:
    """Return the file content that represents the adapters of one model in `format`.

    adapters: maps each layer's name, as in diffusers or in the original code, to its adapter. Names from known families
        are converted to the names that the format uses; other names stay unchanged.
    base: dotted name of the model in the training module.
    dropout: dropout probability used in training, to be recorded in the metadata.
    family: name in FAMILIES; None detects the family from the layers.
    """
    match format:
        case "diffusers" | "peft":
            return _with_config(diffusers_names(adapters, family), format, base, dropout)
        case "diffsynth":
            plain = {layer: one.scaled() for layer, one in original_names(adapters, family).items()}
            tensors = {name.replace(".weight", ".default.weight"): one for name, one in unpaired(plain).items()}
        case "comfyui":
            plain = {layer: one.scaled() for layer, one in original_names(adapters, family).items()}
            tensors = {f"diffusion_model.{name}": one for name, one in unpaired(plain).items()}
        case "kohya":
            plain = original_names(adapters, family)
            tensors = _kohya(plain)
        case _:
            assert_never(format)
    facts = _facts(plain, base, dropout)
    if format == "kohya":
        facts |= {"ss_network_dim": facts["rank"], "ss_network_alpha": str(_number(_most(adapters)[1]))}
    return EncodedAdapters(tensors, facts)


def _with_config(adapters: Mapping[str, Adapter], format: LoraFormat, base: str, dropout: float) -> EncodedAdapters:
    config, facts, state = _config(adapters, dropout), _facts(adapters, base, dropout), unpaired(adapters)
    if format == "peft":
        return EncodedAdapters({f"{PEFT_MODEL}{name}": one for name, one in state.items()}, facts, config)
    name = base.rpartition(".")[2]
    prefix = name if name in PIPELINE_PARTS else PIPELINE_PARTS[0]
    theirs = {key: value for key, value in sorted(config.items()) if key != "peft_type" and value != {}}
    facts |= {"format": "pt", DIFFUSERS_FACTS: json.dumps({f"{prefix}.{key}": value for key, value in theirs.items()})}
    return EncodedAdapters({f"{prefix}.{key}": tensor for key, tensor in state.items()}, facts)


def _kohya(adapters: Mapping[str, Adapter]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for layer, one in adapters.items():
        name = f"lora_unet_{layer.replace('.', '_')}"
        found |= {
            f"{name}.alpha": torch.tensor(one.alpha),
            f"{name}.lora_down.weight": one.down,
            f"{name}.lora_up.weight": one.up,
        }
    return found


def _config(adapters: Mapping[str, Adapter], dropout: float) -> dict[str, Any]:
    """Return the content of peft's adapter_config.json.

    `rank_pattern` and `alpha_pattern` list the layers whose rank or alpha differs from the most frequent value.
    """
    rank, alpha = _most(adapters)
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": _number(alpha),
        "lora_dropout": dropout,
        "target_modules": sorted(adapters),
        "rank_pattern": {layer: one.rank for layer, one in adapters.items() if one.rank != rank},
        "alpha_pattern": {layer: _number(one.alpha) for layer, one in adapters.items() if one.alpha != alpha},
    }


def _facts(adapters: Mapping[str, Adapter], base: str, dropout: float) -> dict[str, str]:
    rank, alpha = _most(adapters)
    # A reader would apply a single alpha to layers of every rank.
    is_single = all(one.alpha == alpha for one in adapters.values())
    return {
        "base_model": base,
        "rank": str(rank),
        **({"alpha": str(_number(alpha))} if is_single else {}),
        "dropout": str(dropout),
        "target_modules": json.dumps(sorted(adapters)),
    }


def _most(adapters: Mapping[str, Adapter]) -> tuple[int, float]:
    """Return the most frequent rank and alpha."""
    ((found, _),) = collections.Counter((one.rank, one.alpha) for one in adapters.values()).most_common(1)
    return found


def _number(value: float) -> float:
    return int(value) if value.is_integer() else value
