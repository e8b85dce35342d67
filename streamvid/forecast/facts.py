"""What metadata says of clips' sizes, a block of rows at a time, for a forecast: nothing else of a file is kept.

Rows are read as they come, so that memory does not grow with them; of CSV and Parquet only the columns that are needed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from streamvid.dataset.arrow import numbers_of
from streamvid.errors import SourceError
from streamvid.sharder.source.columns import VIDEO_COLUMNS, find_column
from streamvid.sharder.source.metadata import READERS, read_metadata
from streamvid.storage import StorageOptions

if TYPE_CHECKING:
    import pyarrow as pa

Float64Array: TypeAlias = npt.NDArray[np.float64]

BLOCK_ROWS = 1 << 17
_CSV_BLOCK_BYTES = 8 * 2**20

COLUMNS: Mapping[str, tuple[str, ...]] = {
    "num_frames": ("num_frames", "n_frames", "nb_frames", "frame_count", "frames"),
    "height": ("height", "video_height", "h"),
    "width": ("width", "video_width", "w"),
    "fps": ("fps", "frame_rate", "framerate", "avg_fps", "video_fps"),
    "seconds": ("duration_seconds", "duration", "seconds", "duration_sec"),
    "num_bytes": ("num_bytes", "bytes", "file_size", "filesize", "size_bytes", "size"),
}
"""What is read, and how the columns are usually called."""

_NUMBER = r"^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?$"


@dataclass(frozen=True)
class FactsBlock:
    """Some rows of a metadata file. row: the first one's number, from 0.

    values: name in COLUMNS → float64 (rows,), NaN where it is missing or no number; only columns that are there.
    sources: (rows,) texts or None, as the file has them; None where it has no such column.
    num_broken: rows after these that could not be read at all.
    """

    row: int
    num_rows: int
    values: Mapping[str, Float64Array]
    sources: pa.Array | None
    num_broken: int = 0

    def source(self, place: int) -> str:
        """What row `row + place` calls its file, "" where nothing does."""
        value = None if self.sources is None else self.sources[place].as_py()
        return "" if value is None else str(value)


@dataclass(frozen=True)
class FactsFile:
    """A metadata file, or several of one kind: which columns are read, and their rows.

    columns: name in COLUMNS → the file's column. source_column: with paths.
    """

    paths: tuple[Path, ...]
    columns: Mapping[str, str]
    source_column: str | None

    def blocks(self) -> Iterator[FactsBlock]:
        """All rows, in order. Raises SourceError for a file that cannot be read."""
        row = 0
        for path in self.paths:
            for block in _reader(path)(path, self, row):
                yield block
                row += block.num_rows + block.num_broken


def is_metadata(source: Path) -> bool:
    """Whether a path is a metadata file by its name, or a folder of Parquet files."""
    if source.is_dir():
        return not (source / "manifest.json").exists() and any(source.glob("*.parquet"))
    return source.suffix.lower() in READERS


def open_facts(source: Path, video_column: str | None = None) -> FactsFile:
    """Look at the columns of a metadata file or of a folder of Parquet files.

    Raises SourceError, naming what is missing and what to use instead, where its rows do not say how large clips are.
    """
    paths = tuple(sorted(source.glob("*.parquet"))) if source.is_dir() else (source,)
    try:
        names = _names(paths[0])
    except OSError as error:
        raise SourceError(f"cannot read the metadata {source}: {error.strerror or error}") from error
    columns = {}
    for name, usual in COLUMNS.items():
        folded = {column.strip().casefold(): column for column in reversed(names)}
        found = next((folded[one] for one in usual if one in folded), None)
        if found is not None:
            columns[name] = found
    missing = [name for name in ("height", "width") if name not in columns]
    if "num_frames" not in columns and not {"fps", "seconds"} <= columns.keys():
        missing.append("num_frames (or fps and duration)")
    if missing:
        raise SourceError(
            f"metadata {source} has no column {', '.join(missing)}; it has {', '.join(names) or 'none'}. "
            "plan reads sizes from columns and opens no video: `streamvid shard SOURCE DEST --dry-run` probes the files"
        )
    try:
        video: str | None = find_column(names, video_column, VIDEO_COLUMNS, "video_column")
    except SourceError:
        if video_column is not None:
            raise
        video = None
    return FactsFile(paths, columns, video)


def _names(path: Path) -> list[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    suffix = path.suffix.lower()
    if suffix == ".parquet":
        try:
            return list(pq.read_schema(path).names)
        except pa.ArrowException as error:
            raise SourceError(f"metadata {path} is no readable parquet file: {error}") from error
    if suffix == ".csv":
        import csv

        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            return [name.strip() for name in next(csv.reader(file), [])]
    if suffix == ".jsonl":
        with path.open("rb") as file:
            first = next((line for line in file if line.strip()), b"{}")
        value = _parsed(first)
        return list(value) if isinstance(value, dict) else []
    if suffix == ".json":
        return read_metadata(path, StorageOptions()).names
    raise SourceError(f"metadata {path}: allowed are files named {', '.join(f'*{name}' for name in READERS)}")


_Reader: TypeAlias = Callable[[Path, FactsFile, int], Iterator[FactsBlock]]


def _reader(path: Path) -> _Reader:
    return {".parquet": _parquet, ".csv": _csv, ".jsonl": _jsonl, ".json": _json}[path.suffix.lower()]


def _parquet(path: Path, file: FactsFile, row: int) -> Iterator[FactsBlock]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as opened:
            present = set(opened.schema_arrow.names)
            wanted = [name for name in _wanted(file) if name in present]
            for batch in opened.iter_batches(BLOCK_ROWS, columns=wanted, use_threads=False):
                yield _block(batch, file, row)
                row += len(batch)
    except pa.ArrowException as error:
        raise SourceError(f"metadata {path} is no readable parquet file: {error}") from error


def _csv(path: Path, file: FactsFile, row: int) -> Iterator[FactsBlock]:
    import pyarrow as pa
    from pyarrow import csv

    broken = 0

    def skip(_: object) -> str:
        nonlocal broken
        broken += 1
        return "skip"

    wanted = _wanted(file)
    names = _names(path)
    try:
        with csv.open_csv(
            path,
            csv.ReadOptions(block_size=_CSV_BLOCK_BYTES, column_names=names, skip_rows=1, use_threads=False),
            csv.ParseOptions(newlines_in_values=True, invalid_row_handler=skip),
            # As text: types are guessed from the first block otherwise, and a later one may differ.
            csv.ConvertOptions(
                include_columns=wanted, column_types=dict.fromkeys(wanted, pa.string()), check_utf8=False
            ),
        ) as reader:
            for batch in reader:
                lost, broken = broken, 0
                yield _block(batch, file, row, lost)
                row += len(batch) + lost
    except pa.ArrowException as error:
        raise SourceError(f"metadata {path} is no readable CSV: {error}") from error


def _jsonl(path: Path, file: FactsFile, row: int) -> Iterator[FactsBlock]:
    def rows() -> Iterator[Any]:
        with path.open("rb") as lines:
            for line in lines:
                if line.strip():
                    yield _parsed(line)

    yield from _from_rows(rows(), file, row)


def _json(path: Path, file: FactsFile, row: int) -> Iterator[FactsBlock]:
    yield from _from_rows(iter(read_metadata(path, StorageOptions()).rows), file, row)


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig", "surrogateescape"))
    except (ValueError, RecursionError):
        return None


def _from_rows(rows: Iterator[Any], file: FactsFile, row: int) -> Iterator[FactsBlock]:
    import pyarrow as pa

    wanted, broken = _wanted(file), 0
    kept: dict[str, list[Any]] = {name: [] for name in wanted}

    def block() -> FactsBlock:
        columns = {name: pa.array([_text(value) for value in values], pa.string()) for name, values in kept.items()}
        return _block(pa.record_batch(columns), file, row, broken)

    for value in rows:
        if not isinstance(value, dict):
            broken += 1
            continue
        for name in wanted:
            kept[name].append(value.get(name))
        if len(kept[wanted[0]]) == BLOCK_ROWS:
            made = block()
            yield made
            row, broken = row + made.num_rows + made.num_broken, 0
            kept = {name: [] for name in wanted}
    if kept[wanted[0]] or broken:
        yield block()


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, bool):
        return None
    text = value if isinstance(value, str) else json.dumps(value)
    return text.encode("utf-8", "backslashreplace").decode()


def _wanted(file: FactsFile) -> list[str]:
    return list(dict.fromkeys([*file.columns.values(), *([file.source_column] if file.source_column else [])]))


def _block(batch: pa.RecordBatch, file: FactsFile, row: int, num_broken: int = 0) -> FactsBlock:
    names = batch.schema.names
    values = {
        name: numbers(batch.column(column)) if column in names else np.full(len(batch), np.nan)
        for name, column in file.columns.items()
    }
    sources = batch.column(file.source_column) if file.source_column in names else None
    return FactsBlock(row, len(batch), values, sources, num_broken)


def numbers(column: pa.Array) -> Float64Array:
    """A column as float64, NaN where a value is missing or no number."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if isinstance(column, pa.DictionaryArray):
        column = column.dictionary_decode()
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        trimmed = pc.utf8_trim_whitespace(column)
        try:
            column = pc.cast(trimmed, pa.float64())
        except pa.ArrowInvalid:
            is_number = pc.match_substring_regex(trimmed, _NUMBER)
            column = pc.cast(pc.if_else(is_number, trimmed, pa.scalar(None, trimmed.type)), pa.float64())
    elif pa.types.is_boolean(column.type) or not _is_numeric(column.type):
        return np.full(len(column), np.nan)
    return numbers_of(pc.fill_null(pc.cast(column, pa.float64(), safe=False), np.nan))


def _is_numeric(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))
