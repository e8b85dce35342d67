"""Reader for metadata files: yields the rows of CSV, JSON, JSON Lines and Parquet files in blocks.

A row that cannot be read stays in its block as a broken row with a reason, so that row numbers match the file.
To add a file format, write a function from (path, columns) to blocks and add it to `_FORMATS`.
"""

from __future__ import annotations

import csv
import json
import posixpath
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types

from streamvid.dataset.arrow import check_unpacked
from streamvid.dataset.tabular.columns import (
    NOT_UTF8,
    Column,
    check_count,
    checked_names,
    plain_text,
)
from streamvid.errors import SourceError

BLOCK_ROWS = 1 << 14
_CSV_ROWS = 256
_HEADER_CHARS = 2**17
_FILE_ROWS = 8  # rows per block if cells contain files
_PARQUET_BUFFER_BYTES = 2**20
MAX_JSON_BYTES = 2 * 2**30
_MAX_FIELD_CHARS = 16 * 2**20
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class BrokenRow:
    """Input row that cannot be read, and the reason."""

    reason: str


InputRow: TypeAlias = Mapping[str, object] | BrokenRow


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Consecutive rows of a file. broken: maps the index of each unreadable row, within the block, to the reason."""

    num_rows: int
    columns: Mapping[str, Column]
    broken: Mapping[int, str] = field(default_factory=dict)

    def column(self, name: str) -> Column:
        """Return a column, or a column of nulls if the block does not contain the column."""
        return self.columns[name] if name in self.columns else Column(pa.nulls(self.num_rows))

    def rows(self) -> Iterator[InputRow]:
        """Yield the rows one at a time."""
        values = {name: column.raw_values() for name, column in self.columns.items()}
        for place in range(self.num_rows):
            if place in self.broken:
                yield BrokenRow(self.broken[place])
            else:
                yield {name: cells[place] for name, cells in values.items()}


def blocks_of(rows: Iterable[InputRow], columns: Collection[str] | None = None) -> Iterator[RowBlock]:
    """Group rows of Python values into blocks. columns: names of the columns to keep; None keeps all."""
    rows = iter(rows)
    while batch := list(islice(rows, BLOCK_ROWS)):
        broken = _broken(batch)
        good: list[Mapping[str, object]] = [{} if isinstance(row, BrokenRow) else row for row in batch]
        names = dict.fromkeys(name for row in good for name in row)
        check_count(len(names), "the metadata")  # check before each column gets a cell per row
        taken = names if columns is None else [name for name in names if name in columns]
        yield _block(len(batch), {name: [row.get(name) for row in good] for name in taken}, broken, _json_column)


def _broken(rows: Sequence[object]) -> dict[int, str]:
    return {place: row.reason for place, row in enumerate(rows) if isinstance(row, BrokenRow)}


_Made: TypeAlias = tuple[Column, dict[int, str]]
"""A column, and a mapping from row indices to the reasons why the values in these rows cannot be used."""


def _block(
    num_rows: int, values: Mapping[str, Sequence[Any]], broken: dict[int, str], make: Callable[[Sequence[Any]], _Made]
) -> RowBlock:
    columns: dict[str, Column] = {}
    for name, cells in values.items():
        columns[name], reasons = make(cells)
        for place, reason in reasons.items():
            broken.setdefault(place, f"column {name.strip('_')!r} {reason}")
    return RowBlock(num_rows, columns, broken)


def _text_column(texts: Sequence[str]) -> _Made:
    array, broken = _texts(texts)
    return Column(array, "text"), broken


def _json_column(values: Sequence[Any]) -> _Made:
    if all(value is None or isinstance(value, str) for value in values):
        array, broken = _texts(values)
        return Column(pa.nulls(len(array)) if array.null_count == len(array) else array), broken
    texts: list[str | None] = []
    too_deep = {}
    for place, value in enumerate(values):
        try:
            text = json.dumps(value, ensure_ascii=False, sort_keys=True, default=plain_text)
            texts.append(None if value is None else text)
        except RecursionError:
            texts.append(None)
            too_deep[place] = "is nested too deeply"
    # A backslash escape would be valid JSON, which decodes to the same invalid text.
    array, broken = _texts(texts, "replace")
    return Column(array, "json"), too_deep | broken


def value_column(values: Sequence[object]) -> Column:
    """Convert Python values to a column."""
    return _json_column(values)[0]


def _texts(texts: Sequence[str | None], errors: str = "backslashreplace") -> tuple[pa.Array, dict[int, str]]:
    """Return the texts as large strings, and a mapping from the index of each invalid text to the reason.

    Characters that are not valid Unicode are escaped or replaced.
    """
    try:
        return pa.array(texts, pa.large_string()), {}
    except UnicodeEncodeError:
        escaped = [None if text is None else text.encode("utf-8", errors).decode() for text in texts]
        broken = {place: NOT_UTF8 for place, text in enumerate(texts) if text != escaped[place]}
        return pa.array(escaped, pa.large_string()), broken


def is_metadata_name(name: str) -> bool:
    """Return True if a file name has the extension of a supported metadata format."""
    return posixpath.splitext(name)[1].lower() in METADATA_SUFFIXES


def column_names(path: Path, is_sample: bool = False) -> tuple[str, ...]:
    """Return the column names of a local file. Raises SourceError if the file cannot be read.

    is_sample: True to read only the first block of rows. The result then lacks columns that occur only in later rows of
        a JSON file.
    """
    blocks = read_blocks(path)
    if is_sample or path.suffix.lower() in (".csv", ".parquet"):
        blocks = islice(blocks, 1)
    return checked_names((name for block in blocks for name in block.columns), f"metadata {path}")


def read_blocks(path: Path, columns: Collection[str] | None = None) -> Iterator[RowBlock]:
    """Yield the rows of a local file in blocks. Raises SourceError if the file cannot be read.

    columns: names of the columns to read; None reads all. For CSV and Parquet, the first block has columns but no rows.
    """
    read = _FORMATS.get(path.suffix.lower())
    if read is None:
        raise SourceError(f"metadata {path}: the name must match one of {', '.join(f'*{name}' for name in _FORMATS)}")
    try:
        with path.open("rb") as file:
            if file.read(2) in _UTF16:
                raise SourceError(f"metadata {path} is UTF-16; save it as UTF-8")
        yield from read(path, columns)
    except OSError as error:
        raise SourceError(
            f"cannot read the metadata file {path}: {error.strerror or error}; check the path and its permissions"
        ) from error


def _read_csv(path: Path, columns: Collection[str] | None) -> Iterator[RowBlock]:
    csv.field_size_limit(max(csv.field_size_limit(), _MAX_FIELD_CHARS))
    # Bytes that are not UTF-8 become lone surrogates, which `_texts` detects.
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        line = file.readline(_HEADER_CHARS)
        file.seek(0)
        # The delimiter is the first of comma, tab and semicolon that the header contains.
        delimiter = next((sign for sign in ",\t;" if sign in line), ",")
        reader = csv.reader(file, strict=True, delimiter=delimiter)
        try:
            header = [name.strip() or "unnamed" for name in next(reader, [])]
        except csv.Error as error:
            raise SourceError(f"metadata {path} has no valid CSV header ({error}); fix the header") from error
        _check_unique(header, path)
        taken = {name: place for place, name in enumerate(header) if columns is None or name in columns}
        yield _block(0, dict.fromkeys(taken, ()), {}, _text_column)
        rows = _csv_rows(path, reader, len(header))
        while (block := _csv_block(rows, len(header), taken)).num_rows:
            yield block


def _csv_block(rows: Iterator[Sequence[str] | BrokenRow], num_fields: int, taken: Mapping[str, int]) -> RowBlock:
    cells: dict[str, list[str]] = {name: [] for name in taken}
    broken: dict[int, str] = {}
    num_rows = 0
    # Rows are read in small batches, because the garbage collector would repeatedly traverse long lists of rows.
    while num_rows < BLOCK_ROWS and (batch := list(islice(rows, _CSV_ROWS))):
        if BrokenRow in map(type, batch):
            broken |= {num_rows + place: reason for place, reason in _broken(batch).items()}
            batch = [("",) * num_fields if isinstance(row, BrokenRow) else row for row in batch]
        columns = list(zip(*batch, strict=True))
        for name, place in taken.items():
            cells[name] += columns[place]
        num_rows += len(batch)
    return _block(num_rows, cells, broken, _text_column)


def _csv_rows(path: Path, reader: Any, num_fields: int) -> Iterator[Sequence[str] | BrokenRow]:
    line = reader.line_num + 1
    while True:
        try:
            for cells in reader:
                if len(cells) == num_fields:
                    yield cells
                elif cells:
                    reason = f"has {len(cells)} fields, but the header has {num_fields}; check for a missing quote"
                    yield BrokenRow(f"line {line} {reason}")
                line = reader.line_num + 1
            return
        except csv.Error as error:
            if "end of data" in str(error):  # csv has read all rows after an unclosed quote as one field
                raise SourceError(
                    f'metadata {path}: the row on line {line} opens a quote (") that is never closed; close the quote'
                ) from error
            yield BrokenRow(f"line {line} is not valid CSV: {error}")
            line = reader.line_num + 1


def _read_jsonl(path: Path, columns: Collection[str] | None) -> Iterator[RowBlock]:
    with path.open("rb") as file:
        yield from blocks_of(_json_lines(file), columns)


def _json_lines(lines: Iterable[bytes]) -> Iterator[InputRow]:
    names: dict[str, str] = {}  # one copy of each name instead of one per line
    for number, line in enumerate(lines, 1):
        text = line.removeprefix(_BOM) if number == 1 else line
        if not text.strip():
            continue
        try:
            row = _parse_json(text)
        except (ValueError, RecursionError) as error:
            yield BrokenRow(f"line {number} is not valid JSON: {_first_line(error)}")
            continue
        yield {names.setdefault(k, k): v for k, v in row.items()} if isinstance(row, dict) else _not_object(row)


def _read_json(path: Path, columns: Collection[str] | None) -> Iterator[RowBlock]:
    if path.stat().st_size > MAX_JSON_BYTES:
        raise SourceError(
            f"metadata {path} is larger than {MAX_JSON_BYTES} bytes; convert the file to .jsonl or .parquet"
        )
    try:
        value = _parse_json(path.read_bytes().removeprefix(_BOM))
    except (ValueError, RecursionError) as error:
        raise SourceError(f"metadata {path} is not valid JSON ({_first_line(error)}); fix the file") from error
    rows = _json_list(value, path)
    yield from blocks_of((row if isinstance(row, dict) else _not_object(row) for row in rows), columns)


def _json_list(value: object, path: Path) -> list[object]:
    if isinstance(value, dict) and value and all(posixpath.splitext(name)[1] for name in value):
        return [{"path": name, "caption": caption} for name, caption in value.items()]
    if isinstance(value, dict):
        lists = [part for part in value.values() if isinstance(part, list)]
        if len(lists) != 1:
            raise SourceError(
                f"metadata {path} is an object with {len(lists)} lists; expected a list of objects, an object with "
                "exactly one such list, or an object that maps file names to captions"
            )
        value = lists[0]
    if not isinstance(value, list):
        raise SourceError(
            f"metadata {path} contains a value of type {type(value).__name__}, not a list of objects; use one object "
            "per row"
        )
    return value


def _parse_json(data: bytes) -> Any:
    return json.loads(data.decode("utf-8", "surrogateescape"), parse_constant=lambda _: None)


def _not_object(value: object) -> BrokenRow:
    return BrokenRow(f"the row has type {type(value).__name__}; it must be an object")


def _check_unique(names: Sequence[str], path: Path) -> None:
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise SourceError(f"metadata {path} has duplicate column names: {', '.join(repeated)}; rename the duplicates")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _read_parquet(path: Path, columns: Collection[str] | None) -> Iterator[RowBlock]:
    try:
        # With a buffer, the reader reads one page at a time instead of a whole row group, which may contain videos.
        with pq.ParquetFile(path, pre_buffer=False, buffer_size=_PARQUET_BUFFER_BYTES) as file:
            check_unpacked(file.metadata, path.stat().st_size)
            schema = file.schema_arrow
            _check_unique(schema.names, path)
            taken = [name for name in schema.names if columns is None or name in columns]
            yield RowBlock(0, {name: _decoded(pa.nulls(0, schema.field(name).type)) for name in taken})
            num_rows = _FILE_ROWS if any(is_embedded(schema.field(name).type) for name in taken) else BLOCK_ROWS
            for batch in file.iter_batches(num_rows, columns=taken, use_threads=False):
                yield RowBlock(len(batch), {name: _decoded(batch.column(name)) for name in taken})
    except (pa.ArrowException, ValueError, MemoryError) as error:
        raise SourceError(
            f"metadata {path} is not a readable Parquet file ({_first_line(error)}); write or copy the file again"
        ) from error


def is_embedded(kind: pa.DataType) -> bool:
    """Return True if cells of this type contain files, as bytes or as Hugging Face structs with bytes and a path."""
    if types.is_struct(kind):
        return kind.get_field_index("bytes") >= 0 and is_embedded(kind.field("bytes").type)
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def _decoded(cells: pa.Array) -> Column:
    return Column(cells.dictionary_decode() if types.is_dictionary(cells.type) else cells)


_FORMATS: dict[str, Callable[[Path, Collection[str] | None], Iterator[RowBlock]]] = {
    ".csv": _read_csv,
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}
METADATA_SUFFIXES = tuple(_FORMATS)
