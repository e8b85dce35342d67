"""The file manifest.json, which describes a sealed dataset and lists its files with their sizes and checksums."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import chain
from typing import Any, Literal, TypeAlias, get_args

from streamvid.buckets.bucket import Bucket
from streamvid.buckets.frames import FrameRate
from streamvid.buckets.model import ModelRule
from streamvid.dataset.draws import StoredSet
from streamvid.dataset.sealed_json import CHECKSUM, MANIFEST, naming, read_sealed, sealed_json, unsealed_json
from streamvid.errors import DatasetError, IntegrityError
from streamvid.storage import Store, check_relative

FORMAT = "streamvid"
FORMAT_VERSION = 1
LARGE_FOLDERS = ("shards", "index")
"""Folders whose files can be large enough to be uploaded in parts."""
COLUMN_TYPES = frozenset(("bool", "double", "int64", "sha256", "string"))
"""Allowed types of columns added later."""

_SHA256 = re.compile(r"[0-9a-f]{64}")
MAX_BUILD_ID = 2**32
_MAX_MEDIA_ITEMS = 64
_EVERY_FRAME = FrameRate()


@dataclass(frozen=True, slots=True)
class FileInfo:
    """Description of one file of the dataset: relative path, size in bytes, and SHA-256 in lowercase hexadecimal."""

    path: str
    num_bytes: int
    sha256: str

    def __post_init__(self) -> None:
        check_relative(self.path)
        if not self.path.isprintable() or self.num_bytes < 0 or not _SHA256.fullmatch(self.sha256):
            raise DatasetError(
                f"file {self.path!r} has num_bytes={self.num_bytes}, sha256={self.sha256!r}; the path must be "
                "printable, num_bytes must be at least 0, and sha256 must be 64 lowercase hex digits; copy the "
                "dataset again"
            )

    @staticmethod
    def of(path: str, data: bytes) -> FileInfo:
        """Return the FileInfo for `data` that is stored at `path`."""
        return FileInfo(path, len(data), hashlib.sha256(data).hexdigest())

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> FileInfo:
        """Parse the description of a file in a manifest."""
        return FileInfo(str(value["path"]), int(value["num_bytes"]), str(value["sha256"]))


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """Description of a shard: a tar with samples of one bucket and split, and the location of their rows in the index.

    build_id: 0 for shards of the first build; otherwise a number from 1 to 2**32 - 1 derived from everything that
        determines the shard. It is part of the file's name, so that names are never reused (SHARD-2).
    num_samples: number of samples, excluding those that were removed later.
    """

    bucket_id: str
    number: int
    build_id: int
    split: str
    num_samples: int
    num_bytes: int
    sha256: str
    offsets_num_bytes: int
    offsets_sha256: str
    max_clip_bytes: int
    index_path: str
    index_row_group: int

    def __post_init__(self) -> None:
        check_relative(self.path)
        check_relative(self.index_path)
        if self.num_samples < 1 or self.number < 0 or not 0 <= self.build_id < MAX_BUILD_ID:
            raise DatasetError(
                f"shard {self.path} has num_samples={self.num_samples}, number={self.number} and "
                f"build_id={self.build_id}; num_samples must be at least 1, number at least 0, and build_id from 0 to "
                f"{MAX_BUILD_ID - 1}; copy or rebuild the dataset"
            )

    @property
    def path(self) -> str:
        return shard_path(self.bucket_id, self.number, self.build_id)


def shard_path(bucket_id: str, number: int, build_id: int = 0) -> str:
    """Return the path of a shard. The file's name contains the bucket id, so the name is unique in the dataset."""
    suffix = f"-{build_id:08x}" if build_id else ""
    return f"shards/{bucket_id}/{bucket_id}-{number:06d}{suffix}.tar"


def offsets_path(path: str) -> str:
    """Return the path where Megatron-Energon looks for the sample offsets of a shard."""
    return f"{path}.idx"


