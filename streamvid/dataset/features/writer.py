"""Writer for precomputed features.

Any number of processes can write different shards, and one process then seals the features.

Until the features are sealed, `.staging/` contains a description of the encoder and a record of each finished shard, so
that a killed run can resume and produce the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from streamvid.config import require_integer
from streamvid.dataset.features.sidecar import (
    MAX_VISITS,
    NULL_FILE,
    SidecarManifest,
    TensorInfo,
    base_facts,
    differences,
    read_sidecar_manifest,
)
from streamvid.dataset.features.tables import SidecarShard, encode_members, encode_shards, index_path
from streamvid.dataset.features.tensors import RawTensor, check_name, encode_tensors
from streamvid.dataset.manifest import LARGE_FOLDERS, FileInfo, ShardInfo
from streamvid.dataset.passes import DEFAULT_WORKERS, in_parallel
from streamvid.dataset.reader import Dataset
from streamvid.dataset.sealed_json import MANIFEST
from streamvid.dataset.tar import scan_tar, write_shard
from streamvid.errors import ConfigError, DatasetError, StorageError
from streamvid.storage import LocalStore, StorageOptions, open_store

STAGING = ".staging"
_BEGUN = f"{STAGING}/begun.json"

Visits = Sequence[Mapping[str, RawTensor] | None]
"""A sample's tensors for each visit. None marks a visit that could not be encoded. Readers then deliver
another sample."""


@dataclass(frozen=True, slots=True)
class FinishedShard:
    """Record of a finished shard: its row in the table of shards, and the types and shapes of its tensors."""

    shard: SidecarShard
    tensors: Mapping[str, TensorInfo]
    shapes: Mapping[str, list[int]]

    def to_json(self) -> bytes:
        """Return the record as JSON."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    @staticmethod
    def from_json(data: bytes, where: str) -> FinishedShard:
        """Parse a record. Raises DatasetError if it is damaged. where: name of the record in the message."""
        try:
            value = json.loads(data)
            tensors = {name: TensorInfo(**one) for name, one in value["tensors"].items()}
            return FinishedShard(SidecarShard(**value["shard"]), tensors, value["shapes"])
        except (ValueError, KeyError, TypeError) as error:
            raise DatasetError(
                f"{where} is damaged ({error}); remove this file, and run the same command again"
            ) from error


@dataclass
class TensorKinds:
    """Tensor types and shapes of all samples in a shard. `shapes` omits the first dimension of ragged tensors."""

    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    shapes: dict[str, list[int]] = field(default_factory=dict)

    def add(self, key: str, tensors: Mapping[str, RawTensor]) -> None:
        """Add the tensors of a sample. Raises ConfigError unless they match the tensors of earlier samples."""
        kinds = {name: TensorInfo(one.dtype, one.is_ragged) for name, one in tensors.items()}
        shapes = {name: list(one.shape[1:] if one.is_ragged else one.shape) for name, one in tensors.items()}
        if not self.tensors:
            self.tensors, self.shapes = _check_kinds(kinds), shapes
        elif (kinds, shapes) != (self.tensors, self.shapes):
            raise ConfigError(
                f"sample {key} has the tensors {_described(kinds, shapes)}, but earlier samples have "
                f"{_described(self.tensors, self.shapes)}; types and shapes must not differ within a shard, "
                "except for the first dimension of ragged tensors"
            )


