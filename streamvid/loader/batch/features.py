"""Precomputed features in place of clips: compatibility checks, and tensors as fields of a batch.

Legend: B samples, L the largest first dimension in a batch, for tensors whose first dimension varies between samples.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamvid.dataset.features.sidecar import Sidecar, differences
from streamvid.dataset.features.tensors import RawTensor
from streamvid.errors import ConfigError, StreamvidError
from streamvid.loader.batch.batch import STANDARD_FIELDS
from streamvid.loader.batch.tokens import MASK, TOKENS
from streamvid.loader.delivery.delivery import sample_error
from streamvid.loader.delivery.pending import PendingBatch
from streamvid.loader.mix import Mix, MixPart
from streamvid.loader.options import OutputOptions
from streamvid.loader.stores import Stores
from streamvid.storage import open_store

if TYPE_CHECKING:
    import torch

_DTYPES = {
    "I64": "int64",
    "F64": "float64",
    "F32": "float32",
    "I32": "int32",
    "BF16": "bfloat16",
    "F16": "float16",
    "I16": "int16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


def raw_tensor(tensor: torch.Tensor, *, is_ragged: bool = False) -> RawTensor:
    """Return one sample's tensor in the format of stored features. Raises ConfigError for an unsupported dtype."""
    import torch

    names = {getattr(torch, name): dtype for dtype, name in _DTYPES.items()}
    if tensor.dtype not in names:
        raise ConfigError(f"dtype={tensor.dtype} cannot be stored; allowed: {', '.join(map(str, names))}")
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return RawTensor(names[tensor.dtype], tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes(), is_ragged)


def torch_tensor(raw: RawTensor) -> torch.Tensor:
    """Return a stored tensor as a torch tensor, sharing the memory of its bytes if possible."""
    import numpy as np
    import torch

    dtype = getattr(torch, _DTYPES[raw.dtype])
    if not raw.num_bytes:
        return torch.empty(raw.shape, dtype=dtype)
    data = np.frombuffer(raw.data, np.uint8)
    if raw.dtype == "BOOL":  # in a hostile file, the bytes may have any value
        return torch.from_numpy(data != 0).reshape(raw.shape)
    values = torch.from_numpy(data if data.flags.writeable else data.copy())
    return values.view(dtype).reshape(raw.shape)


def collate(tensors: Mapping[str, Sequence[torch.Tensor]], ragged: Collection[str] = ()) -> dict[str, torch.Tensor]:
    """Return one tensor per name, with shape (B, …), stacked from the tensors of B samples.

    Tensors with a name in `ragged` may differ in their first dimension. They are padded with zeros to (B, L, …), and
    `<name>_mask`, bool with shape (B, L), is False for padding. Raises ConfigError, which names the tensor and its
    shapes, if tensors cannot be combined.
    """
    import torch

    fields: dict[str, torch.Tensor] = {}
    for name, several in tensors.items():
        first = several[0]
        if name in ragged and not first.ndim:
            raise ConfigError(
                f"tensor {name!r} is a scalar; if an encoder returns a list of tensors, each tensor must have at least "
                "one dimension"
            )
        kinds = {(one.dtype, one.shape[1:] if name in ragged else one.shape) for one in several}
        if len(kinds) > 1:
            shapes = ", ".join(dict.fromkeys(f"{one.dtype} {tuple(one.shape)}" for one in several))
            raise ConfigError(
                f"tensor {name!r}: all tensors in a batch must have the same dtype and shape, but these are {shapes}; "
                "only tensors that an encoder returns as a list may differ, and only in their first dimension"
            )
        if name not in ragged:
            fields[name] = _joined(several, first.shape)
            continue
        lengths = [len(one) for one in several]
        fields[name] = _joined(several, (max(lengths), *first.shape[1:]))
        places = torch.arange(max(lengths), device=first.device)
        fields[f"{name}_mask"] = places < torch.tensor(lengths, device=first.device)[:, None]
    return fields


