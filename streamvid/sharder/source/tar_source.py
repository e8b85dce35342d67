"""Tars as a source: webdataset tars, video2dataset tars with Parquet files, and Cosmos tars with metadata tars.

Members are not extracted; they are read by byte range. A sample consists of the members whose names are equal up to the
first dot. Its caption and columns come from its .txt and .json members, from its row in the Parquet file named after
the tar, and from the metadata tar whose path contains `metas` instead of `video`.
"""

from __future__ import annotations

import json
import logging
import posixpath
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from streamvid.dataset.captions import CAPTION_COLUMNS
from streamvid.dataset.tabular.reader import BrokenRow, InputRow, blocks_of
from streamvid.dataset.tabular.table import MetadataTable, read_table
from streamvid.errors import Rejected, SourceError
from streamvid.sharder.source.folder import IMAGE_EXTENSIONS, is_media_name
from streamvid.sharder.source.media import Media, part_path
from streamvid.sharder.source.place import MAX_CAPTION_BYTES, MemberFolder, Place, caption_text, concurrently
from streamvid.sharder.source.spool import SpooledFile
from streamvid.sharder.source.tar_members import Read, TarMember, tar_members

MEDIA, CAPTION = "__media__", "__caption__"
MAX_JSON_BYTES = 2**20
_FIRST_BYTES = 64 * 2**10
_METAS_OF = {"video": "metas", "videos": "metas"}
_NO_SOURCES = ("metas", "t5_xxl", "umt5_xxl")
_WINDOWS = ("t2w_windows", "i2w_windows", "v2w_windows", "windows")
_log = logging.getLogger(__name__)


@dataclass
class _TarSample:
    """Members of one sample, keyed by extension (the part of the name after the first dot).

    broken: messages about members that cannot be used.
    """

    media: dict[str, TarMember] = field(default_factory=dict)
    texts: dict[str, str | None] = field(default_factory=dict)
    columns: dict[str, Mapping[str, object]] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Tar:
    """Contents of one tar. problem: reason that the tar could not be read to its end; "" if it was read."""

    media: Media
    samples: dict[str, _TarSample]
    problem: str


def read_tars(
    place: Place, names: Sequence[str], wanted: Collection[str]
) -> tuple[MemberFolder, MetadataTable, str, str | None]:
    """Read tars in order. Return (place of the members, table of samples, video column, caption column or None).

    wanted: extensions that the options specify as columns of clips or conditioning inputs.
    Raises SourceError if a tar cannot be read at all, and StorageError if a store fails.
    """
    sources = [name for name in names if not _is_below(name, _NO_SOURCES) or len(names) == 1]
    if not sources:
        raise SourceError(
            f"source {place.url} contains only tars with metadata or embeddings (in folders named "
            f"{', '.join(_NO_SOURCES)}); pass the folder that contains the tars with videos"
        )
    reader = _TarReader(place, frozenset(wanted))
    rows = [row for _, part in concurrently(reader.rows, sources) for row in part]
    has_captions = any(isinstance(row, dict) and CAPTION in row for row in rows)
    for row in rows:
        if has_captions and isinstance(row, dict) and CAPTION not in row:
            # Some samples have a .txt member. Samples without one may have a caption in their JSON member.
            row[CAPTION] = next((row[name] for name in CAPTION_COLUMNS if row.get(name)), None)
    if reader.num_left_out:
        _log.warning(
            "ignored %d media members in the tars in %s, because they are neither clips nor conditioning inputs",
            reader.num_left_out,
            place.url,
        )
    table = MetadataTable(blocks_of(rows), f"source {place.url}")
    return MemberFolder(place.url, reader.where, reader.states), table, MEDIA, CAPTION if has_captions else None


