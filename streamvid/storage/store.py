"""What a store can do, and which paths may be in one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias

from streamvid.errors import StorageError

Ranges: TypeAlias = Sequence[tuple[int, memoryview]]
"""(offset, where its bytes go) of parts of one file."""


class ShortFileError(StorageError):
    """A file of an object store ends before the bytes that were asked for."""


@dataclass(frozen=True, slots=True)
class FileState:
    """A file as it is now: its size, and a text that is another one once the file is replaced ("" where unknown)."""

    path: str
    num_bytes: int
    version: str = ""


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What this process asked of a store so far; a local folder counts nothing.

    num_requests: sent, the failed ones and the second ones of slow reads among them. num_retries: sent again after a
    failure; num_hedged: sent a second time while the first was slow. num_bytes_read: bodies, gaps between ranges that
    were read along among them; num_bytes_wanted: without these. p50_seconds, p99_seconds: of the last whole reads, 0.0
    before the first. seconds_lost: from the first failure of whatever was asked until it succeeded, summed.
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

    Every method raises StorageError (naming store and path) for what cannot be done. Safe in several threads, and in a
    process forked from the one that made it.
    """

    @property
    def url(self) -> str:
        """Where the store is, without credentials: fit for logs."""
        ...

    @property
    def is_local(self) -> bool:
        """Whether reads are those of a local disk: none is worth joining with its neighbour."""
        ...

    def state(self, path: str) -> FileState | None:
        """Size and version of a file, None where there is none."""
        ...

    def size(self, path: str) -> int | None:
        """Bytes of a file, None where there is none."""
        ...

    def read(self, path: str) -> bytes:
        """A whole file."""
        ...

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`; a file that ends before that is an error, never a short read."""
        ...

    def read_ranges(self, path: str, ranges: Ranges, version: str = "") -> None:
        """Fill all buffers, near ones with one request. `version`, where given: of that version, or StorageError."""
        ...

    def forget(self, path: str) -> None:
        """A file's bytes were found wrong: what is kept of them nearer by is not to be used again."""
        ...

    def files(self, folder: str = "") -> Iterator[FileState]:
        """All files below a folder, in the order of their paths, hidden ones too; none where it is not there."""
        ...

    def put(self, path: str, data: bytes | Path) -> None:
        """Make a file out of bytes, or of a local file, which is gone afterwards: whole or not at all, replacing what
        was there."""
        ...

    def create(self, path: str, data: bytes) -> bool:
        """`put` where there is no such file yet; False, and nothing is changed, where there is one."""
        ...

    def remove(self, path: str) -> None:
        """Delete one file; none there is fine."""
        ...

    def abort_uploads(self, folder: str = "") -> int:
        """Give up what killed writers left half uploaded below a folder, which nobody sees but pays for; how many."""
        ...

    def stats(self) -> StoreStats:
        """What was asked of it."""
        ...


def check_relative(path: str) -> str:
    """`path` if it stays inside its store (SAFE-1): relative, no `..`, no NUL, no backslash, not empty."""
    try:
        path.encode()
    except UnicodeEncodeError:
        raise StorageError(f"path {path!r} is not allowed: it is no valid Unicode") from None
    if not path.strip("./") or path[0] == "/" or "\0" in path or "\\" in path or ".." in path.split("/"):
        raise StorageError(f"path {path!r} is not allowed: paths in a dataset are relative and stay inside it")
    return path
