"""Training configurations for tests, changed by dotted names as with `--set`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from streamvid.trainer.config import AccelerateConfig, DataConfig, TrainConfig

Config = TypeVar("Config")


def train_config(
    dataset: str | Path | dict[str, Any], output: Path, changes: Mapping[str, Any] | None = None
) -> TrainConfig:
    """Return the default configuration of a run on CPUs, with changes."""
    data = DataConfig(dataset=dataset if isinstance(dataset, dict) else str(dataset))
    return changed(TrainConfig(output=output, data=data, accelerate=AccelerateConfig(cpu=True)), changes or {})


def combined(usual: Mapping[str, Any], changes: Mapping[str, Any] | None) -> dict[str, Any]:
    """Merge changes into the usual ones; a whole section in `changes`, {"checkpoints": …}, replaces all its usual
    options."""
    sections = set(changes or ())
    return {name: value for name, value in usual.items() if name.partition(".")[0] not in sections} | dict(
        changes or {}
    )


def changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return a copy with other values for the named options: {"data.batch_size": 2}."""
    whole = {name: value for name, value in changes.items() if "." not in name}
    sections: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        section, dot, rest = name.partition(".")
        if dot:
            sections.setdefault(section, {})[rest] = value
    for name, inner in sections.items():
        whole[name] = changed(whole.get(name, getattr(config, name)), inner)
    return dataclasses.replace(config, **whole)  # type: ignore[type-var]
