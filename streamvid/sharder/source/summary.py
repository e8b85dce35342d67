"""Summary of how the sharder interprets its input, so that users notice wrong guesses before hours of work."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TypeVar

from streamvid.errors import SourceError
from streamvid.sharder.source.media import Media

_NUM_EXAMPLES = 3
_HEAD_BYTES = 1 << 12
_READ_BYTES = 1 << 20
_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Counted:
    """Number of items with a certain property, and the first few of these items as examples."""

    count: int = 0
    examples: tuple[str, ...] = ()

    @staticmethod
    def of(items: Iterable[str]) -> Counted:
        """Count `items`, and keep the first few as examples."""
        items = iter(items)
        examples = tuple(islice(items, _NUM_EXAMPLES))
        return Counted(len(examples) + sum(1 for _ in items), examples)


@dataclass(frozen=True, slots=True)
class SourceSummary:
    """Layout, metadata and columns of one source. A value that was not determined is None.

    metadata: names of the files from which the rows were read; empty if each media file is a row.
    unread_metadata: other metadata files in the source's folder.
    columns: maps each use to its columns. The uses are "video", "caption", "caption weight", "time range", names of
        conditioning inputs, "kept" (stored with each sample) and "ignored".
    num_usable: number of records. Each usable row becomes one record, or one record per time range.
    num_captions: number of records with a caption.
    unnamed_files: media files in the folder that no metadata row refers to.
    """

    url: str
    layout: str
    num_rows: int
    metadata: tuple[str, ...] = ()
    unread_metadata: Counted = Counted()
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    num_usable: int | None = None
    num_captions: int | None = None
    unnamed_files: Counted | None = None


@dataclass(frozen=True, slots=True)
class Duplicates:
    """Groups of near-duplicates. rows: all rows in these groups, except the best row in each group."""

    num_groups: int
    rows: Counted


@dataclass(frozen=True, slots=True)
class AudioSummary:
    """Facts about the audio of videos that have a bucket.

    num_videos: number of videos that have a bucket.
    num_with_audio: number of these videos with readable audio.
    unreadable: videos whose audio cannot be read, with the reason.
    other_start: videos whose audio begins at least MAX_START_SECONDS before or after the first frame.
    other_length: videos whose audio is at least MAX_LENGTH_SECONDS longer or shorter than their pictures.
    """

    num_videos: int
    num_with_audio: int
    unreadable: Counted
    other_start: Counted
    other_length: Counted


MAX_START_SECONDS, MAX_LENGTH_SECONDS = 0.045, 0.125
"""Smallest differences between a file's audio and its pictures that are reported: the offsets at which viewers notice
that audio is early or late, according to ITU-R BT.1359."""


@dataclass(frozen=True, slots=True)
class InputSummary:
    """The sharder's interpretation of its input. A value that was not determined is None.

    shared_files: rows that use the same file as an earlier row.
    duplicates: files with the same content as another file.
    fps: lowest and highest frame rate of the videos that have a bucket.
    read_fps: frame rate at which videos are read; None if each video is read at its own rate.
    repeated: videos with a bucket and a frame rate below `read_fps`, some of whose frames are therefore repeated.
    num_dropped: number of videos with a bucket and a frame rate above `read_fps`, some of whose frames are therefore
        dropped.
    num_without_bucket: number of files, windows or rows that no bucket accepts.
    near_duplicates: groups of rows with similar pictures; None unless `curation.dedup` is set.
    audio: facts about the audio of the videos; None if files are not probed first.
    """

    sources: tuple[SourceSummary, ...]
    shared_files: Counted | None = None
    duplicates: Counted | None = None
    fps: tuple[float, float] | None = None
    read_fps: float | None = None
    repeated: Counted | None = None
    num_dropped: int | None = None
    num_without_bucket: int | None = None
    near_duplicates: Duplicates | None = None
    audio: AudioSummary | None = None


def duplicates(files: Iterable[Media]) -> Counted:
    """Return the number of files with the same content as another file, and some examples.

    A local file is read completely only if another file has the same size and the same first bytes. Objects in a store
    are not read; two objects with the same size and version (ETag) are regarded as equal.
    """
    found = []
    for same_size in _groups({file.path: file for file in files}.values(), lambda file: file.num_bytes):
        for same_head in _groups(same_size, lambda file: _digest(file, _HEAD_BYTES)):
            for same in _groups(same_head, lambda file: _digest(file, file.num_bytes)):
                found += [f"{file.source} = {same[0].source}" for file in same[1:]]
    return Counted.of(found)


def _groups(items: Iterable[_Item], key: Callable[[_Item], Hashable]) -> list[list[_Item]]:
    """Return the groups of at least two items with equal keys."""
    groups: dict[Hashable, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return [group for group in groups.values() if len(group) > 1]


def _digest(file: Media, most_bytes: int) -> Hashable:
    """Return a value that is equal for files with the same first `most_bytes` bytes."""
    if file.has_checksum or (file.is_remote and not file.is_part):
        return file.version or file.path
    if file.is_remote:
        return file.path
    digest, left = hashlib.sha256(), most_bytes
    try:
        with file.opened() as place, Path(place).open("rb") if isinstance(place, str) else nullcontext(place) as opened:
            while left and (data := opened.read(min(left, _READ_BYTES))):
                digest.update(data)
                left -= len(data)
    except (OSError, SourceError):  # the error is raised when the file is read for a shard
        return file.path
    return digest.digest()
