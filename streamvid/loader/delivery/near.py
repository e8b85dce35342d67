"""Which clips of a batch one request can read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from streamvid.loader.delivery.pending import Work
from streamvid.storage import near_spans


def near_each_other(works: Sequence[Work]) -> Iterator[list[Work]]:
    """Groups of clips whose wanted parts lie near each other in one shard; of a local store, each is a group alone."""
    shards: dict[tuple[int, str], list[Work]] = {}
    for work in works:
        if work.sample.part.source.store.is_local:
            yield [work]
        else:
            shards.setdefault((work.sample.part.number, work.sample.shard_info.path), []).append(work)
    for several in shards.values():
        for group in near_spans([work.span for work in several]):
            yield [several[number] for number in group]
