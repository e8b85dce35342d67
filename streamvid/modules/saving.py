"""Tensors that a run saves: those that training changes, gathered from all ranks, in one file per model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from streamvid.errors import ConfigError, StreamvidError
from streamvid.modules import lora


@dataclass(frozen=True)
class WeightFile:
    """Content of one saved file.

    name: "" if it is the only one, else the child, or "lora".   metadata: for the header.
    """

    name: str
    tensors: dict[str, Tensor]
    metadata: dict[str, str]


def files(module: nn.Module, tensors: Mapping[str, Tensor]) -> tuple[WeightFile, ...]:
    """Split the changed tensors into one file per child that trains, and one for adapters.

    tensors: those of `changing`, gathered from several processes, or a moving average of them. Buffers are included
    for a child that trains as a whole. The file of the adapters is called "lora" if other weights train too. Its keys
    are those of plain peft, relative to the model that has the adapters; its metadata contain rank and alpha.
    """
    trains = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    whole = _whole_children(module)
    children: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if not lora.is_adapter(name) and (name in trains or name.startswith(whole)):
            children.setdefault(name.partition(".")[0] if "." in name else "", {})[name] = tensor.detach()
    is_only_one = len(children) == 1
    parts = [WeightFile("" if is_only_one else child, own, {}) for child, own in children.items()]
    if adapters := lora.adapter_state(module, tensors):
        parts.append(WeightFile("lora" if parts else "", adapters, lora.metadata(module)))
    return tuple(parts)


def _whole_children(module: nn.Module) -> tuple[str, ...]:
    """Return the prefixes of the children whose parameters all train."""
    trains = {name: [one.requires_grad for one in child.parameters()] for name, child in module.named_children()}
    return tuple(f"{name}." for name, each in trains.items() if each and all(each))


def remove_prefix(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Remove `prefix` from the names that begin with it. Raises ConfigError if two names become one."""
    renamed = {name: name.removeprefix(prefix) for name in state}
    if len(set(renamed.values())) < len(renamed):
        twice = sorted(name for name, new in renamed.items() if new != name and new in state)
        raise ConfigError(
            f"remove_prefix is {prefix!r}; without it {twice[0]} would have the name of another tensor; omit it"
        )
    return {new: state[name] for name, new in renamed.items()}


def changing(module: nn.Module) -> dict[str, Tensor]:
    """Return by name the parameters that train, and persistent buffers (batch normalization).

    The buffers are those of parts in train mode, and of children that train as a whole. This uses no state dict, which
    is a collective operation if weights are sharded.
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
    """Gather each tensor whole on the CPU. Every rank calls it, with the same names in the same order."""
    whole = {}
    for name, tensor in tensors.items():
        part: Any = tensor.detach()
        if hasattr(tensor, "ds_id"):
            from deepspeed.runtime.zero import GatheredParameters

            with GatheredParameters([tensor]):
                whole[name] = tensor.detach().to("cpu", copy=True)
        else:
            # A copy on CPUs too: the next save of a state frees what FSDP gathered for a forward pass.
            whole[name] = (part.full_tensor() if hasattr(part, "full_tensor") else part).to("cpu", copy=True)
    return whole


def require_finite(module: nn.Module, tensors: Mapping[str, Tensor], step: int) -> None:
    """Raise StreamvidError if a trained tensor has an infinity or NaN, because a run would resume from it."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and not tensors[name].isfinite().all():
            raise StreamvidError(
                f"{name} has values that are not finite after step {step}; the step is not saved and earlier "
                "checkpoints remain: lower optimizer.lr or optimizer.grad_clip"
            )
