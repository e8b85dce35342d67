"""Files of records, on this machine or in an object store. Reading fails if a file has changed since probing.

A file may be a part of a larger file, such as a member of a tar. Only this part is read.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, cast

from streamvid.errors import Rejected, SourceError, StorageError
from streamvid.host.range_file import RangeFile
from streamvid.storage import FileState, Ranges, StorageOptions, Store, open_store, redact

_READ_BYTES = 64 * 2**20
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_PART = "\0"  # separates a file's path from the byte offset of a part; no file name contains it
_PART_BUFFER_BYTES = 2**16
_CHECKSUM = "sha256:"
UNKNOWN = "unknown"
"""Version of a file that is known only from metadata and whose state has not been requested."""
MISSING = "cannot be read: No such file or directory"
"""Reason for rejecting a missing object. Missing local files have the same reason, so that datasets are equal."""


def is_remote(path: str | Path) -> bool:
    """Return True if a path is a URL other than a file:// URL."""
    return isinstance(path, str) and _URL.match(path) is not None and path[:5].lower() != "file:"


def split_url(url: str) -> tuple[str, str]:
    """Split a URL into (bucket URL, key). Escapes and queries in the key are not interpreted."""
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    return f"{scheme.lower()}://{bucket}", key


@lru_cache(16)
def store_of(bucket_url: str, storage: StorageOptions) -> Store:
    """Return the store for a bucket. The store is opened only once per process."""
    return open_store(bucket_url, storage)


def version_of(status: os.stat_result) -> str:
    """Return the version of a local file: its modification time in nanoseconds."""
    return str(status.st_mtime_ns)


def file_state(path: str) -> tuple[int, str]:
    """Return the (size in bytes, version) of a local file. Raises Rejected if it is not a readable regular file."""
    try:
        status = Path(path).stat()
    except OSError as error:
        kind = "missing-file" if isinstance(error, FileNotFoundError) else "unreadable-file"
        raise Rejected(f"cannot be read: {error.strerror or error}", kind=kind) from error
    if not stat.S_ISREG(status.st_mode):
        reason = "is a folder" if stat.S_ISDIR(status.st_mode) else "is not a regular file"
        raise Rejected(reason, kind="unreadable-file")
    return status.st_size, version_of(status)


def object_state(url: str, storage: StorageOptions) -> FileState | None:
    """Return the state of an object, or None if it does not exist."""
    bucket_url, key = split_url(url)
    return store_of(bucket_url, storage).state(key)


def part_path(path: str, offset: int) -> str:
    """Return the path of the part of a file that begins at byte `offset`."""
    return f"{path}{_PART}{offset}"


def checksum_version(sha256: bytes) -> str:
    """Return the version of a file with a known checksum. `Media.read` verifies the file against this checksum."""
    return f"{_CHECKSUM}{sha256.hex()}"


