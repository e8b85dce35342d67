"""Preflight check of a run: dataset and model, memory per bucket, one step of the largest bucket, and time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from rich.filesize import decimal

from streamvid.buckets.batch_size import tokens_of
from streamvid.errors import ConfigError
from streamvid.host.resources import usable_bytes
from streamvid.loader.view.model_rule import rule_of
from streamvid.plan.cost import fit_costs
from streamvid.trainer.config import TrainConfig
from streamvid.trainer.preflight.memory import (
    Activations,
    FixedMemory,
    checkpoint_blocks,
    count_activations,
    fixed_memory,
)
from streamvid.trainer.preflight.trial import TrialRun, open_trial

if TYPE_CHECKING:
    from streamvid.buckets.bucket import Bucket
    from streamvid.loader.batch.batch import Batch

_ENCODE_ONCE = (
    "encode once (--task sft:data_process --set data.features.url=FOLDER), then train without encoders (--task "
    "sft:train and the same data.features.url)"
)


@dataclass(frozen=True)
class BucketCheck:
    """Estimates for one bucket.

    tokens: tokens per sample of the model.
    activation_bytes, checkpointed_bytes: activations of a batch without and with activation checkpointing.
    needed_bytes: memory of a step as it is configured.
    seconds: predicted duration of a step.
    """

    bucket_id: str
    batch_size: int
    tokens: int
    num_steps: int
    activation_bytes: int
    checkpointed_bytes: int
    needed_bytes: int
    seconds: float


@dataclass(frozen=True)
class CheckReport:
    """Result of `check`.

    device_bytes: memory of the device, or of this machine if it has no accelerator.
    largest: bucket whose step ran, or None if it did not fit.
    peak_bytes: measured peak of that step; None on the CPU, where it cannot be measured.
    epoch_seconds: predicted time of an epoch without waits for data.
    problems: reasons why the run cannot start. advice: changes that would make it fit.
    """

    device: str
    device_bytes: int
    fixed: FixedMemory
    checkpoints_activations: bool
    buckets: tuple[BucketCheck, ...]
    largest: str | None
    step_seconds: float | None
    peak_bytes: int | None
    epoch_seconds: float | None
    problems: tuple[str, ...]
    advice: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def check(config: TrainConfig, device_bytes: int | None = None) -> CheckReport:
    """Check a configuration without saving anything.

    device_bytes: memory of the device that will train; None for the device of this machine.
    Raises errors that would keep a run from reaching its first batch, such as for a dataset that the model's rule
    rejects.
    """
    has_blocks = bool(config.model.activation_checkpointing.blocks)
    with open_trial(config, checkpoints_activations=False) as trial:
        batches = trial.batches()
        if not batches:
            raise ConfigError(
                "no bucket has enough samples for a step; lower data.batch_size, or use a dataset with more samples"
            )
        _check_sizes(trial, [batch.bucket for batch in batches])
        tokens = [_tokens(trial, batch.bucket) for batch in batches]
        fixed = fixed_memory(trial.module.model, config.optimizer.ema_decay is not None)
        stored = count_activations(trial, batches, tokens)
        # In the order that needs one module: its blocks cannot be unwrapped.
        ran = None if has_blocks else _run_largest(trial, batches[0])
        num_blocks = checkpoint_blocks(trial)
        inputs = count_activations(trial, batches, tokens) if num_blocks else stored
        activations = Activations(stored, inputs, num_blocks)
        ran = _run_largest(trial, batches[0]) if has_blocks else ran
        rows = _rows(trial, batches, tokens, fixed, activations, has_blocks, ran)
        device = trial.accelerator.device
        limit = _device_bytes(device) if device_bytes is None else device_bytes
    too_large = [row for row in rows if row.needed_bytes > limit]
    problems = [
        f"bucket {row.bucket_id} needs about {decimal(row.needed_bytes)} of {decimal(limit)}" for row in too_large
    ]
    if ran is None:
        problems.insert(0, f"one step of bucket {batches[0].bucket.id} ran out of memory")
    worst = max(rows, key=lambda row: row.needed_bytes)
    return CheckReport(
        device=str(device),
        device_bytes=limit,
        fixed=fixed,
        checkpoints_activations=has_blocks,
        buckets=tuple(rows),
        largest=None if ran is None else batches[0].bucket.id,
        step_seconds=None if ran is None else ran.seconds,
        peak_bytes=None if ran is None else ran.peak_bytes,
        epoch_seconds=None if ran is None else sum(row.num_steps * row.seconds for row in rows),
        problems=tuple(problems),
        advice=_advice(config, worst, fixed, activations, limit) if problems else (),
    )


@dataclass(frozen=True)
class _Ran:
    seconds: float
    peak_bytes: int | None


def _run_largest(trial: TrialRun, batch: Batch) -> _Ran | None:
    """Run two steps, the first of which warms up. Return None if they run out of memory."""
    has_cuda = trial.accelerator.device.type == "cuda"
    try:
        trial.step(batch)
        if has_cuda:
            torch.cuda.reset_peak_memory_stats()
        seconds = trial.seconds(batch)
    except (torch.cuda.OutOfMemoryError, MemoryError):
        return None
    return _Ran(seconds, torch.cuda.max_memory_allocated() if has_cuda else None)


def _rows(
    trial: TrialRun,
    batches: Sequence[Batch],
    tokens: Sequence[int],
    fixed: FixedMemory,
    activations: Activations,
    is_checkpointed: bool,
    ran: _Ran | None,
) -> list[BucketCheck]:
    sizes = {batch.bucket.id: trial.loader.batch_sizes[batch.bucket.id] for batch in batches}
    steps = {row.bucket_id: row.num_steps for row in trial.loader.plan_report()}
    costs: dict[str, int] = {}
    if ran is not None:
        first = batches[0].bucket.id
        rule = rule_of(trial.config.data.loader.get("preset"))
        costs = fit_costs([(first, sizes[first], ran.seconds)], trial.loader.buckets, rule).costs(sizes)
    rows = []
    for batch, count in zip(batches, tokens, strict=True):
        name = batch.bucket.id
        size = sizes[name]
        plain, less = size * activations.stored.of(count), size * activations.checkpointed(count)
        used = fixed.total + (less if is_checkpointed else plain)
        rows.append(BucketCheck(name, size, count, steps[name], plain, less, used, costs.get(name, 0) / 1e9))
    return rows


def _advice(
    config: TrainConfig, worst: BucketCheck, fixed: FixedMemory, activations: Activations, limit: int
) -> tuple[str, ...]:
    """Return the changes that each make the worst bucket fit or, if none is sufficient, all changes that help."""
    used = worst.needed_bytes
    saved: list[tuple[int, str]] = []
    has_blocks = bool(config.model.activation_checkpointing.blocks)
    if not has_blocks and activations.num_blocks:
        less = worst.activation_bytes - worst.checkpointed_bytes
        saved.append((less, "--set model.activation_checkpointing.blocks=[auto]"))
    own = worst.checkpointed_bytes if has_blocks else worst.activation_bytes
    if worst.batch_size > 1:
        one = own // worst.batch_size
        fitting = max(1, min(worst.batch_size - 1, (limit - (used - own)) // max(1, one)))
        name = f"data.batch_size={{'{worst.bucket_id}': {fitting}, '*': …}}"
        saved.append((own - fitting * one, f"a smaller batch of this bucket: {name}"))
    if fixed.encoders:
        saved.append((fixed.encoders, _ENCODE_ONCE))
    if config.model.lora.base_model is None:
        saved.append((fixed.gradients + fixed.optimizer, "train adapters (--lora)"))
    elif not config.model.fp8:
        base = config.model.lora.base_model
        saved.append(((fixed.weights - fixed.encoders) // 2, f"frozen weights in FP8: --set model.fp8=[{base}]"))
    enough = [text for less, text in saved if used - less <= limit]
    return tuple(enough) or (*(text for _, text in saved), "shard the weights over several GPUs (FSDP, DeepSpeed)")


def _check_sizes(trial: TrialRun, buckets: Sequence[Bucket]) -> None:
    """Let the module reject unsupported sizes, if it has a method `check_size` and its VAE is available."""
    model: Any = trial.module.model
    if not hasattr(model, "check_size") or not hasattr(model, "vae"):
        return
    for bucket in buckets:
        model.check_size(bucket.shape, bucket.id)


def _tokens(trial: TrialRun, bucket: Bucket) -> int:
    return tokens_of(bucket, rule_of(trial.config.data.loader.get("preset")))


def _device_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return usable_bytes()
