"""Checkpoints: written under a temporary name, then renamed, so that every visible checkpoint is complete.

OUTPUT/step-N.safetensors             trained weights: one file per model, adapters in a separate file
OUTPUT/step-N/                        adapters in peft's format, instead of a file
OUTPUT/config.yaml, versions.json     configuration and software of the run
OUTPUT/state/step-N/                  everything that a resumed run needs
    model.safetensors, optimizer.bin …    accelerate's own files, without frozen weights
    trainer.json                          step, samples, tokens, and how the model was built
    loader.json                           the loader's state
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import itertools
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import load as load_pickle
from safetensors.torch import load_file
from torch import Tensor, nn

from streamvid.config import dump_config
from streamvid.dataset.sealed_json import MANIFEST
from streamvid.errors import ConfigError, StateError
from streamvid.modules import saving
from streamvid.modules.encoding import digest_tensors, portable
from streamvid.modules.optimizer import Ema
from streamvid.trainer.config import TrainConfig
from streamvid.trainer.data import Batches
from streamvid.trainer.metrics import METRICS_FILE

_log = logging.getLogger(__name__)

STATE_VERSION = 1
_WEIGHTS = re.compile(r"((?:step|epoch)-[0-9]+)(?:\..*)?")
_DIGEST = "digest of the "
_FROZEN = f"{_DIGEST}frozen weights of "
_PACKAGES = ("streamvid", "torch", "accelerate", "peft", "safetensors", "av", "numpy")


@dataclass(frozen=True)
class TrainProgress:
    """Progress since the start of a run: optimizer steps, and the samples and tokens that this rank has processed."""

    step: int = 0
    num_samples: int = 0
    num_tokens: int = 0

    def after(self, num_samples: int, num_tokens: int) -> TrainProgress:
        """Return the progress after one more step with the given numbers of samples and tokens."""
        return TrainProgress(self.step + 1, self.num_samples + num_samples, self.num_tokens + num_tokens)


class Checkpoints:
    """Checkpoints of one run. All ranks must call `save` and `load` together."""

    def __init__(self, config: TrainConfig, accelerator: Accelerator) -> None:
        self.config = config
        self.accelerator = accelerator
        self.folder = config.output / "state"
        self._made_of = _made_of(config)
        self._has_zero = accelerator.distributed_type.value == "DEEPSPEED"

    def identify(self, module: nn.Module) -> None:
        """Record the names and shapes of trained tensors and the digests of frozen weights for later comparison."""
        shapes = {name: list(tensor.shape) for name, tensor in saving.changing(module).items()}
        digest = hashlib.sha256(json.dumps(shapes, sort_keys=True).encode()).hexdigest()
        self._made_of[f"{_DIGEST}names and shapes of trained tensors"] = digest
        for name, child in module.named_children():
            frozen = {key: one for key, one in child.state_dict().items() if f"{name}.{key}" not in shapes}
            if frozen and not any(key.endswith("_fp8") for key in frozen):  # FP8 storage may begin at any step
                self._made_of[f"{_FROZEN}{name}"] = digest_tensors(frozen)

    def describe(self) -> None:
        """Write the effective configuration and the package versions."""
        try:
            self.config.output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot create output {self.config.output}: {error.strerror}; choose another folder"
            ) from error
        (self.config.output / "config.yaml").write_text(dump_config(self.config), encoding="utf-8")
        installed = {one.name: one.version for one in importlib.metadata.distributions()}
        _write_json(self.config.output / "versions.json", {name: installed.get(name) for name in _PACKAGES})

    def save(
        self,
        name: str,
        module: nn.Module,
        ema: Ema | None,
        progress: TrainProgress,
        loader_state: Mapping[str, object],
    ) -> None:
        """Save the weights as `name`, and save the state of this step.

        Then remove the oldest weight files and states, so that only the configured number of each remains.
        """
        folder = self.folder / f"step-{progress.step}"
        temporary = folder.with_name(f".{folder.name}.tmp")
        model = self.accelerator.unwrap_model(module).model
        trained = saving.gathered(saving.changing(model))
        saving.require_finite(model, trained, progress.step)
        if self.accelerator.is_main_process:
            for abandoned in self.folder.glob(".step-*.tmp"):
                shutil.rmtree(abandoned)
            temporary.mkdir(parents=True)
        self.accelerator.wait_for_everyone()
        # DeepSpeed writes its own weight file, which would include frozen weights.
        options = {"exclude_frozen_parameters": True} if self._has_zero else {}
        self.accelerator.save_state(str(temporary), safe_serialization=True, **options)
        averaged = None if ema is None else trained | saving.gathered(ema.mean)
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            self._save_weights(name, model, trained)
            if averaged is not None:
                self._save_weights(f"{name}.ema", model, averaged)
            run = {"version": STATE_VERSION, **dataclasses.asdict(progress), "model": self._made_of, "weights": name}
            _write_json(temporary / "trainer.json", run)
            _write_json(temporary / "loader.json", loader_state)
            shutil.rmtree(folder, ignore_errors=True)
            temporary.rename(folder)
            self._remove_old()
            _log.info("saved %s", folder)
        self.accelerator.wait_for_everyone()

    def _save_weights(self, name: str, model: nn.Module, tensors: dict[str, Tensor]) -> None:
        for file in saving.files(model, tensors, self.config.model.lora.format):
            state = saving.remove_prefix(file.tensors, self.config.checkpoints.remove_prefix)
            path = self.config.output / f"{name}{file.name and '.'}{file.name}"
            saving.write(dataclasses.replace(file, tensors=state), path)

    def find(self) -> Path | None:
        """Return the state folder to resume from, or None for a new run.

        Raises ConfigError if `checkpoints.resume` is invalid, or if the output folder would contain two runs.
        """
        existing, output = _state_folders(self.folder), self.config.output
        if self.config.checkpoints.resume == "latest":
            return existing[-1] if existing else None
        if self.config.checkpoints.resume is None:
            if existing or (output / METRICS_FILE).exists():
                raise ConfigError(
                    f"output {output} already contains a run, but checkpoints.resume is null; set checkpoints.resume "
                    "to 'latest' to resume the run, or choose another output folder"
                )
            return None
        resume = Path(self.config.checkpoints.resume)
        if not (resume / "trainer.json").is_file():
            raise ConfigError(
                f"checkpoints.resume is {resume}, which is not a checkpoint; "
                "allowed: 'latest', null or OUTPUT/state/step-N"
            )
        newer = [path.name for path in existing if _step_of(path) > _read_run(resume)["step"]]
        if newer:
            raise ConfigError(
                f"checkpoints.resume is {resume}, but output {output} contains newer checkpoints "
                f"({', '.join(newer)}), which 'latest' would mistake for checkpoints of this run; move these "
                "checkpoints elsewhere, or choose another output"
            )
        return resume

    def load(self, folder: Path | None, module: nn.Module, ema: Ema | None, loader: Batches) -> TrainProgress:
        """Restore the prepared model, optimizer and loader from `folder`, if any. Return the progress of this rank."""
        _leave_frozen_out(self.accelerator, self.accelerator.unwrap_model(module))
        if ema is not None:
            self.accelerator.register_for_checkpointing(ema)
        if folder is None:
            return TrainProgress()
        saved = _read_run(folder)
        different = _differences(self._made_of, saved["model"])
        if different:
            raise StateError(
                f"checkpoint {folder} does not match this run: {', '.join(different)}; use the checkpoint's values "
                "and weights, or another output folder"
            )
        try:
            self.accelerator.load_state(str(folder), **({"load_module_strict": False} if self._has_zero else {}))
            _check_random_states(folder / f"random_states_{self.accelerator.process_index}.pkl")
        except Exception as error:  # torch, safetensors and DeepSpeed have no error class in common
            raise StateError(f"cannot read checkpoint {folder}: {error}; {_earlier(folder)}") from error
        self.accelerator.step = 0  # it counts batches, but the number of batches per step may have changed
        state = _read_json(folder / "loader.json")
        try:
            loader.load_state_dict(state)
        except StateError as error:
            raise StateError(
                f"checkpoint {folder} does not match the data of this run; use the checkpoint's options, or another "
                f"output folder. Loader: {error}"
            ) from error
        _log.info("resumed %s", folder)
        # Counts are summed over the ranks, whose number may have changed.
        if not self.accelerator.is_main_process:
            return TrainProgress(saved["step"])
        return TrainProgress(saved["step"], saved["num_samples"], saved["num_tokens"])

    def _remove_old(self) -> None:
        for folder in _state_folders(self.folder)[: -self.config.checkpoints.keep]:
            saving.remove(folder)
        if self.config.checkpoints.keep_weights is not None:
            saves: dict[str, list[Path]] = {}  # oldest first, by time, because step and epoch numbers do not compare
            for path in saving.written(self.config.output):
                if found := _WEIGHTS.fullmatch(path.name):
                    saves.setdefault(found[1], []).append(path)
            old = list(saves.values())[: -self.config.checkpoints.keep_weights]
            for path in itertools.chain.from_iterable(old):
                saving.remove(path)


def require_output(output: Path) -> None:
    """Raise ConfigError if a run cannot write to `output`. Nothing is created."""
    place = next(one for one in (output.absolute(), *output.absolute().parents) if os.path.lexists(one))
    reason = None
    if not place.is_dir():
        reason = f"{place} is not a folder"
    elif not os.access(place, os.W_OK | os.X_OK):
        reason = f"{place} cannot be written to"
    elif (output / MANIFEST).is_file():
        reason = "it contains a dataset or features"
    if reason is not None:
        raise ConfigError(f"output {output} cannot be used for a run: {reason}; choose another folder")


def _check_random_states(path: Path) -> None:
    """Raise an error if accelerate failed to restore the random states. Accelerate itself only logs such a failure.

    If the checkpoint has no random states for this rank, nothing is checked, because the run that saved it had
    fewer ranks.
    """
    if path.exists() and not torch.equal(load_pickle(path)["torch_manual_seed"], torch.get_rng_state()):
        raise ValueError(f"{path.name} does not contain the random states of a training run")


def _leave_frozen_out(accelerator: Accelerator, model: nn.Module) -> None:
    """Make accelerate save and load only the tensors that training changes.

    FSDP and DeepSpeed write sharded weights themselves.
    """
    wanted = saving.changing(model).keys()

    def save(models: list[nn.Module], states: list[dict[str, Tensor]], folder: str) -> None:
        plain = [{name.removeprefix("module."): tensor for name, tensor in one.items()} for one in states]  # DDP's
        states[:] = [{name: tensor for name, tensor in one.items() if name in wanted} for one in plain]

    def load(models: list[nn.Module], folder: str) -> None:
        if models:
            models.clear()
            model.load_state_dict(load_file(Path(folder) / "model.safetensors"), strict=False)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def _differences(here: dict[str, object], there: dict[str, object]) -> list[str]:
    """Describe each value that differs between this run and a checkpoint."""
    # A frozen part may be absent on one side, such as an encoder if its features are precomputed.
    keys = [key for key in here | there if not key.startswith(_FROZEN) or (key in here and key in there)]
    pairs = [(key, here.get(key, "not set"), there.get(key, "not set")) for key in keys]
    return [
        f"the {key.removeprefix(_DIGEST)} differ"
        if key.startswith(_DIGEST)
        else f"{key} is {now}, but {before} in the checkpoint"
        for key, now, before in pairs
        if now != before
    ]


def _made_of(config: TrainConfig) -> dict[str, object]:
    model = config.model
    made: dict[str, object] = {
        "optimizer.factory": config.optimizer.factory,
        **{f"model.args.{name}": portable(value) for name, value in model.args.items()},
        "model.trainable": model.trainable,
        "optimizer.ema_decay": "null" if config.optimizer.ema_decay is None else "set",
        **{
            f"model.lora.{name}": getattr(model.lora, name)
            for name in ("base_model", "target_modules", "rank", "alpha")
        },
    }
    return json.loads(json.dumps(made, default=str))  # type: ignore[no-any-return]


def _state_folders(folder: Path) -> list[Path]:
    folders = [path for path in folder.glob("step-*") if re.fullmatch(r"step-[0-9]+", path.name)]
    return sorted(folders, key=_step_of)


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _read_run(folder: Path) -> Mapping[str, Any]:
    """Read a checkpoint's trainer.json. Raises StateError if the file is unreadable or its version is not supported."""
    saved = _read_json(folder / "trainer.json")
    if saved.get("version") != STATE_VERSION:
        raise StateError(
            f"checkpoint {folder} has version {saved.get('version')!r}, but only version {STATE_VERSION} can be "
            "resumed; start a new run in another output folder"
        )
    return saved


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StateError(f"cannot read checkpoint file {path}: {reason}; {_earlier(path.parent)}") from error


def _earlier(folder: Path) -> str:
    return f"remove the folder {folder} to resume from the previous checkpoint, if there is one, or to start over"


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
