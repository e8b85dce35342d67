"""Which clips of a batch one request can read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from streamvid.loader.pending import Work
from streamvid.storage import GAP_BYTES, MAX_RANGE_BYTES


def near_each_other(works: Sequence[Work]) -> Iterator[list[Work]]:
    """Groups of clips whose wanted parts lie near each other in one shard; of a local store, each is a group alone.

    Groups come in the order of their first clips among `works`, which is the order that they are needed in.
    """
    shards: dict[tuple[int, str], list[Work]] = {}
    for work in works:
        if work.sample.part.dataset.store.is_local:
            yield [work]
        else:
            shards.setdefault((work.sample.part.number, work.sample.shard_info.path), []).append(work)
    for several in shards.values():
        several.sort(key=_start)
        group: list[Work] = []
        for work in several:
            if group and not (
                _start(work) - _end(group[-1]) <= GAP_BYTES and _end(work) - _start(group[0]) <= MAX_RANGE_BYTES
            ):
                yield group
                group = []
            group.append(work)
        yield group


def _start(work: Work) -> int:
    return int(work.row["clip_offset"]) + work.part.first_byte


def _end(work: Work) -> int:
    return _start(work) + work.part.num_bytes
