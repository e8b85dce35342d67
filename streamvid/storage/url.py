"""How a URL becomes a store, and what of it may be shown."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit
from urllib.request import url2pathname

from streamvid.errors import StorageError
from streamvid.storage.local import LocalStore
from streamvid.storage.options import StorageOptions
from streamvid.storage.store import Store

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*):(?=//|[^\\/])")


def redact(url: str) -> str:
    """A URL without user, password and query: what may stand in a log, an error or a manifest."""
    if "://" not in url:
        return url
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.port is not None:
        host = f"{host}:{parts.port}"
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


def open_store(url: str | Path, options: StorageOptions | None = None) -> Store:
    """The store at a local path or a `file://` URL. `options`: of object stores.

    Raises StorageError for another scheme; nothing is opened or created yet.
    """
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
