"""A record's file, on this machine or in a bucket: what names it, and its bytes as long as it is what was looked at.

It may be a part of a larger file, a member of a tar: then it is read where it lies.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, cast

from streamvid.errors import SourceError, StorageError
from streamvid.storage import Ranges, StorageOptions, Store, open_store, redact

BUCKET_SCHEMES = ("s3",)
_READ_BYTES = 64 * 2**20
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_PART = "\0"  # between a file's path and the byte where a part of it begins: no name holds it
_PART_BUFFER_BYTES = 2**16
_PROOF = "sha256:"


def is_remote(path: str | Path) -> bool:
    """Whether that is a URL, of a file or a folder that is not on this machine."""
    return isinstance(path, str) and _URL.match(path) is not None and path[:5].lower() != "file:"


def split_url(url: str) -> tuple[str, str]:
    """(URL of the bucket, key). A key is taken as it is: nothing in it is quoted, or a query."""
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    return f"{scheme.lower()}://{bucket}", key


@lru_cache(16)
def store_of(bucket_url: str, storage: StorageOptions) -> Store:
    """This process's own store of a bucket."""
    return open_store(bucket_url, storage)


def version_of(status: os.stat_result) -> str:
    """What changes with a local file."""
    return str(status.st_mtime_ns)


def part_path(path: str, offset: int) -> str:
    """Names what lies in a file from byte `offset` on."""
    return f"{path}{_PART}{offset}"


def proved_version(sha256: bytes) -> str:
    """The version of bytes that are known by their checksum, wherever they lie: reading them proves it."""
    return f"{_PROOF}{sha256.hex()}"


@dataclass(frozen=True, slots=True)
class Media:
    """One version of a source's file: what a worker is told of it.

    path: local, or the URL of an object; or a `part_path` of one, and then num_bytes are the part's.
    """

    path: str
    source: str
    num_bytes: int
    version: str
    storage: StorageOptions

    def to_json(self) -> dict[str, Any]:
        """For a task; options hold no keys."""
        return asdict(self)

    @staticmethod
    def from_json(value: dict[str, Any]) -> Media:
        return Media(**{**value, "storage": StorageOptions(**value["storage"])})

    @property
    def is_remote(self) -> bool:
        return is_remote(self.path)

    @property
    def file(self) -> str:
        """Path or URL of the file that it is, or is a part of."""
        return self.path.partition(_PART)[0]

    @property
    def offset(self) -> int:
        """Where in that file it begins, in bytes."""
        return int(self.path.partition(_PART)[2] or 0)

    @property
    def is_part(self) -> bool:
        return _PART in self.path

    @property
    def is_proved(self) -> bool:
        """Whether `read` compares the bytes with their checksum."""
        return self.version.startswith(_PROOF)

    @property
    def place(self) -> tuple[Store, str]:
        """The store and the path in it, of one that is remote."""
        bucket_url, key = split_url(self.file)
        return store_of(bucket_url, self.storage), key

    @contextmanager
    def opened(self) -> Iterator[str | BinaryIO]:
        """A local one, for who decodes it: its path, or a part as a file of its own. Raises SourceError."""
        if not self.is_part:
            yield self.path
            return
        try:
            file = Path(self.file).open("rb", buffering=0)  # noqa: SIM115 — closed below
        except OSError as error:
            raise self._gone(error.strerror or str(error)) from error
        with file, io.BufferedReader(_Part(file.fileno(), self.offset, self.num_bytes), _PART_BUFFER_BYTES) as part:
            yield part

    def read(self) -> bytes:
        """All bytes, if they still are what was probed: another video must not take its place unseen.

        Raises SourceError where they are not, StorageError where the store fails.
        """
        if not self.is_remote:
            return self._proved(self._read_local())
        data = bytearray(self.num_bytes)
        view = memoryview(data)
        with self.reading():
            for start in range(0, self.num_bytes, _READ_BYTES):  # each has the store's whole deadline
                self.read_ranges([(start, view[start : start + _READ_BYTES])])
        # A bytearray, which nobody writes to: a copy would be as large again.
        return self._proved(cast("bytes", data))

    def read_ranges(self, ranges: Ranges) -> None:
        """Fill buffers with parts of one that is remote; offsets count from where it begins. Raises StorageError."""
        store, key = self.place
        version = "" if self.is_proved else self.version
        store.read_ranges(key, [(self.offset + start, buffer) for start, buffer in ranges], version)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Tells of a store's errors inside which are the source's: that it is gone, or another one now."""
        try:
            yield
        except StorageError as error:
            store, key = self.place
            state = store.state(key)
            if state is None:
                raise self._gone("there is no such object now") from error
            if not self._is_same(state.num_bytes, state.version):
                raise self._changed() from error
            raise

    def check_unchanged(self) -> None:
        """SourceError where a local file is no longer what was probed. What is remote is proved by each read of it."""
        if self.is_remote:
            return
        try:
            status = Path(self.file).stat()
        except OSError as error:
            raise self._gone(error.strerror or str(error)) from error
        if not self._is_same(status.st_size, version_of(status)):
            raise self._changed()

    def _is_same(self, num_bytes: int, version: str) -> bool:
        """Whether a file of that size and version is still what was looked at."""
        is_as_long = self.offset + self.num_bytes <= num_bytes if self.is_part else self.num_bytes == num_bytes
        return is_as_long and (self.is_proved or version == self.version)

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

    def _proved(self, data: bytes) -> bytes:
        if self.is_proved and proved_version(hashlib.sha256(data).digest()) != self.version:
            raise SourceError(
                f"{self.source} is damaged: its bytes in {redact(self.file)} are not those that were sealed there; "
                "copy that dataset again, or say what is wrong with: streamvid verify --deep"
            )
        return data

    def _gone(self, reason: str) -> SourceError:
        return SourceError(
            f"{self.source} could be probed and now cannot be read ({reason}); "
            "bring it back, or run the same command again to leave it out"
        )

    def _changed(self) -> SourceError:
        return SourceError(f"{self.source} changed after it was probed; run the same command again")


class _Part(io.RawIOBase):
    """A stretch of an open file as a file."""

    def __init__(self, descriptor: int, offset: int, num_bytes: int) -> None:
        self._descriptor, self._offset, self._num_bytes = descriptor, offset, num_bytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._num_bytes}[whence]
        self._position = max(0, origin + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._num_bytes - self._position))
        done = os.preadv(self._descriptor, [view[:count]], self._offset + self._position) if count else 0
        self._position += done
        return done
