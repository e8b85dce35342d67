"""Tars as a source: webdataset's, video2dataset's with parquet files beside, Cosmos' with metas in tars beside.

Members stay where they are, and are read from there by range. A sample is what shares a name up to its first dot; its
caption and columns are its .txt and .json, those of the parquet file of the same name as the tar, and those of the tar
of the same name where one path has `metas` for the other's `video`.
"""

from __future__ import annotations

import json
import logging
import os
import posixpath
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from streamvid.dataset.captions import CAPTION_COLUMNS
from streamvid.errors import Rejected, SourceError
from streamvid.sharder.source.columns import MAX_TEXT_BYTES, check_names
from streamvid.sharder.source.folder import IMAGE_EXTENSIONS, is_media_name
from streamvid.sharder.source.media import Media, part_path
from streamvid.sharder.source.metadata import BadRow, Metadata, Row, cell_text, read_metadata
from streamvid.sharder.source.place import Members, Place, at_once, caption_text
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
class _Sample:
    """Members of one name up to the first dot: media and what cannot be one, by extension; what is said of them."""

    media: dict[str, TarMember] = field(default_factory=dict)
    texts: dict[str, str | None] = field(default_factory=dict)
    columns: dict[str, dict[str, Any]] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Tar:
    """What one tar holds. problem: why it could be read no further, "" where it was read to its end."""

    media: Media
    samples: dict[str, _Sample]
    problem: str


def read_tars(place: Place, names: Sequence[str], wanted: Collection[str]) -> tuple[Members, Metadata]:
    """(where the members lie, a row each sample) of tars, in the order of their names.

    wanted: extensions that the user names as columns, of clips or of further media. Raises SourceError for a tar that
    cannot be read at all, StorageError where a store fails.
    """
    sources = [name for name in names if not _is_of(name, _NO_SOURCES) or len(names) == 1]
    if not sources:
        raise SourceError(f"source {place.url} holds tars of metadata alone; give the folder above, with its videos")
    reader = _Reader(place, frozenset(wanted))
    found = at_once(reader.rows, sources)
    rows = [row for _, part in found for row in part]
    columns = dict.fromkeys(name for row in rows if isinstance(row, dict) for name in row)
    check_names(list(columns), f"source {place.url}")
    has_captions = CAPTION in columns
    for row in rows:
        if has_captions and isinstance(row, dict) and CAPTION not in row:
            # Some have a .txt: those that have none may say it in their JSON.
            row[CAPTION] = next((row[name] for name in CAPTION_COLUMNS if cell_text(row.get(name))), None)
    if reader.left_out:
        _log.warning("%d further media lie beside the clips in %s and are left out", reader.left_out, place.url)
    members = Members(place.url, reader.where, reader.states)
    return members, Metadata(rows, list(columns), MEDIA, CAPTION if has_captions else None)


@dataclass
class _Reader:
    """Reads tars, and gathers where their media lie."""

    place: Place
    wanted: frozenset[str]
    where: dict[str, tuple[str, str]] = field(default_factory=dict)
    states: dict[str, tuple[int, str]] = field(default_factory=dict)
    left_out: int = 0

    def rows(self, name: str) -> list[Row]:
        tar = self._scan(name)
        notes = self._metas(name)
        listed = self._parquet(name)
        rows: list[Row] = []
        for key, sample in tar.samples.items():
            try:
                said = {**listed.pop(posixpath.basename(key), {}), **listed.pop(key, {})}
                rows += self._rows_of(tar, key, sample, said, notes.get(key))
            except Rejected as error:
                rows.append(BadRow(f"{name}/{key}: {error}"))
        rows += [BadRow(_not_there(name, key, row)) for key, row in listed.items()]
        if tar.problem:
            rows.append(BadRow(f"{name}: {tar.problem}"))
        return rows

    def _rows_of(
        self, tar: _Tar, key: str, sample: _Sample, said: Mapping[str, Any], note: _Sample | None
    ) -> Iterator[Row]:
        for problem in sample.broken:
            yield BadRow(f"{tar.media.source}/{problem}")
        for extension in self._clips_of(sample):
            base = extension.rpartition(".")[0]
            row: dict[str, Any] = {MEDIA: self._place_of(tar, sample.media[extension])}
            for other in self.wanted & sample.media.keys():
                row[other] = self._place_of(tar, sample.media[other])
            texts = {**(note.texts if note else {}), **sample.texts}
            row.update(said)
            for part in (note, sample):
                for stem in dict.fromkeys(("", base)):
                    row.update(part.columns.get(stem, {}) if part else {})
            row.pop(CAPTION, None)
            row[MEDIA] = self._place_of(tar, sample.media[extension])
            caption = texts.get(base, texts.get("")) or _caption_of_windows(row)
            if caption is not None:
                row[CAPTION] = caption
            yield row

    def _clips_of(self, sample: _Sample) -> list[str]:
        """Extensions of the media that are clips of their own."""
        bare = [extension for extension in sample.media if "." not in extension]
        if not bare or self.wanted & sample.media.keys():
            asked = [extension for extension in sample.media if extension in self.wanted]
            return asked[:1] if asked else list(sample.media)
        videos = [extension for extension in bare if extension not in IMAGE_EXTENSIONS]
        if len(bare) > 1 and len(videos) != 1:
            raise Rejected(f"holds {' and '.join(bare)} of one name; say which is the clip with --video-column")
        self.left_out += len(sample.media) - 1
        return videos or bare

    def _place_of(self, tar: _Tar, member: TarMember) -> str:
        value = f"{tar.media.source}/{member.name}"
        path = part_path(tar.media.path, member.offset)
        self.where[value] = (value, path)
        self.states[path] = (member.num_bytes, tar.media.version)
        return value

    def _scan(self, name: str) -> _Tar:
        try:
            media = self.place.media(name)
        except Rejected as error:
            raise SourceError(f"cannot read {self.place.url}/{name}: it {error}") from None
        samples: dict[str, _Sample] = {}
        try:
            with _reading(media) as read:
                for member in tar_members(read, media.num_bytes):
                    _take_in(samples, member, read)
        except Rejected as error:
            return _Tar(media, samples, str(error))
        return _Tar(media, samples, "")

    def _metas(self, name: str) -> dict[str, _Sample]:
        """What Cosmos' tar of metadata says of the samples of a tar of videos."""
        parts = name.split("/")
        for at, part in enumerate(parts[:-1]):
            beside = "/".join([*parts[:at], _METAS_OF.get(part, ""), *parts[at + 1 :]])
            if part in _METAS_OF and self.place.is_file(beside):
                return self._scan(beside).samples
        return {}

    def _parquet(self, name: str) -> dict[str, dict[str, Any]]:
        """Rows of the parquet file beside a tar, by their key."""
        beside = posixpath.splitext(name)[0] + ".parquet"
        if not self.place.is_file(beside):
            return {}
        table = read_metadata(f"{self.place.url}/{beside}", self.place.media(beside).storage)
        if "key" not in table.names:
            _log.warning("%s/%s has no column key, so that its rows belong to nothing", self.place.url, beside)
            return {}
        return {str(row["key"]): row for row in table.rows if isinstance(row, dict) and row.get("key") is not None}


