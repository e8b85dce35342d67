"""A sidecar: tensors that were made of a dataset's samples once, in shards of their own beside it.

What lies where is in this folder's README.md. It has the dataset's samples in the dataset's order, `num_visits` times
each, and its manifest says what it was made of and with, so that a stale one is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from streamvid.dataset.arrow import numbers_of
from streamvid.dataset.index import schema
from streamvid.dataset.manifest import MANIFEST, MAX_MANIFEST_BYTES, FileInfo, ShardInfo, manifest_checksum
from streamvid.dataset.proof import read_table
from streamvid.dataset.reader import Dataset
from streamvid.dataset.sidecar_tensors import DTYPES, RawTensor, check_name, decode_tensors
from streamvid.dataset.tar import BLOCK_BYTES
from streamvid.errors import ConfigError, DatasetError, IntegrityError
from streamvid.storage import CachedStore, StorageOptions, Store, open_store

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = "streamvid-sidecar"
FORMAT_VERSION = (1, 0)
NULL_FILE = "null.safetensors"
MAX_NULL_BYTES = 2**30
REMEDY = "make it again with `streamvid encode`, or give the sidecar that belongs to this"
_CHECKSUM = "manifest_sha256"
_MAX_VISITS = 1 << 20

SHARD_TYPES = {
    "bucket_id": "string",
    "number": "int32",
    "base_sha256": "sha256",
    "num_bytes": "int64",
    "sha256": "sha256",
    "max_member_bytes": "int64",
    "index_num_bytes": "int64",
    "index_sha256": "sha256",
    "num_missing": "int64",
}
MEMBER_TYPES = {"key": "string", "visit": "int32", "offset": "int64", "num_bytes": "int64", "sha256": "sha256"}


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
        value: dict[str, Any] = {
            "format": FORMAT,
            "format_version": list(FORMAT_VERSION),
            "base": {"plan": self.base_plan, "content": self.base_content},
            "made_with": dict(self.made_with),
            "num_visits": self.num_visits,
            "num_missing": self.num_missing,
            "tensors": {n: {"dtype": one.dtype, "is_ragged": one.is_ragged} for n, one in self.tensors.items()},
            "shards": _file_json(self.shard_file),
            "null": None if self.null_file is None else _file_json(self.null_file),
        }
        value[_CHECKSUM] = manifest_checksum(value)
        return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()

    @staticmethod
    def from_json(data: bytes, where: str) -> SidecarManifest:
        """Parse and check manifest.json; a newer major version is refused. Raises DatasetError, IntegrityError."""
        try:
            value = json.loads(data)
            if value.get("format") != FORMAT:
                raise DatasetError(f"{where}: field format is {str(value.get('format'))[:40]!r}, not {FORMAT!r}")
            major, minor = (int(part) for part in value["format_version"])
            if major != FORMAT_VERSION[0] or minor < 0:
                raise DatasetError(f"{where}: format_version {[major, minor]}: update streamvid")
            if value[_CHECKSUM] != manifest_checksum(value):
                raise IntegrityError(f"{where} is damaged or was edited: {_CHECKSUM} is not that of its content")
            num_visits = value["num_visits"]
            if type(num_visits) is not int or not 1 <= num_visits <= _MAX_VISITS:
                raise ValueError(f"num_visits={num_visits!r}")
            null = value["null"]
            return SidecarManifest(
                base_plan=str(value["base"]["plan"]),
                base_content=str(value["base"]["content"]),
                made_with=dict(value["made_with"]),
                num_visits=num_visits,
                tensors={check_name(n): TensorInfo(t["dtype"], t["is_ragged"]) for n, t in value["tensors"].items()},
                shard_file=FileInfo(**value["shards"]),
                null_file=None if null is None else FileInfo(**null),
                num_missing=int(value["num_missing"]),
            )
        except ConfigError as error:  # of a tensor's name; it is a ValueError too
            raise DatasetError(f"{where} is damaged ({error}); copy it again") from error
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise DatasetError(f"{where} is damaged ({type(error).__name__}: {error}); copy it again") from error


def _file_json(file: FileInfo) -> dict[str, Any]:
    return {"path": file.path, "num_bytes": file.num_bytes, "sha256": file.sha256}


@dataclass(frozen=True, slots=True)
class SidecarShard:
    """A shard of a sidecar: that of the same bucket and number of its dataset, whose tar had `base_sha256`.

    num_missing: of its samples' visits, those that could not be made.
    """

    bucket_id: str
    number: int
    base_sha256: str
    num_bytes: int
    sha256: str
    max_member_bytes: int
    index_num_bytes: int
    index_sha256: str
    num_missing: int = 0

    @property
    def index_file(self) -> FileInfo:
        """Where its members stand."""
        return FileInfo(index_path(self.bucket_id, self.number), self.index_num_bytes, self.index_sha256)


def index_path(bucket_id: str, number: int) -> str:
    return f"index/{bucket_id}-{number:06d}.parquet"


@dataclass(frozen=True, eq=False, slots=True)
class Members:
    """Where a shard's members lie in its tar: arrays of num_samples * num_visits values, a sample's visits in a row.

    offsets: -1 for one that could not be made. sha256: uint8 (…, 32).
    """

    num_visits: int
    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    sha256: npt.NDArray[np.uint8]

    @property
    def num_bytes(self) -> int:
        """In memory."""
        return self.offsets.nbytes + self.sizes.nbytes + self.sha256.nbytes

    def place(self, row: int, visit: int) -> tuple[int, int, bytes] | None:
        """(offset, bytes, SHA-256) of a sample's member for a visit; None where there is none."""
        place = row * self.num_visits + visit % self.num_visits
        if self.offsets[place] < 0:
            return None
        return int(self.offsets[place]), int(self.sizes[place]), self.sha256[place].tobytes()


