"""The file manifest.json, which describes a sealed dataset and lists its files with their sizes and checksums."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import chain
from typing import Any, TypeVar

from streamvid.buckets.bucket import Bucket
from streamvid.buckets.frames import FrameRate
from streamvid.buckets.model import ModelRule
from streamvid.dataset.draws import StoredSet
from streamvid.errors import DatasetError, IntegrityError, StreamvidError
from streamvid.storage import LocalStore, Store, WrongReads, check_relative

T = TypeVar("T")

MANIFEST = "manifest.json"
FORMAT = "streamvid"
FORMAT_VERSION = 1
MAX_MANIFEST_BYTES = 256 * 2**20
LARGE_FOLDERS = ("shards", "index")
"""Folders whose files can be large enough to be uploaded in parts."""
COLUMN_TYPES = frozenset(("bool", "double", "int64", "sha256", "string"))
"""Allowed types of columns added later."""

_CHECKSUM = "manifest_sha256"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_MEDIA_ITEMS = 64
_EVERY_FRAME = FrameRate()


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One file of the dataset: relative path, size in bytes, and SHA-256 in lowercase hexadecimal."""

    path: str
    num_bytes: int
    sha256: str

    def __post_init__(self) -> None:
        check_relative(self.path)
        if not self.path.isprintable() or self.num_bytes < 0 or not _SHA256.fullmatch(self.sha256):
            raise DatasetError(
                f"file {self.path!r} has num_bytes={self.num_bytes}, sha256={self.sha256!r}; the path must be "
                "printable, num_bytes must be at least 0, and sha256 must have 64 lowercase hex digits; copy the "
                "dataset again"
            )

    @staticmethod
    def of(path: str, data: bytes) -> FileInfo:
        """Return the description of `data` stored at `path`."""
        return FileInfo(path, len(data), hashlib.sha256(data).hexdigest())

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> FileInfo:
        """Parse the description of a file in a manifest."""
        return FileInfo(str(value["path"]), int(value["num_bytes"]), str(value["sha256"]))


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """One tar of one bucket and one split, and the location of its rows in the samples index."""

    bucket_id: str
    number: int
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
        if self.num_samples < 1 or self.number < 0:
            raise DatasetError(
                f"shard {self.path} has num_samples={self.num_samples} and number={self.number}; num_samples must be "
                "at least 1, and number at least 0; copy or rebuild the dataset"
            )

    @property
    def path(self) -> str:
        return shard_path(self.bucket_id, self.number)


def shard_path(bucket_id: str, number: int) -> str:
    """Return the path of a shard. It contains the bucket id twice, so that file names are unique in the dataset."""
    return f"shards/{bucket_id}/{bucket_id}-{number:06d}.tar"


def offsets_path(path: str) -> str:
    """Return the path where Megatron-Energon looks for the sample offsets of a shard."""
    return f"{path}.idx"


@dataclass(frozen=True, slots=True)
class ColumnGroup:
    """Columns added to the samples index later: new columns, or new values of existing ones.

    files: one file per samples file, in the same order, with the same row groups and rows. Each file also contains the
        keys.
    columns: index column → type, as in `index.schema`.
    source_sha256: checksum of the annotation.
    """

    files: tuple[FileInfo, ...]
    columns: Mapping[str, str]
    source_sha256: str = ""

    def to_json(self) -> dict[str, object]:
        """Return JSON-serializable values. Files are given by path only; `ManifestFiles.other` describes them."""
        return {**asdict(self), "files": [file.path for file in self.files]}

    @staticmethod
    def from_json(value: Mapping[str, Any], files: ManifestFiles) -> ColumnGroup:
        """Parse the output of `to_json`. Raises DatasetError for invalid values, and KeyError for an unlisted file."""
        known = {file.path: file for file in files.other}
        columns = {str(name): str(kind) for name, kind in value["columns"].items()}
        group = ColumnGroup(tuple(known[path] for path in value["files"]), columns, str(value["source_sha256"]))
        if len(group.files) != len(files.samples) or not columns or set(columns.values()) - COLUMN_TYPES:
            raise DatasetError(
                f"the field columns contains a group with {len(group.files)} files and the types {columns}; a group "
                f"must have one file for each of the {len(files.samples)} samples files, and at least one column, with "
                f"only the types {', '.join(sorted(COLUMN_TYPES))}; copy the dataset again"
            )
        return group


