"""What wrong bytes prove: the same ones twice are what is stored, different ones each time come from the network."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal

MAX_READS = 5
"""Reads of the same bytes, as long as each of them gives other wrong ones."""

UNPROVEN = f"{MAX_READS} reads gave other bytes each time; look at the network and the store"


class WrongReads:
    """The wrong reads of one range of a file so far (FETCH-1)."""

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()

    def __len__(self) -> int:
        return len(self._seen)

    def judge(self, wrong: Hashable) -> Literal["again", "stored", "unproven"]:
        """Judge one more wrong read: read again, or stop, as the bytes are proved bad or never will be.

        wrong: something that two reads share only if they gave the same bytes, such as their digest.
        """
        if wrong in self._seen:
            return "stored"
        self._seen.add(wrong)
        return "again" if len(self._seen) < MAX_READS else "unproven"
