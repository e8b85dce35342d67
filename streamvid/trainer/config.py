"""Configuration of a training run. `streamvid.config.load_config(TrainConfig, path, overrides)` reads it from YAML."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from streamvid.config import Options, option, require
from streamvid.errors import ConfigError, refuse_credentials
from streamvid.loader.view.audio import AudioOptions
from streamvid.modules.config import ModelConfig
from streamvid.modules.optimizer import OptimizerConfig
from streamvid.storage import StorageOptions, redact

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:[/\\]")  # a path has only one of the slashes

_MAX_PROMPT_BYTES = 1 << 20

DatasetValue = str | dict[str, Any] | tuple[str | dict[str, Any], ...]
"""A URL, the fields of a `streamvid.DatasetConfig`, or several of either."""


@dataclass(frozen=True, kw_only=True)
class FeaturesConfig(Options):
    """Precomputed features, which task "sft:data_process" writes and "sft:train" reads."""

    url: str | None = option(None, metavar="URL", help="Folder or URL of the features.")
    num_visits: int = option(1, minimum=1, help="Number of crops to encode per clip.")
    dtype: Literal["float32", "bfloat16", "float16"] | None = option(
        None, help="Stored dtype of floating-point features.", shown_default="the dtype of the module's output"
    )


@dataclass(frozen=True, kw_only=True)
class DataConfig(Options):
    """Datasets and batches of a run."""

    dataset: DatasetValue = option(help="URL of a sealed dataset, fields of a DatasetConfig, or a list of either.")
    batch_size: int | dict[str, int] | None = option(None, help="Samples per batch on each rank, or {bucket: samples}.")
    max_tokens_per_batch: int | None = option(
        None, minimum=1, help="Maximum number of video tokens per batch, as an alternative to batch_size."
    )
    accumulate: int = option(1, minimum=1, help="Batches per optimizer step on each rank.")
    num_workers: int | None = option(
        None, minimum=0, help="Decode processes per rank.", shown_default="this rank's share of the cores"
    )
    storage: StorageOptions = option(default_factory=StorageOptions, help="Object store access and cache.")
    features: FeaturesConfig = option(default_factory=FeaturesConfig, help="Precomputed features.")
    audio: AudioOptions | None = option(None, help="Audio to deliver as `batch.audio`.")
    extra_inputs: tuple[str, ...] = option(
        (), help="Columns and conditioning inputs that the module needs; names that end with ? are optional."
    )
    loader: dict[str, Any] = option(default_factory=dict, help="Additional arguments for streamvid.VideoLoader.")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.dataset), "dataset", "empty", "the URL or path of a sealed dataset")
        for one in self.dataset if isinstance(self.dataset, tuple) else (self.dataset,):
            refuse_credentials("dataset", str(one.get("url", "")) if isinstance(one, dict) else one)
        refuse_credentials("features.url", self.features.url or "")
        _require_one_of(self, "batch_size", "max_tokens_per_batch")
        sizes = self.batch_size.values() if isinstance(self.batch_size, dict) else [self.batch_size]
        require(all(n is None or n >= 1 for n in sizes), "batch_size", self.batch_size, "integers of at least 1")


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Options):
    """Evaluation during training: the loss on fixed held-out batches with fixed noise, and generated samples."""

    steps: int | None = option(100, minimum=1, help="Evaluate every N steps, or never if null.")
    num_batches: int = option(2, minimum=0, help="Held-out batches per rank.")
    split: str = option("val", help="Split to evaluate on; datasets without this split are not evaluated.")
    sample_steps: int | None = option(None, minimum=1, help="Generate videos with the module's `sample` every N steps.")
    prompts: Path | tuple[str, ...] | None = option(
        None,
        help="Prompts for generated videos: a list, or a text file with one prompt per line.",
        shown_default="the captions of the first held-out batch",
    )

    def read_prompts(self) -> list[str]:
        """Return the prompts for generated videos. The result is empty if captions of held-out clips are used instead.

        Raises ConfigError if the prompts cannot be read.
        """
        if not isinstance(self.prompts, Path):
            return list(self.prompts or ())
        try:
            with self.prompts.open("rb") as file:
                content = file.read(_MAX_PROMPT_BYTES + 1)
            lines = [line.strip() for line in content.decode("utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8 text"
            raise ConfigError(
                f"eval.prompts {self.prompts}: {reason}; use a text file with one prompt per line"
            ) from None
        found = [line for line in lines if line]
        require(len(content) <= _MAX_PROMPT_BYTES, "eval.prompts", self.prompts, f"at most {_MAX_PROMPT_BYTES} bytes")
        require(bool(found), "eval.prompts", self.prompts, "a file with at least one prompt")
        return found


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Options):
    """Saved weights and training states."""

    steps: int | None = option(None, minimum=1, help="Save every N steps.", shown_default="after each epoch")
    keep: int = option(3, minimum=1, help="Number of training states to keep.")
    keep_weights: int | None = option(None, minimum=1, help="Number of weight files to keep.", shown_default="all")
    remove_prefix: str = option("", help="Prefix to remove from the names of saved tensors.")
    resume: str | Path | None = option(
        "latest", help="Checkpoint to resume: 'latest', a folder OUTPUT/state/step-N, or null for a new run."
    )


@dataclass(frozen=True, kw_only=True)
class LoggingConfig(Options):
    """Metrics of a run, in OUTPUT/metrics.jsonl and in trackers."""

    steps: int = option(10, minimum=1, help="Log metrics every N steps.")
    trackers: tuple[str, ...] = option(
        (), help="Additional trackers supported by Accelerate, such as tensorboard or wandb."
    )
    profile_steps: int = option(0, minimum=0, help="Number of steps to profile with torch, after the first two.")


@dataclass(frozen=True, kw_only=True)
class AccelerateConfig(Options):
    """Settings that the run passes to accelerate."""

    mixed_precision: Literal["no", "fp16", "bf16"] | None = option(
        None, help="Autocast precision.", shown_default="the setting of `accelerate launch`"
    )
    cpu: bool = option(False, help="Use the CPU even if accelerators are available.")
    find_unused_parameters: bool | None = option(
        None,
        help="Allow trainable parameters that some steps do not use.",
        shown_default="as the module states",
    )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Options):
    """Training run configuration. A step is an optimizer step."""

    output: Path = option(help="Output folder for metrics, weights and training states.")
    task: str = option("sft", help="Task: sft, sft:data_process, sft:train or package.module:name.")
    seed: int = option(0, minimum=0, maximum=2**63 - 1, help="Seed for all random numbers in the run.")
    max_steps: int | None = option(None, minimum=1, help="Length of the run in steps.")
    num_epochs: int | None = option(None, minimum=1, help="Length of the run in epochs.", shown_default="1")
    data: DataConfig = option(help="Datasets and batches of the run.")
    model: ModelConfig = option(default_factory=ModelConfig, help="The training module.")
    optimizer: OptimizerConfig = option(default_factory=OptimizerConfig, help="Optimizer and learning rate schedule.")
    eval: EvalConfig = option(default_factory=EvalConfig, help="Evaluation during training.")
    checkpoints: CheckpointConfig = option(default_factory=CheckpointConfig, help="Saved weights and states.")
    logging: LoggingConfig = option(default_factory=LoggingConfig, help="Metrics and trackers.")
    accelerate: AccelerateConfig = option(
        default_factory=AccelerateConfig, help="Settings for Hugging Face Accelerate."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_one_of(self, "max_steps", "num_epochs")
        url = str(self.output)
        require(not _URL.match(url), "output", redact(url), "a local folder; copy the run to a store afterwards")
        needs_features = self.task in ("sft:data_process", "sft:train")
        require(
            self.data.features.url is not None or not needs_features,
            "data.features.url",
            "null",
            f"a folder or URL, such as data.features.url=latents/, for task {self.task!r}",
        )


def _require_one_of(options: Options, first: str, second: str) -> None:
    """Raise ConfigError if both options are set."""
    values = (getattr(options, first), getattr(options, second))
    if None not in values:
        raise ConfigError(f"{first}={values[0]} and {second}={values[1]} are both set; set one of them to null")
