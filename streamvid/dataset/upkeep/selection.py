"""Selection of samples by keys, by a condition, or by a pattern for source names."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from streamvid.dataset.annotate.file import KEY_COLUMNS, find_key_column
from streamvid.dataset.filter.filter import Filter, parse_filter
from streamvid.dataset.reader import Dataset
from streamvid.dataset.tabular.reader import column_names, read_blocks
from streamvid.errors import ConfigError, SourceError

if TYPE_CHECKING:
    import pyarrow as pa

_TEXT_SUFFIX = ".txt"
_MAX_TEXT_BYTES = 2**30


class SampleSelection:
    """Selects samples from index tables by key, by condition, or by source name.

    columns: index columns that `matching` needs.
    unmatched: keys that have not matched a row of any table so far.
    """

    def __init__(self, keys: tuple[tuple[str, ...], Collection[str]] | None, filter: Filter | None, source: str | None):
        self._filter, self._key_columns = filter, () if keys is None else keys[0]
        self._pattern = None if source is None else re.compile(fnmatch.translate(source))
        self.unmatched: set[str] = set() if keys is None else set(keys[1])
        self._keys: Any = None if keys is None else _texts(sorted(self.unmatched))
        own = ("source",) if source is not None else () if filter is None else filter.columns
        self.columns: tuple[str, ...] = (*self._key_columns, *own)

    def matching(self, table: pa.Table) -> npt.NDArray[np.int32]:
        """Return the ascending row numbers of the selected samples."""
        if self._filter is not None:
            return self._filter.matching(table)
        if self._pattern is not None:
            names = table.column("source").to_pylist()
            return np.array([row for row, name in enumerate(names) if self._pattern.match(name)], np.int32)
        return self._by_keys(table)

    def _by_keys(self, table: pa.Table) -> npt.NDArray[np.int32]:
        import pyarrow as pa
        import pyarrow.compute as pc

        found = np.zeros(table.num_rows, bool)
        for name in self._key_columns:
            column = table.column(name).cast(pa.large_string())
            is_in = pc.is_in(column, value_set=self._keys)
            self.unmatched.difference_update(column.filter(is_in).to_pylist())
            found |= np.asarray(is_in.combine_chunks(), bool)
        return np.flatnonzero(found).astype(np.int32)


def select(
    dataset: Dataset, keys: str | Path | Collection[str] | None, where: str | None, source: str | None
) -> SampleSelection:
    """Return the selection that `keys`, `where` or `source` describes. Raises ConfigError unless exactly one is given.

    keys: keys, record keys or source names, or the path of a file that lists them.
    where: condition on the dataset's columns.
    source: pattern that source names must match, with shell wildcards.
    """
    if sum(value is not None for value in (keys, where, source)) != 1:
        raise ConfigError(
            "set exactly one of keys, where and source; pass keys (--keys FILE), a condition (--where CONDITION) or "
            "a pattern for source names (--source PATTERN)"
        )
    if keys is not None:
        listed = _read_keys(Path(keys).expanduser()) if isinstance(keys, str | Path) else (KEY_COLUMNS, keys)
        return SampleSelection(listed, None, None)
    return SampleSelection(None, None if where is None else parse_filter(where, dataset), source)


def _read_keys(path: Path) -> tuple[tuple[str, ...], set[str]]:
    """Return the index columns to which the keys in a file refer, and the set of keys.

    A text file has one key, record key or source name per line. Other files are tables with a key column.
    """
    if path.suffix.lower() == _TEXT_SUFFIX:
        found = set(filter(None, (line.strip() for line in _read_text(path).splitlines())))
        columns: tuple[str, ...] = KEY_COLUMNS
    else:
        column, own = find_key_column(path, column_names(path), None)
        columns, found = (column,), set()
        for block in read_blocks(path, (own,)):
            if block.broken:
                raise SourceError(f"{path}: {min(block.broken.items())[1]}; fix the row")
            found.update(block.column(own).as_kind("string").drop_null().to_pylist())
    if not found:
        raise SourceError(
            f"{path} contains no keys; list one key per line, or put the keys in a column named key, record_key "
            "or source"
        )
    return columns, found


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > _MAX_TEXT_BYTES:
            raise SourceError(
                f"{path} is larger than {_MAX_TEXT_BYTES} bytes; split it into several files, and pass one file at "
                "a time"
            )
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SourceError(f"{path} is not UTF-8 ({error}); save it as UTF-8") from error
    except OSError as error:
        raise SourceError(
            f"cannot read {path}: {error.strerror or error}; check the path and its permissions"
        ) from error


def _texts(values: Collection[str]) -> Any:
    import pyarrow as pa

    return pa.array(list(values), pa.large_string())


def in_all_buckets(dataset: Dataset, found: dict[int, npt.NDArray[np.int32]]) -> dict[int, npt.NDArray[np.int32]]:
    """Return the selected samples and their copies in other buckets, in the same form as `found`.

    Matching shards of a draw set list their clips in the same order.

    found: maps rows of the shard table to the ascending positions of the samples selected in that shard.
    """
    if not dataset.manifest.draws:
        return found
    places = {(shard.bucket_id, shard.number): number for number, shard in enumerate(dataset.shards)}
    for one in dataset.manifest.draws:
        for offset in range(one.num_shards):
            alike = [places[bucket_id, first + offset] for bucket_id, _, first in one.buckets]
            parts = [found[number] for number in alike if number in found]
            if parts:
                found |= dict.fromkeys(alike, np.unique(np.concatenate(parts)))
    return found
