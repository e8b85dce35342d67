from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streamvid.plan.hashing import hash64, hash64_array, hash_below, hash_text, permute, uniform, uniform_array

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "plan_golden.json").read_text())
INTEGERS = st.integers(-(2**63), 2**64 - 1)


def keys(*values: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array(values, dtype=np.uint64)


def test_golden_values() -> None:
    """PLAN-1: the numbers are the same with every version of numpy and on every machine."""
    for parts, value in GOLDEN["hash64"]:
        assert hash64(*parts) == value
    for text, value in GOLDEN["hash_text"]:
        assert hash_text(text) == value
    for parts, value in GOLDEN["uniform"]:
        assert uniform(*parts) == value
    for n, parts, value in GOLDEN["hash_below"]:
        assert hash_below(n, *parts) == value
    for size, key, places in GOLDEN["permute"]:
        assert permute(np.arange(size), np.array([size]), keys(key)).tolist() == places


@given(columns=st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**64 - 1), INTEGERS), min_size=1))
def test_arrays_equal_integers(columns: list[tuple[int, int, int]]) -> None:
    """PLAN-1"""
    signed = np.array([a for a, _, _ in columns], dtype=np.int64)
    unsigned = keys(*(b for _, b, _ in columns))
    constant = columns[0][2]
    expected = [hash64(constant, a, b, 7) for a, b, _ in columns]
    assert hash64_array(constant, signed, unsigned, 7).tolist() == expected
    assert uniform_array(constant, signed, unsigned).tolist() == [uniform(constant, a, b) for a, b, _ in columns]


@given(parts=st.lists(INTEGERS, max_size=4), n=st.integers(1, 2**64))
def test_ranges(parts: list[int], n: int) -> None:
    assert 0 <= hash64(*parts) < 2**64
    assert 0.0 <= uniform(*parts) < 1.0
    assert 0 <= hash_below(n, *parts) < n


@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_a_permutation_reaches_every_place_once(size: int, key: int) -> None:
    places = permute(np.arange(size), np.array([size]), keys(key))
    assert sorted(places.tolist()) == list(range(size))


@given(st.lists(st.tuples(st.integers(1, 2**62), st.integers(0, 2**64 - 1), st.floats(0, 1)), min_size=1, max_size=20))
def test_permutations_of_several_sizes_work_in_one_call(rows: list[tuple[int, int, float]]) -> None:
    """Each element has its own size and key; its place does not depend on the other elements of the call."""
    sizes = np.array([size for size, _, _ in rows])
    positions = np.array([min(int(share * size), size - 1) for size, _, share in rows])
    together = permute(positions, sizes, keys(*(key for _, key, _ in rows)))
    alone = [permute(positions[[i]], sizes[[i]], keys(key))[0] for i, (_, key, _) in enumerate(rows)]
    assert together.tolist() == alone
    assert (together >= 0).all() and (together < sizes).all()


def test_a_long_call_equals_several_short_ones() -> None:
    """Runs of equal sizes and keys may be split anywhere by the internal work arrays."""
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 900, 250)
    sizes, seeds = np.repeat(rng.integers(1, 5000, 250), counts), np.repeat(hash64_array(np.arange(250)), counts)
    positions = rng.integers(0, 1 << 40, len(sizes)) % sizes
    together = permute(positions, sizes, seeds)
    assert len(together) > 100_000
    cuts = [0, *np.sort(rng.integers(0, len(sizes), 40)).tolist(), len(sizes)]
    for first, last in itertools.pairwise(cuts):
        part = slice(first, last)
        np.testing.assert_array_equal(together[part], permute(positions[part], sizes[part], seeds[part]))


def test_permutations_are_uniform() -> None:
    """Every place is equally likely for every position, also in windows of a few samples (chi-squared, fixed keys)."""
    for size in (2, 3, 5, 8, 12):
        places = permute(np.arange(size)[None, :], np.array([[size]]), hash64_array(np.arange(6000))[:, None])
        counts = np.array([np.bincount(column, minlength=size) for column in places.T])
        chi_squared = ((counts - 6000 / size) ** 2).sum() / (6000 / size)
        assert chi_squared < (size - 1) ** 2 + 5 * np.sqrt(2 * (size - 1) ** 2)
        assert len({tuple(row) for row in places.tolist()}) > min(6000, {2: 1, 3: 5, 5: 100, 8: 4000, 12: 5900}[size])
