"""Tensors of a weight file: safetensors, or a torch pickle that holds nothing but tensors."""

from __future__ import annotations

import json
import os
import pickle
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from streamvid.errors import ConfigError

SAFETENSORS = ".safetensors"


def write_state(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """A safetensors file, the same bytes for the same content: safetensors itself writes metadata in any order."""
    path.unlink(missing_ok=True)
    path.touch()
    mode = path.stat().st_mode  # as for any file of this user's; safetensors makes its own for nobody else to read
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(path), metadata=dict(metadata))
    with path.open("r+b") as file:
        room = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(room))
        if "__metadata__" in header:
            header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        file.seek(8)
        file.write(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(room))
        file.flush()
        os.fsync(file.fileno())
    path.chmod(mode)


def proved(file: Path) -> str | None:
    """What is wrong with a file that is there, as far as can be told without reading it all; None: nothing."""
    if file.stat().st_size == 0:
        return f"{file} is empty"
    if file.suffix != SAFETENSORS:
        return None
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(file), framework="pt"):
            return None
    except (SafetensorError, OSError) as error:
        return f"{file} is no whole safetensors file ({' '.join(str(error).split())[:120]}); get it again"


def read_state(files: Sequence[Path]) -> dict[str, Tensor]:
    """The tensors of all `files` together, on the CPU, read as they are used.

    Raises ConfigError for a file that is not what its name says, holds more than tensors, or repeats a key of another.
    """
    state: dict[str, Tensor] = {}
    for file in files:
        tensors = _read(file)
        repeated = state.keys() & tensors.keys()
        if repeated:
            raise ConfigError(f"{file} and a file before it both have the key {min(repeated)!r}; these are no shards")
        state.update(tensors)
    return state


def read_metadata(file: Path) -> dict[str, str]:
    """What a safetensors file says of itself; empty for others."""
    if file.suffix != SAFETENSORS:
        return {}
    from safetensors import safe_open

    with safe_open(str(file), framework="pt") as opened:
        return dict(opened.metadata() or {})


def _read(file: Path) -> dict[str, Tensor]:
    if file.suffix == SAFETENSORS:
        return _read_safetensors(file)
    try:
        # weights_only: a pickle may name any function to be run as it is read, and these come from anywhere.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickles that others than torch wrote: what is wrong, the error says
            loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except pickle.UnpicklingError as error:
        reason = " ".join(str(error).split())
        detail = reason[reason.find("Unsupported") :][:160] if "Unsupported" in reason else reason[:160]
        raise ConfigError(
            f"{file} is a pickle of more than tensors, which can run any code as it is read: refused ({detail}); "
            "save its tensors as safetensors where you trust it"
        ) from None
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {' '.join(str(error).split())[:200]}; get it again") from error
    return _only_tensors(file, loaded)


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        state: dict[str, Tensor] = load_file(str(file))
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} cannot be read: {' '.join(str(error).split())[:200]}; get it again") from error
    return state


def _only_tensors(file: Path, loaded: Any) -> dict[str, Tensor]:
    if isinstance(loaded, Mapping) and isinstance(loaded.get("state_dict"), Mapping):
        loaded = loaded["state_dict"]  # as trainers write them, beside other things
    if not isinstance(loaded, Mapping):
        raise ConfigError(f"{file} holds a {type(loaded).__name__}; allowed: a state dict, names and tensors")
    strange = [str(key) for key, value in loaded.items() if not (isinstance(key, str) and isinstance(value, Tensor))]
    if strange:
        raise ConfigError(f"{file} has {strange[0]!r}, which is no tensor; allowed: a state dict, names and tensors")
    return dict(loaded)
