"""Configuration of the training module: factory, weight files, trainable parameters, adapters, precision."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from streamvid.config import Options, option, require

Paths = dict[str, str | tuple[str, ...]] | tuple[str | tuple[str, ...], ...]
"""Weight files by child, or as a list. A nested list holds the shards of one model."""


@dataclass(frozen=True, kw_only=True)
class WeightsConfig(Options):
    """Weight files of the training module. Each goes to the child whose keys and shapes it fits."""

    paths: Paths = option((), help="Weight files; the shards of one model form a nested list.")
    id_with_origin_paths: str = option("", help="More weight files, as 'ID:GLOB,ID:GLOB' below `root`.")
    root: Path | None = option(
        None,
        help="Folder of id_with_origin_paths.",
        shown_default="$STREAMVID_MODEL_ROOT, $DIFFSYNTH_MODEL_BASE_PATH or ./models",
    )
    download: bool = option(False, help="Download files of id_with_origin_paths from the Hugging Face Hub.")
    allow_missing: bool = option(False, help="Accept keys of the module that no file has.")
    allow_unexpected: bool = option(False, help="Accept keys of files that the module does not have.")


@dataclass(frozen=True, kw_only=True)
class LoraConfig(Options):
    """Low-rank adapters, by peft."""

    base_model: str | None = option(None, help="Child that gets adapters; dotted names too.")
    target_modules: str | tuple[str, ...] = option(
        "",
        help="Layers by the ends of their names, or 'regex:EXPRESSION' for whole names.",
        shown_default="large linear layers in blocks",
    )
    rank: int = option(32, minimum=1, help="Rank of the adapters.")
    alpha: float | None = option(
        None, above=0, help="Scale of the adapters, divided by the rank.", shown_default="the rank"
    )
    dropout: float = option(0.0, minimum=0, help="Dropout in front of the adapters.")
    checkpoint: Path | None = option(None, help="Adapters to start from.")
    preset_path: Path | None = option(None, help="Adapters to fuse into the weights of `preset_model` first.")
    preset_model: str | None = option(None, help="Child whose weights the preset adapters change.")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.dropout < 1, "dropout", self.dropout, "0 up to 1")
        presets = (self.preset_path, self.preset_model)
        require(
            presets.count(None) != 1,
            "preset_path",
            f"{self.preset_path} and preset_model {self.preset_model}",
            "both, or neither",
        )
        has_model = self.checkpoint is None or self.base_model is not None
        require(has_model, "checkpoint", self.checkpoint, "null, or with base_model, the child that has the adapters")


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointingConfig(Options):
    """Blocks whose activations are recomputed in the backward pass instead of being stored."""

    blocks: tuple[str, ...] = option(
        (), help="Blocks by class or by dotted name with wildcards; 'auto': elements of every ModuleList."
    )
    offload: bool = option(False, help="Store the inputs of these blocks in host memory.")

    def __post_init__(self) -> None:
        super().__post_init__()
        is_used = bool(self.blocks) or not self.offload
        require(is_used, "offload", self.offload, "false, or with blocks to checkpoint, such as blocks: [Block]")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Options):
    """The training module, and which of its parameters train.

    The module's named children are its models. Those named in its attribute `encoders` are always frozen.
    """

    factory: str = option(
        "streamvid.recipes.small:build",
        metavar="PKG.MOD:NAME",
        help="Import path of the function that builds the training module.",
    )
    args: dict[str, Any] = option(
        default_factory=dict, help="Arguments of the factory; task= is added if the factory accepts it."
    )
    weights: WeightsConfig = option(default_factory=WeightsConfig, help="Weight files.")
    init: Literal["cpu", "meta"] = option("cpu", help="'meta' allocates no memory: every tensor must come from a file.")
    trainable: tuple[str, ...] | None = option(
        None,
        help="Dotted names of trainable parts; empty: only adapters.",
        shown_default="parameters that the factory left with requires_grad",
    )
    fp8: tuple[str, ...] = option((), help="Frozen models to store in 8 bits: dotted names, or paths of weight files.")
    lora: LoraConfig = option(default_factory=LoraConfig, help="Low-rank adapters.")
    activation_checkpointing: ActivationCheckpointingConfig = option(
        default_factory=ActivationCheckpointingConfig, help="Blocks to recompute in the backward pass."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(all(self.factory.partition(":")), "factory", repr(self.factory), "'package.module:name'")
