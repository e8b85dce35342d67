"""In-memory shard table: arrays with about 120 bytes per shard, from which ShardInfo values are created on request."""

from __future__ import annotations

import binascii
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from streamvid.dataset.arrow import array_of, numbers_of, texts_of
from streamvid.dataset.draws import StoredSet
from streamvid.dataset.manifest import ShardInfo, shard_path
from streamvid.errors import DatasetError, IntegrityError, StreamvidError
from streamvid.storage import check_relative

if TYPE_CHECKING:
    import pyarrow as pa

Int32s = npt.NDArray[np.int32]
Digests = npt.NDArray[np.uint8]
"""SHA-256 digests, shape (rows, 32)."""
Int64s = npt.NDArray[np.int64]

_DIGEST_BYTES = 32
_BLOCK_ROWS = 1 << 14
_NAMES = ("bucket_id", "split", "index_path")
_NUMBERS = {
    "number": np.int32,
    "build_id": np.uint32,
    "num_samples": np.int64,
    "num_bytes": np.int64,
    "offsets_num_bytes": np.int64,
    "max_clip_bytes": np.int64,
    "index_row_group": np.int32,
}
_DIGESTS = ("sha256", "offsets_sha256")
_KINDS: dict[str, Any] = {
    **dict.fromkeys(_NAMES, np.int32),
    **_NUMBERS,
    **dict.fromkeys(_DIGESTS, np.dtype((np.uint8, _DIGEST_BYTES))),
}
_PATHS: dict[str, Callable[[str], str]] = {"bucket_id": lambda name: shard_path(name, 0), "index_path": str}


@dataclass(frozen=True, slots=True)
class Names:
    """Dictionary-encoded string column: the distinct strings in order of appearance, and one code (index) per row."""

    names: tuple[str, ...]
    codes: Int32s

    def __getitem__(self, row: int) -> str:
        return self.names[int(self.codes[row])]