def _joined(several: Sequence[torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
    """Return tensors stacked to shape (B, *shape). Shorter tensors are padded with zeros along the first dimension."""
    import numpy as np
    import torch

    first = several[0]
    if first.device.type != "cpu" or not math.prod(shape) or any(one.requires_grad for one in several):
        joined = torch.zeros((len(several), *shape), dtype=first.dtype, device=first.device)
        for place, one in zip(joined, several, strict=True):
            (place if one.shape == place.shape else place[: len(one)]).copy_(one)
        return joined
    # Copy bytes, because torch's copies wait for all of its threads, which takes far longer on a busy machine.
    rooms = np.zeros((len(several), math.prod(shape) * first.itemsize), np.uint8)
    for room, one in zip(rooms, several, strict=True):
        room[: one.nbytes] = one.contiguous().reshape(-1).view(torch.uint8).numpy()
    return torch.from_numpy(rooms).reshape(-1).view(first.dtype).reshape(len(several), *shape)


def tensor_fields(pending: PendingBatch, memory: memoryview) -> dict[str, torch.Tensor]:
    """Return the tensors of a complete batch, copied from `memory`.

    Samples with an empty text receive the precomputed tensors for an empty text.
    Raises SampleError, which names the sample, if a features file is invalid.
    """
    found: list[dict[str, torch.Tensor]] = []
    for index, delivery in enumerate(pending.deliveries):
        place, sample, sidecar = pending.clips[index], delivery.sample, delivery.sample.part.sidecar
        assert sidecar is not None
        own = place.own
        data = memory[place.offset : place.offset + place.num_bytes] if own is None else memoryview(bytearray(own))
        try:
            tensors = sidecar.tensors(data, f"{sidecar.url}: {sample.file.path}, the features of {delivery.key}")
        except StreamvidError as error:
            raise sample_error(sample, delivery.key, error) from error
        tensors |= {} if delivery.caption else sidecar.null
        found.append({name: torch_tensor(raw) for name, raw in tensors.items()})
    first = pending.deliveries[0]
    assert first.sample.part.sidecar is not None
    kinds = first.sample.part.sidecar.manifest.tensors
    try:
        ragged = {name for name, kind in kinds.items() if kind.is_ragged}
        return collate({name: [one[name] for one in found] for name in kinds}, ragged)
    except ConfigError as error:
        raise sample_error(first.sample, first.key, f"{error}; copy the features again") from error


def view_facts(part: MixPart, output: OutputOptions) -> Mapping[str, Any]:
    """Return, as JSON, the values that determine the view and the texts of a visit to a sample, except caption dropout.

    The encoder stores these values with the features, in `made_with` under "view". The loader verifies that they match.
    """
    view, options = part.view, part.text.options
    return {
        "seed": part.seed,
        "temporal": view.temporal,
        "max_interval": view.max_interval,
        "spatial": view.spatial,
        "spatial_scale": None if view.spatial_scale is None else list(view.spatial_scale),
        "pixels": output.pixels,
        "accuracy": output.accuracy,
        "caption_column": {name: float(weight) for name, weight in options.weights.items()},
        "caption_choice": options.choice,
        "caption_template": options.template,
        "caption_prefix": options.prefix,
        "caption_part_dropout": float(options.part_dropout),
        # `annotate` may have changed the values of caption columns.
        "caption_values": part.dataset.columns_digest(part.text.needed),
    }


def with_features(
    mix: Mix, features: object, stores: Stores, facts: Sequence[Mapping[str, Any]], columns: Collection[str]
) -> Mix:
    """Return the mix with features instead of clips.

    facts: result of `view_facts` for each part.
    Raises ConfigError, which names all differences, if features were created from a different dataset or with different
    options. Raises DatasetError or StorageError if features cannot be read.
    """
    if features is None:
        return mix
    if not isinstance(features, str | Path | Sidecar | Sequence):
        raise ConfigError(
            f"features={features!r}: must be a path, a URL, an open Sidecar, or a list with one of these per dataset"
        )
    several: list[Any] = [features] if isinstance(features, str | Path | Sidecar) else list(features)
    if len(several) != len(mix.parts):
        raise ConfigError(
            f"features: the number of entries is {len(several)}, but must be {len(mix.parts)}: one per dataset"
        )
    parts = [_with_sidecar(part, one, stores, fact) for part, one, fact in zip(mix.parts, several, facts, strict=True)]
    found = [part.sidecar for part in parts if part.sidecar is not None]
    if not found:
        raise ConfigError("features: all datasets contain only text, which has no features; leave features out")
    for other in found:
        _check_alike(found[0], other)
    _check_names(found[0], columns)
    return replace(mix, parts=tuple(parts))


def _with_sidecar(part: MixPart, given: object, stores: Stores, facts: Mapping[str, Any]) -> MixPart:
    dataset, is_text = part.dataset, part.dataset.manifest.clips == "text"
    if given is None and is_text:
        return part
    if is_text or not isinstance(given, str | Path | Sidecar):
        why = (
            "a text-only dataset has no features, so its entry must be None"
            if is_text
            else "a dataset of clips needs a path, a URL or an open Sidecar"
        )
        raise ConfigError(f"features={given!r} cannot be used with {dataset.url}: {why}")
    sidecar = given if isinstance(given, Sidecar) else Sidecar(open_store(given, stores.options), stores.cache)
    sidecar.check_base(dataset)
    if problems := differences(sidecar.manifest.made_with.get("view", {}), facts):
        raise ConfigError(
            f"features={sidecar.url!r}: these features for {dataset.url} were computed with view options that "
            f"differ from this loader's ({'; '.join(problems)}); use the options with which the features "
            "were created, or "
            "create the features again with `streamvid encode`"
        )
    _ = sidecar.null  # read and verified before the first batch
    return replace(part, sidecar=sidecar)


def _check_alike(first: Sidecar, other: Sidecar) -> None:
    mine, theirs = (
        {name: [kind.dtype, kind.is_ragged] for name, kind in one.manifest.tensors.items()} for one in (first, other)
    )
    places = ("in the former", "in the latter")
    problems = differences(mine, theirs, "tensors", places)
    problems += differences(sorted(first.null), sorted(other.null), "null", places)
    if problems:
        raise ConfigError(
            f"features {first.url} and {other.url} contain different tensors, which a batch cannot combine: "
            f"{'; '.join(problems)}; encode both datasets with the same encoder"
        )


def _check_names(sidecar: Sidecar, columns: Collection[str]) -> None:
    kinds = sidecar.manifest.tensors
    names = [*kinds, *(f"{name}_mask" for name, kind in kinds.items() if kind.is_ragged)]
    taken = {*STANDARD_FIELDS, *columns, TOKENS, MASK}
    if both := sorted(name for name in names if name in taken or names.count(name) > 1):
        raise ConfigError(
            f"features={sidecar.url!r}: these features contain tensors with the names of other batch fields: "
            f"{', '.join(both)}; rename the tensors in the encoder, or leave out columns with these names"
        )