@contextmanager
def _reading(media: Media) -> Iterator[Read]:
    """How a tar is read, a little at a time."""
    if media.is_remote:
        with SpooledFile(media, None, first_bytes=_FIRST_BYTES) as file:

            def fetch(offset: int, num_bytes: int) -> bytes:
                file.seek(offset)
                return file.read(num_bytes)

            yield fetch
        return
    try:
        descriptor = os.open(media.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise SourceError(f"cannot read {media.path}: {error.strerror or error}") from error
    try:
        yield lambda offset, num_bytes: os.pread(descriptor, num_bytes, offset)
    finally:
        os.close(descriptor)


def _take_in(samples: dict[str, _Sample], member: TarMember, read: Read) -> None:
    folder, name = posixpath.split(member.name)
    stem, _, extension = name.partition(".")
    if not stem or not extension:
        return
    extension = extension.lower()
    base, _, kind = extension.rpartition(".")
    is_media = is_media_name(f"x.{kind}")
    if not is_media and kind not in ("txt", "json"):
        return
    sample = samples.setdefault(posixpath.join(folder, stem), _Sample())
    taken: Mapping[str, object] = sample.media if is_media else sample.texts if kind == "txt" else sample.columns
    if member.not_file:
        sample.broken.append(f"{member.name}: is {member.not_file}, and only plain files are read")
    elif (extension if is_media else base) in taken:
        sample.broken.append(f"{member.name}: is in the tar twice; only the first is taken")
    elif is_media:
        sample.media[extension] = member
    elif kind == "txt":
        # One byte more than is allowed: then it is refused as too long, and is not cut.
        sample.texts[base] = caption_text(read(member.offset, min(member.num_bytes, MAX_TEXT_BYTES + 1)))
    else:
        try:
            sample.columns[base] = _object(member, read)
        except Rejected as error:
            sample.broken.append(f"{member.name}: {error}; its sample is taken without it")


def _object(member: TarMember, read: Read) -> dict[str, Any]:
    if member.num_bytes > MAX_JSON_BYTES:
        raise Rejected(f"has {member.num_bytes} bytes, {MAX_JSON_BYTES} are allowed")
    try:
        data = read(member.offset, member.num_bytes)
        value = json.loads(data.decode("utf-8-sig", "surrogateescape"), parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        raise Rejected("is no valid JSON") from None
    if not isinstance(value, dict):
        raise Rejected(f"is a {type(value).__name__}, not an object")
    return value


def _caption_of_windows(row: Mapping[str, Any]) -> str | None:
    """Cosmos-curate's metas have captions of windows: that of the first, as the clip begins with it."""
    for name in _WINDOWS:
        windows = row.get(name)
        if isinstance(windows, list) and windows and isinstance(windows[0], dict):
            texts = [text for key, text in windows[0].items() if key.endswith("caption") and isinstance(text, str)]
            return texts[0].strip() or None if texts else None
    return None


def _is_of(name: str, folders: Sequence[str]) -> bool:
    return any(part in folders for part in name.split("/")[:-1])


def _not_there(tar: str, key: str, row: Mapping[str, Any]) -> str:
    status, message = cell_text(row.get("status")), cell_text(row.get("error_message"))
    why = f" ({status}{f': {message}' if message else ''})" if status and status != "success" else ""
    return f"{tar}/{key}: is listed in the parquet file beside and is not in the tar{why}"
