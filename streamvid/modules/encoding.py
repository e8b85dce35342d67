"""What a module's `encode` makes, as sidecars store it, and what its encoders are known by."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from streamvid.dataset.features.sidecar import REMEDY, Sidecar, differences
from streamvid.dataset.features.tensors import RawTensor
from streamvid.errors import ConfigError
from streamvid.loader.batch.features import collate, raw_tensor
from streamvid.modules import fit
from streamvid.modules.config import ModelConfig
from streamvid.modules.state_files import read_state
from streamvid.modules.weights import WeightSource, fingerprints, resolve
from streamvid.plan.hashing import hash64, hash_text

if TYPE_CHECKING:
    from streamvid.dataset.manifest import ShardInfo
    from streamvid.loader.batch.batch import Batch
    from streamvid.loader.by_shard import ByShard

Row: TypeAlias = Mapping[str, RawTensor]

VERSION = 1
"""Of the way from a sample to its tensors."""


@dataclass(frozen=True)
class Encoder:
    """A module that encodes, where it is. dtype: of what it gives as floats; None: as it gives them.

    seed: each batch has a seed made of this, its first key and its visit, so that what the module draws by itself, as
    from a posterior, is the same whoever encodes the batch. precision: makes a context to run the module in.
    """

    module: nn.Module
    device: torch.device
    dtype: torch.dtype | None
    seed: int
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext

    def __post_init__(self) -> None:
        if not callable(getattr(self.module, "encode", None)):
            raise ConfigError(
                f"factory: its {type(self.module).__name__} has no `encode`, which the task sft:data_process asks for: "
                "encode(batch) → tensors by name"
            )

    def shard(
        self, source: ByShard, shard: ShardInfo, num_visits: int, told: Callable[[int, int], object]
    ) -> Generator[tuple[str, list[Row | None]]]:
        """Each sample of a shard, in its order, with its tensors a visit, None where it is bad.

        told: called after each batch with the number of its samples, and of their visits that are bad.
        """
        for keys, batches in source.batches(shard, num_visits):
            made = [self.rows(one, visit) if one else [None] * len(keys) for visit, one in enumerate(batches)]
            yield from zip(keys, map(list, zip(*made, strict=True)), strict=True)
            told(len(keys), sum(rows.count(None) for rows in made))

    def rows(self, batch: Batch, visit: int) -> list[Row | None]:
        """What `encode` makes of each sample of a batch; None for one that took the place of a bad one.

        A list of tensors is ragged: of each the first size may be another. ConfigError for what cannot be stored.
        """
        with self._run(hash_text(batch.sample_keys[0]), visit):
            encoded: object = self.module.encode(batch.to(self.device))  # type: ignore[operator]  # checked above
        if not isinstance(encoded, Mapping) or not encoded:
            raise ConfigError(f"encode gave {type(encoded).__name__}; it has to give tensors by name")
        rows: list[dict[str, RawTensor]] = [{} for _ in batch.sample_keys]
        for name, tensors in encoded.items():
            _check_rows(name, tensors, len(rows))
            for row, tensor in zip(rows, tensors, strict=True):
                row[name] = _raw(name, tensor, self.dtype, is_ragged=not isinstance(tensors, Tensor))
        return [None if other else row for row, other in zip(rows, batch.is_repeat.tolist(), strict=True)]

    def null(self) -> Row | None:
        """What stands in for the tensors of a text where there is none, as `encode_null` says; None: nothing."""
        if not hasattr(self.module, "encode_null"):
            return None
        with self._run():
            found: Mapping[str, Tensor] = self.module.encode_null()  # type: ignore[operator]  # the contract says so
        return {name: _raw(name, tensor, self.dtype) for name, tensor in found.items()}

    @contextmanager
    def _run(self, *place: int) -> Iterator[None]:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), self.precision():
            torch.manual_seed(hash64(self.seed, *place))
            yield


def _check_rows(name: str, tensors: object, count: int) -> None:
    is_right = isinstance(tensors, Tensor | list | tuple) and (not isinstance(tensors, Tensor) or tensors.ndim > 0)
    if not is_right or len(tensors) != count:  # type: ignore[arg-type]  # has a length if it is right
        found = tuple(tensors.shape) if isinstance(tensors, Tensor) else type(tensors).__name__
        raise ConfigError(
            f"encode gave {name!r} as {found} for a batch of {count} samples; allowed: a tensor ({count}, …), or "
            f"a list of {count} tensors"
        )


def _raw(name: str, tensor: object, dtype: torch.dtype | None, *, is_ragged: bool = False) -> RawTensor:
    if not isinstance(tensor, Tensor):
        raise ConfigError(f"encode gave {name!r} as {type(tensor).__name__}; allowed are tensors")
    try:
        return raw_tensor(
            tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype), is_ragged=is_ragged
        )
    except ConfigError as error:
        raise ConfigError(f"encode gave {name!r}: {error}") from error


def with_encoded(batch: Batch, encoded: Mapping[str, Tensor | Sequence[Tensor]]) -> Batch:
    """The batch with what `encode` made of it; a list of B tensors is padded, with a mask, as a sidecar's are."""
    if taken := encoded.keys() & set(batch):
        raise ConfigError(f"encode gives {min(taken)!r}, which the batch has already; allowed: any other name")
    ragged = {name: tensors for name, tensors in encoded.items() if not isinstance(tensors, Tensor)}
    whole = {name: tensor for name, tensor in encoded.items() if name not in ragged}
    return batch.with_fields({**whole, **collate(ragged, set(ragged))})


