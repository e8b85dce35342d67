"""What a training run is told. `streamvid.config.load_config(TrainConfig, path, overrides)` reads it from YAML."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from streamvid.errors import ConfigError
from streamvid.storage import StorageOptions


def _require(holds: bool, name: str, value: Any, allowed: str) -> None:
    if not holds:
        raise ConfigError(f"{name} is {value}; allowed: {allowed}")


def _require_at_least(instance: Any, least: int, *names: str) -> None:
    for name in names:
        value = getattr(instance, name)
        _require(value is None or value >= least, name, value, f"{least} and up")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The small default model. `patch` is (T, H, W): the frames and pixels that one token covers."""

    dim: int = 128
    depth: int = 4
    heads: int = 4
    patch: tuple[int, int, int] = (1, 8, 8)
    channels: int = 3
    max_text_bytes: int = 256

    def __post_init__(self) -> None:
        _require_at_least(self, 1, "depth", "heads", "channels", "max_text_bytes")
        _require(all(size >= 1 for size in self.patch), "patch", self.patch, "three sizes (T, H, W) of 1 and up")
        fits = self.dim >= 6 and self.dim % 2 == 0 and self.dim % self.heads == 0
        _require(fits, "dim", self.dim, f"an even number of 6 and up that heads={self.heads} divides")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW; the learning rate rises over `warmup_steps` and then stays."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.01
    warmup_steps: int = 100
    grad_clip: float | None = 1.0

    def __post_init__(self) -> None:
        _require(0 < self.lr < float("inf"), "lr", self.lr, "a finite number above 0")
        _require(all(0 <= beta < 1 for beta in self.betas), "betas", self.betas, "two numbers in [0, 1)")
        _require(self.weight_decay >= 0, "weight_decay", self.weight_decay, "0 and up")
        _require(self.grad_clip is None or self.grad_clip > 0, "grad_clip", self.grad_clip, "above 0, or null for none")
        _require_at_least(self, 0, "warmup_steps")

    def lr_at(self, step: int) -> float:
        """The learning rate of optimizer step `step`, counted from 1."""
        return self.lr * min(1.0, step / max(1, self.warmup_steps))


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Held-out loss on the same batches with the same noise and times each time. `num_batches` is per rank; 0: none."""

    every_steps: int = 100
    num_batches: int = 2

    def __post_init__(self) -> None:
        _require_at_least(self, 1, "every_steps")
        _require_at_least(self, 0, "num_batches")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run.

    dataset: URL or path of a sealed dataset.  output: the folder for metrics.jsonl, weights and state.
    num_steps, num_epochs: how long; at most one of them, and one epoch where neither is given.
    batch_size: samples a rank, or {bucket: samples}; max_tokens_per_batch takes its place where given.
    storage: how an object store is reached.   cache_dir, cache_bytes: a local folder for what is read from it.
    save_every_steps: None saves at the end only.  keep_checkpoints: the newest so many stay.
    resume: "latest" goes on from the newest checkpoint in `output` if there is one, a path from that state folder,
        None starts anew.
    mixed_precision: None leaves it to `accelerate launch`.  cpu: do not use an accelerator that is there.
    """

    dataset: str
    output: Path
    seed: int = 0
    num_steps: int | None = None
    num_epochs: int | None = None
    batch_size: int | dict[str, int] | None = None
    max_tokens_per_batch: int | None = None
    num_workers: int = 2
    storage: StorageOptions = field(default_factory=StorageOptions)
    cache_dir: Path | None = None
    cache_bytes: int | None = None
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    save_every_steps: int | None = 1000
    keep_checkpoints: int = 3
    resume: Literal["latest"] | Path | None = "latest"
    mixed_precision: Literal["no", "fp16", "bf16"] | None = None
    log_every_steps: int = 10
    cpu: bool = False

    def __post_init__(self) -> None:
        _require(bool(self.dataset), "dataset", "empty", "the URL or path of a sealed dataset")
        _require(0 <= self.seed < 1 << 63, "seed", self.seed, "0 up to 2**63 - 1")
        _require_at_least(self, 1, "num_steps", "num_epochs", "max_tokens_per_batch", "save_every_steps")
        _require_at_least(self, 1, "keep_checkpoints", "log_every_steps")
        _require_at_least(self, 0, "num_workers")
        if self.num_steps is not None and self.num_epochs is not None:
            raise ConfigError(
                f"num_steps={self.num_steps} and num_epochs={self.num_epochs} are both set; allowed: one of them"
            )
        if self.batch_size is not None and self.max_tokens_per_batch is not None:
            raise ConfigError(
                f"batch_size={self.batch_size} and max_tokens_per_batch={self.max_tokens_per_batch} are both set; "
                "allowed: one, the other null"
            )
        sizes = self.batch_size.values() if isinstance(self.batch_size, dict) else [self.batch_size]
        _require(all(n is None or n >= 1 for n in sizes), "batch_size", self.batch_size, "1 and up")
