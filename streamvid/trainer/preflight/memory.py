"""Memory of a training step on its device.

The weights, the optimizer state and the batch are in memory throughout a step. The peak also includes the additional
memory of the phase that needs the most:

    encode     measured: what encoders need beyond their weights
    backward   activations, and work on one block: with checkpointing 1.7 times its activations, without 0.7 times
    gradients  4 bytes per trained parameter, and the activations of one block, whose gradients come last
    update     gradients, and 4 bytes per trained parameter that torch's optimizers use while they update

    weights    bytes of all parameters and buffers, with the encoders
    optimizer  8 bytes per trained parameter (two float32 moments, as in Adam); with a moving average, 4 more

Activations are counted, not assumed: the forward pass of the two smallest buckets runs with torch's
saved_tensors_hooks, and a plane fitted to the results predicts other token counts and batch sizes. The prediction is
exact for attention kernels that do not store the attention matrix (flash, memory-efficient). With checkpointing, blocks
store only their inputs. The activations of one block are estimated as the activations of all blocks divided by the
number of blocks.
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
from streamvid.trainer.evaluate import prompted

if TYPE_CHECKING:
    from streamvid.loader.batch.batch import Batch
    from streamvid.trainer.preflight.trial import TrialRun

_GRADIENT_BYTES, _ADAM_BYTES, _AVERAGE_BYTES, _UPDATE_BYTES = 4, 8, 4, 4
#: Gradients that a block's backward pass holds at once, in parts of its activations. Measured with Wan 2.1 1.3B on an
#: H200 (bf16): 0.69 with adapters and checkpointing at 7,800, 14,040 and 32,760 tokens.
_WORK = 0.7


@dataclass(frozen=True)
class FixedMemory:
    """Memory that does not depend on the batch, in bytes.

    encoders: part of `weights` that only `encode` uses.
    update: memory that the optimizer uses while it updates the weights.
    """

    weights: int
    encoders: int
    gradients: int
    optimizer: int
    update: int


@dataclass(frozen=True)
class ActivationPlane:
    """Coefficients that predict a batch's activation bytes as fixed + size · (per_sample + per_token · tokens)."""

    fixed: float
    per_sample: float
    per_token: float

    def of(self, size: int, tokens: int) -> float:
        """Return the predicted number of bytes for a batch of `size` samples with `tokens` tokens each."""
        return max(0.0, self.fixed + size * (self.per_sample + self.per_token * tokens))


@dataclass(frozen=True)
class Activations:
    """Predicted sizes of a model's activations, with and without checkpointing.

    stored: size without checkpointing.
    inputs: size with checkpointing, which stores only the inputs of blocks.
    num_blocks: number of blocks that can be checkpointed.
    """

    stored: ActivationPlane
    inputs: ActivationPlane
    num_blocks: int

    def block(self, size: int, tokens: int) -> int:
        """Return the size in bytes of one block's activations, or 0 if no blocks can be checkpointed."""
        return round(self.stored.of(size, tokens) / self.num_blocks) if self.num_blocks else 0

    def backward(self, size: int, tokens: int, is_checkpointed: bool) -> int:
        """Return the size in bytes of all activations at the start of the backward pass, when this size is largest."""
        if not is_checkpointed or not self.num_blocks:
            return round(self.stored.of(size, tokens) + _WORK * self.block(size, tokens))
        return round(self.inputs.of(size, tokens) + (1 + _WORK) * self.block(size, tokens))


