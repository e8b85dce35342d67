"""Gradient checkpointing: a block keeps its inputs alone, and is computed again on the way back.

Which blocks, the user says, by class or by name; how, torch does (or DeepSpeed, if its configuration asks for that).
A block stays what it was, its parameters under the same names and its class under its own: it only runs otherwise.
"""

from __future__ import annotations

import collections
import contextlib
import fnmatch
import functools
import logging
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from streamvid.errors import ConfigError
from streamvid.modules.config import RecomputeConfig

_log = logging.getLogger(__name__)

AUTO = "auto"
"""In place of names: what stands in a ModuleList with others, as blocks do."""

Checkpoint = Callable[..., Any]
"""Called with a function and its arguments, by position; gives what the function gives."""


def wrap(module: nn.Module, config: RecomputeConfig, function: Checkpoint | None = None) -> tuple[str, ...]:
    """Recompute the blocks of `module` that `config.blocks` names; returns their dotted names.

    function: what to checkpoint with in place of torch's, as `deepspeed.checkpointing.checkpoint`; it offloads by its
    own configuration, so that `config.offload` is refused beside it.
    A block inside another one that is named too is left alone. Randomness of a block (dropout) is the same when it is
    computed again. Raises ConfigError for a name that nothing has.
    """
    if function is not None and config.offload:
        raise ConfigError(
            "offload is true, but the checkpoints are another library's; set recompute.offload to false and ask that "
            "library for it (DeepSpeed: activation_checkpointing.cpu_checkpointing)"
        )
    named = _named_blocks(module, config.blocks)
    outermost = [name for name in named if not any(name.startswith(f"{other}.") for other in named)]
    for name in outermost:
        block = module.get_submodule(name)
        block.__class__ = _class_of(type(block))  # type: ignore[arg-type]  # a class can be hashed
        block._run_block = _Run(function, config.offload)  # type: ignore[assignment]
    if outermost:
        _log.info("recomputing %d blocks: %s", len(outermost), ", ".join(outermost[:3]) + ", …" * (len(outermost) > 3))
    return tuple(outermost)


class _Run:
    """How a block is run: an object, so that copies of a block run themselves."""

    def __init__(self, function: Checkpoint | None, offload: bool) -> None:
        self.function = function
        self.offload = offload

    def __call__(self, forward: Checkpoint, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # By position, because what is given by name is neither offloaded by torch nor taken by DeepSpeed.
        names = tuple(kwargs)
        flat = (*args, *kwargs.values())
        count = len(args)

        def run(*flat: Any) -> Any:
            return forward(*flat[:count], **dict(zip(names, flat[count:], strict=True)))

        if self.function is not None:
            return self.function(run, *_with_gradient(flat))
        from torch.utils.checkpoint import checkpoint

        with _on_the_host() if self.offload else contextlib.nullcontext():
            return checkpoint(run, *flat, use_reentrant=False, preserve_rng_state=True)


@functools.cache
def _class_of(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = functools.partial(kind.forward, self)
        return self._run_block(own, args, kwargs) if torch.is_grad_enabled() else own(*args, **kwargs)

    # Of the same name, because policies that wrap blocks (FSDP's) go by it.
    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _with_gradient(flat: tuple[Any, ...]) -> tuple[Any, ...]:
    # A reentrant checkpoint gives gradients to parameters only if one of its inputs wants one. Behind frozen layers
    # none does, as under adapters.
    if any(isinstance(value, Tensor) and value.requires_grad for value in flat):
        return flat
    for place, value in enumerate(flat):
        if isinstance(value, Tensor) and value.is_floating_point():
            return (*flat[:place], value.detach().requires_grad_(), *flat[place + 1 :])
    return flat


def _on_the_host() -> Any:
    return torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())


def _named_blocks(module: nn.Module, blocks: Collection[str]) -> list[str]:
    found: dict[str, None] = {}
    for wanted in blocks:
        of_this = [name for name, part in module.named_modules() if name and _is_meant(wanted, name, part)]
        of_this = [inner for name in of_this for inner in _elements(name, module.get_submodule(name))]
        if not of_this:
            raise ConfigError(f"blocks names {wanted!r}, which no part of the models is; {_candidates(module)}")
        found.update(dict.fromkeys(of_this))
    return list(found)


def _is_meant(wanted: str, name: str, part: nn.Module) -> bool:
    if wanted == AUTO:
        return isinstance(part, nn.ModuleList) and len(part) > 1
    patterns, parts = wanted.split("."), name.split(".")
    by_name = len(patterns) == len(parts) and all(map(fnmatch.fnmatchcase, parts, patterns))
    return by_name or type(part).__name__ == wanted


def _elements(name: str, part: nn.Module) -> Iterable[str]:
    # A list of blocks does not run itself: its elements are meant.
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
        return "allowed: the class of a part of the models, or its dotted name; here no blocks stand in a ModuleList"
    classes = ", ".join(f"{kind} ({count})" for kind, count in kinds.most_common(8))
    return f"allowed: a class, as {classes}, or dotted names, as {', '.join(lists[:8])}"
