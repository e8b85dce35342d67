"""Checkpoints: written whole under a temporary name, then renamed, so that what has its name is complete.

OUTPUT/step-N.safetensors             the weights alone, for `load_model` and any other reader
OUTPUT/state/step-N/                  all that a resumed run needs
    model.safetensors, optimizer.bin …    accelerate's own files
    trainer.json                          step, samples, model config
    loader.json                           where the loader stands
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from streamvid.errors import ConfigError, StateError
from streamvid.trainer.config import ModelConfig, TrainConfig
from streamvid.trainer.metrics import METRICS_FILE
from streamvid.trainer.model import VideoTransformer

_log = logging.getLogger(__name__)

STATE_VERSION = 1


@dataclass(frozen=True)
class Progress:
    """How far a run is: optimizer steps made, samples they took over all ranks."""

    step: int = 0
    num_samples: int = 0

    def after(self, num_samples: int) -> Progress:
        """One step later, which took `num_samples`."""
        return Progress(self.step + 1, self.num_samples + num_samples)


def save_checkpoint(
    accelerator: Accelerator, model: nn.Module, config: TrainConfig, progress: Progress, loader_state: dict[str, Any]
) -> None:
    """Write weights and state of this step; every rank calls it. The oldest beyond `keep_checkpoints` go."""
    name = f"step-{progress.step}"
    folder = config.output / "state" / name
    temporary = folder.with_name(f".{name}.tmp")
    if accelerator.is_main_process:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(temporary), safe_serialization=True)
    weights = accelerator.get_state_dict(model)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        _save_weights(config, name, weights)
        model_config = dataclasses.asdict(config.model)
        trainer_state = {"version": STATE_VERSION, **dataclasses.asdict(progress), "model": model_config}
        _write_json(temporary / "trainer.json", trainer_state)
        _write_json(temporary / "loader.json", loader_state)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
        _remove_old(config)
        _log.info("saved %s", folder)
    accelerator.wait_for_everyone()


def find_checkpoint(config: TrainConfig) -> Path | None:
    """The state folder to go on from, or None for a fresh run. Raises ConfigError where that would spoil a run."""
    there = _state_folders(config.output)
    if config.resume == "latest":
        return there[-1] if there else None
    if config.resume is None:
        if there or (config.output / METRICS_FILE).exists():
            raise ConfigError(
                f"output {config.output} holds a run already and resume is null; "
                "allowed: resume='latest' to go on with it, or an output folder of its own"
            )
        return None
    folder = config.resume
    if not (folder / "trainer.json").is_file():
        raise ConfigError(f"resume is {folder}, which is no checkpoint; allowed: 'latest', null or OUTPUT/state/step-N")
    newer = [path.name for path in there if _step_of(path) > _read_progress(folder).step]
    if newer:
        raise ConfigError(
            f"resume is {folder}, but output {config.output} holds newer checkpoints ({', '.join(newer)}), which "
            "'latest' would take for this run's; move them away or choose another output"
        )
    return folder


def load_checkpoint(accelerator: Accelerator, config: TrainConfig, folder: Path) -> tuple[Progress, dict[str, Any]]:
    """Fill the prepared model and optimizer from a state folder; returns progress and the loader's state."""
    saved = _read_json(folder / "trainer.json")
    progress = _read_progress(folder)
    wanted = json.loads(json.dumps(dataclasses.asdict(config.model)))
    different = [key for key in wanted if wanted[key] != saved["model"].get(key)]
    if different:
        pairs = ", ".join(f"model.{k} is {wanted[k]} here and {saved['model'].get(k)} there" for k in different)
        raise StateError(f"checkpoint {folder} is of another model: {pairs}; use its values, or another output folder")
    accelerator.load_state(str(folder))
    _log.info("resumed %s", folder)
    return progress, _read_json(folder / "loader.json")


def load_model(weights: Path) -> VideoTransformer:
    """The model of a `step-N.safetensors`, on the CPU. Raises StateError for a file that is none."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(weights), framework="pt") as file:
            fields = json.loads((file.metadata() or {})["model"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
        with torch.device("meta"):
            model = VideoTransformer(ModelConfig(**{**fields, "patch": tuple(fields["patch"])}))
        model.load_state_dict(tensors, assign=True)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise StateError(f"{weights} holds no weights of this trainer: {error}; give a step-N.safetensors") from error
    return model


def _save_weights(config: TrainConfig, name: str, weights: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    temporary = config.output / f".{name}.safetensors.tmp"
    tensors = {key: value.detach().cpu().contiguous() for key, value in weights.items()}
    save_file(tensors, str(temporary), metadata={"format": "pt", "model": json.dumps(dataclasses.asdict(config.model))})
    temporary.rename(config.output / f"{name}.safetensors")


def _remove_old(config: TrainConfig) -> None:
    for folder in _state_folders(config.output)[: -config.keep_checkpoints]:
        (config.output / f"{folder.name}.safetensors").unlink(missing_ok=True)
        shutil.rmtree(folder)


def _state_folders(output: Path) -> list[Path]:
    folders = [path for path in (output / "state").glob("step-*") if re.fullmatch(r"step-[0-9]+", path.name)]
    return sorted(folders, key=_step_of)


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _read_progress(folder: Path) -> Progress:
    saved = _read_json(folder / "trainer.json")
    if saved.get("version") != STATE_VERSION:
        raise StateError(f"{folder} has version {saved.get('version')!r}; allowed: {STATE_VERSION}")
    return Progress(step=saved["step"], num_samples=saved["num_samples"])


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StateError(f"cannot read {path} of the checkpoint: {error}; resume from another one") from error
    if not isinstance(value, dict):
        raise StateError(f"{path} of the checkpoint holds no JSON object; resume from another one")
    return value


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
