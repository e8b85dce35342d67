"""Files of conditioning inputs (control videos, reference images, masks), as specified in metadata rows.

Each file becomes a member of the sample's tar, next to the clip. A video input has as many frames as the clip's source,
at the same times, so that every frame that is read from the clip has a counterpart in the input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from streamvid.dataset.tabular.columns import Column
from streamvid.dataset.tabular.reader import RowBlock
from streamvid.dataset.tabular.table import MetadataTable
from streamvid.errors import Rejected, SourceError
from streamvid.sharder.media_columns import MediaColumn
from streamvid.sharder.source.media import Media
from streamvid.sharder.source.place import Place
from streamvid.storage import StorageOptions

MAX_ITEMS = 8

MediaCells: TypeAlias = Mapping[str, object]
"""Name of a conditioning input → value of its column in one row."""


@dataclass(frozen=True, slots=True)
class MediaFile:
    """File for a conditioning input.

    item: index of the file (starting at 0) if the cell contains a list of files; otherwise None.
    source, path, num_bytes, version: same as in Record.
    """

    name: str
    item: int | None
    source: str
    path: str
    num_bytes: int
    version: str

    def media(self, storage: StorageOptions) -> Media:
        """Return a Media that workers use to read the file. storage: options for accessing the file's store."""
        return Media(self.path, self.source, self.num_bytes, self.version, storage)

    @property
    def line(self) -> list[Any]:
        """Facts about the file that determine a dataset's content."""
        return [self.name, self.item, self.source, self.num_bytes]

    @property
    def label(self) -> str:
        """Name of the input for use in messages."""
        number = "" if self.item is None else f", item {self.item}"
        return f"conditioning input {self.name!r}{number}"


def check_columns(table: MetadataTable | None, columns: Sequence[MediaColumn]) -> None:
    """Raise SourceError if the metadata does not contain all of these columns."""
    if table is None and columns:
        raise SourceError(
            "source.media (--media) requires metadata columns, but this source has no metadata; add a metadata file, "
            "or omit --media"
        )
    for medium in columns:
        if table is not None and table.names and medium.column not in table.names:
            listed = ", ".join(table.names)
            raise SourceError(
                f"media {medium}: {medium.column!r} is not a column in the metadata; available columns: {listed}"
            )


def media_cells(block: RowBlock, columns: Sequence[MediaColumn]) -> list[MediaCells]:
    """Return the cells of each row's conditioning inputs. Raises SourceError if a CSV cell contains a list."""
    cells = {medium.name: _cells(block.column(medium.column), medium) for medium in columns}
    return [{name: values[place] for name, values in cells.items()} for place in range(block.num_rows)]


def _cells(column: Column, medium: MediaColumn) -> list[object]:
    values = column.values()
    lists = (text for text in values if isinstance(text, str) and text.strip()[:1] == "[" and text.strip()[-1] == "]")
    text = next(lists, None) if column.form == "text" else None
    if text is not None:
        raise SourceError(
            f"media {medium}: the column contains a list, {text[:60]!r}, which CSV cannot store; use .jsonl, .json or "
            ".parquet metadata instead"
        )
    return values


def paths_of(cells: MediaCells) -> list[object]:
    """Return the paths of all conditioning inputs in a row."""
    return [path for cell in cells.values() for path in (cell if isinstance(cell, list) else [cell]) if path]


def find_files(
    cells: MediaCells, columns: Sequence[MediaColumn], place: Place, max_clip_bytes: int
) -> tuple[MediaFile, ...]:
    """Return a row's conditioning inputs. Raises Rejected if a file cannot be used or a required input is missing."""
    found: list[MediaFile] = []
    for medium in columns:
        cell = cells.get(medium.name)
        if cell is None or cell == []:
            if not medium.is_optional:
                raise Rejected(
                    f"conditioning input {medium.name!r} is missing: column {medium.column!r} is empty in this row; to "
                    f"accept rows without it, use --media {replace(medium, is_optional=True)}",
                    kind="medium",
                )
            continue
        items = cell if isinstance(cell, list) else [cell]
        if len(items) > MAX_ITEMS:
            reason = f"conditioning input {medium.name!r} lists {len(items)} files; at most {MAX_ITEMS} are allowed"
            raise Rejected(reason, kind="medium")
        for number, path in enumerate(items):
            item = number if isinstance(cell, list) else None
            found.append(_find_file(medium, item, path, place, max_clip_bytes))
    return tuple(found)


def _find_file(medium: MediaColumn, item: int | None, value: object, place: Place, max_clip_bytes: int) -> MediaFile:
    label = MediaFile(medium.name, item, "", "", 0, "").label
    try:
        source, path = place.locate_typed(value)
        num_bytes, version = place.state(path)
    except Rejected as error:
        raise Rejected(f"{label}: {error}", kind="medium") from error
    if not 0 < num_bytes <= max_clip_bytes:
        most = f"{max_clip_bytes} are allowed (source.max_clip_bytes, --max-clip-bytes)"
        limit = f"is {num_bytes} bytes long, but at most {most}"
        raise Rejected(f"{label} {limit if num_bytes else 'is empty'}", kind="medium")
    return MediaFile(medium.name, item, source, path, num_bytes, version)
