"""Interface to an object store: single requests, each sent once. remote.py and requests.py add retries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from streamvid.storage.store import FileState

Failure: TypeAlias = Literal[
    "refused",  # a retry cannot succeed
    "transient",  # the same request may succeed in a moment
    "slow down",  # transient; the store asks for fewer requests
    "expired",  # transient; keys or signature are no longer valid
    "absent",  # the object does not exist
    "conflict",  # the object has another version, or exists where none was expected
    "denied",  # the keys do not allow the request; some stores also report this for a missing object
    "unsupported",  # the store does not support the request
    "short",  # the object ends before the end of the range
]


class RequestError(Exception):
    """Failure of one request. `cause` and `hint` (advice for the user, or "") contain neither keys nor signed URLs."""

    def __init__(self, cause: str, kind: Failure = "refused", *, hint: str = "") -> None:
        super().__init__(cause)
        self.cause = cause
        self.kind = kind
        self.hint = hint

    @property
    def is_transient(self) -> bool:
        """True if a retry may succeed."""
        return self.kind in ("transient", "slow down", "expired")


@dataclass(frozen=True, slots=True)
class Body:
    """Bytes from one range of an object, and the object's version ("" if unknown)."""

    data: bytes | bytearray
    version: str = ""


class Transport:
    """Interface for requests to one bucket or its equivalent. Keys are relative to the root of the bucket.

    On failure, methods raise RequestError. Any thread of the process that created the transport may call them.
    """

    def start(self) -> None:
        """Import and initialize the client in advance. If this method is not called, the first request does both."""

    def disconnect(self) -> None:
        """Close all connections. Requests in progress finish first, and later requests open new connections."""

    def state(self, key: str) -> FileState:
        """Return the size and version of an object."""
        raise NotImplementedError

    def get(self, key: str, start: int, num_bytes: int, version: str, is_wanted: Callable[[], bool]) -> Body:
        """Return the bytes in a range. Raises RequestError if `version` is neither "" nor the object's current version.

        `is_wanted` is called only after the response has begun. After it has returned False, the read may end early,
        with any error or result.
        """
        raise NotImplementedError

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        """Write an object. With `if_absent`, raise RequestError if the object already exists."""
        raise NotImplementedError

    def copies_from(self, source: Transport) -> bool:
        """Return True if the store itself can copy objects from `source`."""
        return False

    def copy(self, source: Transport, source_key: str, version: str, key: str) -> None:
        """Copy an object from `source` to `key`. Raises RequestError if the version of the object is not `version`."""
        raise NotImplementedError

    def files(self, prefix: str, following: str = "") -> tuple[list[FileState], str]:
        """Return (page, following). The page lists objects whose keys begin with `prefix`, ordered by key.

        Each path is a whole key. To get the next page, pass the returned `following`; it is "" after the last page.
        """
        raise NotImplementedError

    def remove(self, key: str) -> None:
        """Delete an object if it exists."""
        raise NotImplementedError

    def renew(self) -> None:
        """Discard the access keys, so that they are looked up again for the next request."""
        raise NotImplementedError

    # Multipart uploads of large objects, for stores that support them.

    part_bytes: int = 2**62
    """Size of an upload part, in bytes. Objects up to this size are written with one request."""

    def begin_parts(self, key: str) -> str:
        """Begin a multipart upload and return its id."""
        raise NotImplementedError

    def put_part(self, key: str, upload: str, number: int, data: bytes) -> str:
        """Upload a part, and return its tag. number: part number, starting at 1."""
        raise NotImplementedError

    def copy_part(
        self, source: Transport, source_key: str, version: str, key: str, upload: str, number: int, start: int, end: int
    ) -> str:
        """Create a part by copying bytes [start, end) of an object in `source`. Return the part's tag.

        Raises RequestError if the object's version is not `version`.
        """
        raise NotImplementedError

    def end_parts(self, key: str, upload: str, tags: list[str]) -> None:
        """Assemble the object from its parts. tags: tags of all parts, in order."""
        raise NotImplementedError

    def abort_parts(self, key: str, upload: str) -> None:
        """Abort a multipart upload."""
        raise NotImplementedError

    def uploads(self, prefix: str) -> list[tuple[str, str]]:
        """Return (key, upload id) of each unfinished upload whose key begins with `prefix`."""
        return []
