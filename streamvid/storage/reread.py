"""Repeated reads after a checksum mismatch, to distinguish wrong stored bytes from damage in transit."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal

MAX_READS = 5
"""Maximum number of reads of a range if each read returns different wrong bytes."""

UNPROVEN = f"each of {MAX_READS} reads returned different bytes; check the network and the store"


class WrongReads:
    """Record of the wrong reads of one range of a file (FETCH-1)."""

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()

    def __len__(self) -> int:
        return len(self._seen)

    def judge(self, wrong: Hashable) -> Literal["again", "stored", "unproven"]:
        """Return the verdict on one more wrong read.

        "again": read again. "stored": two reads agree, so the stored data is wrong. "unproven": MAX_READS reads differ.
        wrong: value that is equal for two reads only if they returned the same bytes, such as their digest.
        """
        if wrong in self._seen:
            return "stored"
        self._seen.add(wrong)
        return "again" if len(self._seen) < MAX_READS else "unproven"
