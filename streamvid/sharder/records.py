"""Records: the rows of the user's input, each with a file that is there, or a rejection."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from streamvid.errors import Rejected, SourceError
from streamvid.sharder.columns import (
    CAPTION_COLUMNS,
    MAX_TEXT_BYTES,
    VIDEO_COLUMNS,
    as_type,
    check_text,
    common_type,
    find_column,
)
from streamvid.sharder.folder import locate, media_paths, printable_source
from streamvid.sharder.metadata import READERS, BadRow, Metadata, cell_text, cell_value, read_metadata
from streamvid.sharder.options import ShardOptions
from streamvid.storage import LocalStore, open_store


@dataclass(frozen=True, slots=True)
class Record:
    """One input row whose file is there. `source` names it in the dataset, `path` on this machine."""

    row: int
    source: str
    path: str
    num_bytes: int
    mtime_ns: int
    caption: str | None
    columns: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rejection:
    """One input row that is in no shard, and why. `row` counts input rows from 0."""

    row: int
    source: str
    reason: str


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
        for rejection in self.rejections:
            digest.update(_line(rejection.row, rejection.source, rejection.reason))
        return digest.hexdigest()


_Candidate: TypeAlias = tuple[object, object, dict[str, Any]]
"""(path, caption or the file that may hold it, columns) of a row, as the user gave them."""


def read_records(source: str | Path, options: ShardOptions) -> RecordSet:
    """Read the whole input. A row that cannot be used is a rejection; SourceError is for input that cannot be read."""
    root, metadata = find_input(source, options.metadata)
    user_types: dict[str, str] = {}
    if metadata is None:
        candidates = _folder_candidates(root)
    else:
        candidates, user_types = _metadata_candidates(read_metadata(metadata), options)
    records: list[Record] = []
    rejections: list[Rejection] = []
    for row, candidate in enumerate(candidates):
        try:
            if isinstance(candidate, BadRow):
                raise Rejected(candidate.reason)
            records.append(_record(row, candidate, root, options.max_clip_bytes))
        except Rejected as error:
            name = "" if isinstance(candidate, BadRow) else printable_source(candidate[0])
            rejections.append(Rejection(row, name, str(error)))
    if not records and not rejections:
        what = (
            f"metadata {metadata} has no rows" if metadata else f"{root} holds no file named like a video or an image"
        )
        raise SourceError(f"nothing to shard: {what}")
    return RecordSet(tuple(records), tuple(rejections), user_types)


def find_input(source: str | Path, metadata: str | Path | None) -> tuple[Path, Path | None]:
    """(the folder that relative paths start from, the metadata file if any). Raises SourceError."""
    store = open_store(source)
    if not isinstance(store, LocalStore):
        raise SourceError(f"source {store.url!r} is not on this machine; copy it to a local disk first")
    root = Path(os.path.abspath(store.root))  # noqa: PTH100 — resolve() would follow links, and rename what lies behind them
    if root.is_file():
        if metadata is not None:
            raise SourceError(f"source {root} is a file, and metadata={str(metadata)!r} is given too; give the folder")
        return root.parent, root
    if not root.is_dir():
        raise SourceError(f"source {root} is neither a folder nor a metadata file")
    if metadata is not None:
        return root, Path(metadata)
    found = [path for suffix in READERS if (path := root / f"metadata{suffix}").is_file()]
    if len(found) > 1:
        names = " and ".join(path.name for path in found)
        raise SourceError(f"source {root} holds {names}; say which with --metadata")
    return root, found[0] if found else None


def _folder_candidates(root: Path) -> list[_Candidate | BadRow]:
    return [(path, (root / path).with_suffix(".txt"), {}) for path in media_paths(root)]


def _read_sidecar(path: Path) -> str | None:
    """The caption beside a media file, outer white space aside; None where there is none."""
    try:
        if not path.is_file():
            return None
        with path.open("rb") as file:
            text = file.read(MAX_TEXT_BYTES + 1).decode("utf-8-sig", "surrogateescape").strip()
    except OSError as error:
        raise Rejected(f"its caption file cannot be read: {error.strerror or error}") from error
    return text or None


def _metadata_candidates(metadata: Metadata, options: ShardOptions) -> tuple[list[_Candidate | BadRow], dict[str, str]]:
    if not metadata.names:
        return [row for row in metadata.rows if isinstance(row, BadRow)], {}
    video = find_column(metadata.names, options.video_column, VIDEO_COLUMNS, "video_column")
    caption = _caption_column([name for name in metadata.names if name != video], options.caption_column)
    names = [name for name in metadata.names if name not in (video, caption)]
    values = {name: [cell_value(row.get(name)) for row in metadata.rows if isinstance(row, dict)] for name in names}
    user_types = {name: common_type(values[name]) for name in names}
    columns = (dict(zip(names, row, strict=True)) for row in zip(*values.values(), strict=True))
    candidates: list[_Candidate | BadRow] = []
    for row in metadata.rows:
        if isinstance(row, BadRow):
            candidates.append(row)
            continue
        typed = {name: as_type(value, user_types[name]) for name, value in next(columns, {}).items()}
        text = None if caption is None else cell_text(row.get(caption))
        candidates.append((cell_text(row.get(video)), text, typed))
    return candidates, user_types


def _caption_column(names: list[str], asked: str | None) -> str | None:
    if asked == "" or (asked is None and not names):
        return None
    try:
        return find_column(names, asked, CAPTION_COLUMNS, "caption_column")
    except SourceError as error:
        raise SourceError(f'{error}, or give caption_column="" for no captions') from None


def _record(row: int, candidate: _Candidate, root: Path, max_clip_bytes: int) -> Record:
    source, path = locate(candidate[0], root)
    caption = _read_sidecar(candidate[1]) if isinstance(candidate[1], Path) else candidate[1]
    if caption is not None and not isinstance(caption, str):
        raise Rejected(f"the caption is a {type(caption).__name__}, not text")
    if caption is not None:
        check_text(caption, "the caption")
    for name, value in candidate[2].items():
        if isinstance(value, str):
            check_text(value, f"column {name!r}")
    try:
        status = path.stat()
    except OSError as error:
        raise Rejected(f"cannot be read: {error.strerror or error}") from error
    if not stat.S_ISREG(status.st_mode):
        raise Rejected("is a folder" if stat.S_ISDIR(status.st_mode) else "is no regular file")
    if not 0 < status.st_size <= max_clip_bytes:
        limit = f"has {status.st_size} bytes, max_clip_bytes={max_clip_bytes} are allowed"
        raise Rejected(limit if status.st_size else "is empty")
    return Record(row, source, str(path), status.st_size, status.st_mtime_ns, caption, candidate[2])


def _line(*values: object) -> bytes:
    return (json.dumps(values, sort_keys=True) + "\n").encode()


def sorted_rejections(rejections: Iterable[Rejection]) -> tuple[Rejection, ...]:
    """In the order of the input."""
    return tuple(sorted(rejections, key=lambda rejection: rejection.row))
