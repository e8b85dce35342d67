"""Precomputed features of single samples, which a loader delivers in place of clips."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from streamvid.dataset.features.sidecar import Sidecar, open_sidecar
from streamvid.dataset.features.tensors import RawTensor
from streamvid.dataset.reader import Dataset
from streamvid.errors import ConfigError, IntegrityError
from streamvid.preview.find import SamplePlace
from streamvid.preview.options import PreviewOptions
from streamvid.storage import StorageOptions, read_content

MAX_SHOWN_BYTES = 64 * 2**20
"""Limit for the features of one visit whose values are summarized."""

_NUMPY = {
    "I64": "<i8",
    "F64": "<f8",
    "F32": "<f4",
    "I32": "<i4",
    "F16": "<f2",
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
    "BOOL": "u1",
}


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """One stored tensor. The statistics are None if it is empty or NumPy does not support its type."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    minimum: float | None = None
    mean: float | None = None
    maximum: float | None = None


@dataclass(frozen=True, slots=True)
class VisitFeatures:
    """Features that a loader delivers for a visit.

    stored_visit: number of the stored visit, starting at 0.
    num_bytes: size of the features file in bytes; None if the encoder could not create the file.
    tensors: the tensors of the file; empty if the file does not exist or is larger than MAX_SHOWN_BYTES.
    """

    stored_visit: int
    num_bytes: int | None
    tensors: tuple[TensorFacts, ...] = ()


def open_features(
    datasets: Sequence[Dataset], options: PreviewOptions, storage: StorageOptions
) -> list[Sidecar | None]:
    """Open the features of each dataset.

    Raises ConfigError if the numbers of features and datasets differ, or if features belong to a different dataset.
    """
    given = (options.features,) if isinstance(options.features, str) else options.features
    if given is None:
        return [None] * len(datasets)
    if len(given) != len(datasets):
        raise ConfigError(
            "--features must be given once for each dataset, in the order of the datasets; number of datasets: "
            f"{len(datasets)}, number of --features: {len(given)}"
        )
    found = [open_sidecar(url, storage) for url in given]
    for sidecar, dataset in zip(found, datasets, strict=True):
        sidecar.check_base(dataset)
    return list(found)


def features_of(sidecar: Sidecar, place: SamplePlace, visit: int) -> VisitFeatures:
    """Return the features of a visit.

    Raises IntegrityError if the features are damaged, or StorageError if the features cannot be read.
    """
    stored = visit % sidecar.manifest.num_visits
    member = sidecar.members(place.shard).place(place.index, stored)
    if member is None:
        return VisitFeatures(stored, None)
    offset, num_bytes, sha256 = member
    if num_bytes > MAX_SHOWN_BYTES:
        return VisitFeatures(stored, num_bytes)
    shard, data = sidecar.shard(place.shard), bytearray(num_bytes)
    read_content(sidecar.store, shard.path, (shard.sha256, shard.num_bytes), [(offset, memoryview(data))])
    where = f"{sidecar.url}: {shard.path}, {num_bytes} bytes at offset {offset}"
    if hashlib.sha256(data).digest() != sha256:
        raise IntegrityError(f"{where} do not match the checksum in the table of members; copy the features again")
    tensors = sidecar.tensors(memoryview(data), where)
    return VisitFeatures(stored, num_bytes, tuple(_facts(name, one) for name, one in tensors.items()))


def settings_of(made_with: Mapping[str, object]) -> dict[str, str]:
    """Return the view from which features were made, as URL parameters. See the loader's `view_facts`."""
    view = made_with.get("view")
    facts = view if isinstance(view, Mapping) else {}
    scale, columns = facts.get("spatial_scale"), facts.get("caption_column")
    low, high = scale if isinstance(scale, list) and len(scale) == 2 else (None, None)
    found = {
        "seed": facts.get("seed"),
        "temporal": facts.get("temporal"),
        "interval": facts.get("max_interval"),
        "spatial": facts.get("spatial"),
        "scale_from": low,
        "scale_to": high,
        "caption": next(iter(columns), None) if isinstance(columns, Mapping) and len(columns) == 1 else None,
        "choice": facts.get("caption_choice"),
        "template": facts.get("caption_template"),
    }
    return {name: str(value) for name, value in found.items() if value is not None}


def _facts(name: str, tensor: RawTensor) -> TensorFacts:
    values = _values(tensor)
    if values is None or not math.prod(tensor.shape):
        return TensorFacts(name, tensor.dtype, tensor.shape)
    with np.errstate(all="ignore"):  # stored values may be anything
        low, mean, high = float(values.min()), float(values.mean(dtype=np.float64)), float(values.max())
    return TensorFacts(name, tensor.dtype, tensor.shape, low, mean, high)


def _values(tensor: RawTensor) -> npt.NDArray[np.generic] | None:
    if tensor.dtype == "BF16":  # the upper half of a float32
        return (np.frombuffer(tensor.data, "<u2").astype("<u4") << 16).view("<f4")
    kind = _NUMPY.get(tensor.dtype)
    return None if kind is None else np.frombuffer(tensor.data, kind)
