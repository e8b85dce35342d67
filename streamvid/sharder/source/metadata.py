"""Metadata files: CSV, JSON, JSON lines and parquet, each as a list of rows. A broken row is a row, never a crash."""

from __future__ import annotations

import csv
import json
import posixpath
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from streamvid.errors import SourceError
from streamvid.sharder.source.columns import check_names, clean_value, parse_text
from streamvid.sharder.source.folder import is_media_name
from streamvid.sharder.source.media import is_remote, split_url, store_of
from streamvid.storage import StorageOptions, Store

MAX_METADATA_BYTES = 16 * 2**30
MAX_JSON_BYTES = 2 * 2**30
_DOWNLOAD_BYTES = 64 * 2**20
_PARQUET_ROWS = 4096
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True, slots=True)
class BadRow:
    """An input row that cannot be read, and why."""

    reason: str


Row: TypeAlias = dict[str, Any] | BadRow


@dataclass(frozen=True)
class Metadata:
    """Rows of a metadata file in its order, and all their columns in order of first appearance.

    video_column, caption_column: where the layout says which they are; what the user asks for goes first.
    """

    rows: list[Row]
    names: list[str]
    video_column: str | None = None
    caption_column: str | None = None


def is_metadata_name(name: str) -> bool:
    """Whether a file of this name is read as metadata."""
    return posixpath.splitext(name)[1].lower() in READERS


def read_metadata(where: str | Path, storage: StorageOptions) -> Metadata:
    """All rows of a metadata file, at a path or a URL. SourceError where it is not what its name says."""
    if not isinstance(where, str) or not is_remote(where):
        return _read_file(Path(where))
    bucket_url, key = split_url(where)
    return _download(store_of(bucket_url, storage), key)


def _read_file(path: Path) -> Metadata:
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise SourceError(f"metadata {path}: allowed are files named {', '.join(f'*{name}' for name in READERS)}")
    try:
        if path.stat().st_size > MAX_METADATA_BYTES:
            raise SourceError(f"metadata {path} has over {MAX_METADATA_BYTES} bytes; split the input")
        rows = list(reader(path))
    except OSError as error:
        raise SourceError(f"cannot read the metadata {path}: {error.strerror or error}") from error
    names = list(dict.fromkeys(name for row in rows if isinstance(row, dict) for name in row))
    check_names(names, f"metadata {path}")
    return Metadata(rows, names)


def _download(store: Store, path: str) -> Metadata:
    url = f"{store.url}/{path}"
    state = store.state(path)
    if state is None:
        raise SourceError(f"cannot read the metadata {url}: there is no such object")
    if state.num_bytes > MAX_METADATA_BYTES:
        raise SourceError(f"metadata {url} has over {MAX_METADATA_BYTES} bytes; split the input")
    with tempfile.TemporaryDirectory(prefix="streamvid-") as folder:
        local = Path(folder) / f"metadata{Path(path).suffix}"
        with local.open("wb") as file:
            for start in range(0, state.num_bytes, _DOWNLOAD_BYTES):
                data = bytearray(min(_DOWNLOAD_BYTES, state.num_bytes - start))
                store.read_ranges(path, [(start, memoryview(data))], state.version)
                file.write(data)
        try:
            return _read_file(local)
        except SourceError as error:
            raise SourceError(str(error).replace(str(local), url)) from error


def _read_csv(path: Path) -> Iterator[Row]:
    _refuse_utf16(path)
    rows: list[Row] = []
    # Bytes that are no UTF-8 become lone surrogates here, and the rows that hold them rejections later.
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.reader(file, strict=True)
        header = [name.strip() or "unnamed" for name in next(reader, [])]
        if len(set(header)) < len(header):
            raise SourceError(f"metadata {path} has a column twice: {', '.join(header)}; rename one")
        while True:
            first_line = reader.line_num + 1
            try:
                cells = next(reader)
            except StopIteration:
                break
            except csv.Error as error:
                if "end of data" in str(error):  # a quote that never closes has swallowed all rows after it
                    raise SourceError(
                        f'metadata {path}: the row on line {first_line} opens a quote (") that is never closed'
                    ) from error
                rows.append(BadRow(f"no valid CSV row: {error}"))
                continue
            if not cells:
                continue
            if len(cells) == len(header):
                rows.append(dict(zip(header, cells, strict=True)))
            else:
                rows.append(BadRow(f"has {len(cells)} fields, the header has {len(header)}; is a quote missing?"))
    good = [row for row in rows if isinstance(row, dict)]
    columns = [parse_text(row[name] for row in good) for name in header]
    for index, row in enumerate(good):
        # The text stays at hand: a caption or a path that looks like a number is what was typed.
        row.update({name: Cell(row[name], values[index]) for name, values in zip(header, columns, strict=True)})
    yield from rows


@dataclass(frozen=True, slots=True)
class Cell:
    """A CSV cell: as typed, and as a value of its column's common type."""

    text: str
    value: Any


def cell_text(value: Any) -> Any:
    """What the user wrote where text is expected: None where nothing is, other types as they are."""
    if isinstance(value, Cell):
        return value.text or None
    return None if value is None or value == "" or value != value else value  # noqa: PLR0124 — NaN


def cell_value(value: Any) -> Any:
    """The value for a column of the user's own."""
    return value.value if isinstance(value, Cell) else clean_value(value)


def _read_jsonl(path: Path) -> Iterator[Row]:
    _refuse_utf16(path)
    names: dict[str, str] = {}  # else each line has its own copies of them
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if not text.strip():
                continue
            try:
                row = _as_row(_parse_json(text))
                yield row if isinstance(row, BadRow) else {names.setdefault(k, k): v for k, v in row.items()}
            except (ValueError, RecursionError) as error:
                yield BadRow(f"line {number} is no valid JSON: {_first_line(error)}")


def _read_json(path: Path) -> Iterator[Row]:
    _refuse_utf16(path)
    if path.stat().st_size > MAX_JSON_BYTES:
        raise SourceError(f"metadata {path} has over {MAX_JSON_BYTES} bytes; use .jsonl or .parquet")
    try:
        value = _parse_json(path.read_bytes().removeprefix(b"\xef\xbb\xbf"))
    except (ValueError, RecursionError) as error:
        raise SourceError(f"metadata {path} is no valid JSON: {_first_line(error)}") from error
    if isinstance(value, dict) and value and all(is_media_name(name) for name in value):
        value = [{"path": name, "caption": caption} for name, caption in value.items()]
    if isinstance(value, dict):
        lists = [name for name, part in value.items() if isinstance(part, list)]
        if len(lists) != 1:
            raise SourceError(f"metadata {path}: expected a list of objects, or an object that holds one such list")
        value = value[lists[0]]
    if not isinstance(value, list):
        raise SourceError(f"metadata {path} holds a {type(value).__name__}, not a list of objects")
    for item in value:
        yield _as_row(item)


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(_PARQUET_ROWS):
                yield from batch.to_pylist()
    except pa.ArrowException as error:
        raise SourceError(f"metadata {path} is no readable parquet file: {_first_line(error)}") from error


def _parse_json(data: bytes) -> Any:
    return json.loads(data.decode("utf-8", "surrogateescape"), parse_constant=lambda _: None)


def _as_row(value: Any) -> Row:
    return value if isinstance(value, dict) else BadRow(f"is a {type(value).__name__}, not an object")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _refuse_utf16(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(2) in _UTF16:
            raise SourceError(f"metadata {path} is UTF-16; save it as UTF-8")


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".csv": _read_csv,
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}