@dataclass
class _TarReader:
    """Reads tars and collects the locations of their media members."""

    place: Place
    wanted: frozenset[str]
    where: dict[str, tuple[str, str]] = field(default_factory=dict)
    states: dict[str, tuple[int, str]] = field(default_factory=dict)
    num_left_out: int = 0

    def rows(self, name: str) -> list[InputRow]:
        tar = self._scan(name)
        notes = self._metas(name)
        listed = self._parquet(name)
        rows: list[InputRow] = []
        for key, sample in tar.samples.items():
            try:
                columns = {**listed.pop(posixpath.basename(key), {}), **listed.pop(key, {})}
                rows += self._rows_of(tar, sample, columns, notes.get(key, _TarSample()))
            except Rejected as error:
                rows.append(BrokenRow(f"{name}/{key}: {error}"))
        rows += [BrokenRow(_not_there(name, key, row)) for key, row in listed.items()]
        if tar.problem:
            rows.append(BrokenRow(f"{name}: {tar.problem}"))
        return rows

    def _rows_of(
        self, tar: _Tar, sample: _TarSample, columns: Mapping[str, object], note: _TarSample
    ) -> Iterator[InputRow]:
        for problem in sample.broken:
            yield BrokenRow(f"{tar.media.source}/{problem}")
        for extension in self._clips_of(sample):
            base = extension.rpartition(".")[0]
            row: dict[str, object] = {
                name: self._add(tar, sample.media[name]) for name in self.wanted & sample.media.keys()
            }
            row.update(columns)
            for part in (note, sample):
                for stem in dict.fromkeys(("", base)):
                    row.update(part.columns.get(stem, {}))
            row.pop(CAPTION, None)
            row[MEDIA] = self._add(tar, sample.media[extension])
            texts = {**note.texts, **sample.texts}
            caption = texts.get(base, texts.get("")) or _caption_of_windows(row)
            if caption is not None:
                row[CAPTION] = caption
            yield row

    def _clips_of(self, sample: _TarSample) -> list[str]:
        """Return the extensions of the media members that become clips."""
        bare = [extension for extension in sample.media if "." not in extension]
        if not bare or self.wanted & sample.media.keys():
            asked = [extension for extension in sample.media if extension in self.wanted]
            return asked[:1] if asked else list(sample.media)
        videos = [extension for extension in bare if extension not in IMAGE_EXTENSIONS]
        if len(bare) > 1 and len(videos) != 1:
            raise Rejected(f"the sample has several media members ({', '.join(bare)}); choose one with --video-column")
        self.num_left_out += len(sample.media) - 1
        return videos or bare

    def _add(self, tar: _Tar, member: TarMember) -> str:
        """Record the location of a member, and return the name that rows use for it."""
        name = f"{tar.media.source}/{member.name}"
        path = part_path(tar.media.path, member.offset)
        self.where[name] = (name, path)
        self.states[path] = (member.num_bytes, tar.media.version)
        return name

    def _scan(self, name: str) -> _Tar:
        try:
            media = self.place.media(name)
        except Rejected as error:
            raise SourceError(f"the tar {self.place.url}/{name} {error}") from None
        samples: dict[str, _TarSample] = {}
        try:
            with _reading(media) as read:
                for member in tar_members(read, media.num_bytes):
                    _add_member(samples, member, read)
        except Rejected as error:
            return _Tar(media, samples, str(error))
        return _Tar(media, samples, "")

    def _metas(self, name: str) -> dict[str, _TarSample]:
        """Return the samples in the Cosmos metadata tar for a tar of videos, or {} if there is no metadata tar."""
        parts = name.split("/")
        for at, part in enumerate(parts[:-1]):
            beside = "/".join([*parts[:at], _METAS_OF.get(part, ""), *parts[at + 1 :]])
            if part in _METAS_OF and self.place.is_file(beside):
                return self._scan(beside).samples
        return {}

    def _parquet(self, name: str) -> dict[str, Mapping[str, object]]:
        """Map each sample key to its row in the Parquet file next to a tar. Return {} if there is no such file."""
        beside = posixpath.splitext(name)[0] + ".parquet"
        if not self.place.is_file(beside):
            return {}
        table = read_table(f"{self.place.url}/{beside}", self.place.storage)
        if "key" not in table.names:
            _log.warning("ignored %s/%s because it has no 'key' column", self.place.url, beside)
            return {}
        rows = (row for block in table.blocks for row in block.rows() if not isinstance(row, BrokenRow))
        return {str(key): row for row in rows if (key := row.get("key")) is not None}


