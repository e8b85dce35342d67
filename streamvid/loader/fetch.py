"""Bytes of samples: their index rows, and their clips read into shared memory, checked."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from streamvid.dataset.manifest import ShardInfo
from streamvid.dataset.reader import Dataset
from streamvid.errors import IntegrityError
from streamvid.loader.mix import SampleRequest

_log = logging.getLogger(__name__)

_ROW_COLUMNS = ("key", "text", "fps", "clip_offset", "clip_bytes", "clip_sha256", "window_num_frames")
_CACHED_SHARDS = 64
_MAX_FRAMES = (1 << 31) - 1


class IndexRows:
    """Index rows of shards as column → list, the last used kept."""

    def __init__(self) -> None:
        self._cache: OrderedDict[tuple[int, str], dict[str, list[Any]]] = OrderedDict()

    def row(self, sample: SampleRequest) -> dict[str, Any]:
        """One sample's row: the format's columns that decoding needs, and under "columns" those asked for, by name."""
        part, shard = sample.part, sample.shard_info
        rows = self._cache.get((part.number, shard.path))
        if rows is None:
            wanted = list(dict.fromkeys([*_ROW_COLUMNS, *part.columns.values()]))
            rows = part.dataset.samples(shard, wanted).to_pydict()
            if missing := [name for name in wanted if name not in rows]:
                raise IntegrityError(f"{part.dataset.url}: {shard.index_path} has no column {', '.join(missing)}")
            self._cache[part.number, shard.path] = rows
            if len(self._cache) > _CACHED_SHARDS:
                self._cache.popitem(last=False)
        self._cache.move_to_end((part.number, shard.path))
        row: dict[str, Any] = {name: rows[name][sample.place] for name in _ROW_COLUMNS}
        return row | {"columns": {name: rows[column][sample.place] for name, column in part.columns.items()}}


def check_row(row: dict[str, Any], shard: ShardInfo, num_frames: int) -> None:
    """IntegrityError for an index row (as `IndexRows` gives it) that no clip of the shard can have (SAFE-1)."""
    bounds = {
        "clip_bytes": (1, shard.max_clip_bytes, "the shard's max_clip_bytes"),
        "clip_offset": (0, shard.num_bytes - (row["clip_bytes"] or 0), "the shard's num_bytes less clip_bytes"),
        "window_num_frames": (num_frames, _MAX_FRAMES, "at least the bucket's frames"),
    }
    for name, (least, most, why) in bounds.items():
        if not isinstance(row[name], int) or not least <= row[name] <= most:
            raise IntegrityError(
                f"the index says {name}={row[name]!r}, allowed are {least} to {most} ({why}); copy the dataset again"
            )
    if not isinstance(row["key"], str):
        raise IntegrityError(f"the index says key={row['key']!r}, which is no text; copy the dataset again")


def read_clip(dataset: Dataset, shard: ShardInfo, row: dict[str, Any], buffer: memoryview) -> None:
    """Fill `buffer` with a sample's clip; a wrong checksum is read once more, then IntegrityError (FETCH-1)."""
    for attempt in (1, 2):
        dataset.store.read_into(shard.path, row["clip_offset"], buffer)
        if hashlib.sha256(buffer).digest() == row["clip_sha256"]:
            return
        _log.warning("%s: %s of %s has a wrong checksum (read %d)", dataset.url, row["key"], shard.path, attempt)
    raise IntegrityError("its stored bytes differ from the checksum in the index, twice; copy the shard again")


class FetchThreads:
    """A few daemon threads that run reads in the order they are given."""

    def __init__(self, num_threads: int) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"streamvid-fetch-{i}", daemon=True) for i in range(num_threads)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            self.close()
            raise

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job`, which must not raise, on the next free thread."""
        self._queue.put(job)

    def close(self) -> None:
        """Finish what is queued and end the threads."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            job()