@dataclass(frozen=True, slots=True)
class MediaInfo:
    """One conditioning input of the samples, such as a control video or a mask.

    column: metadata column that listed the files.
    is_still: True if the input is one image per clip, not a video.
    is_mask: True if the input has one channel.
    is_optional: True if samples may lack the input.
    is_list: True if a sample may have several images, at most `max_items`.
    """

    column: str
    is_still: bool
    is_mask: bool
    is_optional: bool
    is_list: bool
    max_items: int

    @staticmethod
    def from_json(name: str, value: Mapping[str, Any]) -> MediaInfo:
        """Parse a conditioning input in a manifest. Raises IntegrityError for invalid values."""
        info = MediaInfo(**value)
        flags = (info.is_still, info.is_mask, info.is_optional, info.is_list)
        is_known = all(isinstance(flag, bool) for flag in flags) and isinstance(info.column, str)
        if not is_known or type(info.max_items) is not int or not 1 <= info.max_items <= _MAX_MEDIA_ITEMS:
            raise IntegrityError(
                f"media {name!r} is {info}; max_items must be an integer from 1 to {_MAX_MEDIA_ITEMS}, column must be "
                "text, and all other fields must be true or false; copy the dataset again"
            )
        return info


@dataclass(frozen=True, slots=True)
class ManifestFiles:
    """All files that the manifest lists. The shard table lists the tars and their offsets files.

    packets: one file per samples file, in the same order, or an empty tuple.
    other: files for other readers, and files of columns added later.
    """

    shards: tuple[FileInfo, ...]
    samples: tuple[FileInfo, ...]
    rejections: tuple[FileInfo, ...]
    packets: tuple[FileInfo, ...] = ()
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
        """Return the packets file that matches a samples file, or None if the dataset has no packet index."""
        if not self.packets:
            return None
        return self.packets[[file.path for file in self.samples].index(samples_path)]

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> ManifestFiles:
        """Parse the field `files` of a manifest."""
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
    base: digest of the tars, the samples index and the rules by which clips and conditioning inputs are read.
    content: digest of `base` and of columns added later; equal to `base` if there are none.
    """

    plan: str
    base: str
    content: str

    @property
    def samples(self) -> str:
        """Digest of `plan` and `base`: the samples and their stored order, regardless of columns added later."""
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
    sample_files: Iterable[FileInfo],
    frame_rate: FrameRate = _EVERY_FRAME,
    media: Mapping[str, MediaInfo] | None = None,
) -> str:
    """Return `Fingerprints.base`. shard_lines: output of `content_line` for all tars, in chunks of any size."""
    file_lines = (content_line(file.path, file.sha256) for file in sample_files)
    rate_line = _field_line("frame_rate", {} if frame_rate.rule == "native" else frame_rate.to_json())
    media_line = _field_line("media", {name: asdict(info) for name, info in (media or {}).items()})
    return _digest(chain(shard_lines, file_lines, rate_line, media_line))


def _field_line(name: str, value: Any) -> list[bytes]:
    """Return the line that a field of the manifest contributes to a fingerprint. An empty field contributes none."""
    return [f"{name} {json.dumps(value, sort_keys=True, separators=(',', ':'))}\n".encode()] if value else []


def content_digest(base: str, groups: Sequence[ColumnGroup]) -> str:
    """Return `Fingerprints.content`. base: `Fingerprints.base`. groups: groups of columns added later."""
    if not groups:
        return base
    lines = [content_line(file.path, file.sha256) for group in groups for file in group.files]
    return _digest([f"{base}\n".encode(), *lines])


def _digest(lines: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for some in lines:
        digest.update(some)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class NativeClips:
    """Encoding of native clips, and their quality: luma PSNR in dB over all clips and per bucket."""

    encoding: Mapping[str, Any]
    quality: Mapping[str, Any]


@dataclass(frozen=True)
class Manifest:
    """Description of a sealed dataset.

    clips: "copy", "native" or "text".
    build: inputs of the build, for information only.
    native: encoding of native clips, or None for other clips.
    frame_rate: frame rate at which clips are read.
    model: requirements of the model for which the buckets were chosen, or None.
    media: conditioning inputs by name.
    draws: sets of clips that are stored in several buckets.
    columns: groups of columns added later; the last group that contains a column takes precedence.
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

    def bucket(self, bucket_id: str) -> Bucket:
        """Return the bucket with this id. Raises DatasetError if the manifest does not list it."""
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
        """Return the manifest of the same dataset with one more group of columns."""
        columns, known = (*self.columns, group), {file.path for file in self.files.other}
        new_files = (file for file in group.files if file.path not in known)
        content = content_digest(self.fingerprints.base, columns)
        return replace(
            self,
            columns=columns,
            files=replace(self.files, other=(*self.files.other, *new_files)),
            fingerprints=replace(self.fingerprints, content=content),
        )


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
            "media": {name: asdict(info) for name, info in manifest.media.items()},
            "draws": list(map(asdict, manifest.draws)),
            "columns": [group.to_json() for group in manifest.columns],
        }
    )


