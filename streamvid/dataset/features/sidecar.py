"""Precomputed features: tensors encoded from each sample of a dataset and stored in separate shards.

dataset/README.md specifies the format. Features have `num_visits` entries per sample, in the order of the dataset.
Their manifest identifies the dataset and the encoder, so that readers can refuse stale features.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from streamvid.dataset.features.tables import MemberTable, SidecarShard, SidecarShards, most_index_bytes
from streamvid.dataset.features.tensors import DTYPES, RawTensor, check_name, decode_tensors
from streamvid.dataset.integrity import check_size, read_verified
from streamvid.dataset.manifest import FileInfo, ShardInfo
from streamvid.dataset.reader import Dataset
from streamvid.dataset.sealed_json import naming, read_sealed, sealed_json, unsealed_json
from streamvid.errors import ConfigError, DatasetError, IntegrityError
from streamvid.storage import BlockCache, CachedStore, StorageOptions, Store, open_store

FORMAT = "streamvid-sidecar"
FORMAT_VERSION = 1
NULL_FILE = "null.safetensors"
MAX_NULL_BYTES = 2**30
REMEDY = "create them again with `streamvid encode`, or use the features that belong to this dataset"
MAX_VISITS = 1 << 20
_KEPT_SHARDS = 256


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Type of a tensor.

    dtype: name of a safetensors type.
    is_ragged: True if the size of the first dimension can vary.
    """

    dtype: str
    is_ragged: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES or not isinstance(self.is_ragged, bool):
            raise DatasetError(
                f"a tensor has dtype={self.dtype!r}, is_ragged={self.is_ragged!r}; dtype must be one of "
                f"{', '.join(DTYPES)}, and is_ragged must be true or false; copy the features again"
            )


@dataclass(frozen=True, slots=True)
class SidecarManifest:
    """Manifest of sealed features.

    base_plan, base_content: the dataset's `plan` and `base` fingerprints.
    made_with: description of the encoder, as JSON.
    shard_file: file that contains the table of shards.
    null_file: file with null tensors. They replace the tensors with the same names if a sample is delivered without
        text.
    num_missing: number of visits that could not be encoded.
    """

    base_plan: str
    base_content: str
    made_with: Mapping[str, Any]
    num_visits: int
    tensors: Mapping[str, TensorInfo]
    shard_file: FileInfo
    null_file: FileInfo | None = None
    num_missing: int = 0

    def to_json(self) -> bytes:
        """Return the bytes of manifest.json."""
        return sealed_json(
            {
                "format": FORMAT,
                "format_version": FORMAT_VERSION,
                "base": {"plan": self.base_plan, "content": self.base_content},
                "made_with": dict(self.made_with),
                "num_visits": self.num_visits,
                "num_missing": self.num_missing,
                "tensors": {name: asdict(one) for name, one in self.tensors.items()},
                "shards": asdict(self.shard_file),
                "null": None if self.null_file is None else asdict(self.null_file),
            }
        )

    @staticmethod
    def from_json(data: bytes, where: str) -> SidecarManifest:
        """Parse manifest.json.

        Raises DatasetError if the file is invalid, and IntegrityError if its checksum is wrong.
        """
        with naming(where, "copy the file again, or create the features again with `streamvid encode`"):
            value = unsealed_json(data, FORMAT, FORMAT_VERSION)
            num_visits, null = value["num_visits"], value["null"]
            if type(num_visits) is not int or not 1 <= num_visits <= MAX_VISITS:
                raise DatasetError(
                    f"num_visits={num_visits!r}: must be an integer from 1 to {MAX_VISITS}; copy the file again"
                )
            return SidecarManifest(
                base_plan=str(value["base"]["plan"]),
                base_content=str(value["base"]["content"]),
                made_with=dict(value["made_with"]),
                num_visits=num_visits,
                tensors={check_name(n): TensorInfo(t["dtype"], t["is_ragged"]) for n, t in value["tensors"].items()},
                shard_file=FileInfo.from_json(value["shards"]),
                null_file=None if null is None else FileInfo.from_json(null),
                num_missing=int(value["num_missing"]),
            )


