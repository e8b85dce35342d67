"""Configuration of the training module: factory, weight files, trainable parameters, adapters, precision."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from streamvid.config import Options, option, require
from streamvid.errors import refuse_credentials

Paths = dict[str, str | tuple[str, ...]] | tuple[str | tuple[str, ...], ...]
"""Weight files, either as a mapping from child names to files or as a list.

A nested list contains the shards of one model.
"""


@dataclass(frozen=True, kw_only=True)
class WeightsConfig(Options):
    """Weight files for the training module. Each file is loaded into the child with matching keys and shapes."""

    paths: Paths = option(
        (),
        help="Weight files, as a list or a mapping from children to files; the shards of one model form a nested list.",
    )
    id_with_origin_paths: str = option("", help="Additional weight files below `root`, as 'ID:GLOB,ID:GLOB'.")
    root: Path | None = option(
        None,
        help="Folder that contains the files listed in id_with_origin_paths.",
        shown_default="$STREAMVID_MODEL_ROOT, $DIFFSYNTH_MODEL_BASE_PATH or ./models",
    )
    download: bool = option(False, help="Download the files listed in id_with_origin_paths from the Hugging Face Hub.")
    allow_missing: bool = option(False, help="Keep the factory's values for keys that no file contains.")
    allow_unexpected: bool = option(False, help="Ignore keys that files contain but the module lacks.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for files in self.paths.values() if isinstance(self.paths, dict) else self.paths:
            for file in (files,) if isinstance(files, str) else files:
                refuse_credentials("paths", file)


LoraFormat: TypeAlias = Literal["diffusers", "peft", "diffsynth", "kohya", "comfyui"]


@dataclass(frozen=True, kw_only=True)
class LoraConfig(Options):
    """Low-rank adapters (LoRA), implemented by peft."""

    base_model: str | None = option(
        None, help="Comma-separated names of the child modules that get adapters; dotted names are allowed."
    )
    target_modules: str | tuple[str, ...] = option(
        "",
        help="Suffixes of layer names, or 'regex:EXPRESSION' to match full names.",
        shown_default="large linear layers in blocks",
    )
    rank: int = option(32, minimum=1, help="Rank of the adapters.")
    alpha: float | None = option(
        None, above=0, help="LoRA alpha: adapters are scaled by alpha / rank.", shown_default="the rank"
    )
    dropout: float = option(0.0, minimum=0, help="Dropout probability for the adapters' inputs.")
    checkpoint: Path | None = option(None, help="Adapter file with the initial adapter weights.")
    format: LoraFormat = option(
        "diffusers",
        help="Format of saved adapters. `peft` writes a folder; `kohya` writes a file that musubi-tuner can read.",
    )
    preset_path: Path | None = option(None, help="Adapter file to fuse into `preset_model` before training.")
    preset_model: str | None = option(None, help="Child module that receives the preset adapters.")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.dropout < 1, "dropout", self.dropout, "at least 0 and less than 1")
        presets = (self.preset_path, self.preset_model)
        require(
            presets.count(None) != 1,
            "preset_path",
            f"{self.preset_path} and preset_model is {self.preset_model}",
            "values for both, or for neither",
        )
        has_model = self.checkpoint is None or len(self.base_models) == 1
        require(has_model, "checkpoint", self.checkpoint, "null, unless base_model names exactly one child")

    @property
    def base_models(self) -> tuple[str, ...]:
        """Names of the children that get adapters."""
        return () if self.base_model is None else tuple(name.strip() for name in self.base_model.split(","))


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointingConfig(Options):
    """Blocks whose activations are recomputed in the backward pass instead of being stored."""

    blocks: tuple[str, ...] = option(
        (), help="Class names or dotted names (wildcards allowed) of blocks, or 'auto' for the elements of ModuleLists."
    )
    offload: bool = option(False, help="Store the blocks' inputs in host memory.")

    def __post_init__(self) -> None:
        super().__post_init__()
        is_used = bool(self.blocks) or not self.offload
        require(is_used, "offload", self.offload, "false, unless blocks is set too, such as blocks: [auto]")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Options):
    """The training module and its trainable parameters.

    The module's named children are its models. The children named in its `encoders` attribute are always frozen.
    """

    factory: str = option(
        "streamvid.recipes.small:build",
        metavar="PKG.MOD:NAME",
        help="Import path of the function that builds the training module.",
    )
    args: dict[str, Any] = option(
        default_factory=dict, help="Keyword arguments for the factory; `task` is added if the factory accepts it."
    )
    weights: WeightsConfig = option(default_factory=WeightsConfig, help="Weight files.")
    init: Literal["cpu", "meta"] = option(
        "cpu",
        help=(
            "Device for new parameters; 'meta' allocates no memory, so the weight files must contain every parameter."
        ),
    )
    trainable: tuple[str, ...] | None = option(
        None,
        help="Dotted names of trainable parts; an empty list trains only adapters.",
        shown_default="parameters for which the factory left requires_grad=True",
    )
    fp8: tuple[str, ...] = option((), help="Frozen models to store in FP8: dotted names, or paths to weight files.")
    lora: LoraConfig = option(default_factory=LoraConfig, help="Low-rank adapters.")
    activation_checkpointing: ActivationCheckpointingConfig = option(
        default_factory=ActivationCheckpointingConfig, help="Blocks whose activations are checkpointed."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(all(self.factory.partition(":")), "factory", repr(self.factory), "'package.module:name'")
