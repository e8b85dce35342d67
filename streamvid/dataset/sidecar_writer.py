"""Sidecars as they are made: a shard at a time, by any number of processes, sealed by one of them at the end.

Until then `.staging/` holds what the sidecar is begun with and a record of each finished shard, so that a run that was
killed goes on where it was, and ends with the same bytes.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from streamvid.dataset.index import WRITING, schema
from streamvid.dataset.manifest import MANIFEST, FileInfo, ShardInfo
from streamvid.dataset.passes import DEFAULT_WORKERS, in_parallel
from streamvid.dataset.reader import Dataset
from streamvid.dataset.sidecar import (
    MEMBER_TYPES,
    NULL_FILE,
    SHARD_TYPES,
    SidecarManifest,
    SidecarShard,
    TensorInfo,
    base_facts,
    differences,
    index_path,
    read_sidecar_manifest,
)
from streamvid.dataset.sidecar_tensors import RawTensor, check_name, encode_tensors
from streamvid.dataset.tar import scan_tar, write_shard
from streamvid.errors import ConfigError, DatasetError, StorageError
from streamvid.storage import LocalStore, StorageOptions, open_store

__all__ = ["RawTensor", "SidecarWriter"]

STAGING = ".staging"
_BEGUN = f"{STAGING}/begun.json"
_BLOCK_BYTES = 2**20

Visits = Sequence[Mapping[str, RawTensor] | None]
"""A sample's tensors, a mapping a visit; None for a visit that could not be made: readers deliver another sample."""


@dataclass(frozen=True, slots=True)
class _Record:
    """A finished shard: how its files stand in the table, and what tensors it has."""

    shard: SidecarShard
    tensors: Mapping[str, TensorInfo]
    shapes: Mapping[str, list[int]]

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True).encode()

    @staticmethod
    def from_json(data: bytes, where: str) -> _Record:
        try:
            value = json.loads(data)
            tensors = {name: TensorInfo(**told) for name, told in value["tensors"].items()}
            return _Record(SidecarShard(**value["shard"]), tensors, value["shapes"])
        except (ValueError, KeyError, TypeError) as error:
            raise DatasetError(f"{where} is damaged ({error}); remove it, and the shard is made again") from error


@dataclass
class _Kinds:
    """What the samples of a shard have in common. shapes: of ragged tensors without the first size."""

    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    shapes: dict[str, list[int]] = field(default_factory=dict)

    def add(self, key: str, tensors: Mapping[str, RawTensor]) -> None:
        kinds = {name: TensorInfo(one.dtype, one.is_ragged) for name, one in tensors.items()}
        shapes = {name: list(one.shape[1:] if one.is_ragged else one.shape) for name, one in tensors.items()}
        if not self.tensors:
            self.tensors, self.shapes = _check_kinds(kinds), shapes
        elif (kinds, shapes) != (self.tensors, self.shapes):
            raise ConfigError(
                f"sample {key} has the tensors {_described(kinds, shapes)}, those before it have "
                f"{_described(self.tensors, self.shapes)}; a shard's samples have the same, but for the first size of "
                "ragged ones"
            )


