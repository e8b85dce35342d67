"""Options that would make a step fit in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from streamvid.trainer.config import TrainConfig
from streamvid.trainer.preflight.memory import StepMemory

_Change = Callable[[StepMemory], StepMemory]

_ENCODE_ONCE = (
    "encode once (--task sft:data_process --set data.features.url=FOLDER), then train without encoders (--task "
    "sft:train and the same data.features.url)"
)


def advice(config: TrainConfig, bucket_id: str, step: StepMemory, limit: int) -> tuple[str, ...]:
    """Return every change that is enough by itself to make the step fit in memory.

    If no single change is enough, return the changes to make together. If all changes together are not enough, the last
    item recommends a distributed run.
    """
    changes = _changes(config, bucket_id, step, limit)
    if alone := [text for text, change in changes if change(step).needed <= limit]:
        return tuple(alone)
    together: list[str] = []
    for text, change in changes:
        changed = change(step)
        if changed.needed < step.needed:
            together.append(f"{'and ' if together else ''}{text}")
            step = changed
        if step.needed <= limit:
            return tuple(together)
    return (*together, "shard the weights over several GPUs (FSDP, DeepSpeed)")


def _changes(config: TrainConfig, bucket_id: str, step: StepMemory, limit: int) -> list[tuple[str, _Change]]:
    """Return a (text, change) pair for each change that this configuration allows, the least costly change first."""
    changes: list[tuple[str, _Change]] = []
    if not step.is_checkpointed and step.activations.num_blocks:
        changes.append(("--set model.activation_checkpointing.blocks=[auto]", _checkpointed))
    if step.encodes:
        changes.append((_ENCODE_ONCE, _without_encoders))
    if step.size > 1:
        size = next((size for size in range(step.size - 1, 1, -1) if replace(step, size=size).needed <= limit), 1)
        sizes = f"{{'{bucket_id}': {size}, '*': …}}"
        changes.append(
            (f"a smaller batch for this bucket: data.batch_size={sizes}", lambda step: replace(step, size=size))
        )
    if config.model.lora.base_model is None:
        changes.append(("train adapters (--lora)", _with_adapters))
    elif not config.model.fp8:
        changes.append(
            (f"frozen weights in FP8: --set model.fp8=[{config.model.lora.base_model}]", _with_half_of_the_weights)
        )
    return changes


def _checkpointed(step: StepMemory) -> StepMemory:
    return replace(step, is_checkpointed=True)


def _without_encoders(step: StepMemory) -> StepMemory:
    fixed = step.fixed
    return replace(step, encodes=False, fixed=replace(fixed, weights=fixed.weights - fixed.encoders, encoders=0))


def _with_adapters(step: StepMemory) -> StepMemory:
    return replace(step, fixed=replace(step.fixed, gradients=0, optimizer=0, update=0))


def _with_half_of_the_weights(step: StepMemory) -> StepMemory:
    half = (step.fixed.weights - step.fixed.encoders) // 2
    return replace(step, fixed=replace(step.fixed, weights=step.fixed.weights - half))
