"""Training tasks: the loss of a batch, with encoder outputs that are computed on the fly or precomputed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from streamvid.errors import ConfigError
from streamvid.loader.batch.batch import Batch
from streamvid.modules.encoding import with_encoded
from streamvid.modules.factory import import_object

Loss = Callable[[nn.Module, Batch], "Tensor | Mapping[str, Tensor]"]


def own_loss(module: nn.Module, batch: Batch) -> Tensor | Mapping[str, Tensor]:
    """Return the loss that the module's `forward` computes."""
    return module(batch)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Task:
    """Training task: how the loss of a batch is computed, and how precomputed features are used.

    loss: function of (module, batch) that returns a mean loss, a loss per sample with shape (B,), or a mapping with
        "loss" and additional figures.
    features: "write" stores the outputs of the module's `encode` and trains nothing; "read" trains on stored outputs;
        None encodes each batch during training.
    """

    loss: Loss = own_loss
    features: Literal["read", "write"] | None = None


TASKS = {"sft": Task(), "sft:data_process": Task(features="write"), "sft:train": Task(features="read")}


def find_task(name: str) -> Task:
    """Return the task with this name, or import a user's task: a Task, or a function that computes the loss."""
    if name in TASKS:
        return TASKS[name]
    module, _, attribute = name.partition(":")
    if module in ("", "sft") or not attribute:
        raise ConfigError(
            f"task is {name!r}; allowed: {', '.join(TASKS)}, or an import path such as 'package.module:name'"
        )
    found = import_object(name)
    if not isinstance(found, Task) and not callable(found):
        raise ConfigError(f"task {name!r} refers to {found!r}; allowed: a Task, or a function (module, batch) → loss")
    return found if isinstance(found, Task) else Task(loss=found)


class TaskModule(nn.Module):
    """Module that accelerate prepares. Its `forward` also runs the frozen parts, so that FSDP gathers their weights."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__()
        self.model = model
        self.task = task

    def encoded(self, batch: Batch) -> Batch:
        """Return the batch with the outputs of the module's `encode` added, unless these outputs are precomputed."""
        encode = getattr(self.model, "encode", None)
        if encode is None or self.task.features == "read":
            return batch
        device = next(batch.tensors()).device
        # Random numbers of `encode` must not shift later ones in the step: runs on stored features do not draw them.
        forked = torch.random.fork_rng([device] if device.type == "cuda" else [])
        # Encoders compute in the dtype of their weights: latents of a float32 VAE are float32.
        with torch.no_grad(), forked, torch.autocast(device.type, enabled=False):
            return with_encoded(batch, encode(batch))

    def forward(self, batch: Batch, validates: bool = False, renders: bool = False) -> dict[str, Tensor]:
        """Return "loss" and the module's additional figures, each a scalar or a tensor of shape (B,).

        renders: True to return only "video", which is the output of the module's `sample`.
        """
        batch = self.encoded(batch)
        if renders:
            model: Any = self.model
            return {"video": model.sample(batch)}
        validate = getattr(self.model, "validate", None) if validates else None
        found = self.task.loss(self.model, batch) if validate is None else validate(batch)
        figures = dict(found) if isinstance(found, Mapping) else {"loss": found}
        loss, count = figures.get("loss"), len(batch.sample_keys)
        if not isinstance(loss, Tensor) or loss.ndim > 1 or loss.numel() not in (1, count):
            raise ConfigError(
                f"task: the loss from {type(self.model).__name__} is not valid (shape or type: "
                f"{getattr(loss, 'shape', type(loss).__name__)}); allowed: a tensor of shape () "
                f"or ({count},), or a mapping with such a tensor as 'loss'"
            )
        return figures
