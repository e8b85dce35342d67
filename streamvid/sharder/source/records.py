"""Reading of input rows. Rows with usable files become records; all other rows become rejections."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from itertools import chain
from pathlib import Path
from posixpath import dirname, normpath
from typing import TypeAlias

from streamvid.dataset.captions import Captions
from streamvid.dataset.tabular.columns import (
    AUDIO_COLUMNS,
    FACT_COLUMNS,
    VIDEO_COLUMNS,
    ColumnType,
    check_text,
    find_column,
    usual_column,
    value_as,
)
from streamvid.dataset.tabular.reader import RowBlock
from streamvid.dataset.tabular.rows import Rows
from streamvid.dataset.tabular.table import MetadataTable
from streamvid.dataset.tabular.text_set import TextSet
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
from streamvid.sharder.source.embedded import EmbeddedFiles
from streamvid.sharder.source.extra_media import (
    MediaCells,
    MediaFile,
    check_columns,
    find_files,
    media_cells,
    paths_of,
)
from streamvid.sharder.source.folder import (
    AUDIO_EXTENSIONS,
    IMAGE_EXTENSIONS,
    VIDEO_EXTENSIONS,
    is_audio_name,
    is_media_name,
    printable_source,
)
from streamvid.sharder.source.layouts import SourceInput, find_input
from streamvid.sharder.source.media import UNKNOWN, Media
from streamvid.sharder.source.place import CaptionFile, LocalFolder, Place, SealedOrigin
from streamvid.sharder.source.summary import Counted, SourceSummary
from streamvid.sharder.source.time_ranges import (
    TimeColumns,
    TimeRange,
    check_own_files,
    check_time_ranges,
)
from streamvid.storage import StorageOptions
from streamvid.video.cropping import NO_MARGINS, Margins

Value: TypeAlias = bool | int | float | str | None


@dataclass(frozen=True, slots=True)
class Record:
    """Input row with a usable file, or one time range of such a row.

    source: name of the file in the dataset.
    path: local path or URL of the file.
    version: modification time in nanoseconds, the store's version of the object, or a checksum.
    extra: files of the conditioning inputs.
    captions: all captions with their weights if there are several captions; `caption` is the first one.
    origin: keys and split of the clip in the sealed dataset from which it comes; None for other clips.
    time_range: the part of the video to use; None for the whole video.
    bars: black bars of the displayed frames in pixels: (left, top, right, bottom).
    signature: signature for finding near-duplicates; None if curation did not compute one.
    """

    row: int
    source: str
    path: str
    num_bytes: int
    version: str
    caption: str | None
    columns: Mapping[str, Value]
    extra: tuple[MediaFile, ...] = ()
    captions: Captions = ()
    origin: SealedOrigin | None = None
    time_range: TimeRange | None = None
    bars: Margins = NO_MARGINS
    signature: str | None = None

    def media(self, storage: StorageOptions) -> Media:
        """Return a Media that workers use to read the file. storage: options for accessing the file's store."""
        return Media(self.path, self.source, self.num_bytes, self.version, storage)


@dataclass(frozen=True, slots=True)
class Rejection:
    """Rejected input row, with the reason. kind: category of the reason. row: row number, starting at 0."""

    row: int
    source: str
    reason: str
    kind: str = field(default="", compare=False)


@dataclass(frozen=True)
class RecordSet:
    """All rows of the input. Each usable row is in `records`, and every other row is in `rejections`.

    user_types: maps each metadata column to its type in the index.
    num_rows: number of input rows. A row with several time ranges becomes several records.
    sources: summary of each source.
    """

    records: Rows[Record]
    rejections: tuple[Rejection, ...]
    user_types: dict[str, str]
    num_rows: int
    sources: tuple[SourceSummary, ...] = ()

    def sha256(self) -> str:
        """Return a digest of everything in the input that determines the dataset, except the contents of files."""
        digest = hashlib.sha256(json.dumps(list(self.user_types.items())).encode())
        for record in self.records:
            digest.update(_line(record.row, record.source, record.num_bytes, record.caption, record.columns))
            if record.captions:
                digest.update(_line(*record.captions))
            if record.extra:
                digest.update(_line(*(file.line for file in record.extra)))
            if record.origin is not None:
                digest.update(_line(*astuple(record.origin)))
            if record.time_range is not None:
                digest.update(_line(str(record.time_range.start), str(record.time_range.end)))
        for rejection in self.rejections:
            digest.update(_line(rejection.row, rejection.source, rejection.kind))  # reasons are worded for people
        return digest.hexdigest()


