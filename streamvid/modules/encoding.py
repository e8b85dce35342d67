"""Conversion of a module's `encode` output to stored features, and identification of its encoders."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn

from streamvid.dataset.features.sidecar import REMEDY, Sidecar, differences
from streamvid.dataset.features.tensors import RawTensor
from streamvid.errors import ConfigError
from streamvid.host.resources import usable_cores
from streamvid.loader.batch.features import collate, raw_tensor
from streamvid.modules.config import ModelConfig
from streamvid.modules.parts import part_of
from streamvid.modules.weight_files import Fingerprint, WeightSource, fingerprints, read_state, resolve
from streamvid.modules.weights import choose
from streamvid.plan.hashing import hash64, hash_text

if TYPE_CHECKING:
    from streamvid.dataset.manifest import ShardInfo
    from streamvid.loader.batch.batch import Batch
    from streamvid.loader.by_shard import ByShard

FeatureRow: TypeAlias = Mapping[str, RawTensor]

_log = logging.getLogger(__name__)
_PATH = re.compile(r"^[^\n]*[./\\][^\n]*$")  # a word such as "patch", without a dot or a slash, is not a path

VERSION = 1
"""Version of the conversion from a sample to its tensors."""


@dataclass(frozen=True)
class Encoder:
    """Module that encodes batches on its device.

    dtype: dtype to which floating-point outputs are converted; None for no conversion.
    seed: combined with the first sample key and the visit number of each batch to seed the module's random numbers.
        Posterior samples, for example, are therefore the same in every process.
    """

    module: nn.Module
    device: torch.device
    dtype: torch.dtype | None
    seed: int

    def __post_init__(self) -> None:
        if not callable(getattr(self.module, "encode", None)):
            raise ConfigError(
                f"{type(self.module).__name__}, built by model.factory, has no `encode` method, which task "
                "sft:data_process requires; add an encode(batch) method that returns a mapping from names to tensors"
            )

    def shard(
        self, source: ByShard, shard: ShardInfo, num_visits: int, on_batch: Callable[[int, int], object]
    ) -> Generator[tuple[str, list[FeatureRow | None]]]:
        """Yield the key of each sample in a shard, in order, with one row of tensors per visit (None for a bad sample).

        on_batch: called after each batch with the number of samples in the batch and the number of visits to bad
            samples.
        """
        for keys, batches in source.batches(shard, num_visits):
            made = [self.rows(one, visit) if one else [None] * len(keys) for visit, one in enumerate(batches)]
            yield from zip(keys, map(list, zip(*made, strict=True)), strict=True)
            on_batch(len(keys), sum(rows.count(None) for rows in made))

    def rows(self, batch: Batch, visit: int) -> list[FeatureRow | None]:
        """Encode a batch. Return one row per sample, with None for each sample that substitutes for a bad one.

        If the module returns a list of tensors, their first dimensions may have different sizes. Raises ConfigError for
        tensors that cannot be stored.
        """
        with self._run(hash_text(batch.sample_keys[0]), visit):
            encoded: object = self.module.encode(batch.to(self.device))  # type: ignore[operator]  # checked above
        if not isinstance(encoded, Mapping) or not encoded:
            found = (
                "an empty mapping" if isinstance(encoded, Mapping) else f"an object of type {type(encoded).__name__}"
            )
            raise ConfigError(f"encode returned {found}; it must return a mapping from names to tensors")
        rows: list[dict[str, RawTensor]] = [{} for _ in batch.sample_keys]
        for name, tensors in encoded.items():
            _check_rows(name, tensors, len(rows))
            for row, tensor in zip(rows, tensors, strict=True):
                row[name] = _raw(name, tensor, self.dtype, is_ragged=not isinstance(tensors, Tensor))
        return [None if other else row for row, other in zip(rows, batch.is_repeat.tolist(), strict=True)]

    def null(self) -> FeatureRow | None:
        """Return the tensors for an empty text from the module's `encode_null`, or None if that method is missing."""
        if not hasattr(self.module, "encode_null"):
            return None
        with self._run():
            found: object = self.module.encode_null()  # type: ignore[operator]  # the contract says so
        if not isinstance(found, Mapping):
            kind = type(found).__name__
            raise ConfigError(
                f"encode_null returned an object of type {kind}; it must return a mapping from names to tensors"
            )
        return {name: _raw(name, tensor, self.dtype, method="encode_null") for name, tensor in found.items()}

    @contextmanager
    def _run(self, *place: int) -> Iterator[None]:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(hash64(self.seed, *place))
            yield