@contextmanager
def _reading(media: Media) -> Iterator[Read]:
    """Open a tar for small reads. Raises SourceError if the tar cannot be opened."""
    try:
        opened = (
            SpooledFile(media, None, first_bytes=_FIRST_BYTES)
            if media.is_remote
            else Path(media.path).open("rb", buffering=0)  # noqa: SIM115 — closed below
        )
    except OSError as error:
        raise SourceError(f"cannot read {media.path}: {error.strerror or error}") from error
    with opened as file:

        def fetch(offset: int, num_bytes: int) -> bytes:
            file.seek(offset)
            return file.read(num_bytes) or b""

        yield fetch


def _add_member(samples: dict[str, _TarSample], member: TarMember, read: Read) -> None:
    folder, name = posixpath.split(member.name)
    stem, _, extension = name.partition(".")
    if not stem or not extension:
        return
    extension = extension.lower()
    base, _, kind = extension.rpartition(".")
    is_media = is_media_name(f"x.{kind}")
    if not is_media and kind not in ("txt", "json"):
        return
    sample = samples.setdefault(posixpath.join(folder, stem), _TarSample())
    taken: Mapping[str, object] = sample.media if is_media else sample.texts if kind == "txt" else sample.columns
    if member.not_file:
        sample.broken.append(f"{member.name} is {member.not_file}; only regular files are read")
    elif (extension if is_media else base) in taken:
        sample.broken.append(
            f"{member.name} is another .{extension} member of the same sample; only the first one is read"
        )
    elif is_media:
        sample.media[extension] = member
    elif kind == "txt":
        # MAX_CAPTION_BYTES exceeds the limit on captions, so that a longer text is rejected instead of truncated.
        sample.texts[base] = caption_text(read(member.offset, min(member.num_bytes, MAX_CAPTION_BYTES)))
    else:
        try:
            sample.columns[base] = _object(member, read)
        except Rejected as error:
            sample.broken.append(f"{member.name}: {error}; the sample is read without this file")


def _object(member: TarMember, read: Read) -> Mapping[str, object]:
    if member.num_bytes > MAX_JSON_BYTES:
        raise Rejected(f"the file is {member.num_bytes} bytes long, but at most {MAX_JSON_BYTES} bytes are allowed")
    try:
        data = read(member.offset, member.num_bytes)
        value = json.loads(data.decode("utf-8-sig", "surrogateescape"), parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        raise Rejected("the file is not valid JSON") from None
    if not isinstance(value, dict):
        raise Rejected(f"the file contains a value of type {type(value).__name__} instead of a JSON object")
    return value


def _caption_of_windows(row: Mapping[str, object]) -> str | None:
    """Return the caption of the first Cosmos-Curate window (the clip's start), or None if there is no window."""
    for name in _WINDOWS:
        windows = row.get(name)
        if isinstance(windows, list) and windows and isinstance(windows[0], dict):
            texts = [text for key, text in windows[0].items() if key.endswith("caption") and isinstance(text, str)]
            return texts[0].strip() or None if texts else None
    return None


def _is_below(name: str, folders: Sequence[str]) -> bool:
    return any(part in folders for part in name.split("/")[:-1])


def _not_there(tar: str, key: str, row: Mapping[str, object]) -> str:
    status, message = row.get("status"), row.get("error_message")
    why = f" ({status}{f': {message}' if message else ''})" if status and status != "success" else ""
    return f"{tar}/{key} is listed in the Parquet file next to the tar, but is not in the tar{why}"
