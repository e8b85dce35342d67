"""The interface of an object store: single requests, each tried once. remote.py and requests.py retry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from streamvid.storage.store import FileState

Failure: TypeAlias = Literal[
    "refused",  # for a reason that a retry does not change
    "transient",  # the same request may succeed in a moment
    "slow down",  # transient; the store asks for fewer requests
    "expired",  # transient; keys or signature are no longer valid
    "absent",  # the object does not exist
    "conflict",  # the object has another version, or exists where none was expected
    "denied",  # these keys do not allow this, or must not learn that the object does not exist
    "unsupported",  # the store does not support this
    "short",  # the object ends before the range
]


class RequestError(Exception):
    """One failed request. `cause` and `hint` (what the user can do, or "") contain neither keys nor signed URLs."""

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
    """Bytes of a range, and their version ("" if the store has no versions)."""

    data: bytes | bytearray
    version: str = ""


class Transport:
    """Requests to one bucket or its equivalent. `key` names an object from the root of the bucket.

    Methods raise RequestError. Any thread of the process that made the transport may call them.
    """

    def state(self, key: str) -> FileState:
        """Return size and version of an object."""
        raise NotImplementedError

    def get(self, key: str, start: int, num_bytes: int, version: str, is_wanted: Callable[[], bool]) -> Body:
        """Read a range, whole or not at all, of the given version if it is not "".

        A read that is no longer wanted may end with any error.
        """
        raise NotImplementedError

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        """Write an object; with `if_absent` only if it does not exist."""
        raise NotImplementedError

    def files(self, prefix: str, following: str = "") -> tuple[list[FileState], str]:
        """List a page of the objects whose keys begin with `prefix`, in order; `path` is the whole key.

        The returned text is the `following` of the next page, "" after the last one.
        """
        raise NotImplementedError

    def remove(self, key: str) -> None:
        """Delete an object if it exists."""
        raise NotImplementedError

    def renew(self) -> None:
        """Look for keys again."""
        raise NotImplementedError

    # Large objects, in parts, where a store supports them.

    part_bytes: int = 2**62
    """Size of a part; smaller objects are written with one request."""

    def begin_parts(self, key: str) -> str:
        """Begin an upload and return its id."""
        raise NotImplementedError

    def put_part(self, key: str, upload: str, number: int, data: bytes) -> str:
        """Upload a part, numbered from 1, and return its tag."""
        raise NotImplementedError

    def end_parts(self, key: str, upload: str, tags: list[str]) -> None:
        """Assemble the object from all parts."""
        raise NotImplementedError

    def abort_parts(self, key: str, upload: str) -> None:
        """Abort an upload."""
        raise NotImplementedError

    def uploads(self, prefix: str) -> list[tuple[str, str]]:
        """List (key, id) of unfinished uploads."""
        return []
