"""Checkpoints: written whole under a temporary name, then renamed, so that what has its name is complete.

OUTPUT/step-N.safetensors             what trains, for any reader: a file a model where several do, LoRA in its own
OUTPUT/config.yaml, versions.json     what made it
OUTPUT/state/step-N/                  all that a resumed run needs
    model.safetensors, optimizer.bin …    accelerate's own files, without what is frozen
    trainer.json                          step, samples, tokens, what the model was made of
    loader.json                           where the loader stands
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
import json
import logging
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor, nn

from streamvid.config import dump_config
from streamvid.errors import ConfigError, StateError
from streamvid.modules import weights
from streamvid.modules.gather import changing, gathered, require_numbers
from streamvid.modules.optimizer import Ema
from streamvid.modules.state_files import write_state
from streamvid.trainer.config import TrainConfig
from streamvid.trainer.data import Batches
from streamvid.trainer.metrics import METRICS_FILE

_log = logging.getLogger(__name__)

STATE_VERSION = 1
_WEIGHTS = re.compile(r"((?:step|epoch)-[0-9]+)(?:\..*)?\.safetensors")
_PACKAGES = ("streamvid", "torch", "accelerate", "peft", "safetensors", "av", "numpy")


@dataclass(frozen=True)
class Progress:
    """How far a run is: optimizer steps made; samples and tokens they took, of this rank and those of a run resumed."""

    step: int = 0
    num_samples: int = 0
    num_tokens: int = 0

    def after(self, num_samples: int, num_tokens: int) -> Progress:
        """One step later, which took so many."""
        return Progress(self.step + 1, self.num_samples + num_samples, self.num_tokens + num_tokens)


class Checkpoints:
    """Those of one run; every rank calls each method."""

    def __init__(self, config: TrainConfig, accelerator: Accelerator) -> None:
        self.config, self.accelerator, self.folder = config, accelerator, config.output / "state"
        self._made_of, self._has_zero = _made_of(config), accelerator.distributed_type.value == "DEEPSPEED"

    def describe(self) -> None:
        """Write the effective config and the versions beside the weights."""
        self.config.output.mkdir(parents=True, exist_ok=True)
        (self.config.output / "config.yaml").write_text(dump_config(self.config), encoding="utf-8")
        installed = {one.name: one.version for one in importlib.metadata.distributions()}
        _write_json(self.config.output / "versions.json", {name: installed.get(name) for name in _PACKAGES})

    def save(
        self, name: str, step: nn.Module, ema: Ema | None, progress: Progress, loader_state: dict[str, Any]
    ) -> None:
        """Weights by `name`, and the state of this step. The oldest go, beyond those that are to stay."""
        folder = self.folder / f"step-{progress.step}"
        temporary = folder.with_name(f".{folder.name}.tmp")
        model = self.accelerator.unwrap_model(step).model
        whole = {"": gathered(changing(model))}
        require_numbers(model, whole[""], progress.step)
        if self.accelerator.is_main_process:
            for left in self.folder.glob(".step-*.tmp"):
                shutil.rmtree(left)
            temporary.mkdir(parents=True)
        self.accelerator.wait_for_everyone()
        # DeepSpeed writes its own file of weights, in which frozen ones would be too.
        own = {"exclude_frozen_parameters": True} if self._has_zero else {}
        self.accelerator.save_state(str(temporary), safe_serialization=True, **own)
        if ema is not None:
            whole[".ema"] = whole[""] | gathered(ema.mean)
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            for kind, tensors in whole.items():
                self._save_weights(f"{name}{kind}", model, tensors)
            _write_json(temporary / "trainer.json", {
                "version": STATE_VERSION, **dataclasses.asdict(progress), "model": self._made_of, "weights": name,
            })  # fmt: skip
            _write_json(temporary / "loader.json", loader_state)
            shutil.rmtree(folder, ignore_errors=True)
            temporary.rename(folder)
            self._remove_old()
            _log.info("saved %s", folder)
        self.accelerator.wait_for_everyone()

    def _save_weights(self, name: str, model: nn.Module, tensors: dict[str, Tensor]) -> None:
        for file in weights.files(model, tensors):
            path = self.config.output / f"{name}{file.name and '.'}{file.name}.safetensors"
            state = weights.remove_prefix(file.tensors, self.config.remove_prefix)
            temporary = path.with_name(f".{path.name}.tmp")
            write_state(temporary, state, file.metadata)
            temporary.rename(path)

    def find(self) -> Path | None:
        """The state folder to go on from, or None for a fresh run. Raises ConfigError where that would spoil a run."""
        there, output, resume = _state_folders(self.folder), self.config.output, self.config.resume_from_checkpoint
        newest = there[-1] if there else None
        if resume == "latest":
            return newest
        if resume is None and (newest or (output / METRICS_FILE).exists()):
            raise ConfigError(
                f"output {output} holds a run already and resume_from_checkpoint is null; "
                "allowed: 'latest' to go on with it, or an output folder of its own"
            )
        if resume is not None and not (resume / "trainer.json").is_file():
            raise ConfigError(
                f"resume_from_checkpoint is {resume}, which is no checkpoint; "
                "allowed: 'latest', null or OUTPUT/state/step-N"
            )
        newer = [path.name for path in there if resume is not None and _step_of(path) > _read(resume)["step"]]
        if newer:
            raise ConfigError(
                f"resume_from_checkpoint is {resume}, but output {output} holds newer ones ({', '.join(newer)}), "
                "which 'latest' would take for this run's; move them away or choose another output"
            )
        return resume

    def load(self, folder: Path | None, step: nn.Module, ema: Ema | None, loader: Batches) -> Progress:
        """Fill the prepared model, optimizer and loader; the progress of this rank."""
        _leave_frozen_out(self.accelerator, self.accelerator.unwrap_model(step))
        if ema is not None:
            self.accelerator.register_for_checkpointing(ema)
        if folder is None:
            return Progress()
        saved = _read(folder)
        different = [key for key in self._made_of if self._made_of[key] != saved["model"].get(key)]
        if different:
            pairs = ", ".join(f"{k} is {self._made_of[k]} here and {saved['model'].get(k)} there" for k in different)
            raise StateError(
                f"checkpoint {folder} is of another model: {pairs}; use its values, or another output folder"
            )
        try:
            self.accelerator.load_state(str(folder), **({"load_module_strict": False} if self._has_zero else {}))
        except Exception as error:  # of torch, safetensors, DeepSpeed, which have no class in common
            raise StateError(f"cannot read checkpoint {folder}: {error}; resume from another one") from error
        self.accelerator.step = 0  # counts batches, of which there may be another number to a step now
        loader.load_state_dict(_read_json(folder / "loader.json"))
        _log.info("resumed %s", folder)
        # Counts are added up over the ranks, of which there may be more or fewer than there were.
        is_first = self.accelerator.is_main_process
        return Progress(saved["step"], *((saved["num_samples"], saved["num_tokens"]) if is_first else (0, 0)))

    def _remove_old(self) -> None:
        for folder in _state_folders(self.folder)[: -self.config.keep_checkpoints]:
            # What has its name is complete, also where a kill comes in the midst of this.
            shutil.rmtree(folder.rename(folder.with_name(f".{folder.name}.tmp")))
        if self.config.keep_weights is not None:
            saves: dict[str, list[Path]] = {}  # oldest first, by time, because steps and epochs do not compare
            for path in sorted(self.config.output.glob("*.safetensors"), key=lambda one: one.stat().st_mtime_ns):
                if found := _WEIGHTS.fullmatch(path.name):
                    saves.setdefault(found[1], []).append(path)
            for path in itertools.chain.from_iterable(list(saves.values())[: -self.config.keep_weights]):
                path.unlink()


def _leave_frozen_out(accelerator: Accelerator, model: nn.Module) -> None:
    """Let accelerate save and load of a model what trains and what it counts: files have the rest.

    Where ranks hold parts of the weights, FSDP and DeepSpeed write theirs themselves.
    """
    wanted = changing(model).keys()

    def save(models: list[nn.Module], states: list[dict[str, Tensor]], folder: str) -> None:
        plain = [{name.removeprefix("module."): tensor for name, tensor in one.items()} for one in states]  # DDP's
        states[:] = [{name: tensor for name, tensor in one.items() if name in wanted} for one in plain]

    def load(models: list[nn.Module], folder: str) -> None:
        if models:
            models.clear()
            model.load_state_dict(load_file(Path(folder) / "model.safetensors"), strict=False)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def _made_of(config: TrainConfig) -> dict[str, Any]:
    lora = dataclasses.asdict(config.lora)
    made: dict[str, Any] = {"model.factory": config.model.factory, "optimizer.factory": config.optimizer.factory}
    made |= {f"model.args.{name}": value for name, value in config.model.args.items()}
    made |= {"model.trainable": config.model.trainable, "ema": config.optimizer.ema_decay is not None}
    made |= {f"lora.{name}": lora[name] for name in ("base_model", "target_modules", "rank", "alpha")}
    return json.loads(json.dumps(made, default=str))  # type: ignore[no-any-return]


def _state_folders(folder: Path) -> list[Path]:
    folders = [path for path in folder.glob("step-*") if re.fullmatch(r"step-[0-9]+", path.name)]
    return sorted(folders, key=_step_of)


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _read(folder: Path) -> dict[str, Any]:
    saved = _read_json(folder / "trainer.json")
    if saved.get("version") != STATE_VERSION:
        raise StateError(f"{folder} has version {saved.get('version')!r}; only {STATE_VERSION} can be read")
    return saved


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise StateError(f"cannot read {path} of the checkpoint: {error}; resume from another one") from error


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