def _check_rows(name: str, tensors: object, count: int) -> None:
    is_right = isinstance(tensors, Tensor | list | tuple) and (not isinstance(tensors, Tensor) or tensors.ndim > 0)
    if not is_right or len(tensors) != count:  # type: ignore[arg-type]  # has a length if it is right
        if isinstance(tensors, Tensor):
            found = f"a tensor of shape {tuple(tensors.shape)}"
        elif isinstance(tensors, list | tuple):
            found = f"a list of length {len(tensors)}"
        else:
            found = f"an object of type {type(tensors).__name__}"
        raise ConfigError(
            f"encode returned {found} as {name!r} for a batch of {count} samples; allowed: a tensor of shape "
            f"({count}, …), or a list of {count} tensors"
        )


def _raw(
    name: str, tensor: object, dtype: torch.dtype | None, *, is_ragged: bool = False, method: str = "encode"
) -> RawTensor:
    if not isinstance(tensor, Tensor):
        raise ConfigError(f"{method} returned an object of type {type(tensor).__name__} as {name!r}; allowed: tensors")
    try:
        return raw_tensor(
            tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype), is_ragged=is_ragged
        )
    except ConfigError as error:
        raise ConfigError(f"{method} returned an invalid tensor as {name!r}: {error}") from error


def with_encoded(batch: Batch, encoded: Mapping[str, Tensor | Sequence[Tensor]]) -> Batch:
    """Return a batch with the output of `encode` added.

    Lists of tensors are padded and get a mask, as in batches of stored features.
    """
    if taken := encoded.keys() & set(batch):
        raise ConfigError(f"encode returned {min(taken)!r}, which is already a field of the batch; use another name")
    ragged = {name: tensors for name, tensors in encoded.items() if not isinstance(tensors, Tensor)}
    whole = {name: tensor for name, tensor in encoded.items() if name not in ragged}
    return batch.with_fields({**whole, **collate(ragged, set(ragged))})


def facts(module: nn.Module, model: ModelConfig) -> dict[str, object]:
    """Return everything that determines the output of `encode`, as JSON values.

    Encoders are identified by their weights, regardless of the source of the weights. The module's `encoder_args`
    attribute may list the factory arguments that the encoders depend on. If it does, features remain valid when other
    arguments change.
    """
    names = getattr(module, "encoder_args", None)
    encoders = getattr(module, "encoders", ())
    of_files = _encoder_sources(module, model, encoders)
    filled = {child for _, child in of_files}
    return {
        **_recipe(model, names, has_encoders=bool(encoders)),
        "encoder_args": None if names is None else sorted(names),
        "weights": fingerprints(file for source, _ in of_files for file in source.files),
        "encoders_sha256": digest_parts(module, encoders or ("",)),
        "encoders_without_files": [] if "" in filled else sorted(set(encoders) - filled),
    }


def check_fresh(
    sidecar: Sidecar,
    model: ModelConfig,
    module: nn.Module | None = None,
    build: Callable[[], nn.Module] | None = None,
) -> None:
    """Raise ConfigError if the encoders that computed the features differ from the encoders of `model`.

    module: built module, whose encoder weights are compared.
    build: function that builds a module with its encoders. It is called only if `module` lacks an encoder whose weights
        did not come from a weight file. If the encoders cannot be built, a warning is logged.
    Datasets and views are not compared here, because the loader compares them.
    """
    made = sidecar.manifest.made_with
    digests = {name: digest for name, digest in made.get("encoders_sha256", {}).items() if name}  # "": no `encoders`
    now = _recipe(model, made.get("encoder_args"), has_encoders=bool(digests))
    problems = differences({name: made.get(name) for name in now}, now)
    if made.get("encoder_args") is None and made.get("args") != now["args"]:
        problems[-1] += (
            " (to compare only the arguments that affect the encoders, list them in the module's encoder_args)"
        )
    problems += _changed_files(made.get("weights", ()), model)
    here = {} if module is None else digest_parts(module, digests)
    unseen = [name for name in made.get("encoders_without_files", ()) if name not in here]
    if unseen and build is not None and not problems:
        here |= _built(build, unseen, sidecar.url)
    problems += differences({name: digests[name] for name in here}, here, "encoders_sha256")
    if problems:
        raise ConfigError(f"features {sidecar.url} are stale: {'; '.join(problems)}; {REMEDY}")


