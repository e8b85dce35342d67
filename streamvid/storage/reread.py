"""Repeated reads after a checksum mismatch, to distinguish wrong stored bytes from damage in transit."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal

MAX_READS = 5
"""Maximum number of reads of a range if each read returns different wrong bytes."""

UNPROVEN = f"each of {MAX_READS} reads returned different bytes; check the network and the store"


class WrongReads:
    """Record of reads that returned wrong bytes for one range of a file (FETCH-1)."""

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()

    def __len__(self) -> int:
        return len(self._seen)

    def judge(self, wrong: Hashable) -> Literal["again", "stored", "unproven"]:
        """Record a wrong read, and return a verdict.

        "again": the caller should read the range again.
        "stored": two reads returned the same wrong bytes, so the stored data is wrong.
        "unproven": MAX_READS reads all returned different bytes.

        wrong: value that is equal for two reads only if both returned the same bytes, such as a digest.
        """
        if wrong in self._seen:
            return "stored"
        self._seen.add(wrong)
        return "again" if len(self._seen) < MAX_READS else "unproven"
