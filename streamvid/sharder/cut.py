"""Where one shard ends and the next begins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

_Item = TypeVar("_Item")


def cut_by_bytes(items: Sequence[_Item], sizes: Sequence[int], shard_size_bytes: int) -> Iterator[Sequence[_Item]]:
    """Consecutive runs of about equal bytes, none above `shard_size_bytes` but where one item alone is.

    sizes: bytes of each item.
    """
    remaining = sum(sizes)
    start = 0
    while start < len(items):
        num_shards = -(-remaining // shard_size_bytes)
        end, total = start, 0
        while end < len(items):
            size = sizes[end]
            # Half of a clip beyond an equal share is rounding; more would make the last shards small.
            is_full = total + size > shard_size_bytes or num_shards * (2 * total + size) > 2 * remaining
            if is_full and end > start:
                break
            total, end = total + size, end + 1
        yield items[start:end]
        remaining, start = remaining - total, end
