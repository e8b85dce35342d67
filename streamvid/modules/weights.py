"""Weight files: proved to be there before anything loads, given to the child whose keys they fit; and what is saved.

    paths: {dit: [a.safetensors, b.safetensors]} ─┐
    paths: [vae.pth, [a.safetensors, …]] ─────────┼─► resolve ─► WeightSource … ─► load ─► the module
    id_with_origin_paths: "org/name:dit*.st,…" ───┘   (files)                     (keys)

A file's keys are those of its child; or all of them with one of these before them: the child's name, pipe.NAME, model,
module. A file may be of the whole training module too.
"""

from __future__ import annotations

import glob
import hashlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from streamvid.errors import ConfigError
from streamvid.modules import fit, lora
from streamvid.modules.config import ModelConfig
from streamvid.modules.state_files import proved, read_state

_log = logging.getLogger(__name__)

ROOT_VARIABLES = ("STREAMVID_MODEL_ROOT", "DIFFSYNTH_MODEL_BASE_PATH")


@dataclass(frozen=True)
class WeightSource:
    """The files of one model. child: whose they are, None for the one that they fit; written: as the user has them."""

    files: tuple[Path, ...]
    child: str | None
    written: tuple[str, ...]


def resolve(model: ModelConfig) -> tuple[WeightSource, ...]:
    """The weight files that a configuration names, each proved to be there and to be what its name says.

    A path may be a glob; its files, sorted, are the shards of one model. A model that is named twice counts once.
    Raises ConfigError that names all that are wrong.
    """
    items = model.paths.items() if isinstance(model.paths, dict) else ((None, item) for item in model.paths)
    problems: list[str] = []
    sources: list[WeightSource] = []
    for child, item in items:
        written = (item,) if isinstance(item, str) else tuple(item)
        files = tuple(file for path in written for file in _expand(path, problems))
        if not written:
            problems.append("paths has an empty list; leave it out, or name the shards of one model")
        sources.append(WeightSource(files, child, written))
    for spec in filter(None, (part.strip() for part in model.id_with_origin_paths.split(","))):
        sources.append(WeightSource(tuple(_of_origin(spec, model, problems)), None, (spec,)))
    problems += [problem for source in sources for file in source.files if (problem := proved(file))]
    if problems:
        raise ConfigError("weight files: " + "; ".join(dict.fromkeys(problems)))
    return _without_repeats(sources)


def fingerprints(sources: Iterable[WeightSource]) -> list[dict[str, Any]]:
    """[{name, num_bytes, sha256}] of their files, without their folders: the same wherever they lie."""
    rows = []
    for file in (file for source in sources for file in source.files):
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        rows.append({"name": file.name, "num_bytes": file.stat().st_size, "sha256": digest})
    return rows


def load(
    module: nn.Module, sources: Sequence[WeightSource], model: ModelConfig, *, may_lack: Sequence[str] | None = ()
) -> dict[str, str]:
    """Fill `module` from files; returns which child ("" for the whole module) each path of the user went to.

    may_lack: children that this task may do without: files of one that is not there are skipped; None: any child.
    Raises ConfigError, before the first tensor is changed, for keys that are missing or unexpected and not allowed to
    be, for files that fit no child or several, and at the end for tensors of a meta module that no file had.
    """
    states = [read_state(source.files) for source in sources]
    went: dict[str, str] = {}
    chosen: dict[str, tuple[WeightSource, dict[str, Tensor]]] = {}
    for source, state in zip(sources, states, strict=True):
        skips = may_lack is None or bool([name for name in may_lack if not _has(module, name)])
        match = fit.choose(
            module, source.child, state, what=", ".join(source.written), may_lack=may_lack,
            skips_strangers=skips, allow_missing=model.allow_missing, allow_unexpected=model.allow_unexpected,
        )  # fmt: skip
        if match is None:
            _log.info("skipped %s: this task does without its model", ", ".join(source.written))
            continue
        went.update(dict.fromkeys(source.written, match.child))
        if match.child in chosen:
            first = ", ".join(chosen[match.child][0].written)
            _log.warning("%s has weights from %s already; left out: %s", match.child, first, ", ".join(source.written))
            continue
        chosen[match.child] = (source, {name: state[key] for key, name in match.names.items()})
    for child, (source, tensors) in chosen.items():
        _fill(module, tensors)
        _log.info("%s: %d tensors from %s", child or "all models", len(tensors), ", ".join(source.written))
    _require_memory(module)
    return went


@dataclass(frozen=True)
class WeightFile:
    """What one file of a save holds. name: "" for the only one, else the child, or "lora"; metadata: for its header."""

    name: str
    tensors: dict[str, Tensor]
    metadata: dict[str, str]


