"""A sealed dataset as its readers see it: manifest, shard table, and the samples of one shard at a time."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamvid.dataset.index import USER_PREFIX, open_samples, read_table, shards_from_table
from streamvid.dataset.manifest import Manifest, ShardInfo, read_manifest
from streamvid.errors import ConfigError, DatasetError, IntegrityError
from streamvid.storage import Store, open_store

if TYPE_CHECKING:
    import pyarrow as pa

_OPEN_FILES = 64


class Dataset:
    """A sealed dataset at a URL. Safe to use from several threads; reads nothing but what is asked for.

    `manifest` is read when it is opened; tables are pyarrow tables.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.manifest: Manifest = read_manifest(store)
        self._shards: tuple[ShardInfo, ...] | None = None
        self._files: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return self.store.url

    @property
    def shards(self) -> tuple[ShardInfo, ...]:
        """All shards, in the order that plans count them."""
        if self._shards is None:
            rows: list[ShardInfo] = []
            for file in self.manifest.shard_files:
                rows.extend(shards_from_table(read_table(self.store, file)))
            if sum(shard.num_samples for shard in rows) != self.manifest.counts["samples"]:
                raise IntegrityError(f"{self.url}: the shard table and the manifest count different numbers of samples")
            self._shards = tuple(rows)
        return self._shards

    def samples(self, shard: ShardInfo, columns: Sequence[str] | None = None) -> pa.Table:
        """The index rows of one shard, in tar order: one row group, one small read."""
        with self._lock:
            table = self._samples_file(shard.index_path).read_row_group(
                shard.index_row_group, columns=columns, use_threads=False
            )
        if table.num_rows != shard.num_samples:
            raise IntegrityError(
                f"{self.url}: the index has {table.num_rows} rows for {shard.path}, not {shard.num_samples}"
            )
        return table

    def _samples_file(self, path: str) -> Any:
        if path not in self._files:
            file = next((file for file in self.manifest.sample_files if file.path == path), None)
            if file is None:
                raise DatasetError(f"{self.url}: the shard table names {path}, which the manifest does not")
            self._files[path] = open_samples(self.store, file)
            if len(self._files) > _OPEN_FILES:
                self._files.popitem(last=False)
        self._files.move_to_end(path)
        return self._files[path]

    def is_numeric(self, column: str) -> bool:
        """Whether an index column (as `column()` names it) holds numbers or truth values."""
        from pyarrow import types

        with self._lock:
            kind = self._samples_file(self.manifest.sample_files[0].path).schema_arrow.field(column).type
        return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))

    @property
    def user_columns(self) -> tuple[str, ...]:
        """Names of the user's own columns."""
        if not self.manifest.sample_files:
            return ()
        with self._lock:
            names = self._samples_file(self.manifest.sample_files[0].path).schema_arrow.names
        return tuple(name.removeprefix(USER_PREFIX) for name in names if name.startswith(USER_PREFIX))

    def column(self, name: str) -> str:
        """The index column that a user means by `name`: their own first, else one of the format's."""
        with self._lock:
            names = self._samples_file(self.manifest.sample_files[0].path).schema_arrow.names
        for candidate in (USER_PREFIX + name, name):
            if candidate in names:
                return candidate
        known = ", ".join(sorted({n.removeprefix(USER_PREFIX) for n in names}))
        raise ConfigError(f"columns: {name!r} is not in the dataset at {self.url}; it has {known}")

    def shards_table(self) -> pa.Table:
        """The shard table, a row a shard."""
        return self._concat(self.manifest.shard_files)

    def samples_table(self) -> pa.Table:
        """The whole samples index, a row a sample: memory in proportion to the dataset."""
        return self._concat(self.manifest.sample_files)

    def rejections_table(self) -> pa.Table:
        """Input rows that are in no shard: row number, source, reason."""
        return self._concat(self.manifest.rejection_files)

    def _concat(self, files: Sequence[Any]) -> pa.Table:
        import pyarrow as pa

        return pa.concat_tables([read_table(self.store, file) for file in files])


def open_dataset(url: str | Path) -> Dataset:
    """Open a sealed dataset at a local path or a file:// URL.

    Raises DatasetError where there is none, StorageError where it cannot be read.
    """
    return Dataset(open_store(url))