_FIELDS = {"format", "format_version", _CHECKSUM, *(one.name for one in fields(Manifest))}


def manifest_from_json(data: bytes, where: str = MANIFEST) -> Manifest:
    """Parse manifest.json. Raises DatasetError if it is invalid, or IntegrityError if its checksum is wrong."""
    with naming(where):
        value = unsealed_json(data, FORMAT, FORMAT_VERSION)
        if unknown := sorted(set(value) - _FIELDS):
            raise DatasetError(f"field {unknown[0]!r} is unknown; update streamvid (pip install -U streamvid)")
        files, native, model = ManifestFiles.from_json(value["files"]), value["native"], value["model"]
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
        )


def read_manifest(store: Store) -> Manifest:
    """Return the manifest of the dataset in `store`. Raises DatasetError if it is missing."""
    remedy = "pass the DEST of a completed `streamvid shard SOURCE DEST`; if the command was interrupted, run it again"
    return read_sealed(store, manifest_from_json, f"no dataset at {store.url}", remedy)


# Manifests of datasets and of features: JSON that contains its own checksum.


def sealed_json(value: Mapping[str, Any]) -> bytes:
    """Return a manifest's bytes: indented JSON with sorted keys and the checksum of its content."""
    sealed = {**value, _CHECKSUM: manifest_checksum(value)}
    return (json.dumps(sealed, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def manifest_checksum(value: Mapping[str, Any]) -> str:
    """Return the SHA-256 of all fields except the checksum itself, serialized as compact JSON."""
    content = {name: field for name, field in value.items() if name != _CHECKSUM}
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def unsealed_json(data: bytes, format_name: str, version: int) -> dict[str, Any]:
    """Parse a manifest. Raises DatasetError unless its format, version and checksum are valid."""
    value: dict[str, Any] = json.loads(data)
    if value.get("format") != format_name:
        raise DatasetError(f"format is {str(value.get('format'))[:40]!r}, not {format_name!r}; check the path or URL")
    found = value["format_version"]
    if type(found) is int and found > version:
        raise DatasetError(
            f"format_version {found} is newer than the supported version {version}; "
            "update streamvid (pip install -U streamvid)"
        )
    if value.get(_CHECKSUM) != manifest_checksum(value):
        raise IntegrityError(
            f"checksum mismatch: {_CHECKSUM} is {value.get(_CHECKSUM)!r}; the file is damaged or was edited; copy it "
            "again"
        )
    if type(found) is not int or found != version:
        raise DatasetError(f"format_version {found!r}: must be {version}; copy the file again")
    return value


@contextmanager
def naming(where: str, remedy: str = "copy it again, or rebuild the dataset") -> Iterator[None]:
    """Convert errors from the parsing of a manifest to DatasetErrors with `where`, the file's name, and `remedy`."""
    try:
        yield
    except IntegrityError as error:
        raise IntegrityError(f"{where}: {error}") from error
    except DatasetError as error:
        raise DatasetError(f"{where}: {error}") from error
    except (StreamvidError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        said = str(error) if isinstance(error, StreamvidError) else f"{type(error).__name__}: {error}"
        raise DatasetError(f"{where} is damaged ({said}); {remedy}") from error


def read_sealed(store: Store, parse: Callable[[bytes, str], T], nothing: str, remedy: str) -> T:
    """Read a manifest and return `parse(data, name)`. Data that cannot be parsed is read again (FETCH-1).

    Raises the same errors as `parse`, and DatasetError with the texts `nothing` and `remedy` if there is no manifest.
    """
    size = store.size(MANIFEST)
    if size is None:
        missing = f"{MANIFEST} is missing"
        if isinstance(store, LocalStore) and not store.root.is_dir():
            missing = "it is not a folder" if store.root.exists() else "the folder does not exist"
        raise DatasetError(f"{nothing}: {missing}; {remedy}")
    where = f"{store.url}/{MANIFEST}"
    if size > MAX_MANIFEST_BYTES:
        raise DatasetError(f"{where} has {size} bytes; at most {MAX_MANIFEST_BYTES} are allowed; copy it again")
    wrong = WrongReads()
    while True:
        data = store.read(MANIFEST)
        try:
            return parse(data, where)
        except DatasetError:
            if wrong.judge(hashlib.sha256(data).digest()) != "again":
                raise
        store.forget(MANIFEST)