class Sidecar:
    """A sealed sidecar in a store; reads nothing but what is asked for. Safe to use from several threads."""

    def __init__(self, store: Store) -> None:
        self.manifest = read_sidecar_manifest(store)
        self.store = store

    @property
    def url(self) -> str:
        return self.store.url

    def cached(self, store: CachedStore) -> None:
        """Read by way of a cache from now on."""
        self.store = store

    def check_base(self, dataset: Dataset) -> None:
        """ConfigError where it was made of another dataset, naming what differs."""
        of_it = {"plan": self.manifest.base_plan, "content": self.manifest.base_content}
        problems = differences(of_it, base_facts(dataset), "fingerprints.")
        if problems:
            raise ConfigError(
                f"sidecars={self.url!r} was made of another dataset than {dataset.url}: {'; '.join(problems)}; {REMEDY}"
            )
        self._check_shards(dataset)

    @cached_property
    def _table(self) -> pa.Table:
        table = read_table(self.store, self.manifest.shard_file)
        missing = [name for name in SHARD_TYPES if name not in table.column_names]
        if missing:
            raise IntegrityError(f"{self.url}: {self.manifest.shard_file.path} has no column {', '.join(missing)}")
        try:
            return table.select(list(SHARD_TYPES)).cast(schema(SHARD_TYPES)).combine_chunks()
        except (ValueError, TypeError) as error:  # Arrow's are such
            raise IntegrityError(f"{self.url}: {self.manifest.shard_file.path}: {error}; copy it again") from error

    def _check_shards(self, dataset: Dataset) -> None:
        base, table = dataset.shards, self._table
        stored: list[bytes] = table.column("base_sha256").to_pylist()
        if stored != [digest.tobytes() for digest in base.sha256]:
            raise IntegrityError(
                f"{self.url}: its table of {len(stored)} shards is not that of the {len(base)} shards of "
                f"{dataset.url}; copy the sidecar again"
            )

    @cached_property
    def _rows(self) -> dict[str, int]:
        """Bucket id → row of its first shard: in the dataset's order a bucket's shards follow each other."""
        rows: dict[str, int] = {}
        for row, (bucket_id, number) in enumerate(
            zip(self._table.column("bucket_id").to_pylist(), self._table.column("number").to_pylist(), strict=True)
        ):
            rows.setdefault(bucket_id, row - number)
        return rows

    def shard(self, base: ShardInfo) -> SidecarShard:
        """The shard that has the tensors of a shard of the dataset. Raises IntegrityError."""
        row = self._rows.get(base.bucket_id, -1) + base.number
        if base.bucket_id in self._rows and 0 <= row < self._table.num_rows:
            row_values = {name: self._table.column(name)[row].as_py() for name in SHARD_TYPES}
            values: dict[str, Any] = {k: v.hex() if isinstance(v, bytes) else v for k, v in row_values.items()}
            found = SidecarShard(**values)
            if (found.bucket_id, found.number, found.base_sha256) == (base.bucket_id, base.number, base.sha256):
                return found
        raise IntegrityError(f"{self.url}: its table of shards has no such as {base.path}; copy the sidecar again")

    def members(self, base: ShardInfo) -> Members:
        """Where the members of the shard lie whose samples are those of `base`: one small read. Raises IntegrityError,
        StorageError."""
        shard = self.shard(base)
        table, where = read_table(self.store, shard.index_file), f"{self.url}: {shard.index_file.path}"
        try:
            return _members(table, shard, base.num_samples, self.manifest.num_visits)
        except (ValueError, KeyError, TypeError) as error:
            raise IntegrityError(f"{where} is not the index of its shard ({error}); copy the sidecar again") from error

    def null(self) -> dict[str, RawTensor]:
        """What stands in for tensors where a delivery has no text; none where nothing does."""
        file = self.manifest.null_file
        if file is None:
            return {}
        where = f"{self.url}: {file.path}"
        if file.num_bytes > MAX_NULL_BYTES or self.store.size(file.path) != file.num_bytes:
            raise IntegrityError(f"{where} is missing or has another size than the manifest says; copy it again")
        data = self.store.read(file.path)
        if FileInfo.of(file.path, data) != file:
            raise IntegrityError(f"{where} differs from what the manifest says; copy the sidecar again")
        found = decode_tensors(data, where)
        check_kinds(found, self.manifest.tensors, where, is_part=True)
        return found