def read_records(
    source: str | Path | Sequence[str | Path], options: ShardOptions, folder: Path = Path(), *, extracts: bool = False
) -> RecordSet:
    """Read one source, or several sources one after the other.

    A row that cannot be used is rejected.

    folder: folder for files that are embedded in the metadata.
    extracts: True to write embedded files to `folder`.

    Raises SourceError if a source cannot be read.
    """
    sources = [source] if isinstance(source, str | Path) else list(source)
    if len(sources) > 1 and options.source.metadata is not None:
        raise SourceError(
            f"source.metadata={str(options.source.metadata)!r} (--metadata) cannot be combined with {len(sources)} "
            "sources; pass the metadata files as sources instead"
        )
    parts: list[RecordSet] = []
    for one in sources:
        wanted = {options.source.video_column or "", *options.source.media.values()}
        finds_video = not options.clips.is_text and options.source.video_column is None
        found = find_input(one, options, EmbeddedFiles(folder, extracts, wanted, finds_video))
        parts.append(_read_input(found, options, sum(part.num_rows for part in parts)))
        if not parts[-1].num_rows:
            raise SourceError(f"nothing to shard: {_what_is_missing(found, one, options)}")
    return parts[0] if len(parts) == 1 else _joined(parts, sources)


def _what_is_missing(found: SourceInput, source: str | Path, options: ShardOptions) -> str:
    """Explain why an input has no rows, and what to do."""
    if found.layout == "dataset":
        return f"the dataset {found.place.url} has no samples; check the path"
    if found.table is not None and found.layout != "tars":
        return f"the metadata {', '.join(found.metadata[:3])} of source {source} has no rows; check the file"
    where = f"the tars in {found.place.url} contain" if found.layout == "tars" else f"{found.place.url} contains"
    is_audio = options.clips.is_audio
    extensions = ", ".join(AUDIO_EXTENSIONS if is_audio else VIDEO_EXTENSIONS + IMAGE_EXTENSIONS)
    return (
        f"{where} no file with {'an audio' if is_audio else 'a video or image'} extension; check the path, or rename "
        f"the files (extensions: {extensions})"
    )


# --------------------------------------------------------------------------------------------------- rows of one input


