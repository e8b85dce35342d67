"""Optimizer of a run, its learning rate schedule, and a moving average of the weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from streamvid.config import Options, option, require
from streamvid.errors import ConfigError, StateError
from streamvid.modules.factory import import_object

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Options):
    """Optimizer and its schedule. The factory receives the trainable parameters, lr, betas, weight_decay and args."""

    factory: str = option("torch.optim:AdamW", metavar="PKG.MOD:NAME", help="Import path of the optimizer.")
    lr: float = option(1e-4, help="Peak learning rate.")
    betas: tuple[float, float] | None = option(
        (0.9, 0.99), help="Momentum coefficients; null if the optimizer has none."
    )
    weight_decay: float | None = option(0.01, minimum=0, help="Weight decay; null if the optimizer has none.")
    args: dict[str, Any] = option(default_factory=dict, help="Additional arguments of the optimizer.")
    schedule: Literal["constant", "cosine", "linear"] = option(
        "constant", help="Learning rate schedule after the warmup."
    )
    warmup_steps: int = option(0, minimum=0, help="Steps of linear warmup.")
    min_lr: float = option(0.0, help="Learning rate at the end of the schedule.")
    grad_clip: float | None = option(1.0, above=0, help="Maximum total norm of the gradients; null: no clipping.")
    ema_decay: float | None = option(None, help="Save a moving average of the trained weights, with this decay.")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.lr < float("inf"), "lr", self.lr, "a finite number above 0")
        is_valid = all(0 <= beta < 1 for beta in self.betas or ())
        require(is_valid, "betas", self.betas, "two numbers in [0, 1), or null")
        require(0 <= self.min_lr <= self.lr, "min_lr", self.min_lr, f"0 to lr={self.lr}")
        require(self.ema_decay is None or 0 < self.ema_decay < 1, "ema_decay", self.ema_decay, "above 0 and below 1")

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the optimizer."""
        common = {"betas": self.betas, "weight_decay": self.weight_decay}
        return {"lr": self.lr, **{name: value for name, value in common.items() if value is not None}, **self.args}

    def lr_at(self, step: int, num_steps: int) -> float:
        """Return the learning rate of optimizer step `step`, counted from 1, in a run of `num_steps`."""
        if step <= self.warmup_steps:
            return self.lr * step / self.warmup_steps
        if self.schedule == "constant":
            return self.lr
        done = min(1.0, (step - self.warmup_steps) / max(1, num_steps - self.warmup_steps))
        remaining = 1 - done if self.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.min_lr + (self.lr - self.min_lr) * remaining


def build_optimizer(config: OptimizerConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Build the optimizer for all trainable parameters. Raises ConfigError if there are none, or for bad arguments."""
    from streamvid.modules.parts import child_names

    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ConfigError(
            f"no parameter is trainable; set model.trainable or lora.base_model to one of: {child_names(model)}"
        )
    try:
        made: torch.optim.Optimizer = import_object(config.factory)(parameters, **config.arguments)
    except TypeError as error:
        raise ConfigError(
            f"optimizer.factory {config.factory!r} does not accept {', '.join(config.arguments)}: {error}; "
            "remove unsupported args, or set betas or weight_decay to null"
        ) from error
    return made


class Ema:
    """Exponential moving average of the trainable parameters, in float32, on the same devices."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._live = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
        self.mean = {name: tensor.detach().float().clone() for name, tensor in self._live.items()}

    def update(self) -> None:
        """Update the average with the current weights."""
        for name, tensor in self._live.items():
            self.mean[name].lerp_(tensor.detach().float(), 1 - self.decay)

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.mean)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if state.keys() != self.mean.keys():
            raise StateError(
                "the moving average in the checkpoint covers other parameters; "
                "use the config of the run that saved the checkpoint"
            )
        for name, tensor in state.items():
            self.mean[name].copy_(tensor)
