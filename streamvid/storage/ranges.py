"""Requests for ranges of one file: nearby ranges share a request, and large ranges are split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streamvid.storage.options import MAX_RANGE_BYTES
from streamvid.storage.store import Ranges

GAP_BYTES = 32 * 2**10
"""Maximum gap within a request. It is larger than the gap between two clips in a tar, and smaller than a clip."""


@dataclass(frozen=True, slots=True)
class RangeRequest:
    """Request for the bytes in [start, end). pieces: (offset in the request, buffer) for each wanted part."""

    start: int
    end: int
    pieces: tuple[tuple[int, memoryview], ...]

    @property
    def num_bytes(self) -> int:
        return self.end - self.start

    @property
    def num_bytes_wanted(self) -> int:
        return sum(len(buffer) for _, buffer in self.pieces)

    def scatter(self, data: bytes | bytearray) -> None:
        """Copy the wanted bytes of the request to their buffers."""
        view = memoryview(data)
        for offset, buffer in self.pieces:
            buffer[:] = view[offset : offset + len(buffer)]


def join_ranges(ranges: Ranges, gap_bytes: int = GAP_BYTES, max_bytes: int = MAX_RANGE_BYTES) -> list[RangeRequest]:
    """Return requests of at most `max_bytes` that cover all ranges. Ranges may be unordered and may overlap.

    Neighboring ranges share a request if the gap between them is at most `gap_bytes`.
    """
    cut = [
        (offset + start, buffer[start : start + max_bytes])
        for offset, buffer in ranges
        for start in range(0, len(buffer), max_bytes)
    ]
    spans = [(offset, offset + len(buffer)) for offset, buffer in cut]
    return [_request([cut[number] for number in group]) for group in near_spans(spans, gap_bytes, max_bytes)]


def near_spans(
    spans: Sequence[tuple[int, int]], gap_bytes: int = GAP_BYTES, max_bytes: int = MAX_RANGE_BYTES
) -> list[list[int]]:
    """Group (start, end) spans that are near each other. Return the indices of each group's spans, ordered by start.

    Within a group, gaps are at most `gap_bytes`, and the spans together cover at most `max_bytes`. A span
    longer than `max_bytes` forms a separate group.
    """
    groups: list[list[int]] = []
    first = last = 0
    for number in sorted(range(len(spans)), key=lambda number: spans[number][0]):
        start, end = spans[number]
        if groups and start - last <= gap_bytes and max(last, end) - first <= max_bytes:
            groups[-1].append(number)
            last = max(last, end)
        else:
            groups.append([number])
            first, last = start, end
    return groups


def _request(group: list[tuple[int, memoryview]]) -> RangeRequest:
    start = group[0][0]
    end = max(offset + len(buffer) for offset, buffer in group)
    return RangeRequest(start, end, tuple((offset - start, buffer) for offset, buffer in group))
