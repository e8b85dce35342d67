"""Ranges of one file ─► requests: near ones are read together, large ones in parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streamvid.storage.options import MAX_RANGE_BYTES
from streamvid.storage.store import Ranges

GAP_BYTES = 32 * 2**10
"""A gap is read along where that costs less than a request: what lies between neighbouring clips of a tar, no clip."""


@dataclass(frozen=True, slots=True)
class RangeRequest:
    """One request: bytes from `start` to `end`, and (place in its bytes, where they go) of what is wanted of them."""

    start: int
    end: int
    pieces: tuple[tuple[int, memoryview], ...]

    @property
    def num_bytes(self) -> int:
        return self.end - self.start

    @property
    def num_bytes_wanted(self) -> int:
        return sum(len(buffer) for _, buffer in self.pieces)

    def scatter(self, body: Sequence[bytes | bytearray]) -> None:
        """Put what is wanted of the request's bytes, which come in pieces, where it goes."""
        begin = 0
        for data in body:
            end = begin + len(data)
            for offset, buffer in self.pieces:
                first, last = max(begin, offset), min(end, offset + len(buffer))
                if first < last:
                    buffer[first - offset : last - offset] = memoryview(data)[first - begin : last - begin]
            begin = end


def join_ranges(ranges: Ranges, gap_bytes: int = GAP_BYTES, max_bytes: int = MAX_RANGE_BYTES) -> list[RangeRequest]:
    """Requests of at most `max_bytes` that cover all ranges, whatever their order and overlaps; empty ranges need none.

    Ranges end up in one request where no more than `gap_bytes` lie between them.
    """
    cut = [
        (offset + start, buffer[start : start + max_bytes])
        for offset, buffer in ranges
        for start in range(0, len(buffer), max_bytes)
    ]
    cut.sort(key=lambda piece: piece[0])
    groups: list[list[tuple[int, memoryview]]] = []
    first = last = 0
    for offset, buffer in cut:
        end = offset + len(buffer)
        if groups and offset - last <= gap_bytes and max(last, end) - first <= max_bytes:
            groups[-1].append((offset, buffer))
            last = max(last, end)
        else:
            groups.append([(offset, buffer)])
            first, last = offset, end
    return [_request(group) for group in groups]


def _request(group: list[tuple[int, memoryview]]) -> RangeRequest:
    start = group[0][0]
    end = max(offset + len(buffer) for offset, buffer in group)
    return RangeRequest(start, end, tuple((offset - start, buffer) for offset, buffer in group))
