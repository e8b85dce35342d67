"""Reader of clip sizes in metadata files. It opens no videos.

Rows are read in blocks, so memory does not grow with their number. Only the needed columns of CSV and Parquet files
are converted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamvid.credentials import hide_credentials
from streamvid.dataset.arrow import array_of, numbers_of
from streamvid.dataset.captions import CAPTION_COLUMNS
from streamvid.dataset.tabular.columns import FACT_COLUMNS, VIDEO_COLUMNS, Column, find_column, usual_column
from streamvid.dataset.tabular.reader import RowBlock, column_names, is_metadata_name, read_blocks
from streamvid.errors import SourceError

Float64Array: TypeAlias = npt.NDArray[np.float64]
Int64Array: TypeAlias = npt.NDArray[np.int64]

_NUMBER = r"^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?$"


@dataclass(frozen=True)
class FactsBlock:
    """Readable rows in one block of a metadata file.

    rows: row numbers, counted from 0, with shape (n,).
    values: maps names in FACT_COLUMNS to float64 arrays with shape (n,). NaN marks missing values and values that are
        not numbers. Names without a column are omitted.
    sources: file names, with shape (n,); None if no column contains paths.
    broken: maps the row number of each unreadable row in the block to the reason.
    num_captions: number of rows with a caption.
    """

    rows: Int64Array
    values: Mapping[str, Float64Array]
    sources: pa.Array | None
    broken: Mapping[int, str]
    num_captions: int = 0

    def source(self, place: int) -> str:
        """Return the file name for row `rows[place]`, without credentials, or "" if the row has no file name."""
        value = None if self.sources is None else self.sources[place].as_py()
        return "" if value is None else hide_credentials(str(value))


@dataclass(frozen=True)
class FactsFile:
    """One metadata file, or several Parquet files with the same columns.

    columns: maps names in FACT_COLUMNS to column names in the file.
    source_column: column that contains paths, if any.
    caption_column: column with one of the usual caption names, if any.
    names: names of all columns.
    """

    paths: tuple[Path, ...]
    columns: Mapping[str, str]
    source_column: str | None
    caption_column: str | None
    names: tuple[str, ...]

    @property
    def uses(self) -> dict[str, tuple[str, ...]]:
        """Mapping from each use, such as "caption", to its columns. The key "ignored" lists the unused columns."""
        used = {"video": self.source_column, "caption": self.caption_column, **self.columns}
        found: dict[str, tuple[str, ...]] = {use: (column,) for use, column in used.items() if column is not None}
        ignored = tuple(name for name in self.names if name not in used.values())
        return {**found, "ignored": ignored} if ignored else found

    def blocks(self) -> Iterator[FactsBlock]:
        """Yield all rows in order, in blocks. Raises SourceError if a file cannot be read."""
        wanted = {*self.columns.values(), *filter(None, (self.source_column, self.caption_column))}
        first = 0
        for path in self.paths:
            for block in read_blocks(path, wanted):
                yield self._facts(block, first)
                first += block.num_rows

    def _facts(self, block: RowBlock, first: int) -> FactsBlock:
        places = np.delete(np.arange(block.num_rows), list(block.broken))
        values = {name: numbers(block.column(column))[places] for name, column in self.columns.items()}
        sources = None
        if self.source_column is not None:
            sources = block.column(self.source_column).as_kind("string").take(array_of(places))
        broken = {first + place: why for place, why in block.broken.items()}
        num_captions = 0 if self.caption_column is None else _num_given(block.column(self.caption_column).cells)
        return FactsBlock(places + first, values, sources, broken, num_captions)


def is_metadata(source: Path) -> bool:
    """Return True if the path names a metadata file, or a folder that contains Parquet files but no manifest."""
    if source.is_dir():
        return not (source / "manifest.json").exists() and any(source.glob("*.parquet"))
    return is_metadata_name(source.name)


def open_facts(source: Path, video_column: str | None = None) -> FactsFile:
    """Open a metadata file, or a folder of Parquet files, and find its columns.

    Raises SourceError if columns for clip sizes are missing. The message names the missing columns and a command that
    reads the sizes from the media files instead.
    """
    paths = tuple(sorted(source.glob("*.parquet"))) if source.is_dir() else (source,)
    names = column_names(paths[0], is_sample=True)
    found = {name: usual_column(names, usual) for name, usual in FACT_COLUMNS.items()}
    columns = {name: column for name, column in found.items() if column is not None}
    missing = [name for name in ("height", "width") if name not in columns]
    if "num_frames" not in columns and not {"fps", "seconds"} <= columns.keys():
        missing.append("num_frames (or fps and duration)")
    if missing:
        raise SourceError(
            f"metadata {source} has no column for {', '.join(missing)}; its columns: {', '.join(names) or 'none'}. "
            "Add the missing columns, or run `streamvid shard SOURCE DEST --dry-run`, which probes the files"
        )
    if video_column is None:
        source_column = usual_column(names, VIDEO_COLUMNS)
    else:
        source_column = find_column(names, video_column, VIDEO_COLUMNS, "video_column")
    return FactsFile(paths, columns, source_column, usual_column(names, CAPTION_COLUMNS), tuple(names))


def _num_given(cells: pa.Array) -> int:
    """Return the number of cells that are neither null nor empty text."""
    if pa.types.is_string(cells.type) or pa.types.is_large_string(cells.type):
        return int(pc.sum(pc.greater(pc.binary_length(cells), 0)).as_py() or 0)
    return len(cells) - int(cells.null_count)


def numbers(column: Column) -> Float64Array:
    """Return a column as float64, with NaN for missing values and for values that are not numbers."""
    cells = column.cells
    if pa.types.is_string(cells.type) or pa.types.is_large_string(cells.type):
        texts = pc.utf8_trim(cells, ' \t\r\n"')  # JSON quotes
        try:
            cells = pc.cast(texts, pa.float64())
        except pa.ArrowInvalid:
            is_number = pc.match_substring_regex(texts, _NUMBER)
            cells = pc.cast(pc.if_else(is_number, texts, pa.scalar(None, texts.type)), pa.float64())
    elif not (pa.types.is_integer(cells.type) or pa.types.is_floating(cells.type) or pa.types.is_decimal(cells.type)):
        return np.full(len(cells), np.nan)
    return numbers_of(pc.fill_null(pc.cast(cells, pa.float64(), safe=False), np.nan))
