"""Files embedded in the cells of Parquet files: binary columns, and Hugging Face's structs of bytes and path.

While the rows are read, each file is written to the staging folder under its checksum. Only a few files are therefore
in memory at a time, and a resumed run finds the same files. In the rows, the file's name replaces its bytes.
"""

from __future__ import annotations

import hashlib
import posixpath
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa

from streamvid.dataset.tabular.columns import VIDEO_COLUMNS, Column, usual_column
from streamvid.dataset.tabular.reader import RowBlock, is_embedded, value_column
from streamvid.sharder.source.folder import is_media_name
from streamvid.sharder.source.media import checksum_version
from streamvid.sharder.source.place import MemberFolder, Place
from streamvid.storage import LocalStore


@dataclass
class EmbeddedFiles:
    """Extracts the files embedded in metadata. Columns of embedded files that no option uses are omitted from the rows.

    folder: folder to which the files are written.
    writes: True to write the files; False to compute only their names and checksums.
    wanted: names of the columns that the options use.
    finds_video: True to search the other columns of embedded files for the column that contains the clips.
    video_column: name of the detected column, or None.
    """

    folder: Path
    writes: bool
    wanted: Set[str]
    finds_video: bool
    video_column: str | None = None
    where: dict[str, tuple[str, str]] = field(default_factory=dict)
    states: dict[str, tuple[int, str]] = field(default_factory=dict)

    def extract(self, file: str, blocks: Iterator[RowBlock]) -> Iterator[RowBlock]:
        """Yield a metadata file's blocks, with file names in place of the embedded bytes.

        file: relative path of the metadata file.
        """
        first = 0
        for block in blocks:
            embedded = {name: column for name, column in block.columns.items() if is_embedded(column.cells.type)}
            if not embedded:
                yield block
                continue
            used = self._used(list(embedded))
            # Without a copy, the cells of other columns would keep the memory of the files alive.
            rows = pa.array(range(block.num_rows), pa.int64())
            columns = {
                name: replace(column, cells=column.cells.take(rows))
                for name, column in block.columns.items()
                if name not in embedded
            }
            for name in used:
                columns[name] = self._names(f"{file}/{name}", first, embedded[name])
            first += block.num_rows
            yield replace(block, columns=columns)

    def place(self, base: Place) -> Place:
        """Return a place that contains both the embedded files and the files of `base`."""
        return MemberFolder(base.url, self.where, self.states, base=base) if self.where else base

    def _used(self, names: list[str]) -> list[str]:
        wanted = [name for name in names if name in self.wanted]
        others = [name for name in names if name not in self.wanted]
        if self.finds_video and self.video_column is None:
            self.video_column = usual_column(others, VIDEO_COLUMNS) or (others[0] if len(others) == 1 else None)
        return [*wanted, *(name for name in others if name == self.video_column)]

    def _names(self, prefix: str, first: int, column: Column) -> Column:
        return value_column([self._name(f"{prefix}/{row}", cell) for row, cell in enumerate(_values(column), first)])

    def _name(self, name: str, cell: object) -> object:
        """Return the name of the file that a cell contains.

        If the cell has no bytes, return its path, which may be None.
        """
        path = cell.get("path") if isinstance(cell, Mapping) else None
        data = cell.get("bytes") if isinstance(cell, Mapping) else cell
        if not isinstance(data, bytes):
            return path
        if isinstance(path, str) and is_media_name(path) and path.isprintable():
            name = f"{name}/{posixpath.basename(path)}"
        digest = hashlib.sha256(data)
        stored = self.folder / digest.hexdigest()
        if self.writes and not stored.exists():
            LocalStore(self.folder).put(stored.name, data)
        self.where[name] = (name, str(stored))
        self.states[str(stored)] = (len(data), checksum_version(digest.digest()))
        return name


def _values(column: Column) -> Iterator[object]:
    """Yield the cells as Python values, one at a time."""
    return (cell.as_py() for cell in column.cells)
