"""Tests of rows on disk: they read back unchanged, in any part and any order."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamvid.dataset.tabular.rows import BLOCK_ROWS, Rows
from streamvid.dataset.tabular.text_set import TextSet
from tests.processes import run_python


@dataclass(frozen=True, slots=True)
class Part:
    path: str
    rate: float | None = None


@dataclass(frozen=True)
class Checked:
    """Class that validates its fields; its instances are stored whole."""

    size: Fraction

    def __post_init__(self) -> None:
        assert self.size > 0


@dataclass(frozen=True, slots=True)
class Row:
    number: int
    name: str | None
    part: Part
    checked: Checked
    is_on: bool = False
    items: tuple[str, ...] = ()


TEXTS = st.text(st.characters(), max_size=8)  # with lone surrogates, as in file names that are not UTF-8
ROWS = st.builds(
    Row,
    number=st.integers(-(2**63), 2**63 - 1),
    name=st.none() | TEXTS,
    part=st.builds(Part, path=TEXTS, rate=st.none() | st.floats(allow_nan=False)),
    checked=st.builds(Checked, size=st.fractions(min_value=Fraction(1, 9), max_value=9)),
    is_on=st.booleans(),
    items=st.lists(TEXTS, max_size=2).map(tuple),
)


def numbered(count: int) -> list[Row]:
    return [
        Row(number, f"row {number}", Part(str(number)), Checked(Fraction(1 + number % 3))) for number in range(count)
    ]


@given(st.lists(ROWS, max_size=20), st.integers(-25, 25), st.integers(-25, 25), st.randoms(use_true_random=False))
def test_rows_round_trip(given_rows: list[Row], start: int, stop: int, rng: Random) -> None:
    rows = Rows.of(Row, given_rows)
    assert list(rows) == given_rows and len(rows) == len(given_rows)
    assert list(rows[start:stop]) == given_rows[start:stop]
    assert list(rows[start:][:stop]) == given_rows[start:][:stop]
    assert [rows[number] for number in range(len(rows))] == given_rows
    assert list(rows.tuples("part.path", "items")) == [(row.part.path, row.items) for row in given_rows]
    order = rng.sample(range(len(given_rows)), len(given_rows))
    assert list(rows.arranged(np.array(order, np.int64))) == [given_rows[number] for number in order]


@pytest.mark.parametrize("count", [BLOCK_ROWS - 1, BLOCK_ROWS, BLOCK_ROWS + 1, 5 * BLOCK_ROWS + 7])
def test_many_rows_come_back_in_any_order(count: int) -> None:
    """The counts cross the boundaries of blocks and of the parts in which rows are reordered."""
    order = np.random.default_rng(count).permutation(count).astype(np.int64)
    rows = Rows.of(Row, numbered(count)).arranged(order)
    assert [number for (number,) in rows.tuples("number")] == order.tolist()
    for start in (0, 1, BLOCK_ROWS - 1, BLOCK_ROWS, count - 1):
        assert [row.name for row in rows[start : start + 3]] == [f"row {number}" for number in order[start : start + 3]]


def test_memory_does_not_grow_with_the_rows() -> None:
    """The number of rows of 1 kB grows from 40,000 to 240,000, which adds 200 MB."""
    code = """
import resource
from tests.dataset.test_rows import *
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
def some(count): return (Row(n, "x" * 1000, Part(str(n)), Checked(Fraction(1))) for n in range(count))
peaks = []
for count in (40_000, 240_000):
    rows = Rows.of(Row, some(count)).arranged(np.arange(count)[::-1])
    assert sum(len(row.name) for row in rows) == 1000 * count
    peaks.append(peak())
print(peaks[1] - peaks[0])
"""
    assert float(run_python(code).stdout) < 100


def test_nothing_is_left_behind_and_a_full_disk_is_an_error(tmp_path: Path) -> None:
    """The file has no name, so even kill -9 leaves nothing behind."""
    code = """
import os, sys, tempfile
from tests.dataset.test_rows import *
rows = Rows.of(Row, (Row(n, os.urandom(500).hex(), Part(""), Checked(Fraction(1))) for n in range(40_000)))
assert os.listdir(tempfile.gettempdir()) == []
os.kill(os.getpid(), 9)
"""
    run_python(code, check=False, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert list(tmp_path.iterdir()) == []
    code = """
import os, resource
from tests.dataset.test_rows import *
import signal
from streamvid.errors import StorageError
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
try:
    Rows.of(Row, (Row(n, os.urandom(500).hex(), Part(""), Checked(Fraction(1))) for n in range(40_000)))
except StorageError as error:
    print(error)
"""
    assert "free disk space there, or set TMPDIR" in run_python(code).stdout


@given(st.lists(st.text(max_size=3)), st.text(max_size=3))
def test_a_text_set_contains_the_added_texts(texts: list[str], other: str) -> None:
    found, twice = TextSet.of(texts), TextSet.repeated(texts)
    assert len(found) == len(set(texts)) and all(text in found for text in texts)
    assert (other in found) == (other in texts)
    assert [text in twice for text in texts] == [texts.count(text) > 1 for text in texts]


def test_a_large_set_of_texts() -> None:
    names: Sequence[str] = [str(number) for number in range(100_000)]
    found, twice = TextSet.of(names), TextSet.repeated([*names, *names[:70_000]])
    assert len(found) == 100_000 and len(twice) == 70_000
    assert all((str(number) in found, str(number) in twice) == (True, number < 70_000) for number in range(100_000))
    assert "x" not in found and "99999" not in twice
