"""Tests of reading files that are in the page cache."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamvid.host.page_cache import is_cached, read_cached

SIZE = 300_000
SPANS = st.tuples(st.integers(0, SIZE + 10), st.integers(1, SIZE))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cached") / "file"
    path.write_bytes(os.urandom(SIZE))
    return path


@given(ranges=st.lists(SPANS, max_size=4))
def test_a_read_returns_the_right_bytes_or_false(file: Path, ranges: list[tuple[int, int]]) -> None:
    """FETCH-1: it never returns fewer bytes. Ranges beyond the end are never there."""
    data, buffer = file.read_bytes(), bytearray(sum(size for _, size in ranges))
    is_read = read_cached(str(file), ranges, memoryview(buffer))
    if is_read:
        assert buffer == b"".join(data[start : start + size] for start, size in ranges)
    if any(start + size > SIZE for start, size in ranges):
        assert not is_read and not is_cached(str(file), ranges)


def test_what_is_no_file_is_not_in_the_page_cache(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "missing", tmp_path / "fifo"):
        assert not is_cached(str(path), [(0, 1)]) and not read_cached(str(path), [(0, 1)], memoryview(bytearray(1)))


def test_a_file_that_left_the_page_cache_is_not_read(tmp_path: Path) -> None:
    """A file system that does not drop the pages on request still has the right bytes."""
    path, data, buffer = tmp_path / "file", os.urandom(SIZE), bytearray(SIZE)
    with path.open("wb") as opened:
        opened.write(data)
        opened.flush()
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert read_cached(str(path), [(0, SIZE)], memoryview(buffer)) == (buffer == data)
