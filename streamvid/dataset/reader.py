"""Reader for sealed datasets: manifest, shard table, and the samples of one shard at a time."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from streamvid.dataset.arrow import array_of
from streamvid.dataset.column_groups import ColumnGroups, join, nearest, typed
from streamvid.dataset.draws import stored_clips
from streamvid.dataset.index import SHARD_TYPES, USER_PREFIX, schema
from streamvid.dataset.integrity import SamplesFile, read_range, read_shards, read_tables
from streamvid.dataset.manifest import Manifest, ShardInfo, base_digest, index_files, plan_digest, read_manifest
from streamvid.dataset.packets import MAX_TABLE_BYTES, PacketTables
from streamvid.dataset.removed import Removals
from streamvid.dataset.shard_table import ShardTable, check_sets, exact_sum
from streamvid.errors import ConfigError, DatasetError, IntegrityError
from streamvid.storage import BlockCache, CachedStore, Store

if TYPE_CHECKING:
    import pyarrow as pa

_KEPT_FOOTERS = 64


class Dataset:
    """One version of a sealed dataset. Safe to use from several threads.

    The constructor reads only the manifest, or nothing if `manifest` is given. Other files are read on request.
    Samples that were removed from the dataset are omitted. Tables are pyarrow tables. Index files are verified against
    their checksums before use. The shard table is also verified against the manifest's fingerprints. A mismatch raises
    IntegrityError.

    where: condition of the view that was opened, or None. Loaders deliver only samples that match this condition.
    newest: manifest of the version that was the newest when the dataset was opened.
    """

    def __init__(
        self,
        store: Store,
        cache: BlockCache | None = None,
        manifest: Manifest | None = None,
        where: str | None = None,
        newest: Manifest | None = None,
    ) -> None:
        self.manifest: Manifest = read_manifest(store) if manifest is None else manifest
        self.newest = newest or self.manifest
        if cache is not None and not store.is_local:
            known = {file.path: (file.sha256, file.num_bytes) for file in self.manifest.files}
            store = CachedStore(store, cache, known)
        self.store, self.where = store, where
        self._shards: ShardTable | None = None
        self._removals = Removals()
        self._groups = ColumnGroups.of(self.manifest)
        column_files = (file for group in self.manifest.columns for file in group.known_files)
        self._files = {file.path: SamplesFile(store, file) for file in (*self.manifest.files.samples, *column_files)}
        self._recent: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()  # guards `_recent`; never held during a read

    def __repr__(self) -> str:
        counts, buckets = self.manifest.counts, len(self.manifest.buckets)
        return f"Dataset({self.url}: {counts.samples} sample(s) in {counts.shards} shard(s), {buckets} bucket(s))"

    @property
    def url(self) -> str:
        return self.store.url

    @property
    def shards(self) -> ShardTable:
        """All shards, in the order in which plans number them. The table is read and verified on first access."""
        if self._shards is None:
            files = self.manifest.files
            shards = read_shards(self.store, files.shards).arranged([bucket.id for bucket in self.manifest.buckets])
            removals = Removals.read(self.store, files.removed)
            shards = removals.applied(shards)
            self._check_shards(shards)
            self._removals, self._shards = removals, shards
        return self._shards

    def _check_shards(self, shards: ShardTable) -> None:
        manifest, stored = self.manifest, self.manifest.fingerprints
        for path in shards.index_path.names:
            if path not in self._groups.places:
                raise DatasetError(
                    f"{self.url}: the shard table lists {path}, which is not in the manifest; copy the dataset again"
                )
        self._check_count("samples", exact_sum(shards.num_samples), "the shard table")
        self._check_count("shards", len(shards), "the shard table")
        self._check_count("num_bytes", exact_sum(shards.num_bytes), "the shard table")
        for name, said, found in (
            ("plan", stored.plan, plan_digest(manifest.buckets, shards.plan_lines(), manifest.draws)),
            (
                "base",
                stored.base,
                base_digest(shards.content_lines(), index_files(manifest), manifest.frame_rate, manifest.media),
            ),
        ):
            if said != found:
                raise IntegrityError(
                    f"{self.url}: the {name} fingerprint in the manifest is {said}, but the dataset's files have the "
                    f"fingerprint {found}; copy manifest.json and index/ again, or rebuild the dataset"
                )
        check_sets(manifest.draws, shards, self.url)

    def only(self, shard: ShardInfo) -> Dataset:
        """Return this dataset reduced to one shard. Draw sets are omitted, so that each pass delivers all samples.

        The fingerprints stay the same. Do not use the result for operations on the whole dataset, such as filters and
        `samples_table`.
        """
        view = copy.copy(self)
        view._shards = self.shards.only(shard)
        view.manifest = replace(self.manifest, draws=())
        return view

    def without_view(self) -> Dataset:
        """Return this dataset without the condition of the view through which it was opened."""
        other = copy.copy(self)
        other.where = None
        return other

    @property
    def stored_clips(self) -> tuple[int, int]:
        """Number of clips that are stored in several buckets, and number of samples that contain these clips."""
        if not self.manifest.draws:
            return 0, 0
        return stored_clips(self.manifest.draws, {(one.bucket_id, one.number): one.num_samples for one in self.shards})

    def _check_count(self, name: str, found: int, where: str) -> None:
        said = getattr(self.manifest.counts, name)
        if said != found:
            raise IntegrityError(
                f"{self.url}: {name} is {found} in {where}, but {said} in the manifest; copy the dataset again"
            )

    def samples(self, shard: ShardInfo, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the index rows of one shard, in the order of its tar. This takes one small read.

        columns: index columns to read; None reads all. Columns that were added later require one additional read per
            file that contains them.
        """
        if not self._groups.groups:
            return self._rows(shard, shard.index_path, columns)
        self._samples_file(shard.index_path)
        names = self.samples_schema.names if columns is None else columns
        files = self._groups.files_of(shard.index_path, names) or [(shard.index_path, [])]
        table = join([self._rows(shard, path, wanted) for path, wanted in files], names)
        return typed(table, names, self.samples_schema) if self._groups.is_partial else table

    def _rows(self, shard: ShardInfo, path: str, columns: Sequence[str] | None) -> pa.Table:
        table = self._samples_file(path).rows(shard.index_row_group, columns)
        kept = self.kept_rows(shard)
        if table.num_rows != self.num_stored(shard) or (kept is not None and len(kept) != shard.num_samples):
            said = "the index" if path == shard.index_path else path
            raise IntegrityError(
                f"{self.url}: {said} has {table.num_rows} rows for {shard.path}, but {self.num_stored(shard)} are "
                "required; copy the dataset again"
            )
        return table if kept is None else table.take(array_of(kept))

    def stored_rows(self, path: str, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Yield the row groups of a sample file, one per stored shard, including samples that were removed later."""
        file = self._samples_file(path)
        for row_group in range(file.num_row_groups()):
            yield file.rows(row_group, columns)

    def num_stored(self, shard: ShardInfo) -> int:
        """Return the number of samples in a shard's tar, including samples that were removed later."""
        removed = self._removals.of(shard)
        return shard.num_samples + (0 if removed is None else len(removed))

    def kept_rows(self, shard: ShardInfo) -> npt.NDArray[np.int32] | None:
        """Return the ascending positions of a shard's samples in its tar, or None if no sample was removed."""
        removed = self._removals.of(shard)
        if removed is None:
            return None
        return np.setdiff1d(np.arange(self.num_stored(shard), dtype=np.int32), removed, assume_unique=True)

    def column_paths(self, shard: ShardInfo) -> list[str]:
        """Return the paths of the files that contain this shard's values for columns added later."""
        place = self._groups.places[shard.index_path]
        files = (group.files[place] for group in self.manifest.columns)
        return [file.path for file in files if file is not None]

    def column_rows(self, shard: ShardInfo, path: str, columns: Sequence[str] | None) -> pa.Table:
        """Return a shard's rows from its sample file, or from one of the files in `column_paths`.

        If several of these files contain a column, the last file takes precedence.
        """
        return self._rows(shard, path, columns)

    def columns_digest(self, columns: Sequence[str]) -> str | None:
        """Return a digest of the values that were added later in these columns, or None if no values were added."""
        return self._groups.digest(columns)

    def check_place(
        self, shard: ShardInfo, offset: int | None, num_bytes: int | None, sha256: bytes | None
    ) -> tuple[str, int, int, bytes]:
        """Verify the location of a shard's packet table, and return it as (path, offset, num_bytes, sha256).

        offset, num_bytes, sha256: values from the samples index.
        Raises IntegrityError if these values are invalid (SAFE-1).
        """
        file = self.manifest.files.packets_of(shard.index_path)
        if file is None or offset is None or num_bytes is None or sha256 is None:
            given = {"packets file": file, "offset": offset, "size": num_bytes, "checksum": sha256}
            missing = ", ".join(name for name, value in given.items() if value is None)
            raise self._no_place(shard, f"no {missing}")
        if not 0 < num_bytes <= MAX_TABLE_BYTES or not 0 <= offset <= file.num_bytes - num_bytes:
            raise self._no_place(
                shard, f"{num_bytes} bytes at offset {offset} of {file.path}, which is {file.num_bytes} bytes long"
            )
        return file.path, offset, num_bytes, sha256

    def _no_place(self, shard: ShardInfo, said: str) -> IntegrityError:
        return IntegrityError(
            f"{self.url}: the index gives a wrong location for the packets of {shard.path}: {said}; copy the dataset "
            "again"
        )

    def packets(
        self, shard: ShardInfo, offset: int | None, num_bytes: int | None, sha256: bytes | None
    ) -> PacketTables:
        """Read the packet table of a shard, which covers all stored clips.

        offset, num_bytes, sha256: values from the samples index.
        """
        path, offset, num_bytes, sha256 = self.check_place(shard, offset, num_bytes, sha256)
        data = read_range(self.store, path, offset, num_bytes, sha256)
        where = f"{self.url}: the packets of {shard.path} in {path}"
        return PacketTables(data, sha256, self.num_stored(shard), where)

    def _samples_file(self, path: str) -> SamplesFile:
        if path not in self._files:
            raise DatasetError(
                f"{self.url}: the shard table lists {path}, which is not in the manifest; copy the dataset again"
            )
        with self._lock:
            self._recent[path] = None
            self._recent.move_to_end(path)
            if len(self._recent) > _KEPT_FOOTERS:
                self._files[self._recent.popitem(last=False)[0]].forget()
        return self._files[path]

    @property
    def stored_schema(self) -> pa.Schema:
        """Schema of the sample files, without columns added later. Datasets without samples have an empty schema."""
        import pyarrow as pa

        files = self.manifest.files.samples
        return self._samples_file(files[0].path).arrow_schema() if files else pa.schema([])

    @property
    def samples_schema(self) -> pa.Schema:
        """Schema of the samples index, including columns added later. Datasets without samples have an empty schema."""
        stored = self.stored_schema
        return self._groups.schema(stored) if stored.names else stored

    def is_numeric(self, column: str) -> bool:
        """Return True if an index column contains numbers or booleans. column: name returned by `Dataset.column`."""
        from pyarrow import types

        kind = self.samples_schema.field(column).type
        return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))

    @property
    def user_columns(self) -> tuple[str, ...]:
        """Names of the user's own columns, without the `user.` prefix."""
        names = self.samples_schema.names
        return tuple(name.removeprefix(USER_PREFIX) for name in names if name.startswith(USER_PREFIX))

    def column(self, name: str, option: str = "columns") -> str:
        """Return the name of the index column for `name`. A user column takes precedence over a built-in column.

        Raises ConfigError if there is no such column. option: name of the option in the error message.
        """
        names = self.samples_schema.names
        for candidate in (USER_PREFIX + name, name):
            if candidate in names:
                return candidate
        known = sorted({n.removeprefix(USER_PREFIX) for n in names})
        raise ConfigError(
            f"{option}: {name!r} is not a column of the dataset at {self.url}{nearest(name, known)}; available: "
            f"{', '.join(known)}"
        )

    def shards_table(self) -> pa.Table:
        """Return the shard table: one row per shard, in the order that plans use."""
        import pyarrow as pa

        rows = [{**asdict(shard), "path": shard.path} for shard in self.shards]
        return pa.Table.from_pylist(rows, schema=schema(SHARD_TYPES))

    def samples_table(self) -> pa.Table:
        """Return the whole samples index, one row per sample. Memory usage is proportional to the number of samples."""
        import pyarrow as pa

        if self.manifest.version > 1:
            tables = [self.samples(shard) for shard in self.shards]
            return pa.concat_tables(tables) if tables else self.samples_schema.empty_table()
        table = read_tables(self.store, self.manifest.files.samples)
        self._check_count("samples", table.num_rows, "the samples index")
        parts = [table]
        for group in self.manifest.columns:
            parts.append(read_tables(self.store, group.known_files).drop_columns("key"))
            self._check_count("samples", parts[-1].num_rows, group.known_files[0].path)
        return join(parts, self._groups.schema(table.schema).names)

    def rejections_table(self) -> pa.Table:
        """Return the rejected input rows, with the columns row, source, reason and kind."""
        table = read_tables(self.store, self.manifest.files.rejections)
        self._check_count("rejections", table.num_rows, "the table of rejections")
        return table
