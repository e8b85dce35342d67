"""Further media of a sample (control videos, reference images, masks): which columns name them, and which files.

They are members of the sample's tar beside its clip. One that follows the clip frame by frame has as many frames as the
clip's source, at the same times: then whatever frames a delivery takes of the clip, it takes of the medium too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from streamvid.errors import ConfigError, Rejected, SourceError
from streamvid.sharder.source.media import Media
from streamvid.sharder.source.metadata import Cell, Metadata, cell_text

if TYPE_CHECKING:
    from streamvid.sharder.source.place import Place
    from streamvid.storage import StorageOptions

MAX_MEDIA = 16
MAX_ITEMS = 8
KINDS = ("video", "image", "mask")
_TAKEN = ("txt", "json")
_SPELLING = re.compile(r"(?:([a-z]+):)?([a-z][a-z0-9_]{0,31})(\?)?")

Cells: TypeAlias = Mapping[str, object]
"""Of one input row: name of a medium → what its column holds."""


@dataclass(frozen=True, slots=True)
class MediaColumn:
    """A medium and the column that names its files.

    kind: "video", as many frames as the clip, at the same times; "image", one picture for the whole clip; None: images
    where all its files are, else video. is_mask: it is delivered with one channel, and stored without loss in native
    datasets. is_optional: rows without it are taken all the same.
    """

    name: str
    column: str
    kind: str | None = None
    is_mask: bool = False
    is_optional: bool = False

    @property
    def stem(self) -> str:
        """What the extensions of its members begin with."""
        return self.name.replace("_", "")

    def __str__(self) -> str:
        kind = "mask:" if self.is_mask else f"{self.kind}:" if self.kind else ""
        return f"{kind}{self.name}{'?' if self.is_optional else ''}={self.column}"


def media_columns(given: Mapping[str, str]) -> tuple[MediaColumn, ...]:
    """What `media_columns` says: ``{"control": "control_video", "reference?": "ref", "mask:matte": "matte_path"}``.

    A key is the medium's name, of letters, digits and _; "?" behind it lets rows without it in; "video:", "image:" or
    "mask:" before it says what it is. ConfigError for anything else.
    """
    found: list[MediaColumn] = []
    for key, column in given.items():
        match = _SPELLING.fullmatch(key) if isinstance(key, str) else None
        if match is None or match[1] not in (None, *KINDS) or not isinstance(column, str) or not column:
            raise ConfigError(
                f"media {key!r}={column!r}: allowed is [KIND:]NAME[?]=COLUMN with KIND one of {', '.join(KINDS)} and "
                "NAME of lowercase letters, digits and _, as control=control_video, reference?=ref or mask:matte=matte"
            )
        is_mask = match[1] == "mask"
        found.append(MediaColumn(match[2], column, None if is_mask else match[1], is_mask, match[3] is not None))
    for taken in ([medium.stem for medium in found], [medium.column for medium in found]):
        twice = sorted({word for word in taken if taken.count(word) > 1 or word in _TAKEN})
        if twice:
            raise ConfigError(f"media: {', '.join(twice)} stands twice, or for something else already; rename one")
    if len(found) > MAX_MEDIA:
        raise ConfigError(f"media: {len(found)} are given, {MAX_MEDIA} are allowed")
    return tuple(found)


def file_keys(text: str) -> tuple[str, dict[str, str]]:
    """(column of the clip, media) of DiffSynth's data_file_keys, as ``video,control_video``: rows may lack media."""
    clip, *others = (word.strip() for word in text.split(","))
    if not clip or not all(others):
        raise ConfigError(f"data_file_keys={text!r}: write the columns of files, the clip's first: video,control_video")
    return clip, {f"{re.sub('[^a-z0-9_]', '_', name.lower())}?": name for name in others}


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
