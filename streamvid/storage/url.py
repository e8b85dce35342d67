"""Functions that open stores by URL and remove credentials from URLs."""

from __future__ import annotations

import logging
import re
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

from streamvid.credentials import hide_credentials
from streamvid.errors import StorageError, refuse_credentials
from streamvid.storage.local import LocalStore
from streamvid.storage.options import StorageOptions
from streamvid.storage.remote import RemoteStore
from streamvid.storage.store import Store
from streamvid.storage.transport import Transport

_log = logging.getLogger(__name__)
OBJECT_SCHEMES = ("s3",)
"""URL schemes of the tested object stores, which the sharder accepts as sources."""
_BUCKETS = {"s3", "s3a", "gs", "gcs", "az", "hf"}
_REFUSED = {
    *("pipe", "cmd"),  # these run programs
    *("http", "https", "ftp", "sftp", "ssh", "smb", "git", "data"),  # these are not object stores
    *("zip", "tar", "reference", "local"),  # these wrap another store
}
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*):(?=//|[^\\/])")


def redact(url: str) -> str:
    """Return a URL without its user name, password, query or fragment, so that it is safe for logs and manifests."""
    if "://" in (clean := hide_credentials(url)):
        return re.split(r"[?#]", clean, maxsplit=1)[0]
    return clean


def open_store(url: str | Path, options: StorageOptions | None = None) -> Store:
    """Return the store at a local path or at a file://, s3:// or memory:// URL. `options` apply to object stores.

    Other object stores are opened through fsspec packages; streamvid is not tested with these packages. This function
    opens no connection and creates no file.

    Raises ConfigError if the path or URL contains credentials, and StorageError if the URL is not supported.
    """
    refuse_credentials("url", url)
    if isinstance(url, Path):
        return LocalStore(url)
    match = _SCHEME.match(url)
    if match is None:
        _check_local(url)
        return LocalStore(Path(url).expanduser())
    scheme = match[1].lower()
    if scheme == "file":
        path = file_url_path(url)
        if path is None:
            raise StorageError(f"url {redact(url)!r} contains a host; write file URLs as file:///folder/dataset")
        return LocalStore(Path(path))
    return _open_remote(scheme, url, options or StorageOptions())


def file_url_path(url: str) -> str | None:
    """Return the local path in a file:// URL, or None if the URL contains a host."""
    try:
        parts = urlsplit(url)
    except ValueError:  # the host contains a bracket
        return None
    return unquote(parts.path) if parts.netloc in ("", "localhost") else None


def _check_local(path: str) -> None:
    """Raise StorageError if a local path looks like a mistyped URL."""
    scheme, _, rest = path.partition(":/")
    if scheme in _BUCKETS and not rest.startswith("/"):
        raise StorageError(
            f"{redact(path)!r} is not a URL: did you mean {redact(f'{scheme}://{rest}')!r}? To use a folder with this "
            "name, prefix the name with ./"
        )


def _open_remote(scheme: str, url: str, options: StorageOptions) -> RemoteStore:
    rest = url.split(":", 1)[1]
    _check_scheme(scheme, rest, url)
    if "?" in rest or "#" in rest or re.search("[@:]", rest.removeprefix("//").split("/")[0]):
        raise StorageError(
            f"url {redact(url)!r} must consist of a bucket and a path; remove its port, query, fragment or user "
            "name. Credentials are read from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, the AWS config files or an "
            "IAM role"
        )
    bucket, _, path = rest.removeprefix("//").rstrip("/").partition("/")
    if not bucket or (path and not _is_path(path)):
        raise StorageError(
            f"url {redact(url)!r} must consist of a bucket and a path, as in s3://bucket/folder/dataset; the path must "
            "not contain backslashes or empty, '.' or '..' parts"
        )
    prefix = f"{path}/" if path else ""
    if scheme in ("s3", "s3a"):
        return RemoteStore(f"s3://{bucket}/{path}".rstrip("/"), prefix, options, partial(_s3, bucket, options))
    if scheme != "memory":
        _log.warning("streamvid is not tested with the fsspec package that opens %s:// URLs", scheme)
    clean = f"{scheme}://{bucket}/{path}".rstrip("/")
    return RemoteStore(clean, f"{bucket}/{prefix}", options, partial(_fsspec, scheme))


def _check_scheme(scheme: str, rest: str, url: str) -> None:
    """Raise StorageError unless the URL consists of a supported scheme, "//" and a location."""
    if "::" in url:
        problem = "contains '::', and chained URLs are not supported"
    elif not rest.startswith("//"):
        problem = f"has no '//' after '{scheme}:'"
    elif scheme in _REFUSED:
        problem = f"has the scheme {scheme!r}, which is not supported"
    else:
        return
    raise StorageError(
        f"url {redact(url)!r} {problem}; use a local path (prefix a relative path with ./), a file://, s3:// or "
        "memory:// URL, or the URL (such as gs://bucket/path) of an object store that has an fsspec package"
    )


def _is_path(path: str) -> bool:
    return not any(part in ("", ".", "..") for part in path.split("/")) and "\\" not in path and "\0" not in path


def _s3(bucket: str, options: StorageOptions) -> Transport:
    from streamvid.storage.s3.transport import S3Transport

    return S3Transport(bucket, options)


def _fsspec(scheme: str) -> Transport:
    from streamvid.storage.generic import FsspecTransport

    return FsspecTransport(scheme)
