"""manifest.json: what a sealed dataset is, and the names, sizes and checksums of what it is made of."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from streamvid.buckets.bucket import Bucket
from streamvid.dataset.column_groups import ColumnGroup, columns_digest, groups_from_json, groups_to_json
from streamvid.errors import ConfigError, DatasetError, IntegrityError, StreamvidError
from streamvid.storage import Store, check_relative

MANIFEST = "manifest.json"
FORMAT = "streamvid"
FORMAT_VERSION = (1, 3)
STRICT_VERSION = (2, 0)
"""Of a dataset with `draws`, or of copies with a `frame_rate`: older readers would deliver something else of them."""
MAX_MANIFEST_BYTES = 256 * 2**20
_CHECKSUM = "manifest_sha256"
_CHECKSUM_SINCE = (1, 1)
_PACKETS_SINCE = (1, 2)
_COLUMNS_SINCE = (1, 3)
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One file of the dataset: relative path, size in bytes, SHA-256 as hex."""

    path: str
    num_bytes: int
    sha256: str

    def __post_init__(self) -> None:
        check_relative(self.path)
        if not self.path.isprintable() or self.num_bytes < 0 or not _SHA256.fullmatch(self.sha256):
            raise DatasetError(
                f"file {self.path!r} with num_bytes={self.num_bytes}, sha256={self.sha256!r}: a file has a printable "
                "name, 0 bytes or more and 64 hex digits; copy the dataset again"
            )

    @staticmethod
    def of(path: str, data: bytes) -> FileInfo:
        """The description of `data` stored at `path`."""
        return FileInfo(path, len(data), hashlib.sha256(data).hexdigest())


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """One tar of one bucket and one split, and where the index holds its samples."""

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
        if self.num_samples < 1:
            raise DatasetError(f"shard {self.path} has num_samples={self.num_samples}; a shard holds 1 or more")
        if self.number < 0:
            raise DatasetError(f"shard {self.path} has number={self.number}; shards are counted from 0")

    @property
    def path(self) -> str:
        return shard_path(self.bucket_id, self.number)


@dataclass(frozen=True, slots=True)
class Manifest:
    """The sealed dataset. `files` are all but the shards and what lies beside them: the shard table names those.

    packet_files: from 1.2 on one for each of `sample_files`, in their order, or none; before none.
    encoding, quality: how native clips were encoded, and how well; None where clips are copies.
    From 1.3 on, each None where there is none: frame_rate, the rate that clips are read at (a FrameRate's fields);
    model, the rule of the model that the buckets are for (a ModelRule's); media, what else samples hold, by name;
    draws, the clips that several buckets store (draws.py).
    columns: groups of columns put there later, of which the last that has a column counts; their files are among
    `other_files`. base_fingerprint: the content fingerprint without them, "" where there are none.
    """

    buckets: tuple[Bucket, ...]
    clips: str
    counts: Mapping[str, int]
    shard_files: tuple[FileInfo, ...]
    sample_files: tuple[FileInfo, ...]
    rejection_files: tuple[FileInfo, ...]
    other_files: tuple[FileInfo, ...]
    plan_fingerprint: str
    content_fingerprint: str
    packet_files: tuple[FileInfo, ...] = ()
    build: Mapping[str, Any] = field(default_factory=dict)
    encoding: Mapping[str, Any] | None = None
    quality: Mapping[str, Any] | None = None
    frame_rate: Mapping[str, Any] | None = None
    model: Mapping[str, Any] | None = None
    media: Mapping[str, Any] | None = None
    draws: Mapping[str, Any] | None = None
    columns: tuple[ColumnGroup, ...] = ()
    base_fingerprint: str = ""
    format_version: tuple[int, int] = FORMAT_VERSION
    unknown: Mapping[str, Any] = field(default_factory=dict)

    def bucket(self, bucket_id: str) -> Bucket:
        """The bucket of this id; DatasetError where the table has none."""
        for bucket in self.buckets:
            if bucket.id == bucket_id:
                return bucket
        raise DatasetError(
            f"bucket {bucket_id!r} is not in the manifest's table: {', '.join(b.id for b in self.buckets)}"
        )

    @property
    def files(self) -> tuple[FileInfo, ...]:
        """All files that the manifest itself names."""
        return self.shard_files + self.sample_files + self.packet_files + self.rejection_files + self.other_files

    def packet_file(self, samples_path: str) -> FileInfo | None:
        """The packets file that belongs to a samples file; None where the dataset has none."""
        if not self.packet_files:
            return None
        paths = [file.path for file in self.sample_files]
        return self.packet_files[paths.index(samples_path)]

    def with_columns(self, group: ColumnGroup) -> Manifest:
        """The same dataset with one group of columns more."""
        base, columns = self.base_fingerprint or self.content_fingerprint, (*self.columns, group)
        paths = {file.path for file in self.other_files}
        return replace(
            self,
            columns=columns,
            other_files=(*self.other_files, *(file for file in group.files if file.path not in paths)),
            base_fingerprint=base,
            content_fingerprint=columns_digest(base, columns),
            format_version=max(self.format_version, _COLUMNS_SINCE),
        )