@dataclass(frozen=True, slots=True)
class ColumnGroup:
    """Columns added to the samples index later: new columns, or new values for existing columns.

    files: one file per sample file, in the same order. Each file contains the keys, and has the same rows and row
        groups as its sample file. The entry is None for a sample file that was added after the columns.
    columns: maps each index column to its type, as in `index.schema`. source_sha256: checksum of the annotation.
    """

    files: tuple[FileInfo | None, ...]
    columns: Mapping[str, str]
    source_sha256: str = ""

    def to_json(self) -> dict[str, object]:
        """Return the fields as JSON-serializable values. Files are given as paths; see `ManifestFiles.other`."""
        return {**asdict(self), "files": [file and file.path for file in self.files]}

    @property
    def known_files(self) -> tuple[FileInfo, ...]:
        """All files in the group, excluding entries that are None."""
        return tuple(file for file in self.files if file is not None)

    @staticmethod
    def from_json(value: Mapping[str, Any], files: ManifestFiles) -> ColumnGroup:
        """Parse the output of `to_json`. Raises DatasetError for invalid values, and KeyError for unlisted files."""
        known = {file.path: file for file in files.other}
        columns = {str(name): str(kind) for name, kind in value["columns"].items()}
        of_files = tuple(None if path is None else known[path] for path in value["files"])
        group = ColumnGroup(of_files, columns, str(value["source_sha256"]))
        if len(group.files) != len(files.samples) or not columns or set(columns.values()) - COLUMN_TYPES:
            raise DatasetError(
                f"the 'columns' field contains a group with {len(group.files)} files and the types {columns}; a group "
                f"must have one entry (a file or null) for each of the {len(files.samples)} sample files and at least "
                f"one column, and each type must be one of {', '.join(sorted(COLUMN_TYPES))}; copy the dataset again"
            )
        return group


@dataclass(frozen=True, slots=True)
class MediaInfo:
    """One conditioning input of the samples, such as a control video or a mask.

    column: metadata column that listed the files. is_optional: True if samples may lack the input.
    is_still: True if the input is one image per clip. is_audio: True if the input is audio.
    is_mask: True if the input has one channel.
    is_list: True if a sample may have several images, at most `max_items`.
    """

    column: str
    is_still: bool
    is_mask: bool
    is_optional: bool
    is_list: bool
    max_items: int
    is_audio: bool = False

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "is_audio" or value}

    @staticmethod
    def from_json(name: str, value: Mapping[str, Any]) -> MediaInfo:
        """Parse a conditioning input in a manifest. Raises IntegrityError for invalid values."""
        info = MediaInfo(**value)
        flags = (info.is_still, info.is_mask, info.is_optional, info.is_list, info.is_audio)
        is_known = all(isinstance(flag, bool) for flag in flags) and isinstance(info.column, str)
        if not is_known or type(info.max_items) is not int or not 1 <= info.max_items <= _MAX_MEDIA_ITEMS:
            raise IntegrityError(
                f"media {name!r} is {info}; max_items must be an integer from 1 to {_MAX_MEDIA_ITEMS}, column must be "
                "text, and all other fields must be true or false; copy the dataset again"
            )
        return info