def _built(build: Callable[[], nn.Module], names: Collection[str], url: str) -> dict[str, str]:
    _log.info(
        "building the encoders %s once, to compare their weights with the weights of the encoders that computed %s",
        ", ".join(names),
        url,
    )
    try:
        return digest_parts(build(), names)
    except (OSError, ImportError, ConfigError) as error:
        _log.warning("features %s may be stale: their encoders cannot be built here (%s)", url, error)
        return {}


def _recipe(model: ModelConfig, names: Collection[str] | None, *, has_encoders: bool) -> dict[str, object]:
    """Return the settings that define the encoders, without their weights.

    names: factory arguments that the encoders depend on; None for all arguments.
    has_encoders: True if the encoders' weights are recorded. The name of the factory is then ignored.
    """
    args = {name: portable(value) for name, value in model.args.items() if names is None or name in names}
    return {"version": VERSION, "factory": None if has_encoders else model.factory, "args": args}


def portable(value: object) -> object:
    """Return a factory argument with all paths replaced, because files and folders may move.

    The path of a file is replaced with the SHA-256 of the file, and any other path with a placeholder. Weights in a
    folder are compared after they are loaded.
    """
    if isinstance(value, Mapping):
        return {str(name): portable(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [portable(one) for one in value]
    if not isinstance(value, Path) and not (isinstance(value, str) and _PATH.search(value)):
        return value
    path = Path(value).expanduser()
    if path.is_file():
        return f"file with SHA-256 {fingerprints([path])[0]['sha256']}"
    return "path (not a file)" if path.is_dir() or path.is_absolute() else str(value)


def digest_parts(module: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return a mapping from each name in `names` to the SHA-256 of that part's weights. Missing parts are omitted."""
    parts = {name: part for name in names if (part := part_of(module, name)) is not None}
    return {name: digest_tensors(part.state_dict(), type(part).__qualname__) for name, part in parts.items()}


def digest_tensors(tensors: Mapping[str, object], otherwise: str = "") -> str:
    """Return a SHA-256 hash of all tensors and their names, or of the text `otherwise` if there are no tensors."""
    named = [(name, tensor) for name, tensor in sorted(tensors.items()) if isinstance(tensor, Tensor)]
    with ThreadPoolExecutor(max_workers=min(8, usable_cores())) as pool:
        lines = list(pool.map(_digest_line, named))
    return hashlib.sha256(("".join(lines) or otherwise).encode()).hexdigest()


def _digest_line(named: tuple[str, Tensor]) -> str:
    name, tensor = named
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{name} {tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(data.data).hexdigest()}\n"


def _encoder_sources(
    module: nn.Module, model: ModelConfig, encoders: Collection[str]
) -> list[tuple[WeightSource, str]]:
    """Return a (source, child name) pair for each weight source that fills one of `encoders` or the whole module."""
    found = [(source, _child(module, model, source)) for source in resolve(model.weights)]
    return [(one, child) for one, child in found if child is not None and (not encoders or child in ("", *encoders))]


def _child(module: nn.Module, model: ModelConfig, source: WeightSource) -> str | None:
    try:
        match = choose(module, source, read_state(source.files), model.weights, may_lack=None)
    except ConfigError:  # it was loaded, but names have changed since, as in 8 bits: an extra file is harmless
        return ""
    return None if match is None else match.child


def _changed_files(recorded: Iterable[Fingerprint], model: ModelConfig) -> list[str]:
    """Describe the recorded encoder weight files whose content differs from the corresponding files in `model`.

    Files correspond if they have the same name or size. A recorded file without a counterpart is ignored, because
    training needs no encoder.
    """
    files = [file for source in resolve(model.weights) for file in source.files]
    problems = []
    for one in recorded:
        near = [file for file in files if file.name == one["name"] or file.stat().st_size == one["num_bytes"]]
        found = fingerprints(near)
        if found and one["sha256"] not in [other["sha256"] for other in found]:
            here = ", ".join(f"{other['name']} with SHA-256 {other['sha256'][:12]}" for other in found)
            problems.append(
                f"weights are {one['name']} with SHA-256 {one['sha256'][:12]} in the features, but {here} here"
            )
    return problems