@dataclass(frozen=True)
class EncodedBatch:
    """Size of a batch with the outputs of `encode`, and peak memory while it was encoded, both in bytes."""

    bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class StepMemory:
    """Memory that a step needs in one bucket, and the values that determine it.

    size: samples per batch.
    tokens: tokens per sample.
    measured: memory that was measured while a batch of this bucket was encoded.
    measured_size: number of samples in the measured batch.
    encodes: True if the step encodes its batch, False if it reads features.
    accumulates: True if gradients of earlier batches exist during the step.
    """

    fixed: FixedMemory
    activations: Activations
    size: int
    tokens: int
    measured: EncodedBatch
    measured_size: int
    is_checkpointed: bool
    encodes: bool
    accumulates: bool

    @property
    def backward(self) -> int:
        """Size in bytes of all activations at the start of the backward pass."""
        return self.activations.backward(self.size, self.tokens, self.is_checkpointed)

    @property
    def needed(self) -> int:
        """Peak memory of the step in bytes."""
        fixed = self.fixed
        batch = round(self.measured.bytes * self.size / self.measured_size)
        # Encoders take one clip at a time, so only the batch itself depends on its size.
        encode = batch + self.measured.peak_bytes - self.measured.bytes if self.encodes else 0
        kept = fixed.gradients if self.accumulates else 0
        block = self.activations.block(self.size, self.tokens)
        phases = (
            kept + encode,
            kept + batch + self.backward,
            fixed.gradients + batch + block,
            fixed.gradients + batch + fixed.update,
        )
        return fixed.weights + fixed.optimizer + max(phases)


def fixed_memory(module: nn.Module, has_average: bool) -> FixedMemory:
    """Return the sizes in bytes of a module's weights, gradients and optimizer state."""
    names = tuple(f"{name}." for name in getattr(module, "encoders", ()))
    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    trained = sum(one.numel() for one in module.parameters() if one.requires_grad)
    return FixedMemory(
        weights=sum(one.nbytes for one in tensors.values()),
        encoders=sum(one.nbytes for name, one in tensors.items() if name.startswith(names)) if names else 0,
        gradients=_GRADIENT_BYTES * trained,
        optimizer=(_ADAM_BYTES + _AVERAGE_BYTES * has_average) * trained,
        update=_UPDATE_BYTES * trained,
    )


def count_activations(trial: TrialRun, batches: Sequence[Batch], tokens: Sequence[int]) -> ActivationPlane:
    """Measure the smallest batches, and return coefficients that predict activation bytes.

    batches: one batch per bucket.
    tokens: number of tokens per sample, for each batch.
    """
    order = sorted(range(len(batches)), key=lambda number: tokens[number])
    first = order[0]
    one, two = (_saved_bytes(trial, _repeated(batches[first], size)) for size in (1, 2))
    sample = max(0.0, two - one)
    larger = next((number for number in order if tokens[number] > tokens[first]), None)
    if larger is None:
        return ActivationPlane(one - sample, 0.0, sample / tokens[first])
    more = _saved_bytes(trial, _repeated(batches[larger], 1)) - one
    per_token = max(0.0, more / (tokens[larger] - tokens[first]))
    return ActivationPlane(one - sample, sample - per_token * tokens[first], per_token)


def checkpoint_blocks(trial: TrialRun) -> int:
    """Permanently enable activation checkpointing for all blocks in the trained parts. Return the number of blocks."""
    model = trial.module.model
    encoders = tuple(f"{name}." for name in getattr(model, "encoders", ()))
    lists = [name for name, part in model.named_modules() if isinstance(part, nn.ModuleList) and len(part) > 1]
    blocks = tuple(f"{name}.*" for name in lists if not (encoders and name.startswith(encoders)))
    return len(activation_checkpointing.wrap(model, ActivationCheckpointingConfig(blocks=blocks))) if blocks else 0


def _repeated(batch: Batch, size: int) -> Batch:
    """Return a batch with `size` copies of the first sample in `batch`."""
    return prompted(batch, [batch.text[0]] * size)


def _saved_bytes(trial: TrialRun, batch: Batch) -> float:
    """Return the number of bytes that a forward pass stores for the backward pass, excluding parameters.

    The tensors are only counted, not kept, so the pass needs no more memory than generating a sample.
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
    return sum(sizes)


def _never(stored: object) -> Tensor:
    raise AssertionError("unexpected backward pass")
