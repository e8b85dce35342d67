"""Records: the rows of the user's input, each with a file that is there, or a rejection."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from streamvid.dataset.captions import Captions
from streamvid.errors import Rejected, SourceError
from streamvid.sharder.media_columns import MediaColumn
from streamvid.sharder.options import ShardOptions
from streamvid.sharder.source.captions import (
    CaptionCells,
    CaptionColumns,
    caption_lines,
    check_captions,
    find_caption_columns,
    text_source,
)
from streamvid.sharder.source.columns import (
    VIDEO_COLUMNS,
    as_type,
    check_text,
    common_type,
    find_column,
)
from streamvid.sharder.source.extra_media import (
    Cells,
    MediaFile,
    cells_of,
    check_columns,
    find_files,
    paths_of,
)
from streamvid.sharder.source.folder import is_media_name, printable_source
from streamvid.sharder.source.layouts import Input, find_input
from streamvid.sharder.source.media import Media
from streamvid.sharder.source.metadata import BadRow, Metadata, Row, cell_text, cell_value
from streamvid.sharder.source.place import Kept, Place, Sidecar
from streamvid.storage import StorageOptions


@dataclass(frozen=True, slots=True)
class Record:
    """One input row whose file is there. `source` names it in the dataset, `path` where it is: a local path or a URL.

    version: the modification time in nanoseconds, or what the store calls the object's version. extra: its further
    media's files. captions: all of them with their weights where it has several, `caption` being the first. kept: of
    clips of a sealed dataset: the keys and the split that they had there.
    """

    row: int
    source: str
    path: str
    num_bytes: int
    version: str
    caption: str | None
    columns: dict[str, Any]
    extra: tuple[MediaFile, ...] = ()
    captions: Captions = ()
    kept: Kept | None = None

    def media(self, storage: StorageOptions) -> Media:
        """Its file, for a worker that reaches stores so."""
        return Media(self.path, self.source, self.num_bytes, self.version, storage)


@dataclass(frozen=True, slots=True)
class Rejection:
    """One input row that is in no shard, and why; `kind` in a word. `row` counts input rows from 0."""

    row: int
    source: str
    reason: str
    kind: str = field(default="", compare=False)


@dataclass(frozen=True)
class RecordSet:
    """The whole input: every row is in `records` or in `rejections`. `user_types` is column → index type."""

    records: tuple[Record, ...]
    rejections: tuple[Rejection, ...]
    user_types: dict[str, str]

    @property
    def num_rows(self) -> int:
        return len(self.records) + len(self.rejections)

    def sha256(self) -> str:
        """Of all that the input gives to the dataset, file contents aside: rows, names, sizes, captions, columns."""
        digest = hashlib.sha256(json.dumps(list(self.user_types.items())).encode())
        for record in self.records:
            digest.update(_line(record.row, record.source, record.num_bytes, record.caption, record.columns))
            if record.captions:
                digest.update(_line(*record.captions))
            if record.extra:
                digest.update(_line(*(file.line for file in record.extra)))
            if record.kept is not None:
                digest.update(_line(*astuple(record.kept)))
        for rejection in self.rejections:
            digest.update(_line(rejection.row, rejection.source, rejection.reason))
        return digest.hexdigest()


_Candidate: TypeAlias = tuple[object, object, dict[str, Any], Cells]
"""(path, caption or its place, columns, further media) of a row, as the user gave them."""


def read_records(source: str | Path | Sequence[str | Path], options: ShardOptions) -> RecordSet:
    """Read the whole input: one source, or several one after the other.

    A row that cannot be used is a rejection; SourceError is for input that cannot be read.
    """
    sources = [source] if isinstance(source, str | Path) else list(source)
    if len(sources) > 1 and options.source.metadata is not None:
        raise SourceError(
            f"metadata={str(options.source.metadata)!r} cannot be combined with {len(sources)} sources; give metadata "
            "files as sources"
        )
    parts: list[RecordSet] = []
    for one in sources:
        found = find_input(one, options)
        parts.append(_read_input(found, options, sum(part.num_rows for part in parts)))
        if not parts[-1].num_rows:
            what = f"{found.place.url} holds no file named like a video or an image"
            raise SourceError(f"nothing to shard: {'the metadata has no rows' if found.metadata else what}")
    return parts[0] if len(parts) == 1 else _joined(parts, sources)


def _read_input(found: Input, options: ShardOptions, first_row: int) -> RecordSet:
    place, metadata = found.place, found.metadata
    if options.clips.is_text and metadata is None:
        raise SourceError(f"{place.url} has no metadata, and clips='text' (--clips text) makes samples of its rows")
    user_types: dict[str, str] = {}
    check_columns(metadata, options.source.media_columns)
    if metadata is None:
        paths = [path for path in place.paths() if is_media_name(path)]
        place.look_ahead(paths, is_folder=True)
        candidates: Iterable[_Candidate | BadRow] = ((path, Sidecar(path), {}, {}) for path in paths)
    else:
        columns = _Columns.of(metadata, options)
        place.look_ahead(columns.paths(), is_folder=False)
        candidates, user_types = columns.take(), columns.user_types
    records: list[Record] = []
    rejections: list[Rejection] = []
    for row, candidate in enumerate(candidates, first_row):
        try:
            if isinstance(candidate, BadRow):
                raise Rejected(candidate.reason)
            records.append(_record(row, candidate, place, options))
        except Rejected as error:
            name = "" if isinstance(candidate, BadRow) else printable_source(candidate[0])
            rejections.append(Rejection(row, name, str(error), error.kind or "bad-row"))
    return RecordSet(tuple(records), tuple(rejections), user_types)


def _joined(parts: Sequence[RecordSet], sources: Sequence[str | Path]) -> RecordSet:
    """Several inputs as one. A file is known by its name, so that no two of them may have the same one."""
    owners: dict[str, int] = {}
    types: dict[str, str] = {}
    for number, part in enumerate(parts):
        for record in part.records:
            if record.kept is None and owners.setdefault(record.source, number) != number:
                raise SourceError(
                    f"{record.source} is in {sources[owners[record.source]]} and in {sources[number]}, and would be "
                    "one record; put both folders into one and give that, or name the files differently"
                )
        for name, kind in part.user_types.items():
            types[name] = kind if types.get(name, kind) == kind else _wider(types[name], kind)
    records = (record for part in parts for record in part.records)
    val = {record.kept.record_key for part in parts for record in part.records if record.kept and record.kept.is_val}
    return RecordSet(
        tuple(_as_types(record, types, val) for record in records),
        tuple(rejection for part in parts for rejection in part.rejections),
        types,
    )


def _wider(one: str, other: str) -> str:
    return "double" if {one, other} == {"int64", "double"} else "string"


def _as_types(record: Record, types: Mapping[str, str], val: Collection[str]) -> Record:
    """With columns of the common types, and for validation where any part of the same record is."""
    columns = {name: as_type(record.columns.get(name), kind) for name, kind in types.items()}
    kept = record.kept
    if kept is not None and kept.record_key in val:
        kept = replace(kept, is_val=True)
    return replace(record, columns=columns, kept=kept)


@dataclass(frozen=True)
class _Columns:
    """The columns of metadata, each with its part. video: None where there are no files to name."""

    rows: list[Row]
    video: str | None
    captions: CaptionColumns
    media: tuple[MediaColumn, ...]
    user_types: dict[str, str]

    @staticmethod
    def of(metadata: Metadata, options: ShardOptions) -> _Columns:
        if not metadata.names:
            return _Columns(metadata.rows, None, CaptionColumns(), (), {})
        video = None if options.clips.is_text else _video_column(metadata, options)
        others = [name for name in metadata.names if name != video]
        asked = metadata.caption_column if options.source.captions.column is None else options.source.captions.column
        captions = find_caption_columns(others, asked, options.source.captions.weight_column)
        of_layout = (metadata.video_column, metadata.caption_column)
        taken = (video, *captions.all, *of_layout, *(medium.column for medium in options.source.media_columns))
        rows = [row for row in metadata.rows if isinstance(row, dict)]
        types = {
            name: common_type([cell_value(row.get(name)) for row in rows])
            for name in metadata.names
            if name not in taken
        }
        return _Columns(metadata.rows, video, captions, options.source.media_columns, types)

    def paths(self) -> list[object]:
        """What all rows call their files."""
        if self.video is None:
            return []
        rows = [row for row in self.rows if isinstance(row, dict)]
        found = [cell_text(row.get(self.video)) for row in rows]
        return [*found, *(path for row in rows if self.media for path in paths_of(cells_of(row, self.media)))]

    def take(self) -> Iterator[_Candidate | BadRow]:
        """The rows, each given away: a million of them beside what becomes of them would be gigabytes."""
        for index, row in enumerate(self.rows):
            self.rows[index] = _TAKEN
            if isinstance(row, BadRow):
                yield row
                continue
            typed = {name: as_type(cell_value(row.get(name)), kind) for name, kind in self.user_types.items()}
            path = None if self.video is None else cell_text(row.get(self.video))
            yield path, self.captions.of_row(row), typed, cells_of(row, self.media)


_TAKEN = BadRow("")


def _video_column(metadata: Metadata, options: ShardOptions) -> str:
    asked = options.source.video_column or metadata.video_column
    try:
        return find_column(metadata.names, asked, VIDEO_COLUMNS, "video_column")
    except SourceError as error:
        raise SourceError(f"{error}; clips='text' (--clips text) makes a dataset of texts without videos") from None


def _record(row: int, candidate: _Candidate, place: Place, options: ShardOptions) -> Record:
    source, path = ("", "") if options.clips.is_text else place.locate(candidate[0])
    captions = check_captions(_captions(candidate[1], place, options))
    for name, value in candidate[2].items():
        if isinstance(value, str):
            check_text(value, f"column {name!r}")
    caption = captions[0][0] if captions else None
    several = captions if len(captions) > 1 else ()
    if options.clips.is_text:
        if caption is None or not caption.strip():
            raise Rejected("has no text", kind="no-text")
        num_bytes = len(caption.encode())
        return Record(row, text_source(caption), "", num_bytes, "", caption, candidate[2], captions=several)
    num_bytes, version = place.state(path)
    max_clip_bytes = options.source.max_clip_bytes
    if not 0 < num_bytes <= max_clip_bytes:
        limit = f"has {num_bytes} bytes, max_clip_bytes={max_clip_bytes} are allowed"
        raise Rejected(limit if num_bytes else "is empty", kind="max-clip-bytes" if num_bytes else "empty-file")
    extra = find_files(candidate[3], options.source.media_columns, place, max_clip_bytes)
    kept = place.kept(path)
    return Record(row, source, path, num_bytes, version, caption, candidate[2], extra, several, kept)


def _captions(cells: object, place: Place, options: ShardOptions) -> Captions:
    if isinstance(cells, CaptionCells):
        return cells.captions()
    if not isinstance(cells, Sidecar):
        return ()
    text = place.caption(cells)
    if options.source.captions.lines:
        return caption_lines(text)
    return () if text is None else ((text, 1.0),)


def _line(*values: object) -> bytes:
    return (json.dumps(values, sort_keys=True) + "\n").encode()


def sorted_rejections(rejections: Iterable[Rejection]) -> tuple[Rejection, ...]:
    """In the order of the input."""
    return tuple(sorted(rejections, key=lambda rejection: rejection.row))
