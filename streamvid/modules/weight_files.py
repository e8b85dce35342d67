"""Weight files: found and verified before anything is loaded, read without running code, and written reproducibly.

paths: {dit: [a.safetensors, b.safetensors]} ─┐
paths: [vae.pth, [a.safetensors, …]] ─────────┼─► resolve ─► WeightSource … ─► read_state ─► tensors by key
id_with_origin_paths: "org/name:dit*.pth,…" ──┘
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
import pickle
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from streamvid.errors import ConfigError
from streamvid.modules.config import WeightsConfig

_log = logging.getLogger(__name__)

SAFETENSORS = ".safetensors"
_ONLY_TENSORS = "A pickle is read only if it contains a state dict, which maps names to tensors"
_CONVERT = "convert its tensors to safetensors"
ROOT_VARIABLES = ("STREAMVID_MODEL_ROOT", "DIFFSYNTH_MODEL_BASE_PATH")


@dataclass(frozen=True)
class WeightSource:
    """Weight files for one model.

    child: child that receives the tensors; None selects the child with matching keys and shapes.
    written: paths as written in the configuration.
    """

    files: tuple[Path, ...]
    child: str | None
    written: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name used in messages: the paths as written in the configuration."""
        return ", ".join(self.written)


class Fingerprint(TypedDict):
    """Identity of a weight file, regardless of the folder that contains it."""

    name: str
    num_bytes: int
    sha256: str


def resolve(config: WeightsConfig) -> tuple[WeightSource, ...]:
    """Return the weight files that a configuration names, after checking their existence, sizes and headers.

    A path may be a glob: its matches, in sorted order, are the shards of one model. A file that is named more than once
    is loaded only once, unless it is assigned to different children. Raises one ConfigError that lists all problems.
    """
    items = config.paths.items() if isinstance(config.paths, dict) else ((None, item) for item in config.paths)
    problems: list[str] = []
    sources: list[WeightSource] = []
    for child, item in items:
        written = (item,) if isinstance(item, str) else tuple(item)
        files = tuple(file for path in written for file in _expand(path, problems))
        if not written:
            problems.append("model.weights.paths contains an empty list; remove it, or list the shards of one model")
        sources.append(WeightSource(files, child, written))
    for spec in filter(None, (part.strip() for part in config.id_with_origin_paths.split(","))):
        sources.append(WeightSource(tuple(_of_origin(spec, config, problems)), None, (spec,)))
    problems += [problem for source in sources for file in source.files if (problem := problem_of(file))]
    if problems:
        lines = list(dict.fromkeys(problems))
        raise ConfigError(f"weight files: {lines[0]}" if len(lines) == 1 else "\n  - ".join(["weight files:", *lines]))
    return _without_repeats(sources)


def fingerprints(files: Iterable[Path]) -> list[Fingerprint]:
    """Return the name, size and SHA-256 of each file."""
    rows = []
    for file in files:
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        rows.append(Fingerprint(name=file.name, num_bytes=file.stat().st_size, sha256=digest))
    return rows


def read_state(files: Sequence[Path]) -> dict[str, Tensor]:
    """Load the tensors from all files into CPU memory, memory-mapped where the format allows it.

    Raises ConfigError if a file is damaged, contains anything other than tensors, or repeats a key from an earlier
    file.
    """
    state: dict[str, Tensor] = {}
    for file in files:
        with _reading(file):
            tensors = load_file(file) if file.suffix == SAFETENSORS else _read_pickle(file)
        repeated = state.keys() & tensors.keys()
        if repeated:
            raise ConfigError(
                f"{file} and an earlier file both contain the key {min(repeated)!r}, so they are not shards of one "
                "model; omit one of them"
            )
        state.update(tensors)
    return state


def tensor_names(file: Path) -> list[str]:
    """Return the names of the tensors in a file. Raises ConfigError if the file is damaged."""
    if file.suffix != SAFETENSORS:
        return list(read_state([file]))
    with _reading(file), safe_open(str(file), framework="pt") as opened:
        return list(opened.keys())


def read_metadata(file: Path) -> dict[str, str]:
    """Return the header metadata of a safetensors file, or an empty dict for any other format."""
    if file.suffix != SAFETENSORS:
        return {}
    with safe_open(str(file), framework="pt") as opened:
        return dict(opened.metadata() or {})


