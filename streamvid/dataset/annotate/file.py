"""A file of annotations as columns: CSV, JSON, JSON lines or parquet, with the types that the sharder gives columns."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamvid.dataset.annotate.types import captions_of, common_type, from_csv, from_values, normal
from streamvid.dataset.captions import CAPTION_COLUMNS
from streamvid.dataset.column_groups import nearest
from streamvid.errors import ConfigError, SourceError

if TYPE_CHECKING:
    import pyarrow as pa

KEY_COLUMNS = ("key", "record_key", "source")
_SOURCE_NAMES = ("source", "path", "video", "file_name")
MAX_JSON_BYTES = 2 * 2**30
MAX_COLUMNS = 1000
MAX_NAME_BYTES = 256
_ROWS_AT_ONCE = 1 << 16
_BLOCK_BYTES = 2**20


@dataclass(frozen=True)
class Annotation:
    """What a file says of samples: a row each, as Arrow columns, in memory as large as the columns that are taken.

    key_column: of the index. keys: texts, null where a row has none. columns: the user's, each of int64, double, bool
    or string. text, captions: None where no caption column was asked for; captions: null where there is one caption.
    sha256: of the file and of what was taken of it.
    """

    key_column: str
    keys: pa.Array
    columns: dict[str, pa.Array]
    text: pa.Array | None
    captions: pa.Array | None
    sha256: str


def read_annotation(
    path: Path, key_column: str | None, columns: Sequence[str] | None, caption_column: str | None
) -> Annotation:
    """The annotation in a file. Raises ConfigError for columns that it has not, SourceError where it cannot be read."""
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise SourceError(f"annotation {path}: allowed are files named {', '.join(f'*{name}' for name in _READERS)}")
    try:
        names = _checked_names(path, reader.names(path))
        key, own = _key_column(path, names, key_column)
        if caption_column is None and columns is None:
            caption_column = next((name for name in CAPTION_COLUMNS if name in names and name != own), None)
        wanted = _wanted(path, names, own, columns, caption_column)
        taken = list(dict.fromkeys([own, *wanted, *([caption_column] if caption_column else [])]))
        found = reader.columns(path, taken, caption_column)
        digest = _sha256(path, [key, own, sorted(wanted), caption_column])
    except OSError as error:
        raise SourceError(f"cannot read the annotation {path}: {error.strerror or error}") from error
    text, captions = captions_of(found[caption_column], path) if caption_column else (None, None)
    return Annotation(
        key, _as_keys(found[own]), {name: normal(found[name], path, name) for name in wanted}, text, captions, digest
    )


def _checked_names(path: Path, names: Sequence[str]) -> list[str]:
    if not names:
        raise SourceError(f"annotation {path} has no rows")
    if len(names) > MAX_COLUMNS or len(set(names)) < len(names):
        raise SourceError(f"annotation {path} has {len(names)} columns, or one twice; {MAX_COLUMNS} are allowed")
    for name in names:
        if not name or not name.isprintable() or len(name.encode(errors="replace")) > MAX_NAME_BYTES:
            raise SourceError(
                f"annotation {path} has a column named {name[:MAX_NAME_BYTES]!a}; rename it: printable, at most "
                f"{MAX_NAME_BYTES} bytes"
            )
    return list(names)


def _key_column(path: Path, names: Sequence[str], asked: str | None) -> tuple[str, str]:
    """(column of the index, column of the file) that say which sample a row is of."""
    if asked is not None and asked not in KEY_COLUMNS:
        raise ConfigError(
            f"key_column={asked!r}: allowed are {', '.join(KEY_COLUMNS)}{nearest(asked, KEY_COLUMNS)}; it names the "
            "column of the dataset, and the file's column is called the same"
        )
    for key in KEY_COLUMNS if asked is None else (asked,):
        for name in _SOURCE_NAMES if key == "source" else (key,):
            if name in names:
                return key, name
    raise ConfigError(
        f"annotation {path} has no column {asked or ', '.join(KEY_COLUMNS)} that says which sample a row is of; it has "
        f"{', '.join(names)}{nearest(asked or 'key', names)} Rename it: key is a sample's, record_key a source's, and "
        "source (or path, video, file_name) the source's name, as `streamvid stats` and the index have them"
    )


def _wanted(
    path: Path, names: Sequence[str], key: str, columns: Sequence[str] | None, caption_column: str | None
) -> list[str]:
    for option, asked in (("columns", columns or ()), ("caption_column", (caption_column,) if caption_column else ())):
        for name in asked:
            if name not in names:
                raise ConfigError(
                    f"{option}: {name!r} is no column of {path}{nearest(name, names)}; it has {', '.join(names)}"
                )
            if name == key:
                raise ConfigError(f"{option}: {name!r} says which sample a row is of; leave it out")
    if columns is None:
        columns = [name for name in names if name not in (key, caption_column, *KEY_COLUMNS)]
    if not columns and not caption_column:
        raise ConfigError(f"annotation {path} has nothing but keys, or columns=() took nothing of it; name columns")
    return list(dict.fromkeys(columns))


def _as_keys(values: pa.ChunkedArray) -> pa.Array:
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.cast(values, pa.large_string()).combine_chunks()


def _sha256(path: Path, taken: object) -> str:
    digest = hashlib.sha256(json.dumps(taken).encode())
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


@dataclass(frozen=True)
class _Reader:
    """names: of a file's columns. columns: (file, names, the caption column) → values by name."""

    names: Callable[[Path], Sequence[str]]
    columns: Callable[[Path, Sequence[str], str | None], dict[str, Any]]


