"""What a training run is told. `streamvid.config.load_config(TrainConfig, path, overrides)` reads it from YAML."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from streamvid.config import require, require_at_least, require_one_of
from streamvid.modules.config import LoraConfig, ModelConfig, RecomputeConfig
from streamvid.modules.optimizer import OptimizerConfig
from streamvid.storage import StorageOptions


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Held-out loss on the same batches with the same noise and times each time, and samples to look at.

    steps: how often, in steps; None: never.   num_batches: a rank's; 0: none.
    sample_steps: how often the module's `sample` makes videos of the first held-out batch; None: never.
    """

    steps: int | None = 100
    num_batches: int = 2
    sample_steps: int | None = None

    def __post_init__(self) -> None:
        require_at_least(self, 1, "steps", "sample_steps")
        require_at_least(self, 0, "num_batches")


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
    sidecar: URL of what "sft:data_process" writes; num_visits: crops of each clip there; encode_dtype: of its floats.
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
        require(bool(self.dataset), "dataset", "empty", "the URL or path of a sealed dataset")
        require(0 <= self.seed < 1 << 63, "seed", self.seed, "0 up to 2**63 - 1")
        require_at_least(self, 1, "max_steps", "num_epochs", "max_tokens_per_batch", "save_steps", "accumulate")
        require_at_least(self, 1, "keep_checkpoints", "keep_weights", "log_steps", "num_visits")
        require_at_least(self, 0, "num_workers", "profile_steps")
        require_one_of(self, "max_steps", "num_epochs")
        require_one_of(self, "batch_size", "max_tokens_per_batch")
        sizes = self.batch_size.values() if isinstance(self.batch_size, dict) else [self.batch_size]
        require(all(n is None or n >= 1 for n in sizes), "batch_size", self.batch_size, "1 and up")
        needs_sidecar = self.task in ("sft:data_process", "sft:train")
        require(
            self.sidecar is not None or not needs_sidecar,
            "sidecar",
            "null",
            f"a folder or URL, as sidecar=latents/, for task {self.task!r}",
        )
