"""Matches annotation rows with samples, and encodes the new column files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from streamvid.dataset.annotate.file import Annotation
from streamvid.dataset.arrow import array_of
from streamvid.dataset.index import USER_PREFIX, encode_row_groups, schema
from streamvid.dataset.manifest import ShardInfo
from streamvid.dataset.passes import Progress
from streamvid.dataset.reader import Dataset
from streamvid.errors import ConfigError, SourceError

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS_AT_ONCE = 1_000_000
_SHOWN = 3
_CAPTIONS = {"text": "string", "text_sha256": "sha256", "captions": "string"}
_KINDS = {"bool": "bool", "int64": "int64", "double": "double", "string": "string", "large_string": "string"}


class Join:
    """Join of an annotation with a dataset. The constructor sets `types`, `num_annotated` and `unmatched`.

    A join keeps the annotation, 4 bytes per sample, and the keys of about a million samples in memory.
    """

    def __init__(self, dataset: Dataset, annotation: Annotation, overwrite: bool, name: str) -> None:
        """Match rows with samples. Raises ConfigError for invalid columns, and SourceError for invalid keys."""
        self._dataset, self._annotation, self._name = dataset, annotation, name
        if dataset.manifest.draws and annotation.key_column == "key":
            # If copies of a clip had different values, a filter could let a clip be delivered twice in an epoch.
            raise ConfigError(
                f"key_column='key': {dataset.url} stores clips in several buckets, and all copies of a clip need the "
                "same values; use record_key or source (--key-column source) instead"
            )
        self.types = {USER_PREFIX + column: self._type(column, overwrite) for column in annotation.columns}
        if annotation.text is not None:
            self.types |= _CAPTIONS
        self._check_keys()
        self._rows = self._match()
        self.num_annotated = sum(int((rows >= 0).sum()) for rows in self._rows)
        self.unmatched = self._unmatched()
        if not self.num_annotated:
            raise SourceError(self._no_match())

    def _type(self, column: str, overwrite: bool) -> str:
        """Return the index type of a user column. Raises ConfigError if it conflicts with an existing column."""
        own = _KINDS[str(self._annotation.columns[column].type)]
        there = self._dataset.samples_schema
        place = there.get_field_index(USER_PREFIX + column)
        if place < 0:
            return own
        if not overwrite:
            raise ConfigError(
                f"columns: the dataset at {self._dataset.url} already has a {column!r} column; set overwrite=True "
                "(--overwrite) to change its values, or rename the column"
            )
        old = _KINDS[str(there.field(place).type)]
        if own == old or {own, old} == {"int64", "double"}:
            return own if own == old else "double"
        raise ConfigError(
            f"columns: {column!r} has type {old} in the dataset at {self._dataset.url} and type {own} in {self._name}; "
            "rename the column, or fix the values of the wrong type"
        )

    def _check_keys(self) -> None:
        import pyarrow.compute as pc

        keys = self._annotation.keys.drop_null()
        if pc.count_distinct(keys).as_py() < len(keys):
            counts = pc.value_counts(keys)
            twice = counts.field("values").filter(pc.greater(counts.field("counts"), 1)).slice(0, _SHOWN).to_pylist()
            raise SourceError(
                f"annotation {self._name} has more than one row for {', '.join(map(repr, twice))}; keep one row per key"
            )

    def _match(self) -> list[npt.NDArray[np.int32]]:
        """Return one int32 array of shape (num_samples,) per shard.

        For each sample, the array contains the index of its row in the annotation, or -1 if no row matches.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        found: list[npt.NDArray[np.int32]] = []
        # Each lookup builds a hash table of the annotation's keys, so it is done for many samples at once.
        for shards in self._windows():
            column = self._annotation.key_column
            parts = [self._dataset.samples(shard, [column]).column(column).cast(pa.large_string()) for shard in shards]
            keys = pa.chunked_array([chunk for part in parts for chunk in part.chunks], pa.large_string())
            places = pc.index_in(keys, value_set=self._annotation.keys, skip_nulls=True)
            numbers = np.asarray(pc.fill_null(places, -1).combine_chunks()).astype(np.int32, copy=False)
            found += np.split(numbers, np.cumsum([shard.num_samples for shard in shards])[:-1])
        return found

    def _windows(self) -> Iterator[list[ShardInfo]]:
        window: list[ShardInfo] = []
        for shard in self._dataset.shards:
            window.append(shard)
            if sum(shard.num_samples for shard in window) >= _ROWS_AT_ONCE:
                yield window
                window = []
        if window:
            yield window

    def _unmatched(self) -> pa.Array:
        """Return the keys in the annotation that match no sample."""
        used = np.zeros(len(self._annotation.keys) + 1, bool)
        for rows in self._rows:
            used[rows] = True
        return self._annotation.keys.take(array_of(np.flatnonzero(~used[:-1])))

    def _no_match(self) -> str:
        column = self._annotation.key_column
        shard = self._dataset.shards[0]
        there = self._dataset.samples(shard, [column]).column(column).slice(0, _SHOWN).to_pylist()
        mine = self._annotation.keys.slice(0, _SHOWN).to_pylist()
        return (
            f"annotation {self._name}: no row matches a sample of {self._dataset.url}; its keys look like {mine}, but "
            f"the dataset's {column} values look like {there}; choose another key_column (--key-column), or fix the "
            "keys"
        )

    def files(self, progress: Progress) -> Iterator[bytes]:
        """Yield the new column files as Parquet bytes, with the same order and row groups as the sample files."""
        files, target = self._dataset.manifest.files.samples, schema({"key": "string", **self.types})
        for done, file in enumerate(files):
            progress("annotate", done, len(files))
            yield encode_row_groups(self._tables(file.path, target), target)
        progress("annotate", len(files), len(files))

    def _tables(self, path: str, target: pa.Schema) -> Iterator[pa.Table]:
        """For each row group in a sample file, yield a table of the new columns."""
        shards, numbers = self._dataset.shards, self._shards_of(path)
        for row_group, keys in enumerate(self._dataset.stored_rows(path, ["key"])):
            table, number = keys.slice(0, 0), numbers.get(row_group)
            kept: npt.NDArray[np.int32] | None = np.empty(0, np.int32)
            if number is not None:
                kept = self._dataset.kept_rows(shards[number])
                table = self._table(shards[number], self._rows[number], target)
            yield table if kept is None else _spread(table, kept, keys, target)

    def _shards_of(self, path: str) -> dict[int, int]:
        """Map each row group in a sample file to its shard's row in the shard table. Empty shards are omitted."""
        shards = self._dataset.shards
        if path not in shards.index_path.names:
            return {}
        rows = np.flatnonzero(shards.index_path.codes == shards.index_path.names.index(path))
        return dict(zip(shards.index_row_group[rows].tolist(), rows.tolist(), strict=True))

    def _table(self, shard: ShardInfo, rows: npt.NDArray[np.int32], target: pa.Schema) -> pa.Table:
        """Return a table of a shard's new columns. Samples without a value in the annotation keep their old values."""
        import pyarrow as pa

        there = [name for name in ("key", *self.types) if name in self._dataset.samples_schema.names]
        old = self._dataset.samples(shard, there)
        places = pa.array(rows, mask=rows < 0)
        said = self._annotation
        columns: dict[str, pa.Array] = {"key": old.column("key")}
        for name in said.columns:
            columns[USER_PREFIX + name] = _filled(said.columns[name].take(places), old, USER_PREFIX + name, target)
        if said.text is not None and said.captions is not None:
            columns |= _captions(said.text.take(places), said.captions.take(places), old, target)
        return pa.table({name: columns[name] for name in target.names}, schema=target)