def shard_path(bucket_id: str, number: int) -> str:
    """Where the shard plan puts a shard; the bucket is in the name so that base names are unique."""
    return f"shards/{bucket_id}/{bucket_id}-{number:06d}.tar"


LARGE_FOLDERS = ("shards", "index")
"""Where files lie that are large enough to be uploaded in parts."""


def offsets_path(path: str) -> str:
    """Where Megatron-Energon looks for the sample offsets of a shard."""
    return f"{path}.idx"


def plan_fingerprint(
    buckets: Iterable[Bucket], shards: Iterable[ShardInfo], draws: Mapping[str, Any] | None = None
) -> str:
    """SHA-256 over what a plan depends on: buckets; bucket, split and sample count of each shard in order; draws."""
    lines = (f"shard {s.bucket_id} {s.number} {s.split} {s.num_samples}\n".encode() for s in shards)
    return plan_digest(buckets, lines, draws)


def plan_digest(buckets: Iterable[Bucket], shard_lines: Iterable[bytes], draws: Mapping[str, Any] | None = None) -> str:
    """`plan_fingerprint` of shards whose lines are made already, any number of them at a time."""
    digest = hashlib.sha256()
    for bucket in buckets:
        digest.update(f"bucket {bucket.id} {bucket.shape}\n".encode())
    for lines in shard_lines:
        digest.update(lines)
    if draws is not None:
        digest.update(f"draws {json.dumps(draws, sort_keys=True, separators=(',', ':'))}\n".encode())
    return digest.hexdigest()


def content_fingerprint(shards: Iterable[ShardInfo], sample_files: Iterable[FileInfo]) -> str:
    """SHA-256 over the checksums of all shards and of the sample index."""
    return content_digest(map(str.encode, (f"{shard.path} {shard.sha256}\n" for shard in shards)), sample_files)


def content_digest(shard_lines: Iterable[bytes], sample_files: Iterable[FileInfo]) -> str:
    """`content_fingerprint` of shards whose lines are made already, any number of them at a time."""
    digest = hashlib.sha256()
    for lines in shard_lines:
        digest.update(lines)
    for file in sample_files:
        digest.update(f"{file.path} {file.sha256}\n".encode())
    return digest.hexdigest()


_FILE_GROUPS = {
    "shards": "shard_files",
    "samples": "sample_files",
    "packets": "packet_files",
    "rejections": "rejection_files",
    "other": "other_files",
}


def manifest_to_json(manifest: Manifest) -> bytes:
    """The bytes of manifest.json: no clock, no host, keys sorted."""
    value = {
        **manifest.unknown,
        "format": FORMAT,
        "format_version": list(manifest.format_version),
        "buckets": [bucket.to_json() for bucket in manifest.buckets],
        "clips": manifest.clips,
        "counts": dict(manifest.counts),
        "files": {
            name: [{"path": f.path, "num_bytes": f.num_bytes, "sha256": f.sha256} for f in getattr(manifest, group)]
            for name, group in _FILE_GROUPS.items()
            if name != "packets" or manifest.format_version >= _PACKETS_SINCE
        },
        "fingerprints": _fingerprints(manifest),
        "build": dict(manifest.build),
        **{name: dict(found) for name in _OPTIONAL if (found := getattr(manifest, name)) is not None},
        # Reserved, so that a 1.x reader knows the names: takedowns, aligned column groups, named selections.
        "removed": manifest.unknown.get("removed", []),
        "sidecars": manifest.unknown.get("sidecars", []),
        "views": manifest.unknown.get("views", []),
    }
    if manifest.columns:
        value["columns"] = groups_to_json(manifest.columns)
    if manifest.format_version >= _CHECKSUM_SINCE:
        value[_CHECKSUM] = manifest_checksum(value)
    return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _fingerprints(manifest: Manifest) -> dict[str, str]:
    if not manifest.columns:
        return {"plan": manifest.plan_fingerprint, "content": manifest.content_fingerprint}
    # A reader of 1.2, which knows no groups, proves `content` by the samples index alone.
    return {
        "plan": manifest.plan_fingerprint,
        "content": manifest.base_fingerprint,
        "columns": manifest.content_fingerprint,
    }


def manifest_checksum(value: Mapping[str, Any]) -> str:
    """SHA-256 of a manifest's content, however it is laid out: all fields but the checksum itself, as compact JSON."""
    content = {name: field for name, field in value.items() if name != _CHECKSUM}
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _check_content(value: Mapping[str, Any], version: tuple[int, int], where: str) -> None:
    stored = value.get(_CHECKSUM)
    if stored is None and version < _CHECKSUM_SINCE:
        return
    if stored != manifest_checksum(value):
        raise IntegrityError(
            f"{where} is damaged or was edited: its {_CHECKSUM} is {stored!r}, not that of its content; copy it again"
        )


