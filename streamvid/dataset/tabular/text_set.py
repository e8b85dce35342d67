"""Sets of strings that are stored as hashes to save memory."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import numpy as np
import numpy.typing as npt

_FEW = 1 << 16


class TextSet:
    """Set of strings that uses 8 bytes per string, because it stores only hashes.

    A string that is not in the set is mistaken for a member with a probability of len(self) / 2**64. If such a mistake
    would be harmful, callers must verify the members.
    """

    def __init__(self, hashes: npt.NDArray[np.int64]) -> None:
        """Create a set from sorted hashes without duplicates."""
        self._hashes = hashes
        self._few = frozenset(hashes.tolist()) if len(hashes) <= _FEW else None

    @staticmethod
    def of(texts: Iterable[str]) -> TextSet:
        """Return a set of `texts`."""
        return TextSet(np.unique(_hashes(texts)))

    @staticmethod
    def repeated(texts: Iterable[str]) -> TextSet:
        """Return the set of all strings that occur more than once in `texts`."""
        hashes = _hashes(texts)
        hashes.sort()
        return TextSet(np.unique(hashes[1:][hashes[1:] == hashes[:-1]]))

    def __len__(self) -> int:
        return len(self._hashes)

    def __contains__(self, text: str) -> bool:
        if self._few is not None:
            return hash(text) in self._few
        place = int(np.searchsorted(self._hashes, hash(text)))
        return place < len(self._hashes) and int(self._hashes[place]) == hash(text)


def first_numbers(values: Iterable[Hashable]) -> npt.NDArray[np.int64]:
    """For each value, return the index of the first equal value. Values with equal hashes count as equal."""
    _, firsts, groups = np.unique(_hashes(values), return_index=True, return_inverse=True)
    return firsts.astype(np.int64)[groups]


def _hashes(values: Iterable[Hashable]) -> npt.NDArray[np.int64]:
    return np.fromiter(map(hash, values), np.int64)
