"""A record's file, on this machine or in a bucket: what names it, and its bytes as long as it is what was looked at."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from streamvid.errors import SourceError, StorageError
from streamvid.storage import StorageOptions, Store, open_store

BUCKET_SCHEMES = ("s3",)
_READ_BYTES = 64 * 2**20
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


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


@dataclass(frozen=True, slots=True)
class Media:
    """One version of a source's file: what a worker is told of it. `path`: local, or the URL of an object."""

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
    def place(self) -> tuple[Store, str]:
        """The store and the path in it, of one that is remote."""
        bucket_url, key = split_url(self.path)
        return store_of(bucket_url, self.storage), key

    def read(self) -> bytes:
        """All bytes, if they still are what was probed: another video must not take its place unseen.

        Raises SourceError where they are not, StorageError where the store fails.
        """
        if not self.is_remote:
            return self._read_local()
        store, key = self.place
        data = bytearray(self.num_bytes)
        view = memoryview(data)
        with self.reading():
            for start in range(0, self.num_bytes, _READ_BYTES):  # each has the store's whole deadline
                store.read_ranges(key, [(start, view[start : start + _READ_BYTES])], self.version)
        return cast("bytes", data)  # a bytearray, which nobody writes to: a copy would be as large again

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
            if (state.num_bytes, state.version) != (self.num_bytes, self.version):
                raise self._changed() from error
            raise

    def check_unchanged(self) -> None:
        """SourceError where a local file is no longer what was probed. What is remote is proved by each read of it."""
        if self.is_remote:
            return
        try:
            status = Path(self.path).stat()
        except OSError as error:
            raise self._gone(error.strerror or str(error)) from error
        if (status.st_size, version_of(status)) != (self.num_bytes, self.version):
            raise self._changed()

    def _read_local(self) -> bytes:
        try:
            with Path(self.path).open("rb") as file:
                before = os.fstat(file.fileno())
                data = file.read(self.num_bytes + 1)
                after = os.fstat(file.fileno())
        except OSError as error:
            raise self._gone(error.strerror or str(error)) from error
        states = {(status.st_size, version_of(status)) for status in (before, after)}
        if states != {(self.num_bytes, self.version)} or len(data) != self.num_bytes:
            raise self._changed()
        return data

    def _gone(self, reason: str) -> SourceError:
        return SourceError(
            f"{self.source} could be probed and now cannot be read ({reason}); "
            "bring it back, or run the same command again to leave it out"
        )

    def _changed(self) -> SourceError:
        return SourceError(f"{self.source} changed after it was probed; run the same command again")
