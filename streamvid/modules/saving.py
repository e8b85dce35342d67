"""Tensors that a run saves: everything that training changes, gathered from all ranks into one file per model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from streamvid.errors import ConfigError, StreamvidError
from streamvid.modules import lora
from streamvid.modules.adapters.reading import PEFT_CONFIG_FILE, is_adapter
from streamvid.modules.config import LoraFormat
from streamvid.modules.weight_files import SAFETENSORS, write_state

#: Name that peft expects in a folder of adapters.
PEFT_WEIGHTS_FILE = f"adapter_model{SAFETENSORS}"


@dataclass(frozen=True)
class WeightFile:
    """Content of one saved file.

    name: name of the trainable child, or of the model with adapters. If there is only one, the name is "", or "lora"
        for adapters that are saved in addition to other weights.
    metadata: header metadata.
    peft_config: content of adapter_config.json if the file is saved as a folder in peft's format; otherwise empty.
    """

    name: str
    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    peft_config: dict[str, Any] = field(default_factory=dict)


def files(
    module: nn.Module, tensors: Mapping[str, Tensor], lora_format: LoraFormat = "diffusers"
) -> tuple[WeightFile, ...]:
    """Split the changed tensors into one file per trainable child and one file per model with adapters.

    tensors: result of `changing`, gathered from all ranks, or moving averages of these tensors.
    lora_format: format of the adapter files.
    Buffers are included for children whose parameters are all trainable.
    """
    trains = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    whole = _whole_children(module)
    children: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if not is_adapter(name) and (name in trains or name.startswith(whole)):
            children.setdefault(name.partition(".")[0] if "." in name else "", {})[name] = tensor.detach()
    is_only_one = len(children) == 1
    parts = [WeightFile("" if is_only_one else child, own, {}) for child, own in children.items()]
    adapters = lora.adapter_files(module, tensors, lora_format)
    of_one = "lora" if parts else ""
    for base, one in adapters.items():
        name = base if len(adapters) > 1 else of_one
        parts.append(WeightFile(name, one.tensors, one.facts, one.peft_config))
    return tuple(parts)


def write(file: WeightFile, path: Path) -> None:
    """Write or replace `path`.safetensors or, for adapters in peft's format, the folder `path`.

    path: path without a suffix. No incomplete file or folder ever has this name.
    """
    path = path if file.peft_config else path.with_name(f"{path.name}{SAFETENSORS}")
    temporary = _temporary(path)
    if file.peft_config:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        write_state(temporary / PEFT_WEIGHTS_FILE, file.tensors, file.metadata)
        text = json.dumps(file.peft_config, indent=1, sort_keys=True) + "\n"
        (temporary / PEFT_CONFIG_FILE).write_text(text, encoding="utf-8")
        shutil.rmtree(path, ignore_errors=True)
    else:
        write_state(temporary, file.tensors, file.metadata)
    temporary.rename(path)


def written(folder: Path) -> list[Path]:
    """Return the files and folders that `write` has written into `folder`, oldest first."""
    paths = [*folder.glob(f"*{SAFETENSORS}"), *(path.parent for path in folder.glob(f"*/{PEFT_WEIGHTS_FILE}"))]
    return sorted(paths, key=lambda path: path.stat().st_mtime_ns)


def remove(path: Path) -> None:
    """Remove a file or a folder. If the process is killed, no incomplete folder remains under this name."""
    if path.is_dir():
        shutil.rmtree(path.rename(_temporary(path)))
    else:
        path.unlink()


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


def _whole_children(module: nn.Module) -> tuple[str, ...]:
    """Return the name prefixes of children whose parameters are all trainable."""
    trains = {name: [one.requires_grad for one in child.parameters()] for name, child in module.named_children()}
    return tuple(f"{name}." for name, each in trains.items() if each and all(each))


def remove_prefix(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Remove `prefix` from the names that begin with it. Raises ConfigError if two names would become equal."""
    renamed = {name: name.removeprefix(prefix) for name in state}
    if len(set(renamed.values())) < len(renamed):
        twice = sorted(name for name, new in renamed.items() if new != name and new in state)
        raise ConfigError(
            f"checkpoints.remove_prefix is {prefix!r}, but without this prefix, {twice[0]} would have the same "
            "name as another tensor; use another prefix, or no prefix"
        )
    return {new: state[name] for name, new in renamed.items()}


def changing(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that training changes: trainable parameters, and buffers such as batch-norm statistics.

    Persistent buffers are included for parts in train mode and for children whose parameters are all trainable.
    `state_dict` is not used, because it is a collective operation if weights are sharded.
    """
    found: dict[str, Tensor] = {name: one for name, one in module.named_parameters() if one.requires_grad}
    whole = _whole_children(module)
    for path, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            is_changing = part.training or f"{path}.".startswith(whole)
            if is_changing and name not in part._non_persistent_buffers_set:
                found[f"{path}.{name}".lstrip(".")] = buffer
    return found


def gathered(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gather the full tensors on the CPU. Every rank must call this function with the same names in the same order."""
    whole = {}
    for name, tensor in tensors.items():
        part: Any = tensor.detach()
        if hasattr(tensor, "ds_id"):
            from deepspeed.runtime.zero import GatheredParameters

            with GatheredParameters([tensor]):
                whole[name] = tensor.detach().to("cpu", copy=True)
        else:
            # Copied on the CPU too, because saving a state later frees what FSDP gathered for a forward pass.
            whole[name] = (part.full_tensor() if hasattr(part, "full_tensor") else part).to("cpu", copy=True)
    return whole


def require_finite(module: nn.Module, tensors: Mapping[str, Tensor], step: int) -> None:
    """Raise StreamvidError if a trainable tensor contains infinity or NaN, so that it is never saved."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and not tensors[name].isfinite().all():
            raise StreamvidError(
                f"{name} has non-finite values after step {step}, so this step was not saved; resume from an earlier "
                "checkpoint with a lower optimizer.lr or optimizer.grad_clip"
            )
