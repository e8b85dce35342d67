"""A sidecar: tensors that were made of a dataset's samples once, in shards of their own beside it.

What lies where is in this folder's README.md. It has the dataset's samples in the dataset's order, `num_visits` times
each, and its manifest says what it was made of and with, so that a stale one is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from streamvid.dataset.features.tables import Members, SidecarShard, SidecarShards, most_index_bytes
from streamvid.dataset.features.tensors import DTYPES, RawTensor, check_name, decode_tensors
from streamvid.dataset.integrity import until_right
from streamvid.dataset.manifest import (
    MANIFEST,
    FileInfo,
    ShardInfo,
    naming,
    read_sealed,
    sealed_json,
    unsealed_json,
)
from streamvid.dataset.reader import Dataset
from streamvid.errors import ConfigError, DatasetError, IntegrityError
from streamvid.storage import BlockCache, CachedStore, StorageOptions, Store, open_store, read_content

FORMAT = "streamvid-sidecar"
FORMAT_VERSION = 1
NULL_FILE = "null.safetensors"
MAX_NULL_BYTES = 2**30
REMEDY = "make it again with `streamvid encode`, or give the sidecar that belongs to this"
_MAX_VISITS = 1 << 20
_KEPT_SHARDS = 256


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """dtype: one of safetensors' names. is_ragged: whether its first size differs from sample to sample."""

    dtype: str
    is_ragged: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES or not isinstance(self.is_ragged, bool):
            raise DatasetError(f"a tensor of dtype={self.dtype!r}, is_ragged={self.is_ragged!r}: there is none such")


@dataclass(frozen=True, slots=True)
class SidecarManifest:
    """A sealed sidecar. made_with: JSON facts about what made it. shard_file: the table of its shards.

    base_plan, base_content: the dataset's fingerprints, the latter without columns that were put there later.
    null_file: what stands in for the tensors that it names where a delivery has no text.
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
        """The bytes of manifest.json: no clock, no host, keys sorted."""
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
        """Parse and verify manifest.json. Raise DatasetError, or IntegrityError if it was damaged or edited."""
        with naming(where):
            value = unsealed_json(data, FORMAT, FORMAT_VERSION)
            num_visits, null = value["num_visits"], value["null"]
            if type(num_visits) is not int or not 1 <= num_visits <= _MAX_VISITS:
                raise DatasetError(f"num_visits={num_visits!r}: must be from 1 to {_MAX_VISITS}; copy the file again")
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
    """A sealed sidecar in a store; reads nothing but what is asked for. Safe to use from several threads.

    A loader reads its members as it reads a dataset's clips.
    """

    def __init__(self, store: Store, cache: BlockCache | None = None) -> None:
        self.manifest: SidecarManifest = read_sidecar_manifest(store)
        self._recent: dict[tuple[str, int, str], SidecarShard] = {}
        self.store = store if cache is None or store.is_local else CachedStore(store, cache, {})

    @property
    def url(self) -> str:
        return self.store.url

    def check_base(self, dataset: Dataset) -> None:
        """ConfigError where it was made of another dataset, naming what differs; IntegrityError where its table of
        shards is not that of the dataset."""
        of_it = {"plan": self.manifest.base_plan, "content": self.manifest.base_content}
        problems = differences(of_it, base_facts(dataset), "fingerprints.")
        if problems:
            raise ConfigError(
                f"features={self.url!r} were made from another dataset than {dataset.url}: "
                f"{'; '.join(problems)}; {REMEDY}"
            )
        if not np.array_equal(self._shards.base_sha256, dataset.shards.sha256):
            raise IntegrityError(
                f"{self.url}: its table of {len(self._shards)} shards is not that of the {len(dataset.shards)} shards "
                f"of {dataset.url}; copy the sidecar again"
            )

    @cached_property
    def _shards(self) -> SidecarShards:
        file = self.manifest.shard_file
        where = f"{self.url}: {file.path}"
        if self.store.size(file.path) != file.num_bytes:
            raise IntegrityError(f"{where} is missing or has another size than the manifest says; copy it again")
        return SidecarShards.read(self._proved(file), where)

    def _proved(self, file: FileInfo) -> bytes:
        """A file of a size that can be, its checksum proved."""
        data, is_again = bytearray(file.num_bytes), False

        def read() -> bytes:
            nonlocal is_again
            ranges = [(0, memoryview(data))] if data else []
            read_content(self.store, file.path, (file.sha256, file.num_bytes), ranges, is_again=is_again)
            is_again = True
            return hashlib.sha256(data).digest()

        if until_right(self.store, file.path, bytes.fromhex(file.sha256), read).hex() != file.sha256:
            raise IntegrityError(f"{self.url}: {file.path} differs from what is told of it; copy the sidecar again")
        return bytes(data)

    @property
    def max_member_bytes(self) -> int:
        """Of the largest member: what a loader has room for."""
        return self._shards.max_member_bytes

    def shard(self, base: ShardInfo) -> SidecarShard:
        """The shard that has the tensors of a shard of the dataset. Raises IntegrityError."""
        name = (base.bucket_id, base.number, base.sha256)
        found = self._recent.get(name)  # making one out of the table takes a while
        if found is None:
            found = self._shards.shard(base)
            if found is None:
                raise IntegrityError(
                    f"{self.url}: its table of shards has none for {base.path}; copy the sidecar again"
                )
            if len(self._recent) >= _KEPT_SHARDS:
                self._recent.clear()
            self._recent[name] = found
        return found

    def members(self, base: ShardInfo) -> Members:
        """Where the members of the shard lie whose samples are those of `base`: one small read. Raises IntegrityError,
        StorageError."""
        shard, num_visits = self.shard(base), self.manifest.num_visits
        file = shard.index_file
        if file.num_bytes > most_index_bytes(base.num_samples, num_visits):
            raise IntegrityError(
                f"{self.url}: {file.path} of {file.num_bytes} bytes is too large; copy the sidecar again"
            )
        return Members.read(self._proved(file), shard, base.num_samples, num_visits, f"{self.url}: {file.path}")

    def tensors(self, data: bytes | memoryview, where: str) -> dict[str, RawTensor]:
        """What a member holds, as views of its bytes: the tensors that the manifest names. Raises IntegrityError."""
        found = decode_tensors(data, where)
        check_kinds(found, self.manifest.tensors, where)
        return found

    @cached_property
    def null(self) -> dict[str, RawTensor]:
        """What stands in for tensors where a delivery has no text; none where nothing does."""
        file = self.manifest.null_file
        if file is None:
            return {}
        where = f"{self.url}: {file.path}"
        if file.num_bytes > MAX_NULL_BYTES or self.store.size(file.path) != file.num_bytes:
            raise IntegrityError(f"{where} is missing or has another size than the manifest says; copy it again")
        found = decode_tensors(self._proved(file), where)
        check_kinds(found, self.manifest.tensors, where, is_part=True)
        return found


def check_kinds(
    found: Mapping[str, RawTensor], kinds: Mapping[str, TensorInfo], where: str, *, is_part: bool = False
) -> None:
    """IntegrityError where tensors are not those that a manifest names; is_part: they may be some of them."""
    if not is_part and set(found) != set(kinds):
        raise IntegrityError(f"{where} has the tensors {sorted(found)}, not {sorted(kinds)}; copy the sidecar again")
    for name, one in found.items():
        kind = kinds.get(name)
        if kind is None or kind.dtype != one.dtype or (kind.is_ragged and not one.shape):
            raise IntegrityError(
                f"{where}: tensor {name!r} of dtype {one.dtype} and shape {one.shape} is not what the manifest says "
                f"({kind}); copy the sidecar again"
            )


def base_facts(dataset: Dataset) -> dict[str, str]:
    """What a sidecar's dataset is known by, columns that were put there later aside."""
    manifest = dataset.manifest
    content = manifest.fingerprints.base
    return {"plan": manifest.fingerprints.plan, "content": content}


