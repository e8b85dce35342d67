"""Dedicated threads that read samples into shared memory, with one request for neighboring samples in a shard."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from streamvid.loader.delivery.delivery import Delivery
from streamvid.loader.view.clip_part import ClipPart, read_ranges
from streamvid.storage import near_spans

if TYPE_CHECKING:
    from streamvid.dataset.features.sidecar import Sidecar
    from streamvid.dataset.features.tables import SidecarShard
    from streamvid.dataset.manifest import ShardInfo
    from streamvid.dataset.reader import Dataset


Wanted: TypeAlias = tuple[int, ClipPart, memoryview]
"""Part of a clip to read, as (offset of the clip in the tar, part, destination memory)."""


@dataclass(frozen=True, slots=True)
class ClipRead:
    """Result of one read: the duration, the number of bytes read, and the problem with the stored file, if any."""

    seconds: float
    num_bytes: int
    problem: str | None = None


def read_parts(
    source: Dataset | Sidecar,
    shard: ShardInfo | SidecarShard,
    wanted: Sequence[Wanted],
    *,
    is_again: bool = False,
) -> ClipRead:
    """Read parts of clips from one shard: fill each block with a part's packet table and byte range.

    is_again: True if the previous read returned wrong bytes.

    The bytes are not verified here (FETCH-1). Raises StorageError if the store fails; the stored bytes may still be
    good.
    """
    since = time.monotonic()
    content = (shard.sha256, shard.num_bytes)
    problem = read_ranges(source.store, shard.path, content, _prepare(wanted), is_again=is_again)
    return ClipRead(time.monotonic() - since, _num_bytes(wanted), problem)


def fill_tables_of_cached(
    source: Dataset | Sidecar, shard: ShardInfo | SidecarShard, wanted: Sequence[Wanted]
) -> str | None:
    """Fill each block with a part's packet table, but not with its bytes if they are in the page cache.

    Return the local path of the shard, or None if the bytes are not in the page cache; see `Store.cached_path`.
    """
    return source.store.cached_path(shard.path, [(offset, len(buffer)) for offset, buffer in _prepare(wanted)])


def _prepare(wanted: Sequence[Wanted]) -> list[tuple[int, memoryview]]:
    """Copy each part's packet table into its block. Return the ranges to read as (offset in the tar, memory)."""
    ranges = []
    for clip_offset, part, block in wanted:
        if part.window is not None:
            block[: part.video_table_bytes] = _bytes_of(part.window.packets)
        if part.audio is not None and part.audio.packets is not None:
            block[part.video_table_bytes : part.table_bytes] = _bytes_of(part.audio.packets)
        at = part.table_bytes
        for first, num_bytes in part.ranges:
            ranges.append((clip_offset + first, block[at : at + num_bytes]))
            at += num_bytes
    return ranges


def _num_bytes(wanted: Sequence[Wanted]) -> int:
    return sum(part.num_bytes for _, part, _ in wanted)


def _bytes_of(packets: npt.NDArray[np.int64]) -> memoryview:
    return packets.reshape(-1).view(np.uint8).data


def near_each_other(deliveries: Sequence[Delivery]) -> Iterator[list[int]]:
    """Yield groups of delivery indices. One request can read all deliveries in a group.

    For local stores, each group contains one delivery.
    """
    shards: dict[tuple[int, str], list[int]] = {}
    for place, delivery in enumerate(deliveries):
        part = delivery.sample.part
        if part.source.store.is_local:
            yield [place]
        else:
            shards.setdefault((part.number, delivery.tar.path), []).append(place)
    for places in shards.values():
        for group in near_spans([deliveries[place].span for place in places]):
            yield [places[number] for number in group]


class FetchThreads:
    """Pool of up to `num_threads` daemon threads, started on demand, that run jobs in submission order.

    on_error: function that is called in the thread with any exception that a job raises.
    """

    def __init__(self, num_threads: int, on_error: Callable[[Exception], None]) -> None:
        self._max_threads, self._on_error = num_threads, on_error
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._num_free = 0  # threads without a job minus jobs without a thread

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` on the next free thread."""
        with self._lock:
            self._num_free -= 1
            if self._num_free < 0 and len(self._threads) < self._max_threads:
                name = f"streamvid-fetch-{len(self._threads)}"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
                self._num_free += 1
        self._queue.put(job)

    def close(self, timeout_seconds: float | None = None) -> None:
        """Finish queued jobs and end the threads. Threads that are still busy after the timeout end on their own."""
        for _ in range(self._max_threads):
            self._queue.put(None)
        until = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        for thread in self._threads:
            if thread.is_alive():
                thread.join(None if until is None else max(0.0, until - time.monotonic()))

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                job()
            except Exception as error:  # noqa: BLE001 - the caller must receive it in its own thread
                self._on_error(error)
            del job
            with self._lock:
                self._num_free += 1
