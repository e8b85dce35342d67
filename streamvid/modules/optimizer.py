"""What moves the weights: any optimizer by its import path, its rate, and a moving average of what it moves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from streamvid.config import require
from streamvid.errors import ConfigError, StateError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Any optimizer, by import path, called with the trainable parameters, lr, weight_decay, betas (null: without)
    and `args`; and how its rate goes: up over `warmup_steps`, then as `schedule` says, down to `min_lr` at the end.

    grad_clip: the largest norm of all gradients.   ema_decay: keep a moving average of what trains, beside it.
    """

    factory: str = "torch.optim:AdamW"
    lr: float = 1e-4
    betas: tuple[float, float] | None = (0.9, 0.99)
    weight_decay: float | None = 0.01
    args: dict[str, Any] = field(default_factory=dict)
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: int = 0
    min_lr: float = 0.0
    grad_clip: float | None = 1.0
    ema_decay: float | None = None

    def __post_init__(self) -> None:
        require(0 < self.lr < float("inf"), "lr", self.lr, "a finite number above 0")
        betas = self.betas or ()
        require(all(0 <= beta < 1 for beta in betas), "betas", self.betas, "two numbers in [0, 1), or null")
        require((self.weight_decay or 0) >= 0, "weight_decay", self.weight_decay, "0 and up, or null")
        require(0 <= self.min_lr <= self.lr, "min_lr", self.min_lr, f"0 up to lr={self.lr}")
        require(self.grad_clip is None or self.grad_clip > 0, "grad_clip", self.grad_clip, "above 0, or null for none")
        require(self.ema_decay is None or 0 < self.ema_decay < 1, "ema_decay", self.ema_decay, "in (0, 1), or null")
        require(self.warmup_steps >= 0, "warmup_steps", self.warmup_steps, "0 and up")

    @property
    def arguments(self) -> dict[str, Any]:
        """What the optimizer is called with, besides parameters."""
        common = {"betas": self.betas, "weight_decay": self.weight_decay}
        return {"lr": self.lr, **{name: value for name, value in common.items() if value is not None}, **self.args}

    def lr_at(self, step: int, num_steps: int) -> float:
        """The learning rate of optimizer step `step`, counted from 1, of a run of `num_steps`."""
        if step <= self.warmup_steps:
            return self.lr * step / self.warmup_steps
        done = min(1.0, (step - self.warmup_steps) / max(1, num_steps - self.warmup_steps))
        left = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[self.schedule]
        return self.min_lr + (self.lr - self.min_lr) * left if self.schedule != "constant" else self.lr


def build_optimizer(config: OptimizerConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer over all parameters that train. Raises ConfigError where none does, or its arguments are wrong."""
    from streamvid.modules.build import import_object

    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ConfigError("trainable: nothing trains; name a child in model.trainable, or one for lora.base_model")
    try:
        made: torch.optim.Optimizer = import_object(config.factory)(parameters, **config.arguments)
    except TypeError as error:
        raise ConfigError(
            f"optimizer.factory {config.factory!r} does not take {', '.join(config.arguments)}: {error}; "
            "set betas or weight_decay to null, and args as it wants them"
        ) from error
    return made


class Ema:
    """An exponential moving average of the parameters that train, in float32, where they are."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._live = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
        self.mean = {name: tensor.detach().float().clone() for name, tensor in self._live.items()}

    def update(self) -> None:
        """One step's worth."""
        for name, tensor in self._live.items():
            self.mean[name].lerp_(tensor.detach().float(), 1 - self.decay)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.mean)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if state.keys() != self.mean.keys():
            raise StateError(
                "the checkpoint's moving average is of other parameters; use the config that it was made by"
            )
        for name, tensor in state.items():
            self.mean[name].copy_(tensor)
