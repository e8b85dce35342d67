"""Local files that are in the page cache, which are read without waiting for a disk."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

_NO_WAIT: int | None = getattr(os, "RWF_NOWAIT", None)  # only Linux has it


def is_cached(path: str, ranges: Sequence[tuple[int, int]]) -> bool:
    """Return True if a file's bytes at the start, middle and end of each (offset, size) range are in the page cache.

    Return False if they are not, if the file is too short or cannot be read, or if its file system cannot tell, as NFS.
    """
    places = [place for start, size in ranges for place in (start, start + size // 2, start + size - 1)]
    buffers = [memoryview(bytearray(1))] * len(places)
    return _read(path, zip(places, buffers, strict=True))


def read_cached(path: str, ranges: Sequence[tuple[int, int]], buffer: memoryview) -> bool:
    """Fill `buffer` with the bytes of the (offset, size) ranges of a file, one after another.

    Return False if some bytes are not in the page cache, or if `is_cached` would return False for another reason; the
    contents of the buffer are then undefined.
    """
    reads, at = [], 0
    for start, size in ranges:
        reads.append((start, buffer[at : at + size]))
        at += size
    return _read(path, reads)


def _read(path: str, reads: Iterable[tuple[int, memoryview]]) -> bool:
    if _NO_WAIT is None:
        return False
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return all(os.preadv(descriptor, [buffer], offset, _NO_WAIT) == len(buffer) for offset, buffer in reads)
    except OSError:
        return False
    finally:
        os.close(descriptor)