def _version(value: Mapping[str, Any], where: str) -> tuple[int, int]:
    major, minor = (int(part) for part in value["format_version"])
    if major > STRICT_VERSION[0]:
        raise DatasetError(
            f"{where}: format_version {[major, minor]} is newer than {list(STRICT_VERSION)}; "
            "update streamvid (pip install -U streamvid)"
        )
    if major < 1 or minor < 0:
        raise DatasetError(f"{where}: format_version {[major, minor]} never was; copy the manifest again")
    return major, minor


def _files(value: Mapping[str, Any], version: tuple[int, int], where: str) -> dict[str, tuple[FileInfo, ...]]:
    named = value if version >= _PACKETS_SINCE else {**value, "packets": []}
    try:
        files = {
            group: tuple(FileInfo(str(f["path"]), int(f["num_bytes"]), str(f["sha256"])) for f in named[name])
            for name, group in _FILE_GROUPS.items()
        }
    except StreamvidError as error:
        raise DatasetError(f"{where}: {error}") from error
    num_packets, num_samples = len(files["packet_files"]), len(files["sample_files"])
    if num_packets not in (0, num_samples):
        raise DatasetError(
            f"{where}: files.packets names {num_packets} files and files.samples {num_samples}; there is one for each "
            "or none; copy it again"
        )
    return files


def _columns(value: Mapping[str, Any], files: Mapping[str, tuple[FileInfo, ...]], where: str) -> dict[str, Any]:
    """Fields of a Manifest: its groups of columns, and both fingerprints of its content."""
    base = str(value["fingerprints"]["content"])
    if not value.get("columns"):
        return {"content_fingerprint": base}
    groups = groups_from_json(value["columns"], files["sample_files"], files["other_files"], where)
    content = columns_digest(base, groups)
    if value["fingerprints"]["columns"] != content:
        raise IntegrityError(f"{where}: fingerprints.columns is not that of its files; copy the manifest again")
    return {"columns": groups, "base_fingerprint": base, "content_fingerprint": content}


_OPTIONAL = ("encoding", "quality", "frame_rate", "model", "media", "draws")
_KNOWN = {"format", "format_version", "buckets", "clips", "counts", "files", "fingerprints", "build", _CHECKSUM}
_KNOWN |= {*_OPTIONAL, "columns"}


def _optional(value: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    return None if value.get(name) is None else dict(value[name])


def manifest_from_json(data: bytes, where: str = MANIFEST) -> Manifest:
    """Parse and check manifest.json. Unknown fields are kept; a newer major version is refused."""
    try:
        value = json.loads(data)
        if value.get("format") != FORMAT:
            raise DatasetError(
                f"{where}: field format is {str(value.get('format'))[:40]!r}, not {FORMAT!r}: no streamvid dataset"
            )
        version = _version(value, where)
        _check_content(value, version, where)
        if value.get("removed"):
            raise DatasetError(
                f"{where}: field removed names {len(value['removed'])} samples that were taken down, and this version "
                "would deliver them; update streamvid (pip install -U streamvid)"
            )
        optional: dict[str, Any] = {name: _optional(value, name) for name in _OPTIONAL}
        files: dict[str, Any] = dict(_files(value["files"], version, where))
        return Manifest(
            buckets=tuple(Bucket.from_json(bucket) for bucket in value["buckets"]),
            clips=str(value["clips"]),
            counts={str(k): int(v) for k, v in value["counts"].items()},
            plan_fingerprint=str(value["fingerprints"]["plan"]),
            build=value["build"],
            format_version=version,
            unknown={k: v for k, v in value.items() if k not in _KNOWN},
            **optional,
            **files,
            **_columns(value, files, where),
        )
    except ConfigError as error:  # of a bucket; it is a ValueError too
        raise DatasetError(f"{where} is damaged ({error}); copy it again or rebuild the dataset") from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise DatasetError(
            f"{where} is damaged ({type(error).__name__}: {error}); copy it again or rebuild the dataset"
        ) from error


def read_manifest(store: Store) -> Manifest:
    """The manifest of the dataset in `store`; DatasetError where there is none."""
    size = store.size(MANIFEST)
    if size is None:
        raise DatasetError(
            f"no dataset at {store.url}: there is no {MANIFEST}. Build one with `streamvid shard SOURCE {store.url}`, "
            "or finish an interrupted build by running the same command again"
        )
    if size > MAX_MANIFEST_BYTES:
        raise DatasetError(f"{store.url}/{MANIFEST} has {size} bytes; {MAX_MANIFEST_BYTES} are allowed")
    return manifest_from_json(store.read(MANIFEST), f"{store.url}/{MANIFEST}")
