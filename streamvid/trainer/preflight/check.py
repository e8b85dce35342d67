"""Preflight check of a run: dataset and model, memory per bucket, one step in the largest bucket, and time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from rich.filesize import decimal

from streamvid.buckets.batch_size import tokens_of
from streamvid.errors import ConfigError
from streamvid.host.resources import usable_bytes
from streamvid.loader.view.model_rule import rule_of
from streamvid.plan.cost import fit_costs
from streamvid.trainer.config import TrainConfig
from streamvid.trainer.preflight.advice import advice
from streamvid.trainer.preflight.encoding import measure_encoding
from streamvid.trainer.preflight.memory import (
    Activations,
    EncodedBatch,
    FixedMemory,
    StepMemory,
    checkpoint_blocks,
    count_activations,
    fixed_memory,
)
from streamvid.trainer.preflight.trial import TrialRun, open_trial

if TYPE_CHECKING:
    from streamvid.buckets.bucket import Bucket
    from streamvid.loader.batch.batch import Batch


@dataclass(frozen=True)
class BucketCheck:
    """Estimates for one bucket.

    tokens: number of tokens that the model sees per sample.
    encode_bytes: memory that encoding a batch needs in addition to the weights.
    activation_bytes: memory for activations in the backward pass without activation checkpointing.
    checkpointed_bytes: memory for activations in the backward pass with activation checkpointing.
    needed_bytes: peak memory of a step with the configured options.
    seconds: predicted duration of a step.
    """

    bucket_id: str
    batch_size: int
    tokens: int
    num_steps: int
    encode_bytes: int
    activation_bytes: int
    checkpointed_bytes: int
    needed_bytes: int
    seconds: float


@dataclass(frozen=True)
class CheckReport:
    """Result of `check`.

    device_bytes: device memory that tensors can use; without an accelerator, the memory of this machine.
    largest: bucket whose step was run, or None if the step did not fit in memory.
    peak_bytes: measured peak memory of this step; None on the CPU, where the peak cannot be measured.
    epoch_seconds: predicted duration of an epoch, excluding time spent waiting for data.
    problems: reasons why the run cannot start.
    advice: changes that would make the step fit in memory.
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

    device_bytes: memory of the device that will train; None uses the memory of this machine's device.
    Raises the errors that would stop a run before its first batch, for example if the model rejects a bucket size.
    """
    has_blocks = bool(config.model.activation_checkpointing.blocks)
    with open_trial(config, checkpoints_activations=False) as trial:
        batches = trial.batches()
        if not batches:
            raise ConfigError(
                "no bucket has enough samples for a step; lower data.batch_size or data.max_tokens_per_batch, or use a "
                "dataset with more samples"
            )
        _check_sizes(trial, [batch.bucket for batch in batches])
        measured = [measure_encoding(trial, batch) for batch in batches]
        fixed = fixed_memory(trial.module.model, config.optimizer.ema_decay is not None)
        # In the order that needs one module: its blocks cannot be unwrapped.
        ran = None if has_blocks else _run_largest(trial, batches[0])
        activations = _activations(trial, batches)
        ran = _run_largest(trial, batches[0]) if has_blocks else ran
        steps = _step_memory(trial, batches, fixed, activations, measured, has_blocks)
        rows = _rows(trial, batches, steps, ran)
        device = trial.accelerator.device
        limit = _device_bytes(device) if device_bytes is None else device_bytes
    too_large = [row for row in rows if row.needed_bytes > limit]
    problems = [
        f"bucket {row.bucket_id} needs about {decimal(row.needed_bytes)}, but only {decimal(limit)} is available"
        for row in too_large
    ]
    if ran is None:
        problems.insert(0, f"one step of bucket {batches[0].bucket.id} ran out of memory")
    worst = max(range(len(rows)), key=lambda place: rows[place].needed_bytes)
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
        advice=advice(config, rows[worst].bucket_id, steps[worst], limit) if problems else (),
    )


@dataclass(frozen=True)
class _Ran:
    seconds: float
    peak_bytes: int | None


def _run_largest(trial: TrialRun, batch: Batch) -> _Ran | None:
    """Run a warm-up step and a measured step in the largest bucket.

    Return None if a step runs out of memory.
    """
    has_cuda = trial.accelerator.device.type == "cuda"
    try:
        trial.step(batch)
        if has_cuda:
            torch.cuda.reset_peak_memory_stats()
        seconds = trial.seconds(batch)
    except (torch.cuda.OutOfMemoryError, MemoryError):
        return None
    return _Ran(seconds, torch.cuda.max_memory_allocated() if has_cuda else None)


def _activations(trial: TrialRun, batches: Sequence[Batch]) -> Activations:
    """Count activation bytes before and after checkpointing is enabled. Checkpointing then remains enabled."""
    tokens = [_tokens(trial, batch.bucket) for batch in batches]
    stored = count_activations(trial, batches, tokens)
    num_blocks = checkpoint_blocks(trial)
    return Activations(stored, count_activations(trial, batches, tokens) if num_blocks else stored, num_blocks)


def _step_memory(
    trial: TrialRun,
    batches: Sequence[Batch],
    fixed: FixedMemory,
    activations: Activations,
    measured: Sequence[EncodedBatch],
    is_checkpointed: bool,
) -> list[StepMemory]:
    return [
        StepMemory(
            fixed=fixed,
            activations=activations,
            size=trial.loader.batch_sizes[batch.bucket.id],
            tokens=_tokens(trial, batch.bucket),
            measured=one,
            measured_size=len(batch.sample_keys),
            is_checkpointed=is_checkpointed,
            encodes=hasattr(trial.module.model, "encode") and trial.module.task.features != "read",
            accumulates=trial.config.data.accumulate > 1,
        )
        for batch, one in zip(batches, measured, strict=True)
    ]


def _rows(
    trial: TrialRun, batches: Sequence[Batch], steps: Sequence[StepMemory], ran: _Ran | None
) -> list[BucketCheck]:
    sizes = {batch.bucket.id: trial.loader.batch_sizes[batch.bucket.id] for batch in batches}
    num_steps = {row.bucket_id: row.num_steps for row in trial.loader.plan_report()}
    costs: dict[str, int] = {}
    if ran is not None:
        first = batches[0].bucket.id
        rule = rule_of(trial.config.data.loader.get("preset"))
        costs = fit_costs([(first, sizes[first], ran.seconds)], trial.loader.buckets, rule).costs(sizes)
    return [
        BucketCheck(
            bucket_id=batch.bucket.id,
            batch_size=step.size,
            tokens=step.tokens,
            num_steps=num_steps[batch.bucket.id],
            encode_bytes=step.measured.peak_bytes if step.encodes else 0,
            activation_bytes=replace(step, is_checkpointed=False).backward,
            checkpointed_bytes=replace(step, is_checkpointed=True).backward,
            needed_bytes=step.needed,
            seconds=costs.get(batch.bucket.id, 0) / 1e9,
        )
        for batch, step in zip(batches, steps, strict=True)
    ]


def _check_sizes(trial: TrialRun, buckets: Sequence[Bucket]) -> None:
    """Raise ConfigError if the model's `check_size` rejects a bucket size.

    Models that lack a VAE or a `check_size` method are not checked.
    """
    model: Any = trial.module.model
    if not hasattr(model, "check_size") or not hasattr(model, "vae"):
        return
    for bucket in buckets:
        model.check_size(bucket.shape, bucket.id)


def _tokens(trial: TrialRun, bucket: Bucket) -> int:
    return tokens_of(bucket, rule_of(trial.config.data.loader.get("preset")))


def _device_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        # Without what CUDA itself and other processes use.
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return usable_bytes()