def _csv_names(path: Path) -> list[str]:
    return [name.strip() for name in _csv(path, None).schema.names]


def _csv_columns(path: Path, names: Sequence[str], caption: str | None) -> dict[str, Any]:
    import pyarrow as pa

    asis = {name.strip(): name for name in _csv(path, None).schema.names}
    try:
        table = _csv(path, [asis[name] for name in names]).read_all()
    except pa.ArrowException as error:
        raise SourceError(f"annotation {path} is no valid CSV: {_first_line(error)}") from error
    texts = {name: table.column(asis[name]) for name in names}
    # Keys and captions that look like numbers are what was typed.
    return {name: values if name in (names[0], caption) else from_csv(values) for name, values in texts.items()}


def _csv(path: Path, names: Sequence[str] | None) -> Any:
    """A stream of batches of texts."""
    import pyarrow as pa
    import pyarrow.csv

    parsing = pa.csv.ParseOptions(newlines_in_values=True)
    reading = pa.csv.ReadOptions(use_threads=False, block_size=8 * 2**20)
    types = None if names is None else dict.fromkeys(names, pa.string())
    converting = pa.csv.ConvertOptions(
        column_types=types, include_columns=names, strings_can_be_null=True, null_values=[""]
    )
    try:
        return pa.csv.open_csv(path, reading, parsing, converting)
    except pa.ArrowException as error:
        raise SourceError(f"annotation {path} is no valid CSV: {_first_line(error)}") from error


def _parquet_names(path: Path) -> list[str]:
    with _parquet(path) as file:
        return list(file.schema_arrow.names)


def _parquet_columns(path: Path, names: Sequence[str], caption: str | None) -> dict[str, Any]:
    import pyarrow as pa

    with _parquet(path) as file:
        try:
            table = file.read(columns=list(names), use_threads=False)
        except pa.ArrowException as error:
            raise SourceError(f"annotation {path} is no readable parquet file: {_first_line(error)}") from error
    return {name: table.column(name) for name in names}


def _parquet(path: Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path)
    except pa.ArrowException as error:
        raise SourceError(f"annotation {path} is no readable parquet file: {_first_line(error)}") from error


def _json_names(path: Path) -> list[str]:
    return list(dict.fromkeys(name for row in _json_rows(path) for name in row))


def _json_columns(path: Path, names: Sequence[str], caption: str | None) -> dict[str, Any]:
    import pyarrow as pa

    parts: dict[str, list[Any]] = {name: [] for name in names}
    rows = _json_rows(path)
    while batch := list(itertools.islice(rows, _ROWS_AT_ONCE)):
        for name in names:
            values = [row.get(name) for row in batch]
            if name == caption:  # lists of captions stay lists, as text
                values = [json.dumps(value) if isinstance(value, list | dict) else value for value in values]
            parts[name].append(from_values(values, path, name))
    kinds = {name: common_type({part.type for part in found}) for name, found in parts.items()}
    return {name: pa.chunked_array([kinds[name](part) for part in found]) for name, found in parts.items()}


def _json_rows(path: Path) -> Iterator[dict[str, Any]]:
    if path.suffix.lower() == ".json":
        if path.stat().st_size > MAX_JSON_BYTES:
            raise SourceError(f"annotation {path} has over {MAX_JSON_BYTES} bytes; use .jsonl or .parquet")
        values: Any = _parsed(path.read_bytes(), path, 1)
        if not isinstance(values, list):
            raise SourceError(f"annotation {path} holds a {type(values).__name__}, not a list of objects")
        numbered: Iterator[tuple[int, Any]] = iter(enumerate(values, 1))
    else:
        numbered = _json_lines(path)
    for number, row in numbered:
        if not isinstance(row, dict):
            raise SourceError(f"annotation {path}, row {number} is a {type(row).__name__}, not an object")
        yield row


def _json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, _parsed(line, path, number)


def _parsed(data: bytes, path: Path, line: int) -> Any:
    try:
        return json.loads(data.decode("utf-8-sig"), parse_constant=lambda _: None)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"annotation {path}, line {line} is no valid JSON: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


_READERS = {
    ".csv": _Reader(_csv_names, _csv_columns),
    ".json": _Reader(_json_names, _json_columns),
    ".jsonl": _Reader(_json_names, _json_columns),
    ".parquet": _Reader(_parquet_names, _parquet_columns),
}