def _check_kinds(kinds: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    for name, kind in kinds.items():
        if kind.is_ragged and f"{check_name(name)}_mask" in kinds:
            raise ConfigError(f"tensors {name!r} and '{name}_mask': a ragged tensor's mask has that name; rename one")
    return kinds


def _described(kinds: Mapping[str, TensorInfo], shapes: Mapping[str, list[int]]) -> str:
    return ", ".join(
        f"{name} {kind.dtype} {['*', *shapes[name]] if kind.is_ragged else shapes[name]}"
        for name, kind in sorted(kinds.items())
    )


class SidecarWriter:
    """Makes the sidecar of a dataset at a local path, or a file:// or s3:// URL.

    made_with: JSON facts that readers compare, such as the encoder's checksum. num_visits: how often each sample is
    encoded. Several writers in several processes may make different shards at once.

    Raises ConfigError, naming what differs, where a sidecar is begun or sealed there that is made with anything else;
    DatasetError where something else is there; StorageError.
    """

    def __init__(
        self,
        url: str | Path,
        dataset: Dataset,
        made_with: Mapping[str, Any],
        num_visits: int = 1,
        storage: StorageOptions | Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(num_visits, bool) or not isinstance(num_visits, int) or not 1 <= num_visits <= 1 << 20:
            raise ConfigError(f"num_visits={num_visits!r}; a whole number from 1 to {1 << 20} is allowed")
        try:
            self._made_with: dict[str, Any] = json.loads(json.dumps(made_with, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"made_with is no JSON: {error}") from error
        self._dataset, self._num_visits = dataset, num_visits
        self._store = open_store(url, StorageOptions.of(storage))
        self._facts = {"base": base_facts(dataset), "made_with": self._made_with, "num_visits": num_visits}
        self._sealed = self._begin()

    def _begin(self) -> SidecarManifest | None:
        url = self._store.url
        if self._store.size(MANIFEST) is not None:
            sealed = read_sidecar_manifest(self._store)
            base = {"plan": sealed.base_plan, "content": sealed.base_content}
            stored = {"base": base, "made_with": sealed.made_with, "num_visits": sealed.num_visits}
            self._refuse_other(stored, f"a sidecar is sealed at {url}")
            return sealed
        # Whoever is here at the same time has written that before anything else.
        is_free = all(file.path.startswith(STAGING) for file in self._store.files())
        if self._store.size(_BEGUN) is None:
            if not is_free:
                raise DatasetError(f"{url} is not empty and holds no sidecar; give a place where nothing is")
            self._store.create(_BEGUN, json.dumps(self._facts, sort_keys=True, indent=1).encode())
        self._refuse_other(json.loads(self._store.read(_BEGUN)), f"a sidecar is begun at {url}")
        return None

    def _refuse_other(self, stored: Mapping[str, Any], what: str) -> None:
        if found := differences(stored, self._facts):
            raise ConfigError(f"{what} that is another: {'; '.join(found)}; give another place, or remove that one")

    @property
    def sealed(self) -> SidecarManifest | None:
        """The manifest, where an earlier run has sealed it: nothing is left to do then but to `seal` again."""
        return self._sealed

    # Shards.

    @cached_property
    def _done(self) -> set[str]:
        """Records that were there when first asked for."""
        return {file.path for file in self._store.files(STAGING)}

    def is_done(self, shard: ShardInfo) -> bool:
        """Whether an earlier run has finished a shard."""
        return self._sealed is not None or _record_path(shard) in self._done

    def write_shard(self, shard: ShardInfo, samples: Iterable[tuple[str, Visits]]) -> None:
        """Make one shard of all the samples of `shard`, in its order: (key, the tensors of each visit).

        A shard that is done is made again. Raises ConfigError for what cannot be stored, DatasetError for other samples
        than the dataset's, StorageError.
        """
        if self._sealed is not None:
            raise DatasetError(f"the sidecar at {self._store.url} is sealed; give another place")
        kinds, checksums = _Kinds(), dict[str, bytes]()
        with self._temporary() as folder:
            path = folder / "shard.tar"
            with path.open("w+b") as file:
                write_shard(file, self._members(shard, samples, kinds, checksums))
                places = {one.name: (one.offset, one.num_bytes) for one in _scan(file)}
                num_bytes, sha256 = _measure(file)
            keys = self._keys(shard)
            index = self._index(keys, places, checksums)
            self._store.put(shard.path, path)
        file_info = FileInfo.of(index_path(shard.bucket_id, shard.number), index)
        self._store.put(file_info.path, index)
        largest = max((size for _, size in places.values()), default=0)
        missing = len(keys) * self._num_visits - len(places)
        done = SidecarShard(
            shard.bucket_id, shard.number, shard.sha256, num_bytes, sha256, largest, file_info.num_bytes,
            file_info.sha256, missing,
        )  # fmt: skip
        self._store.put(_record_path(shard), _Record(done, kinds.tensors, kinds.shapes).to_json())

    def _keys(self, shard: ShardInfo) -> list[str]:
        keys: list[str] = self._dataset.samples(shard, ["key"]).column("key").to_pylist()
        return keys

    def _members(
        self, shard: ShardInfo, samples: Iterable[tuple[str, Visits]], kinds: _Kinds, checksums: dict[str, bytes]
    ) -> Iterator[tuple[str, dict[str, bytes]]]:
        keys = self._keys(shard)
        number = -1
        for number, (key, visits) in enumerate(samples):
            if number >= len(keys) or keys[number] != key:
                raise DatasetError(f"sample {number} of {shard.path} is {keys[number : number + 1]}, not {key!r}")
            if len(visits) != self._num_visits:
                raise ConfigError(f"sample {key}: tensors of {len(visits)} visits, num_visits={self._num_visits}")
            members: dict[str, bytes] = {}
            for visit, tensors in enumerate(visits):
                if tensors is not None:
                    kinds.add(key, tensors)
                    members[_extension(visit)] = data = encode_tensors(tensors)
                    checksums[f"{key}.{_extension(visit)}"] = hashlib.sha256(data).digest()
            if members:
                yield key, members
        if number + 1 != len(keys):
            raise DatasetError(f"{shard.path} has {len(keys)} samples, tensors came of {number + 1}")

    def _index(
        self, keys: Sequence[str], places: Mapping[str, tuple[int, int]], checksums: Mapping[str, bytes]
    ) -> bytes:
        rows: dict[str, list[Any]] = {name: [] for name in MEMBER_TYPES}
        for key in keys:
            for visit in range(self._num_visits):
                name = f"{key}.{_extension(visit)}"
                values = (key, visit, *places.get(name, (None, None)), checksums.get(name))
                for column, value in zip(rows.values(), values, strict=True):
                    column.append(value)
        return _parquet(rows, MEMBER_TYPES)

    @contextmanager
    def _temporary(self) -> Iterator[Path]:
        """A folder that is gone afterwards; from which files can be renamed into place, if the store is a folder."""
        folder = self._store.root / STAGING if isinstance(self._store, LocalStore) else None
        try:
            with tempfile.TemporaryDirectory(prefix="spool-", dir=folder) as name:
                yield Path(name)
        except OSError as error:
            raise StorageError(
                f"cannot write to {folder or tempfile.gettempdir()}: {error.strerror or error}; make room there"
            ) from error

    # The end.

    def seal(self, null: Mapping[str, RawTensor] | None = None) -> SidecarManifest:
        """Write the manifest, by one process, once all shards are done.

        null: what stands in for the tensors of these names where a delivery has no text.

        Raises DatasetError where a shard is missing, or where shards have other tensors than others.
        """
        if self._sealed is None:
            self._sealed = self._seal(null)
        if isinstance(self._store, LocalStore):
            shutil.rmtree(self._store.root / STAGING, ignore_errors=True)
        else:
            for file in list(self._store.files(STAGING)):
                self._store.remove(file.path)
        return self._sealed

    def _seal(self, null: Mapping[str, RawTensor] | None) -> SidecarManifest:
        records = self._records()
        tensors = _in_common(records)
        table = _parquet(_columns(records), SHARD_TYPES)
        digest = hashlib.sha256(table).hexdigest()
        shard_file = FileInfo.of(f"index/shards-{digest[:12]}.parquet", table)
        self._store.put(shard_file.path, table)
        manifest = SidecarManifest(
            self._facts["base"]["plan"], self._facts["base"]["content"], self._made_with, self._num_visits, tensors,
            shard_file, self._put_null(null, records), sum(one.shard.num_missing for one in records),
        )  # fmt: skip
        self._store.put(MANIFEST, manifest.to_json())
        return manifest

    def _records(self) -> list[_Record]:
        """Of all shards, in the dataset's order."""
        shards = self._dataset.shards
        there = {file.path for file in self._store.files(STAGING)}
        missing = [shard.path for shard in shards if _record_path(shard) not in there]
        if missing:
            raise DatasetError(
                f"{self._store.url}: {len(missing)} of {len(shards)} shards are not made yet, {missing[0]} the first; "
                "run the same command again"
            )
        return list(in_parallel(lambda shard, _: self._record(shard), shards, DEFAULT_WORKERS))

    def _record(self, shard: ShardInfo) -> _Record:
        path = _record_path(shard)
        return _Record.from_json(self._store.read(path), f"{self._store.url}: {path}")

    def _put_null(self, null: Mapping[str, RawTensor] | None, records: Sequence[_Record]) -> FileInfo | None:
        if null is None:
            return None
        for one in records:
            if one.tensors:
                _check_null(null, one)
        data = encode_tensors(null)
        self._store.put(NULL_FILE, data)
        return FileInfo.of(NULL_FILE, data)


def _check_null(null: Mapping[str, RawTensor], record: _Record) -> None:
    for name, one in null.items():
        kind = record.tensors.get(name)
        shape = list(one.shape[1:] if kind is not None and kind.is_ragged else one.shape)
        if kind is None or kind.dtype != one.dtype or shape != record.shapes[name]:
            raise ConfigError(
                f"null: {name!r} of dtype {one.dtype} and shape {one.shape} cannot stand in for those of the samples, "
                f"{_described(record.tensors, record.shapes)}"
            )


def _extension(visit: int) -> str:
    return f"v{visit}.safetensors"


def _record_path(shard: ShardInfo) -> str:
    return f"{STAGING}/{shard.bucket_id}-{shard.number:06d}.json"


def _scan(file: BinaryIO) -> Iterator[Any]:
    file.flush()
    return scan_tar(file)


def _measure(file: BinaryIO) -> tuple[int, str]:
    """Size and SHA-256 of a file."""
    file.seek(0)
    digest, num_bytes = hashlib.sha256(), 0
    while block := file.read(_BLOCK_BYTES):
        digest.update(block)
        num_bytes += len(block)
    return num_bytes, digest.hexdigest()


def _in_common(records: Sequence[_Record]) -> dict[str, TensorInfo]:
    """The tensors that all shards have, of one shape in a bucket."""
    first: _Record | None = None
    of_bucket: dict[str, _Record] = {}
    for one in records:
        if not one.tensors:  # none of its samples could be made
            continue
        first = first or one
        near = of_bucket.setdefault(one.shard.bucket_id, one)
        if one.tensors != first.tensors or one.shapes != near.shapes:
            other = first if one.tensors != first.tensors else near
            raise DatasetError(
                f"shard {one.shard.bucket_id}-{one.shard.number:06d} has the tensors "
                f"{_described(one.tensors, one.shapes)}, others have {_described(other.tensors, other.shapes)}; "
                "make the sidecar anew"
            )
    if first is None:
        raise DatasetError("no sample could be made: there is nothing to seal")
    return dict(first.tensors)


def _columns(records: Sequence[_Record]) -> dict[str, list[Any]]:
    def value(record: _Record, name: str, kind: str) -> Any:
        found = getattr(record.shard, name)
        return bytes.fromhex(found) if kind == "sha256" else found

    return {name: [value(one, name, kind) for one in records] for name, kind in SHARD_TYPES.items()}


def _parquet(columns: Mapping[str, list[Any]], types: dict[str, str]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    pq.write_table(pa.table(dict(columns), schema=schema(types)), sink, **WRITING)
    return sink.getvalue()