@dataclass(frozen=True, eq=False)
class ShardTable(Sequence[ShardInfo]):
    """All shards of a dataset, in the order in which plans number them, as read-only arrays with one value per shard.

    `table[i]` and iteration create ShardInfo values; slices are `ShardRows` views. Safe to use from several threads.
    """

    bucket_id: Names
    split: Names
    index_path: Names
    number: Int32s
    build_id: npt.NDArray[np.uint32]
    num_samples: Int64s
    num_bytes: Int64s
    offsets_num_bytes: Int64s
    max_clip_bytes: Int64s
    index_row_group: Int32s
    sha256: Digests
    offsets_sha256: Digests

    def __len__(self) -> int:
        return len(self.number)

    @overload
    def __getitem__(self, index: int) -> ShardInfo: ...
    @overload
    def __getitem__(self, index: slice) -> ShardRows: ...
    def __getitem__(self, index: int | slice) -> ShardInfo | ShardRows:
        rows = range(len(self))[index]
        if isinstance(rows, range):
            return ShardRows(self, np.arange(rows.start, rows.stop, rows.step, dtype=np.int64))
        return ShardInfo(
            bucket_id=self.bucket_id[rows],
            number=int(self.number[rows]),
            build_id=int(self.build_id[rows]),
            split=self.split[rows],
            num_samples=int(self.num_samples[rows]),
            num_bytes=int(self.num_bytes[rows]),
            sha256=self.sha256[rows].tobytes().hex(),
            offsets_num_bytes=int(self.offsets_num_bytes[rows]),
            offsets_sha256=self.offsets_sha256[rows].tobytes().hex(),
            max_clip_bytes=int(self.max_clip_bytes[rows]),
            index_path=self.index_path[rows],
            index_row_group=int(self.index_row_group[rows]),
        )

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits that have shards."""
        return self.split.names

    def select(self, split: str) -> dict[str, Int64s]:
        """Map each bucket id in a split to the int64 row numbers of the bucket's shards, in ascending order.

        Bucket ids are in order of appearance. The mapping is empty if the split has no shards.
        """
        if split not in self.splits:
            return {}
        rows = np.flatnonzero(self.split.codes == self.split.names.index(split)).astype(np.int64)
        codes = self.bucket_id.codes[rows]
        order = np.argsort(codes, kind="stable")
        ends = np.flatnonzero(np.diff(codes[order])) + 1
        groups = sorted(np.split(rows[order], ends), key=lambda group: int(group[0]))
        return {self.bucket_id[int(group[0])]: group for group in groups}

    def only(self, shard: ShardInfo) -> ShardTable:
        """Return a table that contains only this shard. Raises KeyError if this table does not contain the shard."""
        mine = np.flatnonzero((self.number == shard.number) & (self.index_row_group == shard.index_row_group))
        rows = [row for row in mine.tolist() if self[row] == shard]
        if not rows:
            raise KeyError(shard.path)
        columns: dict[str, Any] = {name: getattr(self, name)[rows] for name in (*_NUMBERS, *_DIGESTS)}
        columns |= {name: Names((getattr(shard, name),), np.zeros(1, np.int32)) for name in _NAMES}
        return ShardTable(**columns)

    def taken(self, rows: Int64s, num_samples: Int64s | None = None) -> ShardTable:
        """Return a table of the given rows, in the given order.

        num_samples: new sample counts for these rows; None keeps the old counts.
        """
        columns: dict[str, Any] = {name: getattr(self, name)[rows] for name in (*_NUMBERS, *_DIGESTS)}
        for name in _NAMES:
            column = getattr(self, name)
            used, codes = np.unique(column.codes[rows], return_inverse=True)
            columns[name] = Names(tuple(column.names[code] for code in used.tolist()), codes.astype(np.int32))
        if num_samples is not None:
            columns["num_samples"] = num_samples
        for column in columns.values():
            (column.codes if isinstance(column, Names) else column).flags.writeable = False
        return ShardTable(**columns)

    def arranged(self, bucket_ids: Sequence[str]) -> ShardTable:
        """Return the table in the order that plans use: buckets as in `bucket_ids`, then ascending shard numbers."""
        places = {name: place for place, name in enumerate(bucket_ids)}
        ranks = np.array([places.get(name, len(places)) for name in self.bucket_id.names], np.int64)
        order = np.lexsort((self.number, ranks[self.bucket_id.codes]))
        is_sorted = bool((order == np.arange(len(order))).all())
        return self if is_sorted else self.taken(order.astype(np.int64))

    def plan_lines(self) -> Iterator[bytes]:
        """Yield the lines that `plan_digest` hashes, several thousand at a time."""
        for rows in self._blocks():
            texts = [_taken(self.bucket_id, rows, "shard {} "), _decimals(self.number[rows])]
            texts += [" ", _taken(self.split, rows, "{}"), " ", _decimals(self.num_samples[rows]), "\n"]
            yield _joined(texts)

    def content_lines(self) -> Iterator[bytes]:
        """Yield the lines that `base_digest` hashes, several thousand at a time."""
        import pyarrow as pa
        import pyarrow.compute as pc

        stem, ending = shard_path("{0}", 0).split("000000")
        for rows in self._blocks():
            texts = [_taken(self.bucket_id, rows, stem), pc.utf8_lpad(_decimals(self.number[rows]), 6, "0")]
            texts.append(
                texts_of([f"-{build_id:08x}" if build_id else "" for build_id in self.build_id[rows].tolist()])
            )
            buffers = [None, pa.py_buffer(binascii.hexlify(self.sha256[rows].tobytes()))]
            hexes = pa.FixedSizeBinaryArray.from_buffers(pa.binary(2 * _DIGEST_BYTES), len(self.sha256[rows]), buffers)
            yield _joined([*texts, f"{ending} ", hexes.cast(pa.binary()).cast(pa.string()), "\n"])

    def _blocks(self) -> Iterator[slice]:
        for start in range(0, len(self), _BLOCK_ROWS):
            yield slice(start, min(start + _BLOCK_ROWS, len(self)))


@dataclass(frozen=True, eq=False)
class ShardRows(Sequence[ShardInfo]):
    """View of selected shards in a table. rows: int64 row numbers of shape (len(self),)."""

    table: ShardTable
    rows: Int64s

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> ShardInfo: ...
    @overload
    def __getitem__(self, index: slice) -> ShardRows: ...
    def __getitem__(self, index: int | slice) -> ShardInfo | ShardRows:
        if isinstance(index, slice):
            return ShardRows(self.table, self.rows[index])
        return self.table[int(self.rows[index])]


def rows_of(shards: Sequence[ShardInfo], table: ShardTable) -> Int64s | None:
    """Return the int64 row numbers of `shards`, or None if `shards` is neither `table` nor a view of it."""
    if shards is table:
        return np.arange(len(table), dtype=np.int64)
    return shards.rows if isinstance(shards, ShardRows) and shards.table is table else None


def check_sets(sets: Sequence[StoredSet], shards: ShardTable, where: str) -> None:
    """Raise DatasetError if draw sets share shards, or if the shards of a set do not match between its buckets."""
    numbers: dict[str, dict[int, int]] = {}
    for one in sets:
        alike: list[list[tuple[int, str]]] = []
        for bucket_id, _, first in one.buckets:
            rows = numbers.get(bucket_id)
            if rows is None:
                rows = numbers[bucket_id] = _rows_by_number(shards, bucket_id)
            taken = [rows.pop(number, None) for number in range(first, first + one.num_shards)]
            if None in taken:
                raise DatasetError(
                    f"{where}: in bucket {bucket_id}, draw set {one.name} lists a shard that is missing or belongs "
                    "to another set; copy the dataset again"
                )
            alike.append([(int(shards.num_samples[row]), shards.split[row]) for row in taken if row is not None])
        if any(other != alike[0] for other in alike):
            raise DatasetError(
                f"{where}: the shards of draw set {one.name} differ between buckets in their splits or numbers of "
                "samples; copy the dataset again"
            )


def _rows_by_number(shards: ShardTable, bucket_id: str) -> dict[int, int]:
    """Map the shard numbers of a bucket to rows of the table."""
    found = np.flatnonzero([name == bucket_id for name in shards.bucket_id.names])
    mine = np.flatnonzero(shards.bucket_id.codes == (found[0] if len(found) else -1))
    return dict(zip(shards.number[mine].tolist(), mine.tolist(), strict=True))


def largest_clip(shards: Sequence[ShardInfo]) -> int:
    """Return the size in bytes of the largest clip in `shards`, or 0 if `shards` is empty."""
    if isinstance(shards, ShardRows):
        return int(shards.table.max_clip_bytes[shards.rows].max(initial=0))
    return max((shard.max_clip_bytes for shard in shards), default=0)


def exact_sum(values: npt.NDArray[np.integer[Any]]) -> int:
    """Return the exact sum of a column as a Python int. The sum of a damaged column could overflow int64."""
    wide = values.astype(np.int64, copy=False)
    return (int((wide >> 32).sum()) << 32) + int((wide & 0xFFFFFFFF).sum())


class ShardTableBuilder:
    """Builds a shard table from verified record batches. It needs no more memory than the finished table.

    Batches must have the columns of ShardInfo, with the types that the format specifies and without nulls.
    """

    def __init__(self) -> None:
        self._known: dict[str, dict[str, int]] = {name: {} for name in _NAMES}
        self._columns: dict[str, npt.NDArray[Any]] = {name: np.empty(0, kind) for name, kind in _KINDS.items()}
        self._num_rows = 0

    def expect(self, num_rows: int) -> None:
        """Reserve memory for `num_rows` more rows, because joining separate parts would need twice as much memory."""
        for name, kind in _KINDS.items():
            column = np.empty(self._num_rows + num_rows, kind)
            column[: self._num_rows] = self._columns[name][: self._num_rows]
            self._columns[name] = column

    def add(self, batch: pa.RecordBatch, where: str) -> None:
        """Append rows. Raises IntegrityError if a row is not a valid shard; `where` names the file in the message."""
        stop = self._num_rows + len(batch)
        if stop > len(self._columns["number"]):
            self.expect(max(len(batch), self._num_rows))
        rows = {name: column[self._num_rows : stop] for name, column in self._columns.items()}
        try:
            for name in _NAMES:
                rows[name][:] = self._codes(name, batch.column(name))
            for name in _NUMBERS:
                rows[name][:] = numbers_of(batch.column(name))
            for name in _DIGESTS:
                rows[name][:] = _digests(name, batch.column(name))
            wrong = np.flatnonzero((rows["num_samples"] < 1) | (rows["number"] < 0))
            if len(wrong):
                ShardInfo(**batch.slice(int(wrong[0]), 1).to_pylist()[0])  # raises an error that names the wrong value
        except StreamvidError as error:
            raise IntegrityError(f"{where}: {error}") from error
        self._num_rows = stop

    def finish(self) -> ShardTable:
        """Return the table of all rows. No more rows can be added afterwards."""
        columns: dict[str, Any] = {name: column[: self._num_rows] for name, column in self._columns.items()}
        for column in (*self._columns.values(), *columns.values()):
            column.flags.writeable = False
        return ShardTable(**columns | {name: Names(tuple(self._known[name]), columns[name]) for name in _NAMES})

    def _codes(self, name: str, column: pa.Array) -> Int32s:
        encoded, known = column.dictionary_encode(), self._known[name]
        codes: list[int] = []
        for text in encoded.dictionary.to_pylist():
            if text not in known and name in _PATHS:
                check_relative(_PATHS[name](text))
            codes.append(known.setdefault(text, len(known)))
        of_rows: Int32s = np.array(codes, np.int32).take(numbers_of(encoded.indices))
        return of_rows


def _digests(name: str, column: pa.Array) -> Digests:
    import pyarrow.compute as pc

    text = data = b""
    if (numbers_of(pc.binary_length(column)) == 2 * _DIGEST_BYTES).all():
        text = _bytes_of(column)
        with contextlib.suppress(binascii.Error):
            data = binascii.unhexlify(text)
    # Among the characters that unhexlify accepts, only upper-case letters have the bit 0x20 unset.
    if len(data) != _DIGEST_BYTES * len(column) or not np.bitwise_and.reduce(np.frombuffer(text, np.uint8)) & 0x20:
        raise IntegrityError(f"{name}: each value must be 64 lowercase hex digits; copy or rebuild the dataset")
    return np.frombuffer(data, np.uint8).reshape(-1, _DIGEST_BYTES)


def _taken(column: Names, rows: slice, form: str) -> pa.Array:
    return texts_of([form.format(name) for name in column.names]).take(array_of(column.codes[rows]))


def _decimals(values: npt.NDArray[Any]) -> pa.Array:
    import pyarrow as pa

    return array_of(values).cast(pa.string())


def _joined(texts: Iterable[pa.Array | str]) -> bytes:
    """Concatenate string arrays of equal length, row by row."""
    import pyarrow.compute as pc

    return _bytes_of(
        pc.binary_join_element_wise(*(texts_of([t])[0] if isinstance(t, str) else t for t in [*texts, ""]))
    )


def _bytes_of(texts: pa.Array) -> bytes:
    """Return the concatenated bytes of the strings in an array, which must not contain nulls."""
    if not len(texts):
        return b""
    first, last = np.frombuffer(texts.buffers()[1], np.int32)[[texts.offset, texts.offset + len(texts)]].tolist()
    return bytes(memoryview(texts.buffers()[2])[first:last])
