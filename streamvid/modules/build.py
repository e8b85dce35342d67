"""The training module, from configuration to ready to train.

    factory ─► weight files ─► preset adapters fused ─► what trains ─► adapters ─► dtypes ─► recompute ─► 8 bits

A factory is named by an import path, "package.module:name". Modules of the working directory are found too, before
installed ones: a `train.py` beside the configuration is "train:build", run from there.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import logging
import operator
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from streamvid.errors import ConfigError
from streamvid.modules import activation_checkpointing, fit, fp8, lora, weights
from streamvid.modules.config import LoraConfig, ModelConfig, RecomputeConfig

_log = logging.getLogger(__name__)

ENCODE_ONLY = "sft:data_process"
ENCODED = "sft:train"
# The host, told apart from the "cpu" that a factory sets itself, for a part that brings its weights along.
_UNTOLD = torch.device("cpu", 0)
_LARGE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)


def build_module(
    model: ModelConfig,
    lora_config: LoraConfig | None,
    recompute_config: RecomputeConfig,
    *,
    task: str,
    seed: int,
    dtype_of_frozen: torch.dtype | None = None,
    checkpoint_function: activation_checkpointing.Checkpoint | None = None,
) -> nn.Module:
    """The module that `model.factory` makes, on the CPU, with its weights, adapters and precision.

    What trains is float32 and in train mode, all else frozen and in eval mode; frozen linear and convolution layers and
    embeddings are in `dtype_of_frozen` (None: as they are). The same seed gives the same module; global randomness is
    left alone. task "sft:train" needs none of the module's `encoders`, "sft:data_process" trains nothing.
    checkpoint_function: see `activation_checkpointing.wrap`.
    Raises ConfigError that names what is wrong: files before anything is made, then factory, keys, names.
    """
    sources = weights.resolve(model)
    if lora_config is not None:
        lora.require_files(lora_config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = _make(model, task)
        encoders = _encoders(module)
        strange = [name for name in encoders if task != ENCODED and not hasattr(module, name.partition(".")[0])]
        if strange:
            children = ", ".join(name for name, _ in module.named_children())
            raise ConfigError(f"encoders of {type(module).__name__} names {strange[0]!r}; its children: {children}")
        may_lack = {ENCODED: encoders, ENCODE_ONLY: None}.get(task, ())
        went = weights.load(module, sources, model, may_lack=may_lack)
        _fuse_preset(module, lora_config, may_lack)
        if task == ENCODE_ONLY:
            module.requires_grad_(False)
        else:
            _choose_trainable(module, model, encoders)
            # Seeded anew: adapters are the same whether or not the factory made encoders before.
            torch.manual_seed(seed)
            _inject(module, lora_config, model, encoders)
            _require_trainable(module)
    _set_dtypes(module, dtype_of_frozen)
    if task != ENCODE_ONLY:
        activation_checkpointing.wrap(module, recompute_config, checkpoint_function)
    skipped = {path for source in sources for path in source.written} - went.keys()
    named = [went.get(name, name) for name in model.fp8 if name not in skipped]
    fp8.store(module, [name for name in named if not _is_absent(module, name, may_lack)])
    train_mode(module)
    return module


def train_mode(module: nn.Module) -> nn.Module:
    """Train mode for what trains, eval mode for what is frozen; in place of `module.train()`, which has both train.

    A part is frozen if it has parameters and none of them trains. Parts without any are as what they belong to.
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
    """Without gradients and dropout; what was frozen in evaluation mode already stays so afterwards."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part in training:
            part.training = True


def import_object(path: str) -> Any:
    """What "package.module:name" names; name may be dotted. The working directory is searched first, and stays on
    `sys.path`, for what the module imports later. Raises ConfigError that says which part of the path there is not."""
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise ConfigError(f"{path!r} is no import path; allowed: 'package.module:name'")
    if os.getcwd() not in sys.path and "" not in sys.path:  # noqa: PTH109  # as sys.path has it
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
    try:
        found = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(_import_problem(path, module_name, error)) from error
    except Exception as error:
        raise ConfigError(f"{path}: {module_name} fails as it is imported: {type(error).__name__}: {error}") from error
    try:
        return operator.attrgetter(name)(found)
    except AttributeError:
        public = [key for key in vars(found) if not key.startswith("_")]
        near = difflib.get_close_matches(name, public, n=3) or public[:8]
        where = getattr(found, "__file__", None) or module_name
        raise ConfigError(f"{path}: {where} has no {name!r}; nearest: {', '.join(near) or 'nothing'}") from None


def call_factory(path: str, *args: Any, **kwargs: Any) -> Any:
    """Import what `path` names and call it. Raises ConfigError if that cannot be, or not with these arguments."""
    factory = import_object(path)
    if not callable(factory):
        raise ConfigError(f"{path} is a {type(factory).__name__}, which cannot be called; name a function or a class")
    signature = _signature(factory)
    try:
        if signature is not None:
            signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ConfigError(f"{path}{signature} does not take the arguments given: {error}") from None
    return factory(*args, **kwargs)


def _signature(factory: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(factory)
    except (TypeError, ValueError):  # builtins, which do not say what they take
        return None


def _make(model: ModelConfig, task: str) -> nn.Module:
    factory = import_object(model.factory)
    arguments = dict(model.args)
    signature = _signature(factory) if callable(factory) else None
    if signature is not None and "task" in signature.parameters:
        arguments.setdefault("task", task)
    with _without_memory() if model.init == "meta" else contextlib.nullcontext():
        module = call_factory(model.factory, **arguments)
    if not isinstance(module, nn.Module):
        raise ConfigError(f"factory {model.factory} gave a {type(module).__name__}; it has to give a torch.nn.Module")
    return module


@contextlib.contextmanager
def _without_memory() -> Iterator[None]:
    # Parameters alone: a table that a module computes as it is made (positions) is in no file, and has to be there.
    register = nn.Module.register_parameter

    def register_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta and torch.get_default_device() == _UNTOLD:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_meta  # type: ignore[method-assign]
    try:
        with _UNTOLD:
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _encoders(module: nn.Module) -> tuple[str, ...]:
    named = getattr(module, "encoders", ())
    if isinstance(named, nn.Module | str) or not all(isinstance(name, str) for name in named):
        raise ConfigError(
            f"encoders of {type(module).__name__} is {type(named).__name__}; allowed: the names of its children that "
            "only `encode` uses, as encoders = ('autoencoder', 'text_encoder')"
        )
    return tuple(named)


def _fuse_preset(module: nn.Module, config: LoraConfig | None, may_lack: Iterable[str] | None) -> None:
    if config is not None and config.preset_model and not _is_absent(module, config.preset_model, may_lack):
        lora.fuse_preset(module, config)


def _is_absent(module: nn.Module, name: str, may_lack: Iterable[str] | None) -> bool:
    return fit.part_of(module, name) is None and (may_lack is None or name in may_lack)


def _choose_trainable(module: nn.Module, model: ModelConfig, encoders: tuple[str, ...]) -> None:
    if model.trainable is not None:
        chosen = [parameter for name in model.trainable for parameter in _parameters_of(module, name, encoders)]
        module.requires_grad_(False)
        for parameter in chosen:
            parameter.requires_grad_(True)
    for name in encoders:
        part = fit.part_of(module, name)
        if part is not None:
            part.requires_grad_(False)


def _parameters_of(module: nn.Module, name: str, encoders: tuple[str, ...]) -> list[nn.Parameter]:
    if any(name == encoder or name.startswith(f"{encoder}.") for encoder in encoders):
        raise ConfigError(
            f"trainable has {name!r}, which belongs to an encoder; encoders run without gradients: take it from "
            "trainable, or from the module's `encoders`"
        )
    part = fit.part_of(module, name) if name else None
    if part is not None:
        found = [parameter for parameter in part.parameters() if parameter.is_floating_point()]
    else:
        found = [parameter for own, parameter in module.named_parameters(remove_duplicate=False) if own == name]
    if not found:
        names = [own for own, _ in module.named_modules() if own] + [own for own, _ in module.named_parameters()]
        near = difflib.get_close_matches(name, names, n=3) or [child for child, _ in module.named_children()]
        raise ConfigError(f"trainable has {name!r}, which has no parameters here; nearest: {', '.join(near)}")
    return found


def _inject(module: nn.Module, config: LoraConfig | None, model: ModelConfig, encoders: tuple[str, ...]) -> None:
    if config is None or config.base_model is None:
        return
    base = config.base_model
    if base.partition(".")[0] in encoders:
        raise ConfigError(f"base_model is {base!r}, an encoder, which runs without gradients; name a model that trains")
    covering = [name for name in model.trainable or () if base == name or base.startswith(f"{name}.")]
    if covering:
        raise ConfigError(
            f"trainable has {covering[0]!r} and lora.base_model is {base!r}: adapters are for frozen weights; take it "
            "from trainable, or name parts of it there that get no adapters"
        )
    inside = [name for name in model.trainable or () if name.startswith(f"{base}.")]
    kept = [parameter for name in inside for parameter in _parameters_of(module, name, encoders)]
    targets = lora.inject(module, config)
    both = [target for target in targets if any(f"{target}.".startswith(f"{name}.") for name in inside)]
    both += [name for name in inside if any(name.startswith(f"{target}.") for target in targets)]
    if both:
        raise ConfigError(f"{fit.some(both)} would train whole and by adapters; narrow target_modules or trainable")
    for parameter in kept:
        parameter.requires_grad_(True)


def _require_trainable(module: nn.Module) -> None:
    if not any(parameter.requires_grad for parameter in module.parameters()):
        children = ", ".join(name for name, _ in module.named_children())
        raise ConfigError(f"nothing trains; name it in model.trainable or lora.base_model: {children}")


def _set_dtypes(module: nn.Module, dtype_of_frozen: torch.dtype | None) -> None:
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            # Where the bytes are, and what autocast casts anyway. A frozen norm in bfloat16 does not take float32 in.
            is_large = isinstance(part, _LARGE)
            wanted = torch.float32 if parameter.requires_grad else dtype_of_frozen if is_large else None
            if wanted is not None and parameter.is_floating_point():
                parameter.data = parameter.data.to(wanted)


def _import_problem(path: str, module_name: str, error: ImportError) -> str:
    missing = error.name or ""
    if isinstance(error, ModuleNotFoundError) and (module_name == missing or module_name.startswith(f"{missing}.")):
        return (
            f"{path}: there is no module {missing!r}, neither installed nor in the working directory {os.getcwd()}; "  # noqa: PTH109
            "run from the folder that has it, or install its package"
        )
    return f"{path}: {module_name} fails as it is imported: {error}"
