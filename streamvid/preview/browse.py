"""Pages of samples: filtered by a condition, sorted by a column, and read from the index one page at a time.

No page needs Python objects for the whole index. Without sorting, a page reads only the shards that contain its rows; a
filter adds one pass over the columns that its condition reads, and the number of matches per shard is cached. Sorting
reads one column of the selected samples and needs 8 bytes per sample.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from streamvid.dataset.filter.filter import Filter, both, count_matches, filter_of_view, parse_filter
from streamvid.dataset.reader import Dataset
from streamvid.dataset.shard_table import ShardRows
from streamvid.errors import ConfigError
from streamvid.preview.find import SamplePlace
from streamvid.preview.sample import SampleFacts, facts_of_row

if TYPE_CHECKING:
    import pyarrow as pa

MAX_SORTED = 5_000_000
"""Maximum number of samples that can be sorted."""

_KEPT_ORDERS = 4
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowQuery:
    """Selection and order of samples.

    bucket, split: bucket and split of the samples; None for all buckets or all splits.
    where: condition on columns, as in VideoLoader.
    sort: column to sort by; None for the stored order.
    """

    bucket: str | None = None
    split: str | None = None
    where: str | None = None
    sort: str | None = None
    descending: bool = False


@dataclass(frozen=True, slots=True)
class RowPage:
    """Samples `first` to `first + len(rows) - 1` of `total`."""

    rows: tuple[SampleFacts, ...]
    first: int
    total: int

    @property
    def next_first(self) -> int | None:
        """Number of the first sample on the next page, or None if this is the last page."""
        end = self.first + len(self.rows)
        return end if end < self.total and self.rows else None


@dataclass(frozen=True, slots=True)
class _Selected:
    """Shards with selected samples, as rows of the shard table, and the number of selected samples in each shard."""

    shards: Int64s
    counts: Int64s
    chosen: Filter | None


class Browser:
    """Reader for the samples of a dataset or a view, page by page. Thread-safe. Recent sort orders are cached."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._orders: OrderedDict[RowQuery, tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def sort_columns(self) -> tuple[str, ...]:
        """Names of the columns by which samples can be sorted."""
        from pyarrow import types

        def is_sortable(kind: pa.DataType) -> bool:
            return not (types.is_nested(kind) or types.is_fixed_size_binary(kind))

        return tuple(field.name for field in self._dataset.samples_schema if is_sortable(field.type))

    def page(self, query: RowQuery, first: int, limit: int) -> RowPage:
        """Return at most `limit` samples, starting at number `first`.

        Raises ConfigError for an unknown bucket, split or column, or an invalid condition.
        """
        found = self._select(query)
        total = int(found.counts.sum())
        if query.sort is None:
            places = self._in_stored_order(found, first, limit)
        else:
            shards, indices = self._order(query, found)
            part = slice(first, first + limit)
            places = list(zip(shards[part].tolist(), indices[part].tolist(), strict=True))
        return RowPage(tuple(self._facts(places)), first, total)

    def count(self, query: RowQuery) -> int:
        """Return the number of selected samples."""
        return int(self._select(query).counts.sum())

    def members(self, row: int) -> npt.NDArray[np.int32]:
        """Return the indices of a shard's samples, omitting samples outside the view.

        row: row of the shard table.
        """
        return self._matching(row, filter_of_view(self._dataset))

    def _select(self, query: RowQuery) -> _Selected:
        dataset, table = self._dataset, self._dataset.shards
        mask = np.ones(len(table), np.bool_)
        for value, names, name in ((query.bucket, table.bucket_id, "bucket"), (query.split, table.split, "split")):
            if value is None:
                continue
            if value not in names.names:
                raise ConfigError(f"{name} {value!r} has no samples in {dataset.url}; choose from {_list(names.names)}")
            mask &= names.codes == names.names.index(value)
        rows = np.flatnonzero(mask).astype(np.int64)
        if query.where is not None:
            parse_filter(query.where, dataset)  # on its own, an invalid condition is explained without that of the view
        where = both(dataset.where, query.where)
        if where is None:
            return _Selected(rows, table.num_samples[rows], None)
        chosen = parse_filter(where, dataset)
        counts = count_matches(dataset, ShardRows(table, rows), chosen)
        kept = counts > 0
        return _Selected(rows[kept], counts[kept], chosen)

    def _in_stored_order(self, found: _Selected, first: int, limit: int) -> list[tuple[int, int]]:
        ends = np.cumsum(found.counts)
        places: list[tuple[int, int]] = []
        for number in range(int(np.searchsorted(ends, first, side="right")), len(found.shards)):
            row, start = int(found.shards[number]), int(ends[number] - found.counts[number])
            indices = self._matching(row, found.chosen)[max(0, first - start) :]
            places += [(row, int(index)) for index in indices[: limit - len(places)]]
            if len(places) >= limit:
                break
        return places

    def _matching(self, row: int, chosen: Filter | None) -> npt.NDArray[np.int32]:
        shard = self._dataset.shards[row]
        if chosen is None:
            return np.arange(shard.num_samples, dtype=np.int32)
        return chosen.matching(self._dataset.samples(shard, chosen.columns))

    def _order(self, query: RowQuery, found: _Selected) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        if found.counts.sum() > MAX_SORTED:
            raise ConfigError(
                f"{int(found.counts.sum())} samples are too many to sort (at most {MAX_SORTED}); choose one bucket, or "
                "a narrower condition"
            )
        with self._lock:
            order = self._orders.pop(query, None) or self._sorted(query, found)
            self._orders[query] = order
            while len(self._orders) > _KEPT_ORDERS:
                self._orders.popitem(last=False)
            return order

    def _sorted(self, query: RowQuery, found: _Selected) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        import pyarrow as pa
        import pyarrow.compute as pc

        if query.sort not in self.sort_columns:
            raise ConfigError(f"sort {query.sort!r}: must be one of {_list(self.sort_columns)}")
        values: list[Any] = []
        indices: list[npt.NDArray[np.int32]] = []
        names = [query.sort, *(found.chosen.columns if found.chosen else ())]
        for row in found.shards.tolist():
            table = self._dataset.samples(self._dataset.shards[row], list(dict.fromkeys(names)))
            mine = np.arange(len(table), dtype=np.int32) if found.chosen is None else found.chosen.matching(table)
            values += table.column(query.sort).take(pa.array(mine)).chunks
            indices.append(mine)
        if not values:
            return np.empty(0, np.int32), np.empty(0, np.int32)
        direction = "descending" if query.descending else "ascending"
        order = pc.array_sort_indices(pa.chunked_array(values).combine_chunks(), order=direction)
        places = np.asarray(order)
        shards = np.repeat(found.shards.astype(np.int32), found.counts)
        return shards[places], np.concatenate(indices)[places]

    def _facts(self, places: list[tuple[int, int]]) -> list[SampleFacts]:
        wanted: dict[int, list[int]] = {}
        for row, index in places:
            wanted.setdefault(row, []).append(index)
        found: dict[tuple[int, int], SampleFacts] = {}
        for row, indices in wanted.items():
            shard = self._dataset.shards[row]
            values = self._dataset.samples(shard).take(indices).to_pylist()
            for index, one in zip(indices, values, strict=True):
                found[row, index] = facts_of_row(SamplePlace(shard, row, index), one)
        return [found[place] for place in places]


def next_query(query: RowQuery, sort: str) -> RowQuery:
    """Return the query that results from a click on a column.

    The new query sorts by this column, in reverse order if the old query already sorts by it.
    """
    return replace(query, sort=sort, descending=query.sort == sort and not query.descending)


def _list(names: tuple[str, ...]) -> str:
    return ", ".join(names[:30]) + (", …" if len(names) > 30 else "") or "none"