def _members(table: pa.Table, shard: SidecarShard, num_samples: int, num_visits: int) -> Members:
    if table.num_rows != num_samples * num_visits:
        raise ValueError(f"{table.num_rows} rows for {num_samples} samples and {num_visits} visits")
    rows = table.select(list(MEMBER_TYPES)).cast(schema(MEMBER_TYPES)).combine_chunks()
    visits = numbers_of(_array(rows, "visit"))
    if not np.array_equal(visits, np.tile(np.arange(num_visits, dtype=np.int32), num_samples)):
        raise ValueError("visits out of order")
    offsets, sizes = (
        numbers_of(_array(rows, "offset").fill_null(-1)),
        numbers_of(_array(rows, "num_bytes").fill_null(0)),
    )
    is_there = offsets >= 0
    ends_wrong = (sizes <= 0) | (sizes > shard.max_member_bytes) | (offsets > shard.num_bytes - sizes)
    if (ends_wrong & is_there).any() or (offsets[is_there] < BLOCK_BYTES).any():
        raise ValueError("a member that its tar cannot have")
    checksums = _array(rows, "sha256").fill_null(bytes(32))
    raw = np.frombuffer(checksums.buffers()[1], np.uint8, 32 * len(checksums), 32 * checksums.offset)
    return Members(num_visits, offsets, sizes, raw.reshape(-1, 32))


def _array(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name)
    return column.chunk(0) if column.num_chunks else column.combine_chunks()


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
    content = manifest.base_fingerprint or manifest.content_fingerprint
    return {"plan": manifest.plan_fingerprint, "content": content}


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
    size = store.size(MANIFEST)
    if size is None:
        raise DatasetError(
            f"no sealed sidecar at {store.url}: there is no {MANIFEST}. Make one with `streamvid encode`, or finish an "
            "interrupted one by running the same command again"
        )
    if size > MAX_MANIFEST_BYTES:
        raise DatasetError(f"{store.url}/{MANIFEST} has {size} bytes; {MAX_MANIFEST_BYTES} are allowed")
    return SidecarManifest.from_json(store.read(MANIFEST), f"{store.url}/{MANIFEST}")


def open_sidecar(url: str | Path, storage: StorageOptions | Mapping[str, Any] | None = None) -> Sidecar:
    """Open a sealed sidecar at a local path, or a file:// or s3:// URL.

    Raises ConfigError, DatasetError where there is none, StorageError where it cannot be read.
    """
    return Sidecar(open_store(url, StorageOptions.of(storage)))
