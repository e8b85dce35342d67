"""Activation checkpointing: a block stores only its inputs and recomputes its activations in the backward pass.

The user names the blocks by class or by dotted name. torch implements the checkpointing, or DeepSpeed if its
configuration requests this. A wrapped block keeps its class name and parameter names; only its forward method changes.
"""

from __future__ import annotations

import collections
import contextlib
import fnmatch
import functools
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from streamvid.errors import ConfigError
from streamvid.modules.config import ActivationCheckpointingConfig

_log = logging.getLogger(__name__)

AUTO = "auto"
"""Value of `blocks` that selects the elements of every ModuleList with more than one element."""

Checkpoint = Callable[..., Any]
"""Function that runs its first argument, with activation checkpointing, on the remaining positional arguments."""

_DEEPSPEED_OPTIONS = (
    "partition_activations",
    "contiguous_memory_optimization",
    "number_checkpoints",
    "cpu_checkpointing",
    "synchronize_checkpoint_boundary",
    "profile",
)


def wrap(
    module: nn.Module, config: ActivationCheckpointingConfig, function: Checkpoint | None = None
) -> tuple[str, ...]:
    """Checkpoint the blocks of `module` that `config.blocks` selects. Return the dotted names of these blocks.

    function: checkpoint function to use instead of torch's, such as `deepspeed.checkpointing.checkpoint`.
    A block inside another selected block is skipped. Recomputing a block draws the same random numbers again.
    Raises ConfigError if a name matches no block, or if `function` is combined with `config.offload`.
    """
    if function is not None and config.offload:
        raise ConfigError(
            "model.activation_checkpointing.offload is true, but another library checkpoints the activations; set "
            "this option to false, and enable offloading in that library (DeepSpeed: "
            "activation_checkpointing.cpu_checkpointing)"
        )
    named = _named_blocks(module, config.blocks)
    outermost = [name for name in named if not any(name.startswith(f"{other}.") for other in named)]
    for name in outermost:
        block = module.get_submodule(name)
        block.__class__ = _class_of(type(block))  # type: ignore[arg-type]  # a class can be hashed
        # A partial function, not a closure, so that a copy of a block runs itself.
        block._checkpointed = functools.partial(_checkpointed, function, config.offload)  # type: ignore[assignment]
    if outermost:
        shown = ", ".join(outermost[:3]) + ", …" * (len(outermost) > 3)
        _log.info("checkpointing activations of %d blocks: %s", len(outermost), shown)
    return tuple(outermost)


def deepspeed_checkpoint(options: Mapping[str, Any], device: str) -> Checkpoint:
    """Configure DeepSpeed's activation checkpointing, and return its checkpoint function.

    options: `activation_checkpointing` section of DeepSpeed's JSON file.
    """
    from deepspeed import checkpointing

    checkpointing.configure(None, None, *(options.get(name) for name in _DEEPSPEED_OPTIONS))

    def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
        # Autocast is off in the backward pass, and DeepSpeed, unlike torch, does not switch it on again.
        enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)

        def again(*args: Any) -> Any:
            with torch.autocast(device, dtype, enabled=enabled):
                return function(*args)

        return checkpointing.checkpoint(again, *args)

    return checkpoint


def _checkpointed(
    function: Checkpoint | None, offload: bool, forward: Checkpoint, /, *args: object, **kwargs: object
) -> object:
    # All arguments become positional: torch does not offload keyword arguments and DeepSpeed does not accept them.
    flat = (*args, *kwargs.values())

    def run(*flat: object) -> object:
        return forward(*flat[: len(args)], **dict(zip(kwargs, flat[len(args) :], strict=True)))

    if function is not None:
        return function(run, *_with_gradient(flat))
    from torch.utils.checkpoint import checkpoint

    has_gpu = torch.cuda.is_available()
    with torch.autograd.graph.save_on_cpu(pin_memory=has_gpu) if offload else contextlib.nullcontext():
        return checkpoint(run, *flat, use_reentrant=False)


@functools.cache
def _class_of(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = functools.partial(kind.forward, self)
        return self._checkpointed(own, *args, **kwargs) if torch.is_grad_enabled() else own(*args, **kwargs)

    # The subclass keeps the name, because wrapping policies such as FSDP's match it.
    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _with_gradient(flat: tuple[object, ...]) -> tuple[object, ...]:
    # A reentrant checkpoint computes gradients of parameters only if one of its inputs requires a gradient.
    # After frozen layers, none does, for example if only adapters are trainable.
    if any(isinstance(value, Tensor) and value.requires_grad for value in flat):
        return flat
    for place, value in enumerate(flat):
        if isinstance(value, Tensor) and value.is_floating_point():
            return (*flat[:place], value.detach().requires_grad_(), *flat[place + 1 :])
    return flat


def _named_blocks(module: nn.Module, blocks: Collection[str]) -> list[str]:
    found: dict[str, None] = {}
    for wanted in blocks:
        matching = [name for name, part in module.named_modules() if name and _matches(wanted, name, part)]
        matching = [inner for name in matching for inner in _elements(name, module.get_submodule(name))]
        if not matching:
            raise ConfigError(
                f"model.activation_checkpointing.blocks contains {wanted!r}, which matches no block; "
                f"{_candidates(module)}"
            )
        found.update(dict.fromkeys(matching))
    return list(found)


def _matches(wanted: str, name: str, part: nn.Module) -> bool:
    if wanted == AUTO:
        return isinstance(part, nn.ModuleList) and len(part) > 1
    patterns, parts = wanted.split("."), name.split(".")
    by_name = len(patterns) == len(parts) and all(map(fnmatch.fnmatchcase, parts, patterns))
    return by_name or type(part).__name__ == wanted


def _elements(name: str, part: nn.Module) -> Iterable[str]:
    # A list of blocks has no forward of its own, so its elements are used.
    if isinstance(part, nn.ModuleList | nn.ModuleDict):
        return [f"{name}.{key}" for key, _ in part.named_children()]
    return [name]


def _candidates(module: nn.Module) -> str:
    kinds: collections.Counter[str] = collections.Counter()
    lists = []
    for name, part in module.named_modules():
        if isinstance(part, nn.ModuleList) and len(part) > 1:
            lists.append(f"{name}.*")
            kinds.update(type(block).__name__ for block in part)
    if not kinds:
        return "allowed: the class or dotted name of a part (no ModuleList in this module has more than one element)"
    classes = ", ".join(f"{kind} ({count})" for kind, count in kinds.most_common(8))
    return f"allowed: class names, such as {classes}, or dotted names, such as {', '.join(lists[:8])}"
