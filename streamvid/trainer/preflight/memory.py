"""Memory of a training step on its device.

    weights      bytes of all parameters and buffers, with the encoders
    gradients    4 bytes per trained parameter
    optimizer    8 bytes per trained parameter (two float32 moments, as in Adam); with a moving average, 4 more
    activations  bytes that the forward pass stores for the backward pass, per sample · samples

Activations are counted, not assumed: the forward pass of the two smallest buckets runs with torch's
saved_tensors_hooks, and a line through both gives those of other token counts. The line is exact for attention that
does not store its matrix (flash, memory-efficient). With checkpointing, blocks store their inputs. One block at a time
is recomputed, so its activations are added: those of all blocks divided by their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from streamvid.modules import activation_checkpointing
from streamvid.modules.config import ActivationCheckpointingConfig

if TYPE_CHECKING:
    from streamvid.loader.batch.batch import Batch
    from streamvid.trainer.preflight.trial import TrialRun

_GRADIENT_BYTES, _ADAM_BYTES, _AVERAGE_BYTES = 4, 8, 4


@dataclass(frozen=True)
class FixedMemory:
    """Bytes that every step needs, whatever its batch. encoders: part of `weights` that only `encode` uses."""

    weights: int
    encoders: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True)
class ActivationLine:
    """Bytes of activations of one sample: fixed + per_token · tokens."""

    fixed: float
    per_token: float

    def of(self, tokens: int) -> int:
        return round(max(0.0, self.fixed + self.per_token * tokens))


@dataclass(frozen=True)
class Activations:
    """Activations with and without checkpointing. num_blocks: number of checkpointed blocks, or 0."""

    stored: ActivationLine
    inputs: ActivationLine
    num_blocks: int

    def checkpointed(self, tokens: int) -> int:
        """Return the bytes per sample with checkpointing, including one block that is recomputed."""
        if not self.num_blocks:
            return self.stored.of(tokens)
        return self.inputs.of(tokens) + self.stored.of(tokens) // self.num_blocks


def fixed_memory(module: nn.Module, has_average: bool) -> FixedMemory:
    """Return the bytes of a module's weights, gradients and optimizer state."""
    names = tuple(f"{name}." for name in getattr(module, "encoders", ()))
    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    trained = sum(one.numel() for one in module.parameters() if one.requires_grad)
    return FixedMemory(
        weights=sum(one.nbytes for one in tensors.values()),
        encoders=sum(one.nbytes for name, one in tensors.items() if name.startswith(names)) if names else 0,
        gradients=_GRADIENT_BYTES * trained,
        optimizer=(_ADAM_BYTES + _AVERAGE_BYTES * has_average) * trained,
    )


def count_activations(trial: TrialRun, batches: Sequence[Batch], tokens: Sequence[int]) -> ActivationLine:
    """Count the activations of the smallest batches.

    batches: one batch per bucket; tokens: tokens per sample of each.
    """
    order = sorted(range(len(batches)), key=lambda number: tokens[number])
    larger = [number for number in order if tokens[number] > tokens[order[0]]]
    chosen = [(batches[number], tokens[number]) for number in [order[0], *larger][:2]]
    return _line([(count, _saved_bytes(trial, batch)) for batch, count in chosen])


def checkpoint_blocks(trial: TrialRun) -> int:
    """Permanently checkpoint the activations of all blocks of the parts that train; return the number of blocks."""
    model = trial.module.model
    encoders = tuple(f"{name}." for name in getattr(model, "encoders", ()))
    lists = [name for name, part in model.named_modules() if isinstance(part, nn.ModuleList) and len(part) > 1]
    blocks = tuple(f"{name}.*" for name in lists if not (encoders and name.startswith(encoders)))
    return len(activation_checkpointing.wrap(model, ActivationCheckpointingConfig(blocks=blocks))) if blocks else 0


def _line(points: Sequence[tuple[int, float]]) -> ActivationLine:
    """Return the line through one or two points (tokens, bytes); one point gives a line through the origin."""
    (first, low), (last, high) = points[0], points[-1]
    if first == last:
        return ActivationLine(0.0, low / first)
    slope = (high - low) / (last - first)
    return ActivationLine(low - slope * first, slope) if slope > 0 else ActivationLine(0.0, high / last)


def _saved_bytes(trial: TrialRun, batch: Batch) -> float:
    """Return the bytes per sample that a forward pass stores for the backward pass, except for parameters.

    The tensors are only counted, not kept, so this needs no more memory than generating a sample.
    """
    parameters = {one.untyped_storage().data_ptr() for one in trial.module.parameters()}
    seen: dict[int, StorageWeakRef] = {}
    sizes: list[int] = []

    def pack(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        # A storage that has been freed may have left its place to another one.
        if place not in parameters and (place not in seen or seen[place].expired()):  # type: ignore[no-untyped-call]
            seen[place] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            sizes.append(storage.nbytes())

    trial.module.train()
    moved = batch.to(trial.accelerator.device)
    with torch.autograd.graph.saved_tensors_hooks(pack, _never), trial.accelerator.autocast():
        trial.module(moved)
    return sum(sizes) / len(batch.sample_keys)


def _never(stored: object) -> Tensor:
    raise AssertionError("unexpected backward pass")
