"""What a training run is told. `streamvid.config.load_config(TrainConfig, path, overrides)` reads it from YAML."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from streamvid.errors import ConfigError
from streamvid.models.config import LoraConfig, ModelConfig, RecomputeConfig
from streamvid.storage import StorageOptions


def _require(holds: bool, name: str, value: Any, allowed: str) -> None:
    if not holds:
        raise ConfigError(f"{name} is {value}; allowed: {allowed}")


def _require_at_least(instance: Any, least: int, *names: str) -> None:
    for name in names:
        value = getattr(instance, name)
        _require(value is None or value >= least, name, value, f"{least} and up")


def _require_one_of(instance: Any, first: str, second: str) -> None:
    values = (getattr(instance, first), getattr(instance, second))
    if None not in values:
        raise ConfigError(f"{first}={values[0]} and {second}={values[1]} are both set; allowed: one, the other null")


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
        _require(0 < self.lr < float("inf"), "lr", self.lr, "a finite number above 0")
        betas = self.betas or ()
        _require(all(0 <= beta < 1 for beta in betas), "betas", self.betas, "two numbers in [0, 1), or null")
        _require((self.weight_decay or 0) >= 0, "weight_decay", self.weight_decay, "0 and up, or null")
        _require(0 <= self.min_lr <= self.lr, "min_lr", self.min_lr, f"0 up to lr={self.lr}")
        _require(self.grad_clip is None or self.grad_clip > 0, "grad_clip", self.grad_clip, "above 0, or null for none")
        _require(self.ema_decay is None or 0 < self.ema_decay < 1, "ema_decay", self.ema_decay, "in (0, 1), or null")
        _require_at_least(self, 0, "warmup_steps")

    def lr_at(self, step: int, num_steps: int) -> float:
        """The learning rate of optimizer step `step`, counted from 1, of a run of `num_steps`."""
        if step <= self.warmup_steps:
            return self.lr * step / self.warmup_steps
        done = min(1.0, (step - self.warmup_steps) / max(1, num_steps - self.warmup_steps))
        left = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[self.schedule]
        return self.min_lr + (self.lr - self.min_lr) * left if self.schedule != "constant" else self.lr


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Held-out loss on the same batches with the same noise and times each time, and samples to look at.

    steps: how often, in steps.   num_batches: a rank's; 0: none.
    sample_steps: how often the module's `sample` makes videos of the first held-out batch; None: never.
    """

    steps: int = 100
    num_batches: int = 2
    sample_steps: int | None = None

    def __post_init__(self) -> None:
        _require_at_least(self, 1, "steps", "sample_steps")
        _require_at_least(self, 0, "num_batches")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run. A step is one of the optimizer.

    dataset: URL or path of a sealed dataset; or fields of a `streamvid.DatasetConfig`; or several of either.
    output: the folder for metrics.jsonl, weights and state.
    task: "sft", "sft:data_process" (encode once, into `sidecar`), "sft:train" (from there), or "package.module:name".
    max_steps, num_epochs: how long; at most one of them, and one epoch where neither is given.
    batch_size: samples a rank, or {bucket: samples}; max_tokens_per_batch takes its place where given.
    accumulate: batches of a rank that make up a step.
    storage: how an object store is reached.   cache_dir, cache_bytes: a local folder for what is read from it.
    loader: any other argument of `streamvid.VideoLoader`.
    sidecar: URL of what "sft:data_process" writes; num_visits: how many crops of each clip; encode_dtype: of its floats.
    save_steps: how often weights and state are saved; None: after each epoch.  keep_checkpoints: the newest so many
        states stay; keep_weights: likewise of the weights, None: all.   remove_prefix: cut from their names.
    resume_from_checkpoint: "latest" goes on from the newest in `output` if there is one, a path from that state folder,
        None starts anew.
    trackers: where metrics go besides metrics.jsonl: any that accelerate knows.   profile_steps: how many steps
        torch's profiler looks at, after the first ones.
    find_unused_parameters: some trainable parameters take no part in some steps.
    mixed_precision: None leaves it to `accelerate launch`.  cpu: do not use an accelerator that is there.
    """

    dataset: str | dict[str, Any] | tuple[str | dict[str, Any], ...]
    output: Path
    task: str = "sft"
    seed: int = 0
    max_steps: int | None = None
    num_epochs: int | None = None
    batch_size: int | dict[str, int] | None = None
    max_tokens_per_batch: int | None = None
    accumulate: int = 1
    num_workers: int | None = None
    storage: StorageOptions = field(default_factory=StorageOptions)
    cache_dir: Path | None = None
    cache_bytes: int | None = None
    loader: dict[str, Any] = field(default_factory=dict)
    sidecar: str | None = None
    num_visits: int = 1
    encode_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    save_steps: int | None = None
    keep_checkpoints: int = 3
    keep_weights: int | None = None
    remove_prefix: str = ""
    resume_from_checkpoint: Literal["latest"] | Path | None = "latest"
    log_steps: int = 10
    trackers: tuple[str, ...] = ()
    profile_steps: int = 0
    find_unused_parameters: bool = False
    mixed_precision: Literal["no", "fp16", "bf16"] | None = None
    cpu: bool = False

    def __post_init__(self) -> None:
        _require(bool(self.dataset), "dataset", "empty", "the URL or path of a sealed dataset")
        _require(0 <= self.seed < 1 << 63, "seed", self.seed, "0 up to 2**63 - 1")
        _require_at_least(self, 1, "max_steps", "num_epochs", "max_tokens_per_batch", "save_steps", "accumulate")
        _require_at_least(self, 1, "keep_checkpoints", "keep_weights", "log_steps", "num_visits")
        _require_at_least(self, 0, "num_workers", "profile_steps")
        _require_one_of(self, "max_steps", "num_epochs")
        _require_one_of(self, "batch_size", "max_tokens_per_batch")
        sizes = self.batch_size.values() if isinstance(self.batch_size, dict) else [self.batch_size]
        _require(all(n is None or n >= 1 for n in sizes), "batch_size", self.batch_size, "1 and up")
        needs_sidecar = self.task in ("sft:data_process", "sft:train")
        _require(self.sidecar is not None or not needs_sidecar, "sidecar", "null", f"a URL, for task {self.task!r}")
