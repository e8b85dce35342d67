"""The interface of a store, and the paths that it accepts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias

from streamvid.errors import StorageError

Ranges: TypeAlias = Sequence[tuple[int, memoryview]]
"""Parts of one file: (offset, buffer to fill)."""


class ShortFileError(StorageError):
    """A file of an object store ends before the requested bytes."""


@dataclass(frozen=True, slots=True)
class FileState:
    """A file as it is now. The version changes when the file is replaced; "" if unknown."""

    path: str
    num_bytes: int
    version: str = ""


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Requests of this process to a store so far; a local folder counts nothing.

    num_requests: all requests sent.   num_retries: those sent again after a failure.   num_hedged: second requests,
    sent while the first was slow.   num_bytes_read: bodies, including gaps between ranges; num_bytes_wanted: without
    gaps.   seconds_lost: time from the first failure of an operation until it succeeded, summed.   p50_seconds,
    p99_seconds: latency of the last successful requests, 0.0 before the first.   by_error: failed requests by cause.
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
    """A tree of immutable files under one URL. Paths are relative, with forward slashes.

    Every method raises StorageError, which names store and path. Safe in several threads and in forked children.
    """

    @property
    def url(self) -> str:
        """URL without credentials, fit for logs."""
        ...

    is_local: bool = False
    """True if the store is a local disk, where joining neighboring reads gains nothing."""

    def state(self, path: str) -> FileState | None:
        """Return size and version of a file, or None if it does not exist."""
        ...

    def size(self, path: str) -> int | None:
        """Return the size of a file in bytes, or None if it does not exist."""
        state = self.state(path)
        return None if state is None else state.num_bytes

    def read(self, path: str) -> bytes:
        """Read a whole file."""
        ...

    def read_ranges(self, path: str, ranges: Ranges, version: str = "") -> None:
        """Fill all buffers, nearby ones with one request. A file that ends too early is an error, never a short read.

        With `version`, raise StorageError for any other version.
        """
        ...

    def forget(self, path: str) -> None:
        """Drop cached bytes of a file that turned out to be wrong."""
        return

    def files(self, folder: str = "") -> Iterator[FileState]:
        """List all files below a folder, including hidden ones, ordered by path; none if there is no such folder."""
        ...

    def put(self, path: str, data: bytes | Path) -> None:
        """Write a file atomically, replacing any other. A local file given as `data` is moved."""
        ...

    def create(self, path: str, data: bytes) -> bool:
        """Write a file atomically; return False if it already exists."""
        ...

    def remove(self, path: str) -> None:
        """Delete a file if it exists."""
        ...

    def abort_uploads(self, folder: str = "") -> int:
        """Abort unfinished uploads below a folder, which are invisible but billed; return how many."""
        return 0

    def stats(self) -> StoreStats:
        """Return statistics of this process's requests so far."""
        return StoreStats()


def check_relative(path: str) -> str:
    """Return `path` if it stays inside its store (SAFE-1): relative, not empty, without `..`, NUL or backslash."""
    try:
        path.encode()
    except UnicodeEncodeError:
        raise StorageError(f"path {path!r} is not allowed: it is not valid Unicode") from None
    if not path.strip("./") or path[0] == "/" or "\0" in path or "\\" in path or ".." in path.split("/"):
        raise StorageError(f"path {path!r} is not allowed: paths in a dataset are relative and stay inside it")
    return path
