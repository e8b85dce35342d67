"""Groups of similar rows, found with time and memory that are practical for 10 million rows.

Each group has a leader, its first row, and each other row of the group is similar to the leader itself, so that no
chain of small changes joins different videos.

Similar rows are found by sorting: rows whose signatures share certain bits are neighbors if the rows are sorted by
these bits. Rows are sorted by several choices of bits, and each row is compared with its next neighbors.
"""

from __future__ import annotations

import hashlib
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from streamvid.sharder.curation.signature import APPEARANCE_BITS, NUM_APPEARANCE_WORDS, Words

Numbers: TypeAlias = npt.NDArray[np.int64]

MOST_DIFFERENT = 100
"""Maximum number of bits, out of 504, by which the appearance of similar rows may differ."""
_LEAST_MOVING = 8  # values that must move in either row for their motion to be compared
_LEAST_AGREEING = 3  # of the values that move, at least 1 / 3 must agree
_NUM_KEYS, _KEY_BITS, _NUM_NEIGHBORS = 64, 32, 24
_MOST_IN_WORD = 14  # quick test of neighbors, with another word for each key
_ROWS_AT_ONCE = 1 << 16


def find_leaders(signatures: Words) -> Numbers:
    """Return the leader of each row. A row without a similar earlier leader is its own leader.

    signatures: array with shape (words, rows), with at most 2**32 rows.
    """
    leaders = np.arange(signatures.shape[1])
    rows = leaders.copy()
    while len(rows):
        touched = [np.empty(0, np.int64)]
        for key in range(_NUM_KEYS):
            alone = rows[leaders[rows] == rows]
            pairs = _neighbors(signatures, alone, key)
            if len(pairs):
                touched += [_follow(leaders, pairs, signatures)]
        # Rows of large groups have more similar rows than neighbors, so that their leaders are compared again.
        rows = np.unique(np.concatenate(touched))
        rows = rows[leaders[rows] == rows]
    return leaders


def similar(signatures: Words, first: Numbers, second: Numbers) -> npt.NDArray[np.bool_]:
    """Return an array that is True for each pair of similar rows.

    signatures: array with shape (words, rows).
    """
    appearance, (high, low) = signatures[:NUM_APPEARANCE_WORDS], signatures[NUM_APPEARANCE_WORDS:]
    different = sum(_count_bits(word[first] ^ word[second]) for word in appearance)
    same = _count_bits(high[first] & high[second]) + _count_bits(low[first] & low[second])
    opposite = _count_bits(high[first] & low[second]) + _count_bits(low[first] & high[second])
    moving = _count_bits(high[first] | low[first] | high[second] | low[second])
    agrees = (moving < _LEAST_MOVING) | (_LEAST_AGREEING * (same - opposite) >= moving)
    return np.asarray((different <= MOST_DIFFERENT) & agrees)


def _follow(leaders: Numbers, pairs: Numbers, signatures: Words) -> Numbers:
    """Make the first row of each pair the leader of the second, unless one of the two already has another leader.

    Each former follower of the second row follows the first row if it is similar to that row; otherwise, it becomes a
    leader.
    Return all rows that became leaders or have new followers.
    """
    for first, second in pairs.tolist():
        if leaders[first] == first and leaders[second] == second:
            leaders[second] = first
    rows = np.flatnonzero(leaders[leaders] != leaders)
    found = leaders[leaders[rows]]
    leaders[rows] = np.where(similar(signatures, found, rows), found, rows)
    return np.concatenate([leaders[rows], leaders[pairs[:, 1]]])


def _neighbors(signatures: Words, rows: Numbers, key: int) -> Numbers:
    """Sort the rows by a key, and return the pairs of neighboring rows that are similar.

    The result is a sorted array with shape (pairs, 2).
    """
    ordered = _ordered(signatures, rows, key)
    word = signatures[key % NUM_APPEARANCE_WORDS][ordered]
    found = [np.empty((0, 2), np.int64)]
    for start in range(0, len(ordered), _ROWS_AT_ONCE):
        block = word[start : start + _ROWS_AT_ONCE]
        for step in range(1, _NUM_NEIGHBORS + 1):
            ahead = word[start + step : start + step + len(block)]
            near = start + np.flatnonzero(_count_bits(block[: len(ahead)] ^ ahead) <= _MOST_IN_WORD)
            pairs = np.sort(np.stack([ordered[near], ordered[near + step]], axis=1), axis=1)
            found.append(pairs[similar(signatures, *pairs.T)])
    pairs = np.concatenate(found)
    return pairs[np.lexsort(pairs.T[::-1])]


def _ordered(signatures: Words, rows: Numbers, key: int) -> Numbers:
    """Sort the rows by the signature bits that `key` selects.

    Rows with equal bits keep their order.
    """
    values = np.zeros(len(rows), np.uint64)
    for word, bit in _key_bits(key):
        values = values << np.uint64(1) | signatures[word][rows] >> np.uint64(bit) & np.uint64(1)
    values = values << np.uint64(32) | np.arange(len(rows), dtype=np.uint64)
    values.sort()  # unlike an argsort, this is fast, and the same on every machine, because no values are equal
    return rows[(values & np.uint64(2**32 - 1)).astype(np.int64)]


def _key_bits(key: int) -> list[tuple[int, int]]:
    """Return the bits that a key selects. A hash chooses the bits, so that they are the same on every machine."""
    return sorted(APPEARANCE_BITS, key=lambda place: hashlib.sha256(f"{key} {place}".encode()).digest())[:_KEY_BITS]


def _count_bits(words: Words) -> npt.NDArray[Any]:
    """Return the number of set bits in each word, like `np.bitwise_count` in NumPy 2."""
    ones, twos, fours, sums = (np.uint64(value * (2**64 // 255)) for value in (0x55, 0x33, 0x0F, 0x01))
    words = words - (words >> np.uint64(1) & ones)
    words = (words & twos) + (words >> np.uint64(2) & twos)
    return ((words + (words >> np.uint64(4)) & fours) * sums >> np.uint64(56)).astype(np.int64)
