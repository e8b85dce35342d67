"""Boxes of MOV, MP4 and HEIF files (ISO/IEC 14496-12, 4.2)."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import TypeAlias

MAX_BOXES = 4096
"""Maximum number of consecutive boxes to read."""

ReadAt: TypeAlias = Callable[[int, int], bytes]
"""Function that takes (offset, size), and returns up to `size` bytes of a file, starting at `offset`."""

Box: TypeAlias = tuple[bytes, int, int]
"""Box, as (type, offset of the contents, offset of the end)."""


def find_box(read_at: ReadAt, start: int, end: int, *path: bytes) -> Box | None:
    """Return the first box at `path` (box types, outermost first), or None if no such box exists."""
    for kind, inner, inner_end in boxes(read_at, start, end):
        if kind == path[0]:
            return (kind, inner, inner_end) if len(path) == 1 else find_box(read_at, inner, inner_end, *path[1:])
    return None


def boxes(read_at: ReadAt, start: int, end: int) -> Iterator[Box]:
    """Yield the boxes between two offsets of a file. Stop at the first damaged box."""
    for _ in range(MAX_BOXES):
        if start + 8 > end:
            return
        head = read_at(start, 16)
        size, kind = struct.unpack_from(">I4s", head)
        length = 8
        if size == 1:
            length, (size,) = 16, struct.unpack_from(">Q", head, 8)
        stop = end if size == 0 else start + size
        if stop < start + length or stop > end:
            return
        yield kind, start + length, stop
        start = stop
