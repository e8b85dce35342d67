"""Passes over all files of a dataset: listing, parallel processing, and reading in blocks."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from queue import SimpleQueue
from typing import TypeAlias, TypeVar, cast

from streamvid.dataset.manifest import FileInfo, ShardInfo, offsets_path
from streamvid.dataset.reader import Dataset
from streamvid.errors import ConfigError
from streamvid.storage import Store

Progress: TypeAlias = Callable[[str, int, int], None]
"""Callback that receives (phase, done, total)."""

BLOCK_BYTES = 16 * 2**20
DEFAULT_WORKERS = 8
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_Answer: TypeAlias = SimpleQueue[tuple[_Result | None, BaseException | None]]


class Stopped(Exception):
    """Exception that stops a reader if the pass ends while the reader is still reading a file."""


def no_progress(phase: str, done: int, total: int) -> None:
    """Ignore a progress report."""


def shard_files(shard: ShardInfo) -> tuple[FileInfo, FileInfo]:
    """Return descriptions of a shard's tar file and offsets file."""
    return (
        FileInfo(shard.path, shard.num_bytes, shard.sha256),
        FileInfo(offsets_path(shard.path), shard.offsets_num_bytes, shard.offsets_sha256),
    )


def dataset_files(dataset: Dataset) -> Iterator[FileInfo]:
    """Yield every file of a dataset except its manifest."""
    yield from dataset.manifest.files
    for shard in dataset.shards:
        yield from shard_files(shard)


def count_files(dataset: Dataset) -> int:
    """Return the number of files that `dataset_files` yields."""
    return len(dataset.manifest.files) + 2 * len(dataset.shards)


def read_blocks(
    store: Store, path: str, num_bytes: int, stop: threading.Event, version: str = ""
) -> Iterator[memoryview]:
    """Yield the bytes of a file in blocks of at most 16 MiB. Each block overwrites the previous block in memory.

    Raises StorageError if the file cannot be read, and Stopped when `stop` is set.
    """
    buffer = memoryview(bytearray(min(BLOCK_BYTES, num_bytes)))
    for start in range(0, num_bytes, BLOCK_BYTES):
        if stop.is_set():
            raise Stopped
        block = buffer[: min(BLOCK_BYTES, num_bytes - start)]
        store.read_ranges(path, [(start, block)], version)
        yield block


def in_parallel(
    job: Callable[[_Item, threading.Event], _Result], items: Iterable[_Item], workers: int
) -> Generator[_Result]:
    """Yield the results of `job(item, stop)` in the order of `items`, processing at most `workers` items at a time.

    The pass ends at the first error, or when the caller stops iterating. `stop` is then set, and all threads have
    ended when this generator returns. This function does not use
    `concurrent.futures`, whose threads could wait forever for a lock that an interrupted caller still holds.
    """
    stop = threading.Event()
    tasks: SimpleQueue[tuple[_Item, _Answer[_Result]] | None] = SimpleQueue()  # None ends a thread
    waiting: deque[_Answer[_Result]] = deque()
    threads: list[threading.Thread] = []
    try:
        for item in items:
            waiting.append(SimpleQueue())
            tasks.put((item, waiting[-1]))
            if len(threads) < workers:
                name = f"streamvid-pass_{len(threads)}"
                threads.append(threading.Thread(target=_serve, args=(job, tasks, stop), name=name, daemon=True))
                threads[-1].start()
            if len(waiting) >= 2 * workers:
                yield _taken(waiting.popleft())
        while waiting:
            yield _taken(waiting.popleft())
    finally:
        stop.set()
        for _ in threads:
            tasks.put(None)
        for thread in threads:
            if thread.ident is not None:  # an interrupt may have arrived before the thread started
                thread.join()


def _serve(
    job: Callable[[_Item, threading.Event], _Result],
    tasks: SimpleQueue[tuple[_Item, _Answer[_Result]] | None],
    stop: threading.Event,
) -> None:
    while (task := tasks.get()) is not None:
        item, answer = task
        if stop.is_set():
            continue
        try:
            answer.put((job(item, stop), None))
        except BaseException as error:  # noqa: BLE001 - raised again in the thread of the caller
            answer.put((None, error))


def _taken(answer: _Answer[_Result]) -> _Result:
    result, error = answer.get()
    if error is None:
        return cast(_Result, result)
    try:
        raise error
    finally:
        del error  # break the reference cycle of the error and this frame


def check_workers(workers: int) -> int:
    """Return `workers`. Raises ConfigError unless it is a valid number of threads."""
    if isinstance(workers, bool) or not isinstance(workers, int) or not 1 <= workers <= 256:
        raise ConfigError(f"workers={workers!r}: must be an integer from 1 to 256")
    return workers
