"""Repeated reads of wrong bytes: equal ones are stored that way, different ones are damaged on the way."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal

MAX_READS = 5
"""Maximum reads of the same bytes while each returns different wrong ones."""

UNPROVEN = f"{MAX_READS} reads returned different bytes each time; check the network and the store"


class WrongReads:
    """The wrong reads of one range of a file so far (FETCH-1)."""

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()

    def __len__(self) -> int:
        return len(self._seen)

    def judge(self, wrong: Hashable) -> Literal["again", "stored", "unproven"]:
        """Judge one more wrong read: read again, or stop, because the bytes are verified to be bad or never will be.

        wrong: a value that two reads share only if they returned the same bytes, such as their digest.
        """
        if wrong in self._seen:
            return "stored"
        self._seen.add(wrong)
        return "again" if len(self._seen) < MAX_READS else "unproven"