class Sidecar:
    """Sealed features in a store. Safe to use from several threads.

    The constructor reads only the manifest. A loader reads the members of feature tars in the same way as clips.
    """

    def __init__(self, store: Store, cache: BlockCache | None = None) -> None:
        self.manifest: SidecarManifest = read_sidecar_manifest(store)
        self._recent: dict[tuple[str, int, str], SidecarShard] = {}
        self.store = store if cache is None or store.is_local else CachedStore(store, cache, {})

    @property
    def url(self) -> str:
        return self.store.url

    def check_base(self, dataset: Dataset) -> None:
        """Verify that the features were created from this dataset.

        Raises ConfigError with the differences if the features were created from another dataset, and IntegrityError if
        the table of feature shards does not match the dataset.
        """
        of_it = {"plan": self.manifest.base_plan, "content": self.manifest.base_content}
        problems = differences(of_it, base_facts(dataset), "fingerprints")
        if problems:
            raise ConfigError(
                f"features={self.url!r}: these features were created from a dataset other than {dataset.url} "
                f"({'; '.join(problems)}); {REMEDY}"
            )
        if not np.array_equal(self._shards.base_sha256, dataset.shards.sha256):
            raise IntegrityError(
                f"{self.url}: the table of {len(self._shards)} shards does not match the {len(dataset.shards)} shards "
                f"of {dataset.url}; copy the features again"
            )

    @cached_property
    def _shards(self) -> SidecarShards:
        file = self.manifest.shard_file
        check_size(self.store, file)
        return SidecarShards.read(read_verified(self.store, file), f"{self.url}: {file.path}")

    @property
    def max_member_bytes(self) -> int:
        """Size in bytes of the largest member. A loader reserves this much memory to read a member."""
        return self._shards.max_member_bytes

    def shard(self, base: ShardInfo) -> SidecarShard:
        """Return the feature shard that matches a shard of the dataset. Raises IntegrityError if there is no match."""
        name = (base.bucket_id, base.number, base.sha256)
        found = self._recent.get(name)  # creating a SidecarShard from the table is slow
        if found is None:
            found = self._shards.shard(base)
            if found is None:
                raise IntegrityError(
                    f"{self.url}: the table of shards does not contain {base.path}; copy the features again"
                )
            if len(self._recent) >= _KEPT_SHARDS:
                self._recent.clear()
            self._recent[name] = found
        return found

    def members(self, base: ShardInfo) -> MemberTable:
        """Read the table of members for one of the dataset's shards, with one small read.

        Raises IntegrityError if the table is damaged, and StorageError if the table cannot be read.
        """
        shard, num_visits = self.shard(base), self.manifest.num_visits
        file = shard.index_file
        if file.num_bytes > most_index_bytes(base.num_samples, num_visits):
            raise IntegrityError(
                f"{self.url}: {file.path} is {file.num_bytes} bytes long, which is too long for {base.num_samples} "
                f"samples with {num_visits} visits; copy the features again"
            )
        return MemberTable.read(
            read_verified(self.store, file), shard, base.num_samples, num_visits, f"{self.url}: {file.path}"
        )

    def tensors(self, data: bytes | memoryview, where: str) -> dict[str, RawTensor]:
        """Return the tensors in a member as views of `data`. Raises IntegrityError unless they match the manifest."""
        found = decode_tensors(data, where)
        check_kinds(found, self.manifest.tensors, where)
        return found

    @cached_property
    def null(self) -> dict[str, RawTensor]:
        """Null tensors by name. They replace a sample's tensors if the sample is delivered without text."""
        file = self.manifest.null_file
        if file is None:
            return {}
        where = f"{self.url}: {file.path}"
        if file.num_bytes > MAX_NULL_BYTES:
            raise IntegrityError(
                f"{where} is {file.num_bytes} bytes long; at most {MAX_NULL_BYTES} are allowed; copy the file again"
            )
        check_size(self.store, file)
        found = decode_tensors(read_verified(self.store, file), where)
        check_kinds(found, self.manifest.tensors, where, is_part=True)
        return found


def check_kinds(
    found: Mapping[str, RawTensor], kinds: Mapping[str, TensorInfo], where: str, *, is_part: bool = False
) -> None:
    """Raise IntegrityError unless `found` has the tensors in `kinds`. With `is_part`, some tensors may be missing."""
    if not is_part and set(found) != set(kinds):
        raise IntegrityError(
            f"{where} has the tensors {sorted(found)}, but must have {sorted(kinds)}; copy the features again"
        )
    for name, one in found.items():
        kind = kinds.get(name)
        if kind is None or kind.dtype != one.dtype or (kind.is_ragged and not one.shape):
            raise IntegrityError(
                f"{where}: tensor {name!r} of dtype {one.dtype} and shape {one.shape} does not match the manifest "
                f"({kind}); copy the features again"
            )


def base_facts(dataset: Dataset) -> dict[str, str]:
    """Return the fingerprints that identify a dataset. Columns added later do not affect these fingerprints."""
    fingerprints = dataset.manifest.fingerprints
    return {"plan": fingerprints.plan, "content": fingerprints.base}


_NULL = json.dumps(None)


def differences(
    stored: Any, given: Any, name: str = "", places: tuple[str, str] = ("in the features", "here")
) -> list[str]:
    """Return the differences between two JSON values, such as 'gop is 8 in the features, but 16 here'.

    A null value is equal to a value that is not set. places: a phrase for the origin of each value, such as 'in the
    features' and 'here'.
    """
    one, other = dict(_leaves(stored, name)), dict(_leaves(given, name))
    return [
        f"{part} is {_shown(one.get(part))} {places[0]}, but {_shown(other.get(part))} {places[1]}"
        for part in sorted({*one, *other})
        if one.get(part, _NULL) != other.get(part, _NULL)
    ]


def _leaves(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield a (dotted name, JSON text) pair for each nested value that is not a mapping."""
    if isinstance(value, Mapping) and value:
        for part, child in value.items():
            yield from _leaves(child, f"{name}.{part}" if name else part)
    else:
        yield name, json.dumps(value, sort_keys=True)


def _shown(text: str | None) -> str:
    return "not set" if text is None else text if len(text) <= 120 else f"{text[:117]}..."


def read_sidecar_manifest(store: Store) -> SidecarManifest:
    """Return the manifest of the features in `store`. Raises DatasetError if there is no manifest."""
    remedy = "create them with `streamvid encode`, or run an interrupted `streamvid encode` again"
    return read_sealed(store, SidecarManifest.from_json, f"no sealed features at {store.url}", remedy)


def open_sidecar(url: str | Path, storage: StorageOptions | Mapping[str, Any] | None = None) -> Sidecar:
    """Open sealed features at a local path, or at a file:// or s3:// URL.

    Raises ConfigError for invalid options, DatasetError if there are no sealed features, and StorageError if the
    features cannot be read.
    """
    return Sidecar(open_store(url, StorageOptions.of(storage)))
