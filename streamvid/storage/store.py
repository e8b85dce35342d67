"""What a store can do, and how a URL becomes one."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Protocol
from urllib.parse import urlsplit, urlunsplit
from urllib.request import url2pathname

from streamvid.errors import StorageError

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*):(?=//|[^\\/])")


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


def redact(url: str) -> str:
    """A URL without user, password and query: what may stand in a log, an error or a manifest."""
    if "://" not in url:
        return url
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.port is not None:
        host = f"{host}:{parts.port}"
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


def check_relative(path: str) -> str:
    """`path` if it stays inside its store (SAFE-1): relative, no `..`, no NUL, no backslash, not empty."""
    pure = PurePosixPath(path)
    if not path or "\0" in path or "\\" in path or pure.is_absolute() or ".." in pure.parts:
        raise StorageError(f"path {path!r} is not allowed: paths in a dataset are relative and stay inside it")
    return path


def open_store(url: str | Path) -> Store:
    """The store at a local path or a `file://` URL.

    Raises StorageError for another scheme; nothing is opened or created yet.
    """
    from streamvid.storage.local import LocalStore

    if isinstance(url, Path):
        return LocalStore(url)
    match = _SCHEME.match(url)
    if match is None:
        return LocalStore(Path(url).expanduser())
    if match[1].lower() == "file":
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost"):
            raise StorageError(f"url {redact(url)!r} names a host; file URLs look like file:///folder/dataset")
        return LocalStore(Path(url2pathname(parts.path)))
    raise StorageError(
        f"url {redact(url)!r} has the scheme {match[1]!r}; this version opens local paths and file:// URLs. "
        "Mount the bucket or copy the dataset to a local disk first"
    )
