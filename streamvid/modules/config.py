"""What a training run is told of its models: where they come from, what of them trains, and how."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from streamvid.errors import ConfigError

Paths = dict[str, str | tuple[str, ...]] | tuple[str | tuple[str, ...], ...]
"""Weight files by child, or in a list, each for the child that its keys fit; several files of one model in a list."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The training module, and what of it trains.

    factory: "package.module:name", called with `args`, and with task= where it takes that; gives an nn.Module whose
        named children are the models.
    paths: weight files.   id_with_origin_paths: more of them, "id:glob,id:glob", below `root` (None: the environment's
        STREAMVID_MODEL_ROOT, DIFFSYNTH_MODEL_BASE_PATH, or ./models).   download: ask the Hugging Face hub for those.
    allow_missing, allow_unexpected: keys of the module that no file has, and of files that the module has not.
    init: "meta" makes the module without memory, so that every tensor has to come from files.
    trainable: dotted names of what trains; None: what the factory left with requires_grad; (): adapters alone. The rest
        is frozen, and so are the module's `encoders` always.
    fp8: dotted names of frozen children, or paths of `paths`, whose weights are stored in 8 bits.
    extra_inputs: columns and media that the module's forward reads: one that the dataset has not is named at start.
    """

    factory: str = "streamvid.recipes.small:build"
    args: dict[str, Any] = field(default_factory=dict)
    paths: Paths = ()
    id_with_origin_paths: str = ""
    root: Path | None = None
    download: bool = False
    allow_missing: bool = False
    allow_unexpected: bool = False
    init: Literal["cpu", "meta"] = "cpu"
    trainable: tuple[str, ...] | None = None
    fp8: tuple[str, ...] = ()
    extra_inputs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        module, colon, name = self.factory.partition(":")
        if not (module and colon and name):
            raise ConfigError(f"factory is {self.factory!r}; allowed: 'package.module:name'")


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters, by peft.

    base_model: the child that gets them, dotted; None: none.   target_modules: names of its layers, by their ends;
        "regex:…" for an expression that a whole name must match; empty: chosen, and the choice logged.
    rank, alpha (None: as rank), dropout.   checkpoint: adapters to go on from.
    preset_path, preset_model: adapters that are fused into the weights of a child before all that; both or neither.
    """

    base_model: str | None = None
    target_modules: str | tuple[str, ...] = ""
    rank: int = 32
    alpha: float | None = None
    dropout: float = 0.0
    checkpoint: Path | None = None
    preset_path: Path | None = None
    preset_model: str | None = None

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"rank is {self.rank}; allowed: 1 and up")
        if self.alpha is not None and not self.alpha > 0:
            raise ConfigError(f"alpha is {self.alpha}; allowed: above 0, or null for the rank")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout is {self.dropout}; allowed: 0 up to 1")
        if (self.preset_path is None) != (self.preset_model is None):
            raise ConfigError(
                f"preset_path is {self.preset_path} and preset_model {self.preset_model!r}; allowed: both, or neither"
            )
        if self.checkpoint is not None and self.base_model is None:
            raise ConfigError(
                f"checkpoint is {self.checkpoint} and base_model null; say which child the adapters are of"
            )


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    """Gradient checkpointing: what activations are not kept, but computed again on the way back.

    blocks: class names of submodules, or dotted names of them with * for any part; "auto": what stands in a ModuleList
        with others.
    offload: what is kept of them, their inputs, waits in the host's memory.
    """

    blocks: tuple[str, ...] = ()
    offload: bool = False

    def __post_init__(self) -> None:
        if self.offload and not self.blocks:
            raise ConfigError("offload is true and blocks is empty; name what is recomputed, as blocks: [Block]")
