"""Export of trained weights for other tools: adapters in another format, and full weights as a diffusers folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from streamvid.errors import ConfigError
from streamvid.modules.adapters.convert import convert_adapters
from streamvid.modules.config import LoraFormat
from streamvid.modules.parts import some
from streamvid.modules.saving import WeightFile, write
from streamvid.modules.weight_files import SAFETENSORS, read_state

_MAX_SHARD = "5GB"  # the default of save_pretrained when diffusers' models were published
_DEFAULT = "transformer"
#: File that makes a folder that of a diffusers pipeline.
MODEL_INDEX = "model_index.json"


def export_adapters(path: Path, format: LoraFormat, target: Path, family: str | None = None) -> int:
    """Convert the adapters stored at `path` to `format`, and write them to a new file or, for peft, to a new folder.

    Return the number of layers with adapters.

    family: name in FAMILIES; None detects the family from the layers.
    Raises ConfigError if the target exists, or if its name does not match the format: a file name must end with
    .safetensors, and a folder name must not. Also raises the same errors as `convert_adapters`.
    """
    if format != "peft" and target.suffix != SAFETENSORS:
        raise ConfigError(f"-o {target}: must end with {SAFETENSORS} for --format {format}")
    if format == "peft" and target.suffix == SAFETENSORS:
        raise ConfigError(f"-o {target}: --format peft writes a folder; use a name without {SAFETENSORS}")
    if target.exists():
        raise ConfigError(f"-o {target} already exists; choose another name, or remove the existing file or folder")
    found = convert_adapters(path, format, family)
    target.parent.mkdir(parents=True, exist_ok=True)
    encoded = found.encoded
    name = target if format == "peft" else target.with_name(target.name.removesuffix(SAFETENSORS))
    write(WeightFile("", encoded.tensors, encoded.facts, encoded.peft_config), name)
    return found.num_layers


def write_pipeline_folder(weights: Sequence[Path], model: Path, output: Path) -> tuple[str, ...]:
    """Write the folder `output`: a copy of the base model's folder that contains the tensors from `weights`.

    Return the names of the changed components. The trained tensors get the dtypes of the tensors that they replace.

    weights: files that a run saved at one step. A tensor whose name does not begin with the name of a component belongs
        to `transformer`.
    model: diffusers folder of the base model. Unchanged files in this folder are hard-linked if possible, otherwise
        copied.
    Raises ConfigError if `output` exists, if `model` is not a diffusers folder, or if the tensors do not match `model`.
    """
    if output.exists():
        raise ConfigError(f"-o {output} already exists; choose a new folder, or remove the existing one")
    if not (model / MODEL_INDEX).is_file():
        raise ConfigError(
            f"--model {model} is not a diffusers folder: it has no model_index.json; pass the folder of the base model"
        )
    parts = _by_component(read_state(weights), model)
    temporary = output.with_name(f".{output.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    for component, tensors in parts.items():
        _write_component(tensors, model / component, temporary / component, some([str(path) for path in weights]))
    for file in sorted(path for path in model.rglob("*") if path.is_file()):
        name = file.relative_to(model)
        is_replaced = name.parts[0] in parts and (file.suffix == SAFETENSORS or file.name.endswith(".index.json"))
        if not is_replaced:
            _link(file.resolve(), temporary / name)
    temporary.rename(output)
    return tuple(parts)


def _by_component(state: Mapping[str, Tensor], model: Path) -> dict[str, dict[str, Tensor]]:
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        first, _, own = name.partition(".")
        component, own = (first, own) if own and (model / first).is_dir() else (_DEFAULT, name)
        parts.setdefault(component, {})[own] = tensor
    return parts


def _write_component(tensors: Mapping[str, Tensor], base: Path, output: Path, source: str) -> None:
    from huggingface_hub import save_torch_state_dict

    files = sorted(base.glob(f"*{SAFETENSORS}"))
    if not files:
        raise ConfigError(
            f"{base} has no {SAFETENSORS} files, but {source} contains tensors for this component; use the folder "
            "of the base model that the run started from"
        )
    state = read_state(files)
    strange = [name for name, one in tensors.items() if name not in state or state[name].shape != one.shape]
    if strange:
        raise ConfigError(
            f"{source} contains {some(strange)}, which {base} lacks or has with different shapes; use the folder "
            "of the base model that the run started from"
        )
    state |= {name: one.to(state[name].dtype) for name, one in tensors.items()}
    output.mkdir(parents=True)
    name = files[0].name.removesuffix(SAFETENSORS).partition("-0")[0]
    save_torch_state_dict(
        state, str(output), filename_pattern=f"{name}{{suffix}}{SAFETENSORS}", max_shard_size=_MAX_SHARD
    )
    _sort_index(output)


def _sort_index(folder: Path) -> None:
    for index in folder.glob("*.index.json"):
        index.write_text(json.dumps(json.loads(index.read_bytes()), indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _link(file: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(file, target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(file, target)
