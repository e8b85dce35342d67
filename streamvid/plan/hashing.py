"""Random numbers from integer arithmetic, identical on all machines and with all versions of numpy and Python.

The whole algorithm, on 64-bit unsigned integers that wrap:

    mix(z)              z ^= z >> 30; z *= 0xBF58476D1CE4E5B9; z ^= z >> 27; z *= 0x94D049BB133111EB; z ^= z >> 31
                        (the finalizer of splitmix64)
    hash64(p1, p2, …)   h = 0; for each part p, taken modulo 2**64: h = mix((h + 0x9E3779B97F4A7C15) ^ p)
    uniform(…)          (hash64(…) >> 11) / 2**53, in [0, 1)
    hash_below(n, …)    (hash64(…) * n) >> 64, in [0, n)
    permute(i, n, k)    an alternating Feistel network of 8 rounds on the b = bit_length(n - 1) bits of i. `high` is the
                        upper b // 2 bits, and `low` is the other bits. Even rounds r apply
                        low ^= mix(high ^ hash64(k, r)), and odd rounds apply high ^= mix(low ^ hash64(k, r)), both
                        masked to their widths. The network is repeated until the result is below n (cycle walking).
                        This result is then rotated: (result + hash64(k, 8) % n) % n

Every part may be a Python int or a numpy integer array. Arrays broadcast, and each element gives the same result as an
equal int. tests/data/plan_golden.json contains reference values.
"""

from __future__ import annotations

import hashlib
from typing import TypeAlias, overload

import numpy as np
import numpy.typing as npt

UInt64Array: TypeAlias = npt.NDArray[np.uint64]
IntArray: TypeAlias = npt.NDArray[np.int64] | npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_NUM_ROUNDS = 8
# Elements permuted at once: few enough for their work arrays to stay in the processor's cache.
_CHUNK = 1 << 15


def hash_text(text: str) -> int:
    """Return a 64-bit number for a string: the first 8 bytes of its SHA-256 digest, as a big-endian integer."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


@overload
def hash64(*parts: int) -> int: ...
@overload
def hash64(*parts: int | IntArray) -> int | UInt64Array: ...
def hash64(*parts: int | IntArray) -> int | UInt64Array:
    """Return the 64-bit hash of integers, as a uint64 array if any part is an array."""
    state: int | UInt64Array = 0
    for part in parts:
        if isinstance(part, int) and isinstance(state, int):
            # The function `mix` above; a call would take as long as the arithmetic.
            value = ((state + _GOLDEN) & _MASK) ^ (part & _MASK)
            value = ((value ^ (value >> 30)) * _FIRST) & _MASK
            value = ((value ^ (value >> 27)) * _SECOND) & _MASK
            state = value ^ (value >> 31)
        else:
            state = _mix_array((_as_array(state) + np.uint64(_GOLDEN)) ^ _as_array(part))
    return state


def hash64_array(*parts: int | IntArray) -> UInt64Array:
    """Return the result of `hash64` as an array with at least one dimension."""
    return _as_array(hash64(*parts))


def uniform(*parts: int) -> float:
    """Return a float64 in [0, 1), computed from 53 bits of the integers' hash."""
    return (hash64(*parts) >> 11) * 2.0**-53


def uniform_array(*parts: int | IntArray) -> npt.NDArray[np.float64]:
    """Return the result of `uniform` for each element of the broadcast parts."""
    return (hash64_array(*parts) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def hash_below(n: int, *parts: int) -> int:
    """Return an integer in [0, n), computed from the integers' hash. The bias is at most n / 2**64."""
    return (hash64(*parts) * n) >> 64


def permute(positions: IntArray, sizes: IntArray, keys: IntArray) -> npt.NDArray[np.int64]:
    """Map each position through the permutation of range(size) that its key selects. Return a broadcast int64 array.

    Positions are in [0, size), and sizes are at most 2**62. Memory use is O(len(positions)), regardless of the sizes.
    """
    shape = np.broadcast_shapes(positions.shape, sizes.shape, keys.shape)
    places, bounds, seeds = (np.broadcast_to(part, shape).ravel() for part in (positions, sizes, keys))
    outcome = np.empty(places.shape, np.int64)
    for first in range(0, len(places), _CHUNK):
        part = slice(first, first + _CHUNK)
        outcome[part] = _permute(*(array[part].astype(np.uint64) for array in (places, bounds, seeds)))
    return outcome.reshape(shape)


def _permute(places: UInt64Array, bounds: UInt64Array, keys: UInt64Array) -> UInt64Array:
    # Neighbors usually share a window, so values that depend on its size and key are computed once per run of these.
    is_first = np.ones(len(places), bool)
    is_first[1:] = (bounds[1:] != bounds[:-1]) | (keys[1:] != keys[:-1])
    runs = np.cumsum(is_first) - 1
    firsts = np.flatnonzero(is_first)
    round_keys = hash64_array(keys[firsts], np.arange(_NUM_ROUNDS + 1)[:, None])
    num_bits = _bit_length(bounds[firsts] - np.uint64(1))
    outcome = places.copy()
    walking = np.flatnonzero(bounds > 1)
    while walking.size:
        here = runs[walking]
        outcome[walking] = _feistel(outcome[walking], num_bits[here], round_keys, here)
        walking = walking[outcome[walking] >= bounds[walking]]
    # A network of a few bits is not quite uniform; the rotation makes every place equally likely for every position.
    outcome += (round_keys[_NUM_ROUNDS] % bounds[firsts])[runs]
    return outcome - bounds * (outcome >= bounds)


def _feistel(places: UInt64Array, num_bits: UInt64Array, round_keys: UInt64Array, runs: IntArray) -> UInt64Array:
    """Apply the Feistel network once to places below the smallest power of two that is at least the size.

    Fewer than half of the results are outside the range of the permutation.
    """
    num_high = num_bits >> np.uint64(1)
    num_low = num_bits - num_high
    low_mask = (np.uint64(1) << num_low) - np.uint64(1)
    high_mask = (np.uint64(1) << num_high) - np.uint64(1)
    low, high = places & low_mask, places >> num_low
    for number in range(0, _NUM_ROUNDS, 2):
        low ^= _mix_array(high ^ round_keys[number][runs]) & low_mask
        high ^= _mix_array(low ^ round_keys[number + 1][runs]) & high_mask
    return (high << num_low) | low


def _bit_length(values: UInt64Array) -> UInt64Array:
    rest, num_bits = values.copy(), np.zeros_like(values)
    for step in (32, 16, 8, 4, 2, 1):
        wide = rest >= np.uint64(1) << np.uint64(step)
        num_bits[wide] += np.uint64(step)
        rest[wide] >>= np.uint64(step)
    return num_bits + (rest > 0)


def _mix_array(values: UInt64Array) -> UInt64Array:
    values = values ^ (values >> np.uint64(30))
    values *= np.uint64(_FIRST)
    values ^= values >> np.uint64(27)
    values *= np.uint64(_SECOND)
    values ^= values >> np.uint64(31)
    return values


def _as_array(part: int | IntArray) -> UInt64Array:
    # At least one dimension: arithmetic on numpy scalars warns when it wraps.
    if isinstance(part, int):
        return np.array([part & _MASK], dtype=np.uint64)
    return np.atleast_1d(part).astype(np.uint64, copy=False)
