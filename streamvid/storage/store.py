"""Interface of a store, and validation of paths within a store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias

from streamvid.errors import StorageError

Ranges: TypeAlias = Sequence[tuple[int, memoryview]]
"""Parts of one file, each as (byte offset, buffer to fill)."""


class ShortFileError(StorageError):
    """Error raised if a file in an object store ends before the end of the requested range."""


class DeniedError(StorageError):
    """Error raised if this process lacks permission for an operation on a file."""


@dataclass(frozen=True, slots=True)
class FileState:
    """Current size and version of a file.

    version: text that changes when the file is replaced; "" means unknown.
    modified: Unix time at which the file was written; 0.0 means unknown. Object stores report this time only in
        `Store.files`.
    """

    path: str
    num_bytes: int
    version: str = ""
    modified: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Statistics on this process's requests to a store so far. For local folders, all values are 0.

    num_requests: all requests sent.
    num_retries: requests sent again after a failure.
    num_hedged: second requests sent because the first request was slow.
    num_bytes_read: bytes received, including the gaps between wanted ranges.
    num_bytes_wanted: bytes received, excluding these gaps.
    num_bytes_written: total size of the files that were written.
    seconds_lost: total time from the first failure of each request until its success.
    p50_seconds, p99_seconds: latency percentiles of recent ranged reads, or 0.0 before the first read.
    by_error: maps each cause to the number of failed requests.
    """

    num_requests: int = 0
    num_retries: int = 0
    num_hedged: int = 0
    num_bytes_read: int = 0
    num_bytes_wanted: int = 0
    num_bytes_written: int = 0
    seconds_lost: float = 0.0
    p50_seconds: float = 0.0
    p99_seconds: float = 0.0
    by_error: dict[str, int] = field(default_factory=dict)


class Store(Protocol):
    """Tree of immutable files under one URL. Paths are relative and use forward slashes.

    On failure, every method raises a StorageError that contains the URL and the path. Thread-safe and fork-safe.
    """

    @property
    def url(self) -> str:
        """URL of the store without credentials, safe for logs."""
        ...

    is_local: bool = False
    """True if the store is a local disk, where joining neighboring reads gains nothing."""

    def disconnect(self) -> None:
        """Close this process's connections. Later calls open new connections."""
        return

    def state(self, path: str) -> FileState | None:
        """Return the size and version of a file, or None if the file does not exist."""
        ...

    def size(self, path: str) -> int | None:
        """Return the size of a file in bytes, or None if the file does not exist."""
        state = self.state(path)
        return None if state is None else state.num_bytes

    def read(self, path: str) -> bytes:
        """Return the contents of a file."""
        ...

    def read_ranges(self, path: str, ranges: Ranges, version: str = "") -> None:
        """Fill each buffer with the bytes of the file at the corresponding offset. Nearby ranges share a request.

        Raises StorageError if the file ends too early, or if `version` is given and is not the file's current version.
        """
        ...

    def cached_path(self, path: str, ranges: Sequence[tuple[int, int]]) -> str | None:
        """Return the absolute path of a local file if its bytes are probably in the page cache, and None otherwise.

        ranges: (offset, size) of the bytes; see `is_cached`. Other processes of this machine can read the file.
        Raises StorageError only for a path that leaves the store.
        """
        return None

    def forget(self, path: str) -> None:
        """Drop the cached bytes of a file, because their checksum did not match."""
        return

    def files(self, folder: str = "") -> Iterator[FileState]:
        """Yield all files below a folder, including hidden ones, ordered by path. A missing folder has no files."""
        ...

    def put(self, path: str, data: bytes | Path) -> None:
        """Write a file atomically, replacing any existing file.

        If `data` is a path, that local file is moved into the store.
        """
        ...

    def create(self, path: str, data: bytes) -> bool:
        """Write a new file atomically and return True; return False if the file already exists."""
        ...

    def copy(self, source: Store, path: str, name: str, num_bytes: int) -> bool:
        """Copy the file `path` from another store to `name` in this store.

        The store copies the bytes itself, so they are not verified.

        Return False if this store cannot copy from `source`, or if the file does not have `num_bytes` bytes. The caller
        must then read and write the file.
        """
        return False

    def remove(self, path: str) -> None:
        """Delete a file if it exists."""
        ...

    def abort_uploads(self, folder: str = "") -> int:
        """Abort unfinished uploads below a folder. Such uploads are invisible but billed.

        Return the number of uploads that were aborted.
        """
        return 0

    def stats(self) -> StoreStats:
        """Return statistics on this process's requests so far."""
        return StoreStats()


def check_relative(path: str) -> str:
    """Check a relative path, and return it unchanged.

    Raises StorageError if `path` is empty or absolute, or contains "..", NUL or a backslash (SAFE-1).
    """
    try:
        path.encode()
    except UnicodeEncodeError:
        raise StorageError(f"path {path!r} is not allowed: it must be valid Unicode") from None
    if not path.strip("./") or path[0] == "/" or "\0" in path or "\\" in path or ".." in path.split("/"):
        raise StorageError(
            f"path {path!r} is not allowed: it must be the relative path of a file, stay inside the store, and contain "
            "neither backslashes nor NUL"
        )
    return path
