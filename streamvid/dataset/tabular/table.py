"""All metadata rows of one source, read once and stored on disk."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache
from pathlib import Path

import pyarrow as pa

from streamvid.dataset.tabular.columns import Column, ColumnType, checked_names, common_kind
from streamvid.dataset.tabular.reader import RowBlock, read_blocks
from streamvid.dataset.tabular.rows import Spill
from streamvid.errors import SourceError
from streamvid.storage import StorageOptions, Store, open_store

MAX_METADATA_BYTES = 64 * 2**30
_DOWNLOAD_BYTES = 64 * 2**20
_REMOTE = re.compile(r"(?!file:)[A-Za-z][A-Za-z0-9+.-]*://")
_COLUMNS, _BROKEN = b"columns", b"broken"  # keys in the Arrow schema of a stored block


class MetadataTable:
    """All rows of one or more metadata files, and the column names in order of first appearance.

    The rows are stored in a temporary file, so that memory usage does not grow with the number of rows.

    where: name of the metadata in messages.
    names: columns that come first, even if no row has a value for them.
    Raises SourceError for columns that an index cannot store.
    """

    def __init__(self, blocks: Iterable[RowBlock], where: str, names: Iterable[str] = ()) -> None:
        self._spill = Spill()
        found = dict.fromkeys(names)
        for block in blocks:
            if not block.columns.keys() <= found.keys():
                found.update(dict.fromkeys(block.columns))
                checked_names(found, where)
            self._spill.append(_stored(block))
        self.names = tuple(found)

    @property
    def num_rows(self) -> int:
        return self._spill.num_rows

    @property
    def blocks(self) -> Iterator[RowBlock]:
        """Read all rows in order, in blocks."""
        return (_loaded(self._spill[number]) for number in range(len(self._spill)))

    def kinds(self, names: Collection[str]) -> dict[str, ColumnType]:
        """Map each column name to a type that fits all values in the column."""
        found: dict[str, list[frozenset[ColumnType] | None]] = {name: [] for name in names}
        for block in self.blocks:
            for name, kinds in found.items():
                kinds.append(block.column(name).kinds())
        return {name: common_kind(kinds) for name, kinds in found.items()}


def _stored(block: RowBlock) -> pa.RecordBatch:
    columns = [(name, column.form) for name, column in block.columns.items()]
    cells = [pa.nulls(block.num_rows), *(column.cells for column in block.columns.values())]
    fields = [pa.field(str(number), one.type) for number, one in enumerate(cells)]
    notes = {_COLUMNS: json.dumps(columns), _BROKEN: json.dumps(list(block.broken.items()))}
    return pa.RecordBatch.from_arrays(cells, schema=pa.schema(fields, notes))


def _loaded(batch: pa.RecordBatch) -> RowBlock:
    notes = batch.schema.metadata
    columns = {
        name: Column(batch.column(number), form) for number, (name, form) in enumerate(json.loads(notes[_COLUMNS]), 1)
    }
    return RowBlock(len(batch), columns, dict(json.loads(notes[_BROKEN])))


def read_table(where: str | Path, storage: StorageOptions) -> MetadataTable:
    """Read a metadata file at a path or a URL. Raises SourceError if the file cannot be read."""
    return MetadataTable(read_file(where, storage), f"metadata {where}")


def read_file(where: str | Path, storage: StorageOptions) -> Iterator[RowBlock]:
    """Yield blocks of rows from a metadata file at a path or a URL. Raises SourceError if it cannot be read."""
    if isinstance(where, Path) or _REMOTE.match(where) is None:
        path = Path(where)
        _check_size(where, path.stat().st_size if path.is_file() else 0)
        yield from read_blocks(path)
        return
    scheme, _, rest = where.partition("://")
    bucket, _, key = rest.partition("/")  # the key is used as is, without escapes or a query
    with tempfile.TemporaryDirectory(prefix="streamvid-") as folder:
        local = Path(folder) / f"metadata{Path(key).suffix}"
        _download(_bucket(f"{scheme.lower()}://{bucket}", storage), key, local, where)
        try:
            yield from read_blocks(local)
        except SourceError as error:
            raise SourceError(str(error).replace(str(local), where)) from error


@lru_cache(16)
def _bucket(url: str, storage: StorageOptions) -> Store:
    return open_store(url, storage)


def _download(store: Store, key: str, local: Path, where: str) -> None:
    state = store.state(key)
    if state is None:
        raise SourceError(f"cannot read the metadata file {where}: the object does not exist; check the URL")
    _check_size(where, state.num_bytes)
    with local.open("wb") as file:
        for start in range(0, state.num_bytes, _DOWNLOAD_BYTES):
            data = bytearray(min(_DOWNLOAD_BYTES, state.num_bytes - start))
            store.read_ranges(key, [(start, memoryview(data))], state.version)
            file.write(data)


def _check_size(where: str | Path, num_bytes: int) -> None:
    if num_bytes > MAX_METADATA_BYTES:
        raise SourceError(
            f"metadata {where} is {num_bytes} bytes long, but at most {MAX_METADATA_BYTES} are allowed; split the file"
        )
