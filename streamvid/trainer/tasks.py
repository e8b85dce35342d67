"""What a step makes of a batch: the encoders' outputs, where they are not read from a sidecar, and the task's loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from streamvid.errors import ConfigError
from streamvid.loader.batch.batch import Batch
from streamvid.modules.build import import_object
from streamvid.modules.encoding import with_encoded

Loss = Callable[[nn.Module, Batch], "Tensor | Mapping[str, Tensor]"]


def own_loss(module: nn.Module, batch: Batch) -> Tensor | Mapping[str, Tensor]:
    """What the module's forward says."""
    return module(batch)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Task:
    """One way of training.

    loss: (module, batch) → a mean loss, one a sample (B,), or a mapping with "loss" and other figures.
    sidecar: "write": the outputs of the module's `encode` go there and nothing trains; "read": they come from there.
    """

    loss: Loss = own_loss
    sidecar: Literal["read", "write"] | None = None


TASKS = {"sft": Task(), "sft:data_process": Task(sidecar="write"), "sft:train": Task(sidecar="read")}


def find_task(name: str) -> Task:
    """One of TASKS, or a user's own by import path: a Task, or the function that is its loss."""
    if name in TASKS:
        return TASKS[name]
    module, _, attribute = name.partition(":")
    if module in ("", "sft") or not attribute:
        raise ConfigError(f"task is {name!r}; allowed: {', '.join(TASKS)}, or 'package.module:name' of your own")
    found = import_object(name)
    if not isinstance(found, Task) and not callable(found):
        raise ConfigError(
            f"task is {name!r}, which is {found!r}; allowed: a Task, or a function (module, batch) → loss"
        )
    return found if isinstance(found, Task) else Task(loss=found)


class Step(nn.Module):
    """What accelerate prepares: one forward, what is frozen included, so that sharded weights are gathered in it."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__()
        self.model, self.task = model, task

    def encoded(self, batch: Batch) -> Batch:
        """The batch with what the module's `encode` makes of it, unless it came from a sidecar."""
        encode = getattr(self.model, "encode", None)
        if encode is None or self.task.sidecar == "read":
            return batch
        device = next(batch.tensors()).device
        # What it draws moves nothing that the rest of the step draws: from a sidecar, it would draw nothing.
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            return with_encoded(batch, encode(batch))

    def forward(self, batch: Batch, validates: bool = False) -> dict[str, Tensor]:
        """The loss, by "loss", and what else the module tells; each a number or (B,)."""
        batch = self.encoded(batch)
        validate = getattr(self.model, "validate", None) if validates else None
        found: Any = self.task.loss(self.model, batch) if validate is None else validate(batch)
        told: dict[str, Any] = dict(found) if isinstance(found, Mapping) else {"loss": found}
        loss, count = told.get("loss"), len(batch.sample_keys)
        if not isinstance(loss, Tensor) or loss.ndim > 1 or loss.numel() not in (1, count):
            raise ConfigError(
                f"task: the loss of {type(self.model).__name__} is {getattr(loss, 'shape', type(loss).__name__)}; "
                f"allowed: a tensor, () or ({count},), or a mapping with one by 'loss'"
            )
        return told