def write_state(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file whose bytes are reproducible, because its metadata is also sorted."""
    path.unlink(missing_ok=True)
    path.touch()
    mode = path.stat().st_mode  # the user's default mode; safetensors would write a file that only the user can read
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(path), metadata=dict(metadata))
    with path.open("r+b") as file:
        num_header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(num_header_bytes))
        if "__metadata__" in header:
            header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        file.seek(8)
        file.write(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(num_header_bytes))
        file.flush()
        os.fsync(file.fileno())
    path.chmod(mode)


def _expand(path: str, problems: list[str]) -> list[Path]:
    file = Path(path).expanduser()
    if file.is_file():
        return [file]
    if file.is_dir():
        problems.append(f"{path} is a folder; list its files, such as {path.rstrip('/')}/*.safetensors")
        return []
    found = sorted(Path(name) for name in glob.glob(str(file)) if Path(name).is_file())  # noqa: PTH207  # absolute ones
    if not found:
        problem = "matches no file" if glob.has_magic(path) else "does not exist"
        problems.append(f"{path} {problem}; correct it in model.weights.paths")
    return found


def _of_origin(spec: str, config: WeightsConfig, problems: list[str]) -> list[Path]:
    name, colon, pattern = spec.rpartition(":")
    if not (colon and name and pattern) or Path(name).is_absolute() or Path(pattern).is_absolute():
        problems.append(f"model.weights.id_with_origin_paths contains {spec!r}; allowed: ID:GLOB, with relative paths")
        return []
    root = config.root or Path(next((os.environ[key] for key in ROOT_VARIABLES if os.environ.get(key)), "models"))
    folder = root.expanduser() / name
    downloads = config.download and not _is_offline()
    if downloads and not _download(name, pattern, folder, problems):
        return []
    found = sorted(path for path in folder.glob(pattern) if path.is_file())
    if not found:
        if downloads:
            hint = "correct the pattern"
        elif config.download:
            hint = (
                "put the files there, or unset HF_HUB_OFFLINE and DIFFSYNTH_SKIP_DOWNLOAD, which prevent the download"
            )
        else:
            hint = "put the files there, or set model.weights.download to true"
        problems.append(f"{spec!r} matches no file below {folder}; {hint}")
    return found


def _is_offline() -> bool:
    skips = os.environ.get("DIFFSYNTH_SKIP_DOWNLOAD", "").lower() in ("true", "1")
    return skips or os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")


def _download(name: str, pattern: str, folder: Path, problems: list[str]) -> bool:
    from huggingface_hub import snapshot_download  # accelerate depends on it

    try:
        snapshot_download(repo_id=name, allow_patterns=pattern, local_dir=folder)
    except Exception as error:  # noqa: BLE001  # many libraries raise here, without a common base class
        reason = f"{type(error).__name__}: {_one_line(error)}"
        problems.append(
            f"cannot download {name} ({reason}); check the name and the network, or put the files into {folder} and "
            "set model.weights.download to false"
        )
        return False
    return True


def _without_repeats(sources: list[WeightSource]) -> tuple[WeightSource, ...]:
    seen: dict[tuple[Path, ...], WeightSource] = {}
    kept = []
    for source in sources:
        key = tuple(file.resolve() for file in source.files)
        first = seen.setdefault(key, source)
        # A file may be named for two children, which then start with equal weights. Naming it again without a child is
        # a repetition.
        if first is not source and (source.child is None or source.child == first.child):
            _log.warning("%s is listed more than once; only the first entry is used", source.name)
            continue
        kept.append(source)
    return tuple(kept)


def problem_of(file: Path) -> str | None:
    """Return what is wrong with an existing weight file, or None if its size and header are valid."""
    if file.stat().st_size == 0:
        return f"{file} is empty; download or copy the file again"
    try:
        with _reading(file):
            read_metadata(file)
    except ConfigError as error:
        return str(error)
    return None


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(
            f"cannot read {file} ({error.strerror or _one_line(error)}); check the file and its permissions"
        ) from error
    except (SafetensorError, RuntimeError, EOFError, ValueError) as error:
        if file.suffix == SAFETENSORS and _is_pickle(file):
            raise ConfigError(f"{file} is a pickle, although its name ends in {SAFETENSORS}; {_CONVERT}") from None
        kind = "safetensors file" if file.suffix == SAFETENSORS else "weight file"
        raise ConfigError(
            f"{file} cannot be read as a {kind} ({_one_line(error)}); if the file is incomplete, "
            "download or copy it again"
        ) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _is_pickle(file: Path) -> bool:
    """Return whether a file that safetensors cannot read begins like a pickle or a torch.save file."""
    with file.open("rb") as opened:
        head = opened.read(9)
    # A safetensors file has 8 bytes with the length of its header, which begins with a brace.
    return head[:4] == b"PK\x03\x04" or (head[:1] == b"\x80" and head[1:2] <= b"\x05" and head[8:] != b"{")


def _read_pickle(file: Path) -> dict[str, Tensor]:
    try:
        # weights_only, because reading a pickle can run any function, and weight files may come from anyone.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about pickles that it did not write; errors are enough
            loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except (IndexError, KeyError, TypeError, AttributeError) as error:  # torch's unpickler, on anything but a pickle
        raise ConfigError(
            f"{file} is not a weight file; allowed: safetensors files, and state dicts saved with torch.save"
        ) from error
    except pickle.UnpicklingError as error:
        # The cause is between torch's advice to load the file without weights_only, and a link.
        cause = str(error).rpartition("WeightsUnpickler error:")[2].partition("Check the documentation")[0]
        raise ConfigError(
            f"{file} is damaged, or is a pickle that contains objects other than tensors and could run code "
            f"({' '.join(cause.split())[:160]}); download the file again or, if you trust the file, save its tensors "
            "as safetensors"
        ) from None
    return _only_tensors(file, loaded)


def _only_tensors(file: Path, loaded: object) -> dict[str, Tensor]:
    if isinstance(loaded, Mapping) and isinstance(loaded.get("state_dict"), Mapping):
        loaded = loaded["state_dict"]  # some trainers store it next to their own state
    if not isinstance(loaded, Mapping):
        raise ConfigError(
            f"{file} is a pickle that contains an object of type {type(loaded).__name__}. {_ONLY_TENSORS}; {_CONVERT}"
        )
    strange = [str(key) for key, value in loaded.items() if not (isinstance(key, str) and isinstance(value, Tensor))]
    if strange:
        raise ConfigError(
            f"{file} is a pickle whose entry {strange[0]!r} does not map a name to a tensor. {_ONLY_TENSORS}; "
            f"{_CONVERT}"
        )
    return dict(loaded)
