"""Sidecars as they are made: a shard at a time, by any number of processes, sealed by one of them at the end.

Until then `.staging/` holds what the sidecar is begun with and a record of each finished shard, so that a run that was
killed goes on where it was, and ends with the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from streamvid.dataset.features.record import Kinds, Record, check_null, in_common
from streamvid.dataset.features.sidecar import (
    NULL_FILE,
    SidecarManifest,
    base_facts,
    differences,
    read_sidecar_manifest,
)
from streamvid.dataset.features.tables import SidecarShard, encode_members, encode_shards, index_path
from streamvid.dataset.features.tensors import RawTensor, encode_tensors
from streamvid.dataset.manifest import LARGE_FOLDERS, MANIFEST, FileInfo, ShardInfo
from streamvid.dataset.passes import DEFAULT_WORKERS, in_parallel
from streamvid.dataset.reader import Dataset
from streamvid.dataset.tar import Member, scan_tar, write_shard
from streamvid.errors import ConfigError, DatasetError, StorageError
from streamvid.storage import LocalStore, StorageOptions, open_store

__all__ = ["RawTensor", "SidecarWriter"]

STAGING = ".staging"
_BEGUN = f"{STAGING}/begun.json"
_BLOCK_BYTES = 2**20

Visits = Sequence[Mapping[str, RawTensor] | None]
"""A sample's tensors, a mapping a visit; None for a visit that could not be made: readers deliver another sample."""


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
        kinds, checksums = Kinds(), dict[str, bytes]()
        with self._temporary() as folder:
            path = folder / "shard.tar"
            with path.open("w+b") as file:
                write_shard(file, self._members(shard, samples, kinds, checksums))
                places = {one.name: (one.offset, one.num_bytes) for one in _scan(file)}
                num_bytes, sha256 = _measure(file)
            keys = self._keys(shard)
            index = self._index(keys, places, checksums)
            self._store.put(shard.path, path)
        index_file = FileInfo.of(index_path(shard.bucket_id, shard.number), index)
        self._store.put(index_file.path, index)
        largest = max((size for _, size in places.values()), default=0)
        missing = len(keys) * self._num_visits - len(places)
        done = SidecarShard(
            shard.bucket_id, shard.number, shard.sha256, num_bytes, sha256, largest, index_file.num_bytes,
            index_file.sha256, missing,
        )  # fmt: skip
        self._store.put(_record_path(shard), Record(done, kinds.tensors, kinds.shapes).to_json())

    def _keys(self, shard: ShardInfo) -> list[str]:
        keys: list[str] = self._dataset.samples(shard, ["key"]).column("key").to_pylist()
        return keys

    def _members(
        self, shard: ShardInfo, samples: Iterable[tuple[str, Visits]], kinds: Kinds, checksums: dict[str, bytes]
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
        rows = []
        for key in keys:
            for visit in range(self._num_visits):
                name = f"{key}.{_extension(visit)}"
                offset, num_bytes = places.get(name, (None, None))
                rows.append((key, visit, offset, num_bytes, checksums.get(name)))
        return encode_members(rows)

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
            for folder in LARGE_FOLDERS:
                self._store.abort_uploads(folder)  # of writers that were killed
            for file in list(self._store.files(STAGING)):
                self._store.remove(file.path)
        return self._sealed

    def _seal(self, null: Mapping[str, RawTensor] | None) -> SidecarManifest:
        records = self._records()
        tensors = in_common(records)
        table = encode_shards([one.shard for one in records])
        digest = hashlib.sha256(table).hexdigest()
        shard_file = FileInfo.of(f"index/shards-{digest[:12]}.parquet", table)
        self._store.put(shard_file.path, table)
        manifest = SidecarManifest(
            self._facts["base"]["plan"], self._facts["base"]["content"], self._made_with, self._num_visits, tensors,
            shard_file, self._put_null(null, records), sum(one.shard.num_missing for one in records),
        )  # fmt: skip
        self._store.put(MANIFEST, manifest.to_json())
        return manifest

    def _records(self) -> list[Record]:
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

    def _record(self, shard: ShardInfo) -> Record:
        path = _record_path(shard)
        return Record.from_json(self._store.read(path), f"{self._store.url}: {path}")

    def _put_null(self, null: Mapping[str, RawTensor] | None, records: Sequence[Record]) -> FileInfo | None:
        if null is None:
            return None
        for one in records:
            if one.tensors:
                check_null(null, one)
        data = encode_tensors(null)
        self._store.put(NULL_FILE, data)
        return FileInfo.of(NULL_FILE, data)


def _extension(visit: int) -> str:
    return f"v{visit}.safetensors"


def _record_path(shard: ShardInfo) -> str:
    return f"{STAGING}/{shard.bucket_id}-{shard.number:06d}.json"


def _scan(file: BinaryIO) -> Iterator[Member]:
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