@dataclass(frozen=True, slots=True)
class _Row:
    """Input row as given in the metadata. problem: reason that the row could not be read; "" if it was read."""

    path: object
    captions: CaptionCells | CaptionFile
    columns: Mapping[str, Value] = field(default_factory=dict)
    media: MediaCells = field(default_factory=dict)
    times: tuple[object, ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class _Roles:
    """Metadata columns, with one field for each use. A field is None if no column has this use.

    video: column of media paths.
    num_bytes: column of file sizes in bytes, if the metadata is trusted.
    """

    video: str | None = None
    captions: CaptionColumns = field(default_factory=CaptionColumns)
    media: tuple[MediaColumn, ...] = ()
    times: TimeColumns = field(default_factory=TimeColumns)
    user_types: dict[str, ColumnType] = field(default_factory=dict)
    num_bytes: str | None = None

    @staticmethod
    def of(found: SourceInput, table: MetadataTable, options: ShardOptions) -> _Roles:
        if not table.names:
            return _Roles()
        video = None if options.clips.is_text else _video_column(found, table, options)
        others = [name for name in table.names if name != video]
        asked = found.caption_column if options.source.captions.column is None else options.source.captions.column
        weights, is_timed = options.source.captions.weight_column, bool(options.source.time_columns)
        captions = find_caption_columns(others, asked, weights, is_timed=is_timed)
        times = TimeColumns.of(others, options.source.time_columns)
        of_layout = (found.video_column, found.caption_column)
        taken = {
            video,
            *captions.all,
            *times.names,
            *of_layout,
            *(medium.column for medium in options.source.media_columns),
        }
        kinds = table.kinds([name for name in table.names if name not in taken])
        sizes = usual_column(list(kinds), FACT_COLUMNS["num_bytes"]) if options.trust_metadata else None
        return _Roles(video, captions, options.source.media_columns, times, kinds, sizes)

    def uses(self, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Map each use to its columns, for a SourceSummary. Columns that the layout created are omitted."""
        used = {
            "video": () if self.video is None else (self.video,),
            "caption": self.captions.names,
            "caption weight": () if self.captions.weights is None else (self.captions.weights,),
            "time range": self.times.names,
            **{medium.name: (medium.column,) for medium in self.media},
            "kept": tuple(self.user_types),
        }
        taken = {name for columns in used.values() for name in columns}
        used["ignored"] = tuple(name for name in names if name not in taken)
        given = {use: tuple(name for name in columns if name[:2] != "__") for use, columns in used.items()}
        return {use: columns for use, columns in given.items() if columns}

    def paths(self, block: RowBlock) -> list[object]:
        """Return the media path of each row. All paths are None if no column contains media paths."""
        return [None] * block.num_rows if self.video is None else block.column(self.video).values()

    def rows(self, block: RowBlock) -> Iterator[_Row]:
        typed = {name: block.column(name).as_kind(kind).to_pylist() for name, kind in self.user_types.items()}
        captions, media = self.captions.cells(block), media_cells(block, self.media)
        cells = zip(self.paths(block), captions, media, self.times.cells(block), strict=True)
        for place, (path, texts, files, times) in enumerate(cells):
            columns = {name: values[place] for name, values in typed.items()}
            yield _Row(path, texts, columns, files, times, block.broken.get(place, ""))


def _read_input(found: SourceInput, options: ShardOptions, first_row: int) -> RecordSet:
    place, table = found.place, found.table
    if options.clips.is_text and table is None:
        raise SourceError(
            f"{place.url} has no metadata, but clips.kind='text' (--clips text) requires metadata rows; add a metadata "
            "file"
        )
    check_columns(table, options.source.media_columns)
    if table is None and options.source.time_columns:
        raise SourceError(
            f"{place.url} has no metadata, but source.time_columns={options.source.time_columns!r} (--time-columns) "
            "requires metadata columns; add a metadata file, or omit --time-columns"
        )
    roles = _Roles()
    if table is None:
        is_wanted = is_audio_name if options.clips.is_audio else is_media_name
        paths = [path for path in place.paths() if is_wanted(path)]
        place.look_up_captions(paths)
        num_rows, rows = len(paths), (_Row(path, CaptionFile(path)) for path in paths)
    else:
        roles = _Roles.of(found, table, options)
        if roles.video is not None and not options.source.whole_files:
            check_time_ranges(table, (*roles.captions.all, *roles.times.names))
        for block in table.blocks if roles.num_bytes is None else ():
            place.look_up(roles.paths(block))
            place.look_up([path for row in media_cells(block, roles.media) for path in paths_of(row)])
        num_rows, rows = table.num_rows, (row for block in table.blocks for row in roles.rows(block))
    rejections: list[Rejection] = []
    records = Rows.of(Record, _usable(enumerate(rows, first_row), place, roles, options, rejections))
    if roles.video is not None and not options.source.whole_files:
        check_own_files(lambda: _whole_files(records))
    summary = _summary(found, roles, records, rejections, num_rows)
    return RecordSet(records, tuple(rejections), dict(roles.user_types), num_rows, (summary,))


def _usable(
    rows: Iterable[tuple[int, _Row]], place: Place, roles: _Roles, options: ShardOptions, rejections: list[Rejection]
) -> Iterator[Record]:
    """Yield the records of usable rows, and add all other rows to `rejections`. rows: (row number, row) pairs."""
    for number, row in rows:
        try:
            record = _record(number, row, place, options, roles.num_bytes)
            yield from _with_ranges(record, roles.times.ranges(row.times))
        except Rejected as error:
            rejections.append(Rejection(number, printable_source(row.path), str(error), error.kind or "bad-row"))


def _summary(
    found: SourceInput, roles: _Roles, records: Rows[Record], rejections: Sequence[Rejection], num_rows: int
) -> SourceSummary:
    table, unnamed = found.table, None
    if found.layout not in ("folder", "tars", "dataset") and roles.video is not None:
        place = found.place
        folders = {dirname(source) for (source,) in records.tuples("source")} if not found.is_folder else set()
        there = [*filter(is_media_name, place.paths() if found.is_folder else place.files_in(folders))]
        sources = chain(_files(records), (rejection.source for rejection in rejections)) if there else ()
        named = TextSet.of(map(normpath, sources))
        unnamed = Counted.of(path for path in there if path not in named)
    return SourceSummary(
        url=found.place.url,
        layout=found.layout,
        num_rows=num_rows,
        metadata=found.metadata,
        unread_metadata=Counted.of(found.unread_metadata),
        columns={} if table is None else roles.uses(table.names),
        num_usable=len(records),
        num_captions=sum(caption is not None for (caption,) in records.tuples("caption")),
        unnamed_files=unnamed,
    )


def _files(records: Rows[Record]) -> Iterator[str]:
    """Yield the names of all files that the records use."""
    for source, extra in records.tuples("source", "extra"):
        yield source
        yield from (file.source for file in extra)


def _whole_files(records: Rows[Record]) -> Iterator[tuple[int, str]]:
    """Yield (row number, file name) for each record that uses its whole file."""
    rows = records.tuples("row", "source", "time_range")
    return ((row, source) for row, source, time_range in rows if time_range is None)


def _video_column(found: SourceInput, table: MetadataTable, options: ShardOptions) -> str:
    asked = options.source.video_column or found.video_column
    try:
        usual = AUDIO_COLUMNS if options.clips.is_audio else VIDEO_COLUMNS
        return find_column(table.names, asked, usual, "source.video_column")
    except SourceError as error:
        raise SourceError(
            f"{error}; for a dataset of captions without videos, use clips.kind='text' (--clips text)"
        ) from None


def _record(number: int, row: _Row, place: Place, options: ShardOptions, size_column: str | None = None) -> Record:
    if row.problem:
        raise Rejected(row.problem)
    source, path = ("", "") if options.clips.is_text else place.locate_typed(row.path)
    truncates = options.source.captions.too_long == "truncate"
    captions = check_captions(_captions(row.captions, place, options), truncates=truncates)
    for name, value in row.columns.items():
        if isinstance(value, str):
            check_text(value, f"column {name!r}")
    caption = captions[0][0] if captions else None
    several = captions if len(captions) > 1 else ()
    if options.clips.is_text:
        if caption is None or not caption.strip():
            raise Rejected("the row has no caption", kind="no-text")
        num_bytes = len(caption.encode())
        return Record(number, text_source(caption), "", num_bytes, "", caption, row.columns, captions=several)
    stated = row.columns.get(size_column or "")
    if isinstance(stated, int) and stated > 0 and isinstance(place, LocalFolder):
        num_bytes, version = stated, UNKNOWN
    else:
        num_bytes, version = place.state(path)
    check_size(num_bytes, options)
    extra = find_files(row.media, options.source.media_columns, place, options.source.max_clip_bytes)
    return Record(number, source, path, num_bytes, version, caption, row.columns, extra, several, place.origin(path))


def check_size(num_bytes: int, options: ShardOptions) -> None:
    """Raise Rejected if a file is empty or too large."""
    if num_bytes == 0:
        raise Rejected("the file is empty", kind="empty-file")
    if num_bytes > options.source.max_clip_bytes:
        most = f"{options.source.max_clip_bytes} are allowed (source.max_clip_bytes, --max-clip-bytes)"
        reason = f"the file is {num_bytes} bytes long, but at most {most}"
        raise Rejected(reason, kind="max-clip-bytes")


def _with_ranges(record: Record, ranges: Sequence[TimeRange]) -> list[Record]:
    """Return one record per time range, or the record itself if there is no time range.

    If a record has several ranges and several captions, each range gets the caption at the same index. Raises Rejected
    if the number of ranges differs from the number of captions.
    """
    if len(ranges) < 2:
        return [replace(record, time_range=one) for one in ranges] or [record]
    if not record.captions:
        return [replace(record, time_range=one) for one in ranges]
    if len(record.captions) != len(ranges):
        raise Rejected(
            f"the row has {len(ranges)} time ranges, but {len(record.captions)} captions; specify one caption per "
            "range, or a single caption",
            kind="time-range",
        )
    pairs = zip(ranges, record.captions, strict=True)
    return [replace(record, time_range=one, caption=text, captions=()) for one, (text, _) in pairs]


def _captions(cells: CaptionCells | CaptionFile, place: Place, options: ShardOptions) -> Captions:
    if isinstance(cells, CaptionCells):
        return cells.captions()
    text = place.caption(cells)
    if options.source.captions.lines:
        return caption_lines(None if text is None else check_text(text, "the caption file"))
    return () if text is None else ((text, 1.0),)


# ------------------------------------------------------------------------------------------------------ several inputs


def _joined(parts: Sequence[RecordSet], sources: Sequence[str | Path]) -> RecordSet:
    """Join several inputs. Raises SourceError if two inputs contain files with the same name."""
    types: dict[str, str] = {}
    _check_owners(parts, sources)
    for part in parts:
        for name, kind in part.user_types.items():
            types[name] = kind if types.get(name, kind) == kind else _wider(types[name], kind)
    origins = (origin for part in parts for (origin,) in part.records.tuples("origin"))
    val = {origin.record_key for origin in origins if origin is not None and origin.is_val}
    return RecordSet(
        Rows.of(Record, (_as_types(record, types, val) for part in parts for record in part.records)),
        tuple(rejection for part in parts for rejection in part.rejections),
        types,
        sum(part.num_rows for part in parts),
        tuple(source for part in parts for source in part.sources),
    )


def _check_owners(parts: Sequence[RecordSet], sources: Sequence[str | Path]) -> None:
    """Raise SourceError if inputs share a file name. Clips from sealed datasets may share names."""
    repeated = TextSet.repeated(source for part in parts for (source,) in part.records.tuples("source"))
    owners: dict[str, int] = {}
    for number, part in enumerate(parts):
        for source, origin in part.records.tuples("source", "origin") if len(repeated) else ():
            if source in repeated and origin is None and owners.setdefault(source, number) != number:
                raise SourceError(
                    f"{source} is in {sources[owners[source]]} and in {sources[number]}, so both files would have the "
                    "same key; rename one, or pass one folder that contains both sources"
                )


def _wider(one: str, other: str) -> str:
    return "double" if {one, other} == {"int64", "double"} else "string"


def _as_types(record: Record, types: Mapping[str, str], val: Collection[str]) -> Record:
    """Return the record with its columns converted to `types`.

    The result is in the "val" split if its record key is in `val`.
    """
    columns = {name: value_as(record.columns.get(name), kind) for name, kind in types.items()}
    origin = record.origin
    if origin is not None and origin.record_key in val:
        origin = replace(origin, is_val=True)
    return replace(record, columns=columns, origin=origin)


def _line(*values: object) -> bytes:
    return (json.dumps(values, sort_keys=True) + "\n").encode()
