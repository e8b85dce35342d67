"""What a store can do, and which paths may be in one."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from streamvid.errors import StorageError


class Store(Protocol):
    """A tree of immutable files under one URL. Paths are relative, with forward slashes.

    Every method raises StorageError (naming store and path) for what cannot be done.
    """

    @property
    def url(self) -> str:
        """Where the store is, without credentials: fit for logs."""
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

    def put(self, path: str, data: bytes | Path) -> None:
        """Make a file out of bytes, or by moving a local file in: whole or not at all, replacing what was there."""
        ...

    def remove(self, path: str) -> None:
        """Delete one file; none there is fine."""
        ...


def check_relative(path: str) -> str:
    """`path` if it stays inside its store (SAFE-1): relative, no `..`, no NUL, no backslash, not empty."""
    if not path or path[0] == "/" or "\0" in path or "\\" in path or ".." in path.split("/"):
        raise StorageError(f"path {path!r} is not allowed: paths in a dataset are relative and stay inside it")
    return path
