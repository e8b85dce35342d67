"""Transport to stores other than S3 through their fsspec packages. Only memory:// is tested."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from streamvid.storage.store import FileState
from streamvid.storage.transport import Body, RequestError, Transport


class FsspecTransport(Transport):
    """Transport to `fsspec.filesystem(protocol)`. The file system itself splits large uploads.

    If a version is requested, it is checked after the read. Responses contain no version, so parts of one large read
    may come from different versions.
    """

    def __init__(self, protocol: str) -> None:
        self._protocol = protocol
        self._made: Any = None
        self._lock = threading.Lock()

    def _filesystem(self) -> Any:
        with self._lock:
            if self._made is None:
                import fsspec

                try:
                    is_cached = self._protocol == "memory"  # the instance itself stores the files
                    self._made = fsspec.filesystem(self._protocol, skip_instance_cache=not is_cached)
                except ImportError as error:
                    raise RequestError(
                        f"{self._protocol}:// URLs require a package that is not installed ({error})",
                        hint="Install the fsspec package for this scheme",
                    ) from None
                except ValueError as error:  # fsspec does not know the scheme, or its package rejects the settings
                    raise RequestError(
                        f"{self._protocol}:// URLs cannot be opened ({error})",
                        hint="Check the scheme, and the settings of its fsspec package",
                    ) from None
            return self._made

    def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        try:
            return getattr(self._filesystem(), method)(*arguments, **named)
        except FileNotFoundError:
            raise RequestError("no such object", "absent") from None
        except PermissionError:
            raise RequestError("access denied", hint="Check the permissions of the keys") from None
        except NotImplementedError:
            raise RequestError(f"the fsspec package for {self._protocol}:// does not support `{method}`") from None
        except RequestError:
            raise
        except Exception as error:  # noqa: BLE001 - each package raises its own errors
            raise RequestError(f"the request failed ({type(error).__name__})", "transient") from None

    def state(self, key: str) -> FileState:
        found = self._call("info", key)
        if found.get("type") == "directory":
            raise RequestError("no such object", "absent")
        return FileState(key, int(found["size"]), _version(found))

    def get(self, key: str, start: int, num_bytes: int, version: str, is_wanted: Callable[[], bool]) -> Body:
        data = self._call("cat_file", key, start=start, end=start + num_bytes)
        if len(data) != num_bytes:
            num_there = self.state(key).num_bytes
            if num_there < start + num_bytes:
                raise RequestError(
                    f"the object ends at byte {num_there}, but the read extends to byte {start + num_bytes}", "short"
                )
            raise RequestError("the response ended early", "transient")
        if version and self.state(key).version != version:
            raise RequestError("the object was replaced by another version", "conflict")
        return Body(data)

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        if if_absent and self._call("exists", key):
            raise RequestError("the object already exists", "conflict")
        self._call("pipe_file", key, data)

    def files(self, prefix: str, following: str = "") -> tuple[list[FileState], str]:
        try:
            found = self._call("find", prefix.rstrip("/"), detail=True)
        except RequestError as error:
            if error.kind != "absent":
                raise
            return [], ""
        named = ((key.lstrip("/") if self._protocol == "memory" else key, found[key]) for key in sorted(found))
        files = [
            FileState(key, int(info["size"]), _version(info), _modified(info))
            for key, info in named
            if key.startswith(prefix)
        ]
        return files, ""

    def remove(self, key: str) -> None:
        try:
            self._call("rm_file", key)
        except RequestError as error:
            if error.kind != "absent":
                raise

    def renew(self) -> None:
        with self._lock:
            if self._protocol != "memory":
                self._made = None


def _version(found: Mapping[str, object]) -> str:
    names = ("ETag", "etag", "md5Hash", "blob_id", "mtime", "created", "LastModified", "last_modified")
    return next((str(found[name]).strip('"') for name in names if found.get(name)), "")


def _modified(found: Mapping[str, object]) -> float:
    values = (found.get(name) for name in ("LastModified", "last_modified", "updated", "mtime", "created"))
    value = next((value for value in values if value), None)
    if isinstance(value, datetime):
        return value.timestamp()
    return float(value) if isinstance(value, int | float) else 0.0
