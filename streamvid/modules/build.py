"""Construction of the training module from its configuration.

factory ─► weight files ─► preset adapters fused ─► trainable parameters ─► adapters ─► dtypes
        ─► activation checkpointing ─► FP8
"""

from __future__ import annotations

import contextlib
import difflib
import reprlib
from collections.abc import Collection, Iterable, Iterator

import torch
from torch import nn

from streamvid.errors import ConfigError
from streamvid.modules import activation_checkpointing, fp8, lora, weights
from streamvid.modules.config import ModelConfig
from streamvid.modules.factory import call_factory
from streamvid.modules.parts import LAYERS, child_names, part_of, some
from streamvid.modules.weight_files import resolve

ENCODE_ONLY = "sft:data_process"
ENCODED = "sft:train"
# The CPU under another index, to distinguish it from a "cpu" that a factory sets for a part with its own weights.
_IMPLICIT_CPU = torch.device("cpu", 0)


def build_module(
    model: ModelConfig,
    *,
    task: str,
    seed: int,
    dtype_of_frozen: torch.dtype | None = None,
    checkpoint_function: activation_checkpointing.Checkpoint | None = None,
) -> nn.Module:
    """Build the training module on the CPU with `model.factory`, and set its weights, adapters and precision.

    Trainable parts are float32 and in train mode; all other parts are frozen and in eval mode. The same seed gives the
    same module, and global random state does not change. Task "sft:train" needs none of the module's `encoders`; task
    "sft:data_process" freezes everything.
    dtype_of_frozen: dtype of frozen linear layers, convolutions and embeddings; None to keep their dtypes.
    checkpoint_function: passed to `activation_checkpointing.wrap`.
    Raises ConfigError before anything is built if a weight file or adapter file is missing. Also raises ConfigError if
    the factory, a weight file or a name in `model` is invalid.
    """
    sources = resolve(model.weights)
    lora.require_files(model.lora)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = _make(model, task)
        encoders = _encoders(module, task)
        may_lack = {ENCODED: encoders, ENCODE_ONLY: None}.get(task, ())
        went = weights.load(module, sources, model.weights, may_lack=may_lack)
        if model.lora.preset_model and not _is_absent(module, model.lora.preset_model, may_lack):
            lora.fuse_preset(module, model.lora)
        if task == ENCODE_ONLY:
            module.requires_grad_(False)
        else:
            _choose_trainable(module, model, encoders)
            # Seeded again: adapters are the same whether or not the factory built encoders before.
            torch.manual_seed(seed)
            _inject(module, model, encoders)
    _set_dtypes(module, dtype_of_frozen)
    if task != ENCODE_ONLY:
        activation_checkpointing.wrap(module, model.activation_checkpointing, checkpoint_function)
    skipped = {path for source in sources for path in source.written} - went.keys()
    named = [went.get(name) or name for name in model.fp8 if name not in skipped]
    fp8.store(module, [name for name in named if not _is_absent(module, name, may_lack)])
    return train_mode(module)


def train_mode(module: nn.Module) -> nn.Module:
    """Set train mode for trainable parts and eval mode for frozen parts.

    Unlike this function, `module.train()` also sets train mode for frozen parts.

    A part is frozen if it has parameters and none of them is trainable. Parts without parameters follow their parent.
    """
    parameters = list(module.parameters())
    if parameters and not any(parameter.requires_grad for parameter in parameters):
        return module.eval()
    module.training = True
    for child in module.children():
        train_mode(child)
    return module


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Disable gradients and set eval mode within this context. Afterwards, restore the mode of each part."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part in training:
            part.training = True


def _make(model: ModelConfig, task: str) -> nn.Module:
    with _without_memory() if model.init == "meta" else contextlib.nullcontext():
        module = call_factory(model.factory, model.args, optional={"task": task})
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"model.factory {model.factory!r} returned an object of type {type(module).__name__}; it must return a "
            "torch.nn.Module"
        )
    return module