@dataclass(frozen=True, slots=True)
class Media:
    """A particular version of a source file, with everything that a worker needs to read it.

    path: local path, URL, or result of `part_path`.
    source: name of the file for messages.
    num_bytes: size of the file or part.
    version: see `file_state`, `FileState` and `checksum_version`.
    storage: options for accessing the file's store.
    """

    path: str
    source: str
    num_bytes: int
    version: str
    storage: StorageOptions

    @property
    def is_remote(self) -> bool:
        return is_remote(self.path)

    @property
    def file(self) -> str:
        """Path or URL of the whole file."""
        return self.path.partition(_PART)[0]

    @property
    def offset(self) -> int:
        """Byte offset of the part in the whole file; 0 for a whole file."""
        return int(self.path.partition(_PART)[2] or 0)

    @property
    def is_part(self) -> bool:
        return _PART in self.path

    @property
    def has_checksum(self) -> bool:
        """True if `read` verifies the bytes against a checksum."""
        return self.version.startswith(_CHECKSUM)

    @property
    def place(self) -> tuple[Store, str]:
        """The store that contains a remote file, and the file's key in that store."""
        bucket_url, key = split_url(self.file)
        return store_of(bucket_url, self.storage), key

    @contextmanager
    def opened(self) -> Iterator[str | BinaryIO]:
        """Yield the path of a whole local file, or a file object for a part of a local file.

        Raises SourceError if the file that contains a part cannot be opened.
        """
        if not self.is_part:
            yield self.path
            return
        try:
            file = Path(self.file).open("rb", buffering=0)  # noqa: SIM115 — closed below
        except OSError as error:
            raise self._gone(error.strerror or str(error)) from error
        with file, io.BufferedReader(_FilePart(file.fileno(), self.offset, self.num_bytes), _PART_BUFFER_BYTES) as part:
            yield part

    def read(self) -> bytes:
        """Return all bytes of the file or part.

        Raises SourceError if the file was removed or changed after it was probed, or if its checksum does not match,
        and StorageError if the store fails.
        """
        if not self.is_remote:
            return self._verified(self._read_local())
        data = bytearray(self.num_bytes)
        view = memoryview(data)
        for start in range(0, self.num_bytes, _READ_BYTES):  # in pieces, because each read has its own deadline
            self.read_ranges([(start, view[start : start + _READ_BYTES])])
        # The bytearray is no longer modified. Converting it to bytes would double the memory use.
        return self._verified(cast("bytes", data))

    def read_ranges(self, ranges: Ranges) -> None:
        """Fill buffers with ranges of a remote file or part.

        Offsets are relative to the first byte of the file or part.

        Raises SourceError if the file was removed or changed after it was probed, and StorageError if the store fails.
        """
        store, key = self.place
        version = "" if self.has_checksum else self.version
        try:
            store.read_ranges(key, [(self.offset + start, buffer) for start, buffer in ranges], version)
        except StorageError as error:
            state = store.state(key)
            if state is None:
                raise self._gone("the object no longer exists") from error
            if not self._is_same(state.num_bytes, state.version):
                raise self._changed() from error
            raise

    def check_unchanged(self) -> None:
        """Raise SourceError if a local file was removed or changed after probing. Remote reads include this check."""
        if self.is_remote:
            return
        try:
            status = Path(self.file).stat()
        except OSError as error:
            raise self._gone(error.strerror or str(error)) from error
        if not self._is_same(status.st_size, version_of(status)):
            raise self._changed()

    def _is_same(self, num_bytes: int, version: str) -> bool:
        """Return True if a file with this size and version is the file that was probed."""
        is_as_long = self.offset + self.num_bytes <= num_bytes if self.is_part else self.num_bytes == num_bytes
        return is_as_long and (self.has_checksum or version == self.version)

    def _read_local(self) -> bytes:
        try:
            with Path(self.file).open("rb") as file:
                before = os.fstat(file.fileno())
                file.seek(self.offset)
                data = file.read(self.num_bytes if self.is_part else self.num_bytes + 1)
                after = os.fstat(file.fileno())
        except OSError as error:
            raise self._gone(error.strerror or str(error)) from error
        is_same = all(self._is_same(status.st_size, version_of(status)) for status in (before, after))
        if not is_same or len(data) != self.num_bytes:
            raise self._changed()
        return data

    def _verified(self, data: bytes) -> bytes:
        if self.has_checksum and checksum_version(hashlib.sha256(data).digest()) != self.version:
            remedy = "restore that file (`streamvid verify --deep` lists all damaged files of the dataset)"
            if not self.is_part:  # a file that was embedded in metadata
                remedy = "delete that file, and run the same command again to recreate it"
            raise SourceError(f"{self.source} is damaged: checksum mismatch in {redact(self.file)}; {remedy}")
        return data

    def _gone(self, reason: str) -> SourceError:
        return SourceError(
            f"{self.source} was found, but can no longer be read ({reason}); restore it, then run the same command "
            "again; rows whose files are still missing are rejected"
        )

    def _changed(self) -> SourceError:
        return SourceError(f"{self.source} changed after it was probed; run the same command again")


class _FilePart(RangeFile):
    """File object for a part of an open file."""

    def __init__(self, descriptor: int, offset: int, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self._descriptor, self._offset = descriptor, offset

    def fill(self, start: int, buffer: memoryview) -> int:
        return os.preadv(self._descriptor, [buffer], self._offset + start)
