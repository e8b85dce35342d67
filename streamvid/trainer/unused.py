"""Trainable parameters that a step does not use. They matter where several processes average their gradients."""

from __future__ import annotations

from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from streamvid.errors import ConfigError
from streamvid.modules.parts import some


def allow_unused(accelerator: Accelerator, allowed: bool | None, module: nn.Module) -> None:
    """Set whether DDP looks for unused parameters in each step. Call this function before `prepare`.

    allowed: value of `accelerate.find_unused_parameters`; None uses the module's `has_unused_parameters` attribute.
    """
    if accelerator.ddp_handler is not None:
        stated = bool(getattr(module, "has_unused_parameters", False))
        accelerator.ddp_handler.find_unused_parameters = stated if allowed is None else allowed


def require_gradients(prepared: nn.Module) -> None:
    """Raise ConfigError if DDP needs a gradient for each trainable parameter, but a parameter got no gradient.

    Without this check, DDP would not average the gradients of the first step, and would fail only in the second step.
    """
    if not isinstance(prepared, DistributedDataParallel) or prepared.find_unused_parameters:
        return
    model = prepared.module.model
    unused = [name for name, one in model.named_parameters() if one.requires_grad and one.grad is None]
    if unused:
        raise ConfigError(
            f"{some(unused)} of the training module got no gradient in the first step, but with several processes, "
            "every trainable parameter needs a gradient in each step; set accelerate.find_unused_parameters=true, or "
            "list in model.trainable only parameters that the loss depends on"
        )