def differences(stored: Any, given: Any, name: str = "") -> list[str]:
    """Where two JSON values differ, for people: 'view.temporal is "head" there and "random" here'."""
    if isinstance(stored, Mapping) and isinstance(given, Mapping):
        head = f"{name}." if name and not name.endswith(".") else name
        absent = object()
        found: list[str] = []
        for part in sorted({*stored, *given}):
            one, other = stored.get(part, absent), given.get(part, absent)
            if one is absent or other is absent:
                found.append(f"{head}{part} is {_told(one, absent)} there and {_told(other, absent)} here")
            else:
                found += differences(one, other, f"{head}{part}")
        return found
    same = json.dumps(stored, sort_keys=True) == json.dumps(given, sort_keys=True)
    return [] if same else [f"{name} is {_told(stored)} there and {_told(given)} here"]


def _told(value: Any, absent: object = None) -> str:
    text = "absent" if value is absent and absent is not None else json.dumps(value, sort_keys=True)
    return text if len(text) <= 120 else f"{text[:117]}..."


def read_sidecar_manifest(store: Store) -> SidecarManifest:
    """The manifest of the sidecar in `store`; DatasetError where there is none."""
    remedy = "Make them with `streamvid encode`, or run an interrupted `streamvid encode` again"
    data = read_sealed(store, f"no sealed features at {store.url}", remedy)
    return SidecarManifest.from_json(data, f"{store.url}/{MANIFEST}")


def open_sidecar(url: str | Path, storage: StorageOptions | Mapping[str, Any] | None = None) -> Sidecar:
    """Open a sealed sidecar at a local path, or a file:// or s3:// URL.

    Raises ConfigError, DatasetError where there is none, StorageError where it cannot be read.
    """
    return Sidecar(open_store(url, StorageOptions.of(storage)))