def _spread(table: pa.Table, kept: npt.NDArray[np.int32], keys: pa.Table, target: pa.Schema) -> pa.Table:
    """Return a table with one row per stored sample of a shard, with nulls for removed samples.

    kept: position of each row's sample among the stored samples of the shard."""
    import pyarrow as pa

    places = np.full(keys.num_rows, -1, np.int64)
    places[kept] = np.arange(len(kept))
    columns = {"key": keys.column("key")}
    for name in target.names[1:]:
        if len(kept):
            columns[name] = table.column(name).take(pa.array(places, mask=places < 0))
        else:
            columns[name] = pa.nulls(keys.num_rows, target.field(name).type)
    return pa.table(columns, schema=target)


def _filled(new: pa.Array, old: pa.Table, name: str, target: pa.Schema) -> Any:
    import pyarrow.compute as pc

    values = new.cast(target.field(name).type)
    return pc.coalesce(values, old.column(name).cast(values.type)) if name in old.column_names else values


def _captions(text: pa.Array, captions: pa.Array, old: pa.Table, target: pa.Schema) -> dict[str, pa.Array]:
    """Return the new caption columns, keyed by name.

    New captions replace all old captions of a sample, even if there is only one new caption.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    is_new = pc.is_valid(text)
    texts = text.cast(pa.string())
    digests = [None if t is None else hashlib.sha256(t.encode()).digest() for t in texts.to_pylist()]
    missing = pa.nulls(len(text), pa.string())
    before = old.column("captions") if "captions" in old.column_names else missing
    return {
        "text": pc.coalesce(texts, old.column("text")),
        "text_sha256": pc.coalesce(pa.array(digests, target.field("text_sha256").type), old.column("text_sha256")),
        "captions": pc.if_else(is_new, captions.cast(pa.string()), before),
    }