def _check_kinds(kinds: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    for name, kind in kinds.items():
        if kind.is_ragged and f"{check_name(name)}_mask" in kinds:
            raise ConfigError(
                f"tensor '{name}_mask': this name is reserved for the mask of ragged tensor {name!r}; rename one of "
                "the two tensors"
            )
    return kinds


def _described(kinds: Mapping[str, TensorInfo], shapes: Mapping[str, list[int]]) -> str:
    return ", ".join(
        f"{name} {kind.dtype} {['*', *shapes[name]] if kind.is_ragged else shapes[name]}"
        for name, kind in sorted(kinds.items())
    )


def in_common(records: Sequence[FinishedShard]) -> dict[str, TensorInfo]:
    """Return the tensor types that all shards share.

    Raises DatasetError if types differ between shards, or if shapes differ within a bucket.
    """
    first: FinishedShard | None = None
    of_bucket: dict[str, FinishedShard] = {}
    for one in records:
        if not one.tensors:  # none of its samples could be encoded
            continue
        first = first or one
        near = of_bucket.setdefault(one.shard.bucket_id, one)
        if one.tensors != first.tensors or one.shapes != near.shapes:
            other = first if one.tensors != first.tensors else near
            raise DatasetError(
                f"shard {one.shard.bucket_id}-{one.shard.number:06d} has the tensors "
                f"{_described(one.tensors, one.shapes)}, but other shards have "
                f"{_described(other.tensors, other.shapes)}; create the features again"
            )
    if first is None:
        raise DatasetError(
            "no sample could be encoded, so there is nothing to seal; check that the clips can be decoded"
        )
    return dict(first.tensors)


def check_null(null: Mapping[str, RawTensor], record: FinishedShard) -> None:
    """Raise ConfigError unless the null tensors can replace the tensors of the shard that `record` describes."""
    for name, one in null.items():
        kind = record.tensors.get(name)
        shape = list(one.shape[1:] if kind is not None and kind.is_ragged else one.shape)
        if kind is None or kind.dtype != one.dtype or shape != record.shapes[name]:
            raise ConfigError(
                f"null tensor {name!r} of dtype {one.dtype} and shape {one.shape} does not match the samples; "
                f"allowed: {_described(record.tensors, record.shapes)}"
            )


class SidecarWriter:
    """Writer that stores a dataset's features at a local path, or at a file:// or s3:// URL.

    made_with: JSON values that describe the encoder, such as its checksum. Readers compare them with the
        description of their own encoder.
    num_visits: number of visits per sample.

    Several processes may write different shards at the same time.

    Raises ConfigError with the differences if `url` contains different features, sealed or unfinished; DatasetError if
    it contains files that are not features; StorageError if the store fails.
    """

    def __init__(
        self,
        url: str | Path,
        dataset: Dataset,
        made_with: Mapping[str, Any],
        num_visits: int = 1,
        storage: StorageOptions | Mapping[str, Any] | None = None,
    ) -> None:
        require_integer("num_visits", num_visits, 1, MAX_VISITS)
        try:
            self._made_with = json.loads(json.dumps(made_with, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"made_with cannot be encoded as JSON ({error}); use only types that JSON supports"
            ) from error
        self._dataset, self._num_visits = dataset, num_visits
        self._store = open_store(url, StorageOptions.of(storage))
        self._facts = {"base": base_facts(dataset), "made_with": self._made_with, "num_visits": num_visits}
        self.sealed = self._begin()
        """Manifest of the features if they are sealed, by this or an earlier run; otherwise None. Call `seal` in both
        cases."""

    def _begin(self) -> SidecarManifest | None:
        url = self._store.url
        if self._store.size(MANIFEST) is not None:
            sealed = read_sidecar_manifest(self._store)
            base = {"plan": sealed.base_plan, "content": sealed.base_content}
            stored = {"base": base, "made_with": sealed.made_with, "num_visits": sealed.num_visits}
            self._refuse_other(stored, f"{url} already contains different sealed features")
            return sealed
        # Concurrent writers create the file _BEGUN before any other file.
        is_free = all(file.path.startswith(STAGING) for file in self._store.files())
        if self._store.size(_BEGUN) is None:
            if not is_free:
                raise DatasetError(f"{url} contains files that are not features; choose an empty folder or prefix")
            self._store.create(_BEGUN, json.dumps(self._facts, sort_keys=True, indent=1).encode())
        stored = json.loads(self._store.read(_BEGUN))
        self._refuse_other(stored, f"{url} already contains different unfinished features")
        return None

    def _refuse_other(self, stored: Mapping[str, Any], what: str) -> None:
        if found := differences(stored, self._facts):
            raise ConfigError(f"{what} ({'; '.join(found)}); choose another destination, or remove these features")

    # Shards.

    @cached_property
    def _done(self) -> set[str]:
        """Paths of the shard records that existed when this property was first read."""
        return {file.path for file in self._store.files(STAGING)}

    def is_done(self, shard: ShardInfo) -> bool:
        """Return True if an earlier run has finished `shard`."""
        return self.sealed is not None or _record_path(shard) in self._done

    def write_shard(self, shard: ShardInfo, samples: Iterable[tuple[str, Visits]]) -> None:
        """Write the features of `shard`. samples: a (key, visits) tuple for every sample, in the order of the shard.

        A finished shard is overwritten. Raises ConfigError for tensors that cannot be stored, DatasetError if the
        samples do not match the shard, and StorageError if the store fails.
        """
        if self.sealed is not None:
            raise DatasetError(f"the features at {self._store.url} are sealed; choose another destination")
        keys: list[str] = self._dataset.samples(shard, ["key"]).column("key").to_pylist()
        kinds, checksums = TensorKinds(), dict[str, bytes]()
        with self._temporary() as folder:
            path = folder / "shard.tar"
            with path.open("w+b") as file:
                write_shard(file, self._members(shard.path, keys, samples, kinds, checksums))
                file.flush()
                places = {one.name: (one.offset, one.num_bytes) for one in scan_tar(file)}
                file.seek(0)
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            num_bytes = path.stat().st_size
            index = self._index(keys, places, checksums)
            self._store.put(shard.path, path)
        index_file = FileInfo.of(index_path(shard.bucket_id, shard.number), index)
        self._store.put(index_file.path, index)
        done = SidecarShard(
            bucket_id=shard.bucket_id,
            number=shard.number,
            build_id=shard.build_id,
            base_sha256=shard.sha256,
            num_bytes=num_bytes,
            sha256=sha256,
            max_member_bytes=max((size for _, size in places.values()), default=0),
            index_num_bytes=index_file.num_bytes,
            index_sha256=index_file.sha256,
            num_missing=len(keys) * self._num_visits - len(places),
        )
        self._store.put(_record_path(shard), FinishedShard(done, kinds.tensors, kinds.shapes).to_json())

    def _members(
        self,
        path: str,
        keys: Sequence[str],
        samples: Iterable[tuple[str, Visits]],
        kinds: TensorKinds,
        checksums: dict[str, bytes],
    ) -> Iterator[tuple[str, dict[str, bytes]]]:
        number = -1
        for number, (key, visits) in enumerate(samples):
            if number >= len(keys):
                raise DatasetError(
                    f"{path} has {len(keys)} samples, but tensors for more samples were passed; pass each sample once"
                )
            if keys[number] != key:
                raise DatasetError(
                    f"sample {number} of {path} has the key {keys[number]!r} in the index, not {key!r}; pass the "
                    "samples in the order of the shard"
                )
            if len(visits) != self._num_visits:
                raise ConfigError(
                    f"sample {key} has tensors for {len(visits)} visits, but num_visits={self._num_visits}; pass one "
                    "mapping of tensors, or None, per visit"
                )
            members: dict[str, bytes] = {}
            for visit, tensors in enumerate(visits):
                if tensors is not None:
                    kinds.add(key, tensors)
                    members[_extension(visit)] = data = encode_tensors(tensors)
                    checksums[f"{key}.{_extension(visit)}"] = hashlib.sha256(data).digest()
            if members:
                yield key, members
        if number + 1 != len(keys):
            raise DatasetError(
                f"{path} has {len(keys)} samples, but tensors for {number + 1} samples were passed; pass tensors for "
                "all samples"
            )

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
        """Create a temporary folder.

        If the store is local, the folder is inside it, so that files can be moved into place by renaming.

        Raises StorageError if the folder cannot be created or written to.
        """
        folder = self._store.root / STAGING if isinstance(self._store, LocalStore) else None
        try:
            with tempfile.TemporaryDirectory(prefix="spool-", dir=folder) as name:
                yield Path(name)
        except OSError as error:
            raise StorageError(
                f"cannot write to {folder or tempfile.gettempdir()}: {error.strerror or error}; check the free space "
                "and the permissions of this folder"
            ) from error

    # Sealing.

    def seal(self, null: Mapping[str, RawTensor] | None = None) -> SidecarManifest:
        """Write the manifest once all shards are finished. Only one process may call this method.

        null: null tensors. They replace the tensors with the same names if a sample is delivered without text.

        Raises DatasetError if a shard is missing or tensors differ between shards, and ConfigError for invalid `null`.
        """
        if self.sealed is None:
            self.sealed = self._seal(null)
        if isinstance(self._store, LocalStore):
            shutil.rmtree(self._store.root / STAGING, ignore_errors=True)
        else:
            for folder in LARGE_FOLDERS:
                self._store.abort_uploads(folder)  # left by killed writers
            for file in list(self._store.files(STAGING)):
                self._store.remove(file.path)
        return self.sealed

    def _seal(self, null: Mapping[str, RawTensor] | None) -> SidecarManifest:
        records = self._records()
        tensors = in_common(records)
        table = encode_shards([one.shard for one in records])
        digest = hashlib.sha256(table).hexdigest()
        shard_file = FileInfo.of(f"index/shards-{digest[:12]}.parquet", table)
        self._store.put(shard_file.path, table)
        base = base_facts(self._dataset)
        manifest = SidecarManifest(
            base_plan=base["plan"],
            base_content=base["content"],
            made_with=self._made_with,
            num_visits=self._num_visits,
            tensors=tensors,
            shard_file=shard_file,
            null_file=self._put_null(null, records),
            num_missing=sum(one.shard.num_missing for one in records),
        )
        self._store.put(MANIFEST, manifest.to_json())
        return manifest

    def _records(self) -> list[FinishedShard]:
        """Read the records of all shards, in the dataset's order."""
        shards = self._dataset.shards
        there = {file.path for file in self._store.files(STAGING)}
        missing = [shard.path for shard in shards if _record_path(shard) not in there]
        if missing:
            raise DatasetError(
                f"{self._store.url}: {len(missing)} of {len(shards)} shards are not finished (for example, "
                f"{missing[0]}); run the same command again"
            )

        def record(shard: ShardInfo, _: object) -> FinishedShard:
            path = _record_path(shard)
            return FinishedShard.from_json(self._store.read(path), f"{self._store.url}: {path}")

        return list(in_parallel(record, shards, DEFAULT_WORKERS))

    def _put_null(self, null: Mapping[str, RawTensor] | None, records: Sequence[FinishedShard]) -> FileInfo | None:
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