@dataclass(frozen=True, slots=True)
class ManifestFiles:
    """All files that the manifest lists. Tars and their offsets files are listed in the shard table instead.

    packets: one file per sample file, in the same order, or an empty tuple.
    records: tables of input rows. A later append uses them to recognize rows that were already processed.
    removed: tables of the samples that were removed later; see `removed.py`.
    moved: tables that list deleted shards and the shards to which their remaining samples were moved.
    other: `.nv-meta/` files, which only Megatron-Energon reads, and files with columns added later.
    """

    shards: tuple[FileInfo, ...]
    samples: tuple[FileInfo, ...]
    rejections: tuple[FileInfo, ...]
    packets: tuple[FileInfo, ...] = ()
    records: tuple[FileInfo, ...] = ()
    removed: tuple[FileInfo, ...] = ()
    moved: tuple[FileInfo, ...] = ()
    other: tuple[FileInfo, ...] = ()

    def __post_init__(self) -> None:
        if len(self.packets) not in (0, len(self.samples)):
            raise DatasetError(
                f"files.packets lists {len(self.packets)} files, but files.samples lists {len(self.samples)}; the "
                "numbers must be equal, or files.packets must be empty; copy the dataset again"
            )

    def __iter__(self) -> Iterator[FileInfo]:
        for group in fields(self):
            yield from getattr(self, group.name)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def packets_of(self, samples_path: str) -> FileInfo | None:
        """Return the packets file that matches a sample file, or None if the dataset has no packet index."""
        if not self.packets:
            return None
        return self.packets[[file.path for file in self.samples].index(samples_path)]

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> ManifestFiles:
        """Parse the `files` field of a manifest."""
        groups = [group.name for group in fields(ManifestFiles)]
        return ManifestFiles(**{name: tuple(map(FileInfo.from_json, value[name])) for name in groups})


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of input rows (`records`), samples, rejections and shards, and the total size of all tars in bytes."""

    records: int
    samples: int
    rejections: int
    shards: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """SHA-256 digests that identify a dataset.

    plan: digest of everything that a plan depends on.
    base: digest of the tars, sample files, tables of removed samples, and rules for reading clips and inputs.
    content: digest of `base` and of columns added later; equal to `base` if there are no such columns.
    """

    plan: str
    base: str
    content: str

    @property
    def samples(self) -> str:
        """Digest of `plan` and `base`. It identifies the samples and their order, regardless of columns added later."""
        return _digest([f"{self.plan}\n{self.base}\n".encode()])

    @staticmethod
    def of(
        buckets: Iterable[Bucket],
        shards: Sequence[ShardInfo],
        sample_files: Iterable[FileInfo],
        draws: Sequence[StoredSet] = (),
        frame_rate: FrameRate = _EVERY_FRAME,
        media: Mapping[str, MediaInfo] | None = None,
    ) -> Fingerprints:
        """Return the fingerprints of a dataset to which no columns were added."""
        plan_lines = (plan_line(s.bucket_id, s.number, s.split, s.num_samples) for s in shards)
        shard_lines = (content_line(shard.path, shard.sha256) for shard in shards)
        base = base_digest(shard_lines, sample_files, frame_rate, media)
        return Fingerprints(plan_digest(buckets, plan_lines, draws), base, base)


def plan_line(bucket_id: str, number: int, split: str, num_samples: int) -> bytes:
    """Return the bytes that a shard contributes to `Fingerprints.plan`."""
    return f"shard {bucket_id} {number} {split} {num_samples}\n".encode()


def content_line(path: str, sha256: str) -> bytes:
    """Return the bytes that a file contributes to `Fingerprints.base` or `Fingerprints.content`."""
    return f"{path} {sha256}\n".encode()


def plan_digest(buckets: Iterable[Bucket], shard_lines: Iterable[bytes], draws: Sequence[StoredSet] = ()) -> str:
    """Return `Fingerprints.plan`. shard_lines: output of `plan_line` for all shards, in chunks of any size."""
    of_buckets = [f"bucket {bucket.id} {bucket.shape}\n".encode() for bucket in buckets]
    return _digest(chain(of_buckets, shard_lines, _field_line("draws", list(map(asdict, draws)))))


def base_digest(
    shard_lines: Iterable[bytes],
    index_files: Iterable[FileInfo],
    frame_rate: FrameRate = _EVERY_FRAME,
    media: Mapping[str, MediaInfo] | None = None,
) -> str:
    """Return `Fingerprints.base`.

    shard_lines: output of `content_line` for all tars, in chunks of any size. index_files: output of `index_files`.
    """
    file_lines = (content_line(file.path, file.sha256) for file in index_files)
    rate_line = _field_line("frame_rate", {} if frame_rate.rule == "native" else frame_rate.to_json())
    media_line = _field_line("media", {name: info.to_json() for name, info in (media or {}).items()})
    return _digest(chain(shard_lines, file_lines, rate_line, media_line))


def index_files(manifest: Manifest) -> tuple[FileInfo, ...]:
    """Return the files that contribute to `Fingerprints.base`: samples, then removed samples."""
    return (*manifest.files.samples, *manifest.files.removed)


def _field_line(name: str, value: Any) -> list[bytes]:
    """Return what a manifest field contributes to a fingerprint: one line, or no line for an empty field."""
    return [f"{name} {json.dumps(value, sort_keys=True, separators=(',', ':'))}\n".encode()] if value else []


def content_digest(base: str, groups: Sequence[ColumnGroup]) -> str:
    """Return `Fingerprints.content`. base: `Fingerprints.base`. groups: groups of columns added later."""
    if not groups:
        return base
    lines = [content_line(file.path, file.sha256) for group in groups for file in group.known_files]
    return _digest([f"{base}\n".encode(), *lines])


def _digest(lines: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for some in lines:
        digest.update(some)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class NativeClips:
    """Encoding and quality of native clips. Quality is the luma PSNR in dB, for all clips and for each bucket."""

    encoding: Mapping[str, Any]
    quality: Mapping[str, Any]


Verb: TypeAlias = Literal["shard", "append", "remove", "merge", "compact", "annotate", "tag", "view"]


@dataclass(frozen=True, slots=True)
class Change:
    """Change that turned the previous version into this version.

    num_added, num_removed: numbers of samples that the version adds and removes.
    note: the reason that the user gave, or a short description.
    """

    verb: Verb = "shard"
    num_added: int = 0
    num_removed: int = 0
    note: str = ""

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Change:
        """Parse the `change` field of a manifest. Raises DatasetError for an unknown verb."""
        if value["verb"] not in get_args(Verb):
            raise DatasetError(f"change.verb={value['verb']!r} is unknown; update streamvid (pip install -U streamvid)")
        return Change(value["verb"], int(value["num_added"]), int(value["num_removed"]), str(value["note"]))


@dataclass(frozen=True)
class Manifest:
    """Description of one version of a sealed dataset.

    clips: "copy", "native" or "text".
    build: inputs of the build, for information only.
    native: encoding and quality of native clips; None for other clips.
    frame_rate: frame rate at which clips are read.
    model: requirements of the model for which the buckets were chosen; None if unknown.
    media: maps each conditioning input's name to its description. draws: sets of clips that are stored in several
    buckets.
    columns: groups of columns added later; the last group that contains a column takes precedence.
    version: number of the version, from 1.
    parent: the manifest of the previous version, or None for the first version.
    change: the change that produced this version.
    tags: maps each tag to a version number. views: maps each view's name to its condition on samples.
    merged: content fingerprints of the datasets that were merged into this one.
    """

    buckets: tuple[Bucket, ...]
    clips: str
    counts: Counts
    files: ManifestFiles
    fingerprints: Fingerprints
    build: Mapping[str, Any] = field(default_factory=dict)
    native: NativeClips | None = None
    frame_rate: FrameRate = field(default_factory=FrameRate)
    model: ModelRule | None = None
    media: Mapping[str, MediaInfo] = field(default_factory=dict)
    draws: tuple[StoredSet, ...] = ()
    columns: tuple[ColumnGroup, ...] = ()
    version: int = 1
    parent: FileInfo | None = None
    change: Change = Change()
    tags: Mapping[str, int] = field(default_factory=dict)
    views: Mapping[str, str] = field(default_factory=dict)
    merged: tuple[str, ...] = ()

    def bucket(self, bucket_id: str) -> Bucket:
        """Return the bucket with this id. Raises DatasetError if the manifest does not list the bucket."""
        if bucket_id not in self._by_id:
            known = ", ".join(self._by_id) or "no buckets"
            raise DatasetError(
                f"bucket {bucket_id!r} is not in the manifest, which lists {known}; copy the dataset again"
            )
        return self._by_id[bucket_id]

    @cached_property
    def _by_id(self) -> dict[str, Bucket]:
        return {bucket.id: bucket for bucket in self.buckets}

    def with_columns(self, group: ColumnGroup) -> Manifest:
        """Return a copy of the manifest with one more group of columns."""
        columns, known = (*self.columns, group), {file.path for file in self.files.other}
        new_files = (file for file in group.known_files if file.path not in known)
        files = replace(self.files, other=(*self.files.other, *new_files))
        digests = replace(self.fingerprints, content=content_digest(self.fingerprints.base, columns))
        return replace(self, columns=columns, files=files, fingerprints=digests)


def manifest_to_json(manifest: Manifest) -> bytes:
    """Return the bytes of manifest.json. They contain no timestamp, host name or local path."""
    native = manifest.native
    return sealed_json(
        {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "buckets": [bucket.to_json() for bucket in manifest.buckets],
            "clips": manifest.clips,
            "counts": asdict(manifest.counts),
            "files": asdict(manifest.files),
            "fingerprints": asdict(manifest.fingerprints),
            "build": dict(manifest.build),
            "native": None if native is None else asdict(native),
            "frame_rate": manifest.frame_rate.to_json(),
            "model": None if manifest.model is None else manifest.model.to_json(),
            "media": {name: info.to_json() for name, info in manifest.media.items()},
            "draws": list(map(asdict, manifest.draws)),
            "columns": [group.to_json() for group in manifest.columns],
            "version": manifest.version,
            "parent": manifest.parent and asdict(manifest.parent),
            "change": asdict(manifest.change),
            "tags": dict(manifest.tags),
            "views": dict(manifest.views),
            "merged": list(manifest.merged),
        }
    )


_FIELDS = {"format", "format_version", CHECKSUM, *(one.name for one in fields(Manifest))}


def manifest_from_json(data: bytes, where: str = MANIFEST) -> Manifest:
    """Parse manifest.json. Raises DatasetError if the file is invalid, and IntegrityError if its checksum is wrong."""
    with naming(where):
        value = unsealed_json(data, FORMAT, FORMAT_VERSION)
        if unknown := sorted(set(value) - _FIELDS):
            raise DatasetError(f"field {unknown[0]!r} is unknown; update streamvid (pip install -U streamvid)")
        files, native, model = ManifestFiles.from_json(value["files"]), value["native"], value["model"]
        parent, version = value["parent"], value["version"]
        if type(version) is not int or version < 1 or (parent is None) != (version == 1):
            raise DatasetError(
                f"version={version!r}, parent={parent!r}: version must be an integer of at least 1, and only version 1 "
                "has no parent; copy the dataset again"
            )
        fingerprints = Fingerprints(**{name: str(digest) for name, digest in value["fingerprints"].items()})
        columns = tuple(ColumnGroup.from_json(group, files) for group in value["columns"])
        if fingerprints.content != content_digest(fingerprints.base, columns):
            raise IntegrityError("fingerprints.content does not match the columns; copy the dataset again")
        return Manifest(
            buckets=tuple(map(Bucket.from_json, value["buckets"])),
            clips=str(value["clips"]),
            counts=Counts(**{name: int(count) for name, count in value["counts"].items()}),
            files=files,
            fingerprints=fingerprints,
            build=dict(value["build"]),
            native=None if native is None else NativeClips(dict(native["encoding"]), dict(native["quality"])),
            frame_rate=FrameRate.from_json(value["frame_rate"]),
            model=None if model is None else ModelRule.from_json(model),
            media={str(name): MediaInfo.from_json(name, info) for name, info in value["media"].items()},
            draws=tuple(map(StoredSet.from_json, value["draws"])),
            columns=columns,
            version=version,
            parent=None if parent is None else FileInfo.from_json(parent),
            change=Change.from_json(value["change"]),
            tags={str(name): int(number) for name, number in value["tags"].items()},
            views={str(name): str(condition) for name, condition in value["views"].items()},
            merged=tuple(map(str, value["merged"])),
        )


def read_manifest(store: Store) -> Manifest:
    """Return the newest manifest of the dataset in `store`. Raises DatasetError if there is no manifest."""
    remedy = "pass the DEST of a completed `streamvid shard SOURCE DEST`; if the command was interrupted, run it again"
    return read_sealed(store, manifest_from_json, f"no dataset at {store.url}", remedy)
