"""Optimizer for a run, its learning rate schedule, and a moving average of the weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
    """Optimizer and learning rate schedule.

    The factory is called with the trainable parameters and, as keyword arguments, lr, betas, weight_decay and the
    entries of args. betas and weight_decay are omitted if they are null.
    """

    factory: str = option("torch.optim:AdamW", metavar="PKG.MOD:NAME", help="Import path of the optimizer class.")
    lr: float = option(1e-4, help="Peak learning rate.")
    betas: tuple[float, float] | None = option(
        (0.9, 0.99), help="Decay rates of the moment estimates; null for an optimizer without betas."
    )
    weight_decay: float | None = option(
        0.01, minimum=0, help="Weight decay; null for an optimizer without weight decay."
    )
    args: dict[str, Any] = option(default_factory=dict, help="Additional keyword arguments for the optimizer.")
    schedule: Literal["constant", "cosine", "linear"] = option(
        "constant", help="Learning rate schedule after the warmup."
    )
    warmup_steps: int = option(0, minimum=0, help="Number of linear warmup steps.")
    min_lr: float = option(0.0, help="Learning rate at the end of the schedule.")
    grad_clip: float | None = option(1.0, above=0, help="Maximum total norm of the gradients, or null for no clipping.")
    ema_decay: float | None = option(
        None,
        help="Decay rate of a moving average of the trained weights, or null for no average. The average is saved "
        "with the weights.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.lr < float("inf"), "lr", self.lr, "a finite number above 0")
        is_valid = all(0 <= beta < 1 for beta in self.betas or ())
        require(is_valid, "betas", self.betas, "two numbers in [0, 1), or null")
        require(0 <= self.min_lr <= self.lr, "min_lr", self.min_lr, f"from 0 to lr={self.lr}")
        is_decay = self.ema_decay is None or 0 < self.ema_decay < 1
        require(is_decay, "ema_decay", self.ema_decay, "a number above 0 and below 1, or null")

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for the optimizer."""
        common = {"betas": self.betas, "weight_decay": self.weight_decay}
        return {"lr": self.lr, **{name: value for name, value in common.items() if value is not None}, **self.args}

    def lr_at(self, step: int, num_steps: int) -> float:
        """Return the learning rate for optimizer step `step`, counted from 1, in a run of `num_steps` steps."""
        if step <= self.warmup_steps:
            return self.lr * step / self.warmup_steps
        if self.schedule == "constant":
            return self.lr
        done = min(1.0, (step - self.warmup_steps) / max(1, num_steps - self.warmup_steps))
        remaining = 1 - done if self.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.min_lr + (self.lr - self.min_lr) * remaining


def build_optimizer(config: OptimizerConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Build the optimizer for all trainable parameters.

    Raises ConfigError if no parameter is trainable or the optimizer rejects its arguments.
    """
    from streamvid.modules.parts import child_names

    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ConfigError(
            "no parameter is trainable; set model.trainable or model.lora.base_model to children that are not encoders "
            f"(all children: {child_names(model)})"
        )
    factory = import_object(config.factory)
    try:
        made: torch.optim.Optimizer = factory(parameters, **config.arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"optimizer.factory {config.factory!r} rejects its arguments ({', '.join(config.arguments)}): {error}; "
            "correct optimizer.args, or set optimizer.betas or optimizer.weight_decay to null if the optimizer "
            "does not accept them"
        ) from error
    return made


class Ema:
    """Exponential moving average of the trainable parameters, kept in float32 on the parameters' devices."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._live = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
        self.mean = {name: tensor.detach().float().clone() for name, tensor in self._live.items()}

    def update(self) -> None:
        """Update the average with the current weights."""
        for name, tensor in self._live.items():
            self.mean[name].lerp_(tensor.detach().float(), 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Replace the weights of the module with the averaged weights within this context."""
        live = {name: tensor.detach().clone() for name, tensor in self._live.items()}
        try:
            for name, tensor in self._live.items():
                tensor.data.copy_(self.mean[name])
            yield
        finally:
            for name, tensor in self._live.items():
                tensor.data.copy_(live[name])

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.mean)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if state.keys() != self.mean.keys():
            raise StateError(
                "the moving average in the checkpoint does not cover the same parameters as the moving average of this "
                f"run (for example, only one of the two has {min(state.keys() ^ self.mean.keys())}); use the "
                "configuration with which the checkpoint was saved"
            )
        for name, tensor in state.items():
            self.mean[name].copy_(tensor)