@contextlib.contextmanager
def _without_memory() -> Iterator[None]:
    # Parameters only, because buffers that a constructor computes, such as position tables, are in no file.
    register = nn.Module.register_parameter

    def register_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta and torch.get_default_device() == _IMPLICIT_CPU:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_meta  # type: ignore[method-assign]
    try:
        with _IMPLICIT_CPU:
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _encoders(module: nn.Module, task: str) -> tuple[str, ...]:
    """Return the names of the module's encoders.

    Raises ConfigError if the module's `encoders` attribute is not a collection of names, or if the task needs an
    encoder that is missing.
    """
    named = getattr(module, "encoders", ())
    kind = type(module).__name__
    is_valid = isinstance(named, Collection) and not isinstance(named, nn.Module | str)
    if not is_valid or not all(isinstance(name, str) for name in named):
        shown = " ".join(reprlib.repr(named).split())
        raise ConfigError(
            f"{kind}.encoders={shown}: must be a tuple with the names of the children that only `encode` uses, such "
            "as ('autoencoder', 'text_encoder')"
        )
    for name in named if task != ENCODED else ():
        child = name.partition(".")[0]
        if not hasattr(module, child):
            raise ConfigError(
                f"{kind}.encoders contains {name!r}, but {kind} has no child {child!r}; allowed: {child_names(module)}"
            )
    return tuple(named)


def _is_absent(module: nn.Module, name: str, may_lack: Iterable[str] | None) -> bool:
    return part_of(module, name) is None and (may_lack is None or name in may_lack)


def _choose_trainable(module: nn.Module, model: ModelConfig, encoders: tuple[str, ...]) -> None:
    if model.trainable is not None:
        chosen = [parameter for name in model.trainable for parameter in _parameters_of(module, name, encoders)]
        module.requires_grad_(False)
        for parameter in chosen:
            parameter.requires_grad_(True)
    for part in filter(None, (part_of(module, name) for name in encoders)):
        part.requires_grad_(False)


def _parameters_of(module: nn.Module, name: str, encoders: tuple[str, ...]) -> list[nn.Parameter]:
    if any(f"{name}.".startswith(f"{encoder}.") for encoder in encoders):
        raise ConfigError(
            f"model.trainable contains {name!r}, which belongs to an encoder and therefore runs without gradients; "
            "remove it from model.trainable, or remove the encoder from the module's `encoders`"
        )
    part = part_of(module, name) if name else None
    if part is not None:
        found = [parameter for parameter in part.parameters() if parameter.is_floating_point()]
    else:
        found = [parameter for own, parameter in module.named_parameters(remove_duplicate=False) if own == name]
    if not found:
        names = [own for own, _ in module.named_modules() if own] + [own for own, _ in module.named_parameters()]
        near = difflib.get_close_matches(name, [own for own in names if own != name], n=3)
        raise ConfigError(
            f"model.trainable contains {name!r}, which matches no floating-point parameter; use the dotted name of a "
            f"part or parameter, such as {', '.join(near) or child_names(module)}"
        )
    return found


def _inject(module: nn.Module, model: ModelConfig, encoders: tuple[str, ...]) -> None:
    bases = model.lora.base_models
    for base in bases:
        _check_base(base, model, encoders)
    if not bases:
        return
    inside = [name for name in model.trainable or () if any(name.startswith(f"{base}.") for base in bases)]
    kept = [parameter for name in inside for parameter in _parameters_of(module, name, encoders)]
    targets = lora.inject(module, model.lora)
    both = [target for target in targets if any(f"{target}.".startswith(f"{name}.") for name in inside)]
    both += [name for name in inside if any(name.startswith(f"{target}.") for target in targets)]
    if both:
        raise ConfigError(
            f"{some(both)} would be trained both directly and through adapters; change model.lora.target_modules or "
            "model.trainable so that they do not overlap"
        )
    for parameter in kept:
        parameter.requires_grad_(True)


def _check_base(base: str, model: ModelConfig, encoders: tuple[str, ...]) -> None:
    """Raise ConfigError if `base`, a model that gets adapters, is part of an encoder or is itself trainable."""
    if base.partition(".")[0] in encoders:
        raise ConfigError(
            f"model.lora.base_model is {base!r}, which belongs to an encoder and therefore runs without gradients; "
            "choose a child that is not in the module's `encoders`"
        )
    covering = [name for name in model.trainable or () if f"{base}.".startswith(f"{name}.")]
    if covering:
        raise ConfigError(
            f"model.trainable contains {covering[0]!r} and model.lora.base_model is {base!r}, but adapters require "
            f"frozen weights; remove {covering[0]!r} from model.trainable, replace it with submodules that get no "
            "adapters, or set model.lora.base_model to null"
        )


def _set_dtypes(module: nn.Module, dtype_of_frozen: torch.dtype | None) -> None:
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            # These layers hold most bytes, and autocast casts them anyway. A frozen bfloat16 norm would reject float32.
            is_large = isinstance(part, (*LAYERS, nn.Embedding))
            wanted = torch.float32 if parameter.requires_grad else dtype_of_frozen if is_large else None
            if wanted is not None and parameter.is_floating_point():
                parameter.data = parameter.data.to(wanted)