def _digest(module: nn.Module) -> str:
    """SHA-256 of all parameters and buffers of the module's `encoders`, by name; of all of it if it has none."""
    digest = hashlib.sha256()
    for name, tensor in sorted(_encoders(module).state_dict().items()):
        if isinstance(tensor, Tensor):
            raw = raw_tensor(tensor)
            digest.update(f"{name} {raw.dtype} {raw.shape}\n".encode())
            digest.update(raw.data)
    return digest.hexdigest()


def _encoders(module: nn.Module) -> nn.Module:
    names: Sequence[str] = getattr(module, "encoders", ())
    parts = {name.replace(".", "/"): part for name in names if (part := fit.part_of(module, name)) is not None}
    return nn.ModuleDict(parts) if names else module


def _encoder_files(module: nn.Module, model: ModelConfig) -> list[dict[str, Any]]:
    """[{name, num_bytes, sha256}] of the weight files that fill the module's `encoders`."""
    names = getattr(module, "encoders", ())
    return fingerprints(
        source for source in resolve(model) if not names or _child(module, model, source) in ("", *names)
    )


def _child(module: nn.Module, model: ModelConfig, source: WeightSource) -> str | None:
    try:
        match = fit.choose(
            module, source.child, read_state(source.files), what=", ".join(source.written), may_lack=None,
            skips_strangers=True, allow_missing=model.allow_missing, allow_unexpected=model.allow_unexpected,
        )  # fmt: skip
    except ConfigError:  # it was loaded, but the module has other names now, as for 8 bits: rather one file too many
        return ""
    return None if match is None else match.child


def _changed_files(recorded: Iterable[Mapping[str, Any]], model: ModelConfig) -> list[str]:
    """Of encoders' weight files that were recorded, those that `model` names with other bytes, for people.

    A file is meant that has the same name or size. One that `model` does not name is none: training needs no encoder.
    """
    files = [file for source in resolve(model) for file in source.files]
    problems = []
    for one in recorded:
        near = [file for file in files if file.name == one["name"] or file.stat().st_size == one["num_bytes"]]
        found = fingerprints(WeightSource((file,), None, ()) for file in near)
        if found and one["sha256"] not in [row["sha256"] for row in found]:
            told = ", ".join(f"{row['name']} with SHA-256 {row['sha256'][:12]}" for row in found)
            problems.append(f"weights are {one['name']} with SHA-256 {one['sha256'][:12]} there and {told} here")
    return problems


def facts(module: nn.Module, model: ModelConfig) -> dict[str, Any]:
    """What the tensors of `encode` depend on, as JSON. A module may name the factory's arguments that its encoders are
    made with, in `encoder_args`; the others may change then, and its sidecars stay fresh."""
    names = getattr(module, "encoder_args", None)
    return {
        "version": VERSION,
        "factory": model.factory,
        "encoder_args": None if names is None else sorted(names),
        "args": _arguments(model, names),
        "weights": _encoder_files(module, model),
        "encoders_sha256": _digest(module),
    }


def check_fresh(sidecar: Sidecar, model: ModelConfig, module: nn.Module | None = None) -> None:
    """ConfigError, naming what changed, for a sidecar of other encoders than `model` says, as far as is known without
    them; the loader compares dataset and views. module: where it has all of its encoders, their weights count too."""
    made = sidecar.manifest.made_with
    now = {"version": VERSION, "factory": model.factory, "args": _arguments(model, made.get("encoder_args"))}
    problems = differences({name: made.get(name) for name in now}, now)
    if made.get("encoder_args") is None and made.get("args") != now["args"]:
        problems[-1] += (
            " (arguments that encoders do not hang on may change: name the others in the module's encoder_args)"
        )
    problems += _changed_files(made.get("weights", ()), model)
    names = getattr(module, "encoders", ())
    if module is not None and names and all(fit.part_of(module, name) is not None for name in names):
        here = {"encoders_sha256": _digest(module)}
        problems += differences({"encoders_sha256": made.get("encoders_sha256")}, here)
    if problems:
        raise ConfigError(f"sidecar {sidecar.url} is stale: {'; '.join(problems)}; {REMEDY}")


def _arguments(model: ModelConfig, names: Iterable[str] | None) -> dict[str, Any]:
    """The factory's arguments of these names; None: all."""
    kept = None if names is None else set(names)
    return {name: value for name, value in model.args.items() if kept is None or name in kept}