def trainable_state(module: nn.Module, state: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """What of `module` trains, by its names in the module, those of adapters without peft's ".default.".

    The buffers of a child of which everything trains are there too, since they are what its training made of them.
    state: the parameters, where they were gathered from several processes, or are others' (a moving average's).
    """
    held = dict(module.named_parameters()) if state is None else state
    found = {name: held[name] for name, parameter in module.named_parameters() if parameter.requires_grad}
    for child, part in module.named_children():
        parameters = list(part.parameters())
        if parameters and all(parameter.requires_grad for parameter in parameters):
            found |= {f"{child}.{name}": held.get(f"{child}.{name}", buffer) for name, buffer in _buffers(part)}
    return {lora.plain_name(name): tensor.detach() for name, tensor in found.items()}


def _buffers(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Those that a state dict has, without asking for one, which takes all processes where weights are spread."""
    for above, holder in part.named_modules():
        for name, buffer in holder.named_buffers(recurse=False):
            if name not in holder._non_persistent_buffers_set:
                yield (f"{above}.{name}" if above else name), buffer


def files(module: nn.Module, state: Mapping[str, Tensor] | None = None) -> tuple[WeightFile, ...]:
    """`trainable_state` as files: one, named "", or one a child where several train; adapters in one of their own.

    The adapters' file is named "lora" where something else trains too; its keys are those of plain peft, below the
    model that has them, and its metadata has rank and alpha.
    """
    everything = trainable_state(module, state)
    children: dict[str, dict[str, Tensor]] = {}
    for name, tensor in everything.items():
        if not lora.is_adapter(name):
            children.setdefault(name.partition(".")[0] if "." in name else "", {})[name] = tensor
    alone = len(children) == 1
    parts = [WeightFile("" if alone else child, tensors, {}) for child, tensors in children.items()]
    adapters = lora.adapter_state(module, state)
    if adapters:
        parts.append(WeightFile("lora" if parts else "", adapters, lora.metadata(module)))
    return tuple(parts)


def remove_prefix(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors with `prefix` cut from the names that begin with it. Raises ConfigError if two become one."""
    renamed = {name: name.removeprefix(prefix) for name in state}
    if len(set(renamed.values())) < len(renamed):
        twice = sorted(name for name, new in renamed.items() if new != name and new in state)
        raise ConfigError(f"remove_prefix is {prefix!r}, without which {twice[0]} has another one's name; leave it")
    return {new: state[name] for name, new in renamed.items()}


def _expand(path: str, problems: list[str]) -> list[Path]:
    file = Path(path).expanduser()
    if file.is_file():
        return [file]
    if file.is_dir():
        problems.append(f"{path} is a folder; name its files, as {path.rstrip('/')}/*.safetensors")
        return []
    found = sorted(Path(name) for name in glob.glob(str(file)) if Path(name).is_file())  # noqa: PTH207  # absolute ones
    if not found:
        problems.append(f"{path} is not there" if not glob.has_magic(path) else f"{path} matches no file")
    return found


def _of_origin(spec: str, model: ModelConfig, problems: list[str]) -> list[Path]:
    name, colon, pattern = spec.rpartition(":")
    if not (colon and name and pattern) or Path(name).is_absolute() or Path(pattern).is_absolute():
        problems.append(f"{spec!r} of id_with_origin_paths is not of the form id:glob")
        return []
    root = model.root or Path(next((os.environ[key] for key in ROOT_VARIABLES if os.environ.get(key)), "models"))
    folder = root.expanduser() / name
    if _asks_hub(model) and not _download(name, pattern, folder, problems):
        return []
    found = sorted(path for path in folder.glob(pattern) if path.is_file())
    if not found:
        hint = "" if _asks_hub(model) else "; put it there, or let model.download fetch it"
        problems.append(f"{spec!r} matches no file below {folder}{hint}")
    return found


def _asks_hub(model: ModelConfig) -> bool:
    off = os.environ.get("DIFFSYNTH_SKIP_DOWNLOAD", "").lower() in ("true", "1")
    offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    return model.download and not off and not offline


def _download(name: str, pattern: str, folder: Path, problems: list[str]) -> bool:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        problems.append(f"{name}: model.download needs the package huggingface_hub")
        return False
    try:
        snapshot_download(repo_id=name, allow_patterns=pattern, local_dir=folder)
    except Exception as error:  # noqa: BLE001  # of many libraries: what it is, the message says
        reason = " ".join(str(error).split())[:300]
        problems.append(f"the hub does not give {name} ({type(error).__name__}: {reason}); or set model.download=false")
        return False
    return True


def _without_repeats(sources: list[WeightSource]) -> tuple[WeightSource, ...]:
    seen: dict[tuple[Path, ...], WeightSource] = {}
    kept = []
    for source in sources:
        key = tuple(file.resolve() for file in source.files)
        first = seen.setdefault(key, source)
        # One file may be named for two children, which are then alike; and once for the one that it fits.
        if first is not source and (source.child is None or source.child == first.child):
            _log.warning("%s is named twice; the first counts", ", ".join(source.written))
            continue
        kept.append(source)
    return tuple(kept)


def _has(module: nn.Module, child: str) -> bool:
    return isinstance(fit.part_of(module, child), nn.Module)


def _fill(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copied, in the dtype that the module has; a tensor without memory is replaced by the file's, in its dtype."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    twins: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        twins.setdefault(id(parameter), []).append(name)
    plain, replaced = {}, {}
    for name, tensor in tensors.items():
        there = parameters.get(name)
        if there is None or not there.is_meta:
            plain[name] = tensor
            continue
        # A copy, because the file may go or change while the run lasts.
        filled = nn.Parameter(tensor.clone(), requires_grad=there.requires_grad and tensor.is_floating_point())
        replaced.update(dict.fromkeys(twins[id(there)], filled))
    module.load_state_dict(plain, strict=False)
    module.load_state_dict(replaced, strict=False, assign=True)


def _require_memory(module: nn.Module) -> None:
    empty = [name for name, tensor in module.named_parameters() if tensor.is_meta]
    if empty:
        raise ConfigError(
            f"init is 'meta' and no weight file has {fit.some(empty)}; give the files, or init='cpu' to have the "
            "factory fill what they lack"
        )
