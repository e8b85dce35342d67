"""What a kind of object store has to offer: single requests, each tried once. Trying again is remote.py's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from streamvid.storage.store import FileState


class RequestError(Exception):
    """One request failed. `cause` is fit for messages: it has neither keys nor signed URLs.

    may_pass: whether the same may work in a moment.   is_slow_down: the store asks for fewer requests.
    is_expired: keys or signature were no longer valid.   is_absent: there is no such file.   is_changed: another
    version is there.   is_taken: there is a file where none was to be.   is_denied: these keys may
    not, or may not know that there is none.   is_unknown: the store cannot do this.   is_short: the object ends before
    the range does.
    hint: what the user can do, "" if nothing.
    """

    def __init__(
        self,
        cause: str,
        *,
        may_pass: bool = False,
        is_slow_down: bool = False,
        is_expired: bool = False,
        is_absent: bool = False,
        is_changed: bool = False,
        is_taken: bool = False,
        is_denied: bool = False,
        is_unknown: bool = False,
        is_short: bool = False,
        hint: str = "",
    ) -> None:
        super().__init__(cause)
        self.cause, self.hint, self.may_pass = cause, hint, may_pass
        self.is_slow_down, self.is_expired = is_slow_down, is_expired
        self.is_absent, self.is_changed, self.is_taken = is_absent, is_changed, is_taken
        self.is_denied, self.is_unknown, self.is_short = is_denied, is_unknown, is_short


@dataclass(frozen=True, slots=True)
class Body:
    """Bytes of a range, and the version that they are of ("" where the store has none)."""

    data: bytes | bytearray
    version: str = ""


class Transport(Protocol):
    """Requests to one bucket or its like. `key`: of an object, from the root of the bucket on.

    Methods raise RequestError, and are called in any thread of the process that made the transport.
    """

    def state(self, key: str) -> FileState:
        """Size and version of an object."""
        ...

    def get(self, key: str, start: int, num_bytes: int, version: str, is_wanted: Callable[[], bool]) -> Body:
        """A range. Another version than a given one, or an object that ends before the range does, is an error; so is
        a body that ends early. Whoever is no longer wanted may end with any error."""
        ...

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        """Make an object."""
        ...

    def files(self, prefix: str, following: str = "") -> tuple[list[FileState], str]:
        """Objects whose key begins so, in order; `path` is the whole key. With them what to give as `following` for
        those that come next, "" after the last."""
        ...

    def remove(self, key: str) -> None:
        """Delete an object; none there is fine."""
        ...

    def renew(self) -> None:
        """Look for keys again."""
        ...

    # Large objects, in parts.

    @property
    def part_bytes(self) -> int:
        """Size of a part; objects of one part or less are put at once."""
        ...

    def begin_parts(self, key: str) -> str:
        """Begin an upload: its id."""
        ...

    def put_part(self, key: str, upload: str, number: int, data: bytes) -> str:
        """One part, numbers from 1 on: its tag."""
        ...

    def end_parts(self, key: str, upload: str, tags: list[str]) -> None:
        """Make the object out of all parts."""
        ...

    def abort_parts(self, key: str, upload: str) -> None:
        """Give an upload up."""
        ...

    def uploads(self, prefix: str) -> list[tuple[str, str]]:
        """(key, id) of uploads that were begun and not ended."""
        ...
