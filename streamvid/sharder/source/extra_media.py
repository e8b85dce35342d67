"""Further media of a sample (control videos, reference images, masks): which columns name them, and which files.

They are members of the sample's tar beside its clip. One that follows the clip frame by frame has as many frames as the
clip's source, at the same times: then whatever frames a delivery takes of the clip, it takes of the medium too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from streamvid.errors import Rejected, SourceError
from streamvid.sharder.media_columns import MediaColumn
from streamvid.sharder.source.media import Media
from streamvid.sharder.source.metadata import Cell, Metadata, cell_text

if TYPE_CHECKING:
    from streamvid.sharder.source.place import Place
    from streamvid.storage import StorageOptions

MAX_ITEMS = 8

Cells: TypeAlias = Mapping[str, object]
"""Of one input row: name of a medium → what its column holds."""


@dataclass(frozen=True, slots=True)
class MediaFile:
    """One file of a medium. `item` is its place in a list, None where the row names one file and no list.

    source, path, num_bytes, version: as Record has them.
    """

    name: str
    item: int | None
    source: str
    path: str
    num_bytes: int
    version: str

    def media(self, storage: StorageOptions) -> Media:
        """The file, for a worker that reaches stores so."""
        return Media(self.path, self.source, self.num_bytes, self.version, storage)

    @property
    def line(self) -> list[Any]:
        """What of it decides a dataset's content."""
        return [self.name, self.item, self.source, self.num_bytes]

    @property
    def label(self) -> str:
        """For messages."""
        return f"medium {self.name!r}" if self.item is None else f"medium {self.name!r}, number {self.item}"


def check_columns(metadata: Metadata | None, columns: Sequence[MediaColumn]) -> None:
    """SourceError where the input cannot name these media at all."""
    if metadata is None and columns:
        raise SourceError("media are named by columns, and this source has no metadata; give a metadata file")
    for medium in columns:
        if metadata is not None and metadata.names and medium.column not in metadata.names:
            listed = ", ".join(metadata.names)
            raise SourceError(f"media {medium}: {medium.column!r} is not a column of the metadata; it has {listed}")


def cells_of(row: Mapping[str, Any], columns: Sequence[MediaColumn]) -> Cells:
    """What a row says of its media. SourceError for a list where lists cannot be."""
    for medium in columns:
        cell = row.get(medium.column)
        if isinstance(cell, Cell) and cell.text.lstrip().startswith("[") and cell.text.rstrip().endswith("]"):
            raise SourceError(
                f"media {medium}: the column holds a list, {cell.text[:60]!r}, which CSV cannot; write the metadata as "
                ".jsonl, .json or .parquet"
            )
    return {medium.name: cell_text(row.get(medium.column)) for medium in columns}


def paths_of(cells: Cells) -> list[object]:
    """All that a row names."""
    return [path for cell in cells.values() for path in (cell if isinstance(cell, list) else [cell]) if path]


def find_files(
    cells: Cells, columns: Sequence[MediaColumn], place: Place, max_clip_bytes: int
) -> tuple[MediaFile, ...]:
    """The files that a row names. Rejected where one cannot be used, or is missing and has to be there."""
    found: list[MediaFile] = []
    for medium in columns:
        cell = cells.get(medium.name)
        if cell is None or cell == []:
            if not medium.is_optional:
                raise Rejected(
                    f"medium {medium.name!r} is missing: column {medium.column!r} is empty; "
                    f"{medium.name}?={medium.column} takes rows without it",
                    kind="medium",
                )
            continue
        items = cell if isinstance(cell, list) else [cell]
        if len(items) > MAX_ITEMS:
            raise Rejected(f"medium {medium.name!r} has {len(items)} files, {MAX_ITEMS} are allowed", kind="medium")
        for number, path in enumerate(items):
            item = number if isinstance(cell, list) else None
            found.append(_find_file(medium, item, path, place, max_clip_bytes))
    return tuple(found)


def _find_file(medium: MediaColumn, item: int | None, value: object, place: Place, max_clip_bytes: int) -> MediaFile:
    label = MediaFile(medium.name, item, "", "", 0, "").label
    try:
        source, path = place.locate(value)
        num_bytes, version = place.state(path)
    except Rejected as error:
        raise Rejected(f"{label}: {error}", kind="medium") from error
    if not 0 < num_bytes <= max_clip_bytes:
        limit = f"has {num_bytes} bytes, max_clip_bytes={max_clip_bytes} are allowed"
        raise Rejected(f"{label} {limit if num_bytes else 'is empty'}", kind="medium")
    return MediaFile(medium.name, item, source, path, num_bytes, version)
