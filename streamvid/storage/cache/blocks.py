"""Cache of blocks of remote objects on a local disk, shared by the ranks and jobs of a machine.

Cached bytes are not trusted. Readers verify them against the checksums in the index and call `discard` if they are
wrong. If the disk fails, the cache logs a warning once and reads from the store.

Put the folder on a local disk; host/lock.py lists the requirements of the locks. If several machines share a folder,
each of them recounts the files repeatedly.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from streamvid.errors import ConfigError, StorageError
from streamvid.storage.cache.files import CacheBlock, CacheFolder
from streamvid.storage.local import fill
from streamvid.storage.store import Ranges
from streamvid.storage.wanted import CANCELLED, is_wanted

_log = logging.getLogger(__name__)

BLOCK_BYTES = 8 * 2**20

_MOST_FETCHED = 2.0  # limit on the fetched bytes in a full cache, as a multiple of the wanted bytes
_TOUCH_SECONDS = 10.0  # resolution of a block's time of last use, so that most hits write nothing
_PAUSE_SECONDS = 60.0  # time without the cache after a disk error
_NAME = re.compile("[0-9a-f]{64}")
_COUNTS = ("hits", "misses", "bytes_from_cache", "bytes_fetched", "evicted")

Fetch = Callable[[Ranges], None]


@dataclass(frozen=True)
class CacheStats:
    """Statistics on this process's reads through the cache, and the size of the cache folder.

    hits, bytes_from_cache: number of blocks read from the disk, and number of bytes that readers requested from these
        blocks.
    misses, bytes_fetched: number of blocks read from the store, and number of bytes received.
    evicted: number of blocks that this process removed to make room.
    num_bytes: total size of the files in the cache, which all processes share; at most max_bytes.
    """

    hits: int
    misses: int
    bytes_from_cache: int
    bytes_fetched: int
    evicted: int
    num_bytes: int
    max_bytes: int


@dataclass(slots=True)
class _Process:
    """Per-process state of the cache. A forked child starts with a new state and an unlocked lock."""

    pid: int = field(default_factory=os.getpid)
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_open: bool = False
    was_open: bool = False
    has_warned: bool = False
    paused_until: float = 0.0
    wrong: set[str] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    recently_wanted: float = 0.0  # in bytes; older traffic counts less
    recently_fetched: float = 0.0


class BlockCache:
    """Size-limited folder of cached blocks. Nothing is opened or created before the first read.

    Thread-safe and fork-safe. The constructor raises ConfigError if `max_bytes` is smaller than a block. The first read
    raises ConfigError if the folder is not a cache.

    wait_seconds: time to wait for a block that another reader is fetching. Afterwards, this reader fetches the block
        itself.
    """

    def __init__(self, folder: Path, max_bytes: int, *, wait_seconds: float = 10.0) -> None:
        if max_bytes < BLOCK_BYTES:
            raise ConfigError(
                f"cache_bytes={max_bytes}: must be at least {BLOCK_BYTES} bytes, the size of one block; use several "
                "GB, or omit cache_dir and cache_bytes"
            )
        self._folder = CacheFolder(Path(folder).absolute(), max_bytes)
        self._wait_seconds = wait_seconds
        self._state = _Process()

    def read_ranges(self, name: str, num_bytes: int, ranges: Ranges, fetch: Fetch) -> None:
        """Fill every buffer with the bytes at its offset in the object.

        Each block that will be cached is held in memory as a whole.

        name: SHA-256 of the whole object, as 64 hex digits.
        num_bytes: size of the object.
        fetch: function that reads the given ranges from the store. The ranges are whole blocks, or only the wanted
            bytes if the blocks cannot be stored. The function is called once for all missing blocks, and again only for
            blocks that another reader failed to fetch. Errors that the function raises propagate.
        """
        blocks = self._blocks(name, num_bytes, ranges)
        self._open()
        missing = [block for block in blocks if not self._read(block)]
        if not missing:
            return
        busy = self._bring(missing, fetch, self._try)
        if busy:
            deadline = time.monotonic() + self._wait_seconds
            self._bring(busy, fetch, lambda block: self._wait(block, deadline))

    def discard(self, name: str, ranges: Sequence[tuple[int, int]]) -> None:
        """Remove the blocks that overlap any (offset, num_bytes) range, because their bytes are wrong."""
        _check_name(name)
        numbers = {
            number
            for offset, size in ranges
            for number in range(offset // BLOCK_BYTES, -(-(offset + size) // BLOCK_BYTES))
        }
        paths = [self._folder.path(name, number) for number in sorted(numbers)]
        self._open()
        try:
            kept = self._folder.forget(paths)
        except OSError as error:
            self._give_up(error)
            kept = paths
        self._process().wrong.update(path for path in kept if os.path.lexists(path))

    def stats(self) -> CacheStats:
        process = self._process()
        with process.lock:
            counts = {name: process.counts[name] for name in _COUNTS}
        return CacheStats(**counts, num_bytes=self._folder.num_bytes(), max_bytes=self._folder.max_bytes)

    def _process(self) -> _Process:
        if self._state.pid != os.getpid():
            self._state = _Process()
        return self._state

    def _open(self) -> None:
        process = self._process()
        if process.is_open or time.monotonic() < process.paused_until:
            return
        with process.lock:
            if process.is_open:
                return
            try:
                process.counts["evicted"] += self._folder.open()
                process.is_open = process.was_open = True
            except ConfigError:
                if not process.was_open:
                    raise
                process.paused_until = time.monotonic() + _PAUSE_SECONDS
            except OSError as error:
                self._give_up(error)

    def _blocks(self, name: str, num_bytes: int, ranges: Ranges) -> list[CacheBlock]:
        _check_name(name)
        found: dict[int, CacheBlock] = {}
        for offset, buffer in ranges:
            end = offset + len(buffer)
            if offset < 0 or end > num_bytes:
                raise StorageError(
                    f"the index refers to bytes {offset} to {end} of object {name[:16]}…, but the object has only "
                    f"{num_bytes} bytes; verify the dataset"
                )
            at = offset
            while at < end:
                number, start = divmod(at, BLOCK_BYTES)
                if number not in found:
                    first = number * BLOCK_BYTES
                    size = min(BLOCK_BYTES, num_bytes - first)
                    found[number] = CacheBlock(self._folder.path(name, number), first, size)
                block = found[number]
                stop = min(end, block.offset + BLOCK_BYTES)
                block.pieces.append((start, buffer[at - offset : stop - offset]))
                at = stop
        return [found[number] for number in sorted(found)]

    def _read(self, block: CacheBlock) -> bool:
        """Fill the pieces of a block from its file. Return False if the file is missing, incomplete or unreadable."""
        process = self._process()
        if block.path in process.wrong:
            return False
        try:
            descriptor = os.open(block.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False
        except OSError as error:
            return self._give_up(error)
        try:
            status = os.fstat(descriptor)
            if status.st_size != block.size or not stat.S_ISREG(status.st_mode):
                return False
            if any(fill(descriptor, start, buffer) < len(buffer) for start, buffer in block.pieces):
                return False
            if abs(time.time() - status.st_mtime) > _TOUCH_SECONDS:
                with contextlib.suppress(OSError):  # hits can also be served from a read-only folder
                    os.utime(descriptor)
        except OSError as error:
            return self._give_up(error)
        finally:
            os.close(descriptor)
        with process.lock:
            process.counts["hits"] += 1
            process.counts["bytes_from_cache"] += block.num_bytes_wanted
            self._count(block.num_bytes_wanted, 0)
        return True

    def _try(self, block: CacheBlock) -> bool | None:
        """Read or claim a block.

        Return True if the block was read, False if this reader claimed it and must fetch it, or None if another reader
        has claimed it.
        """
        if time.monotonic() < self._process().paused_until or self._is_wasted(block):
            return False
        try:
            if not self._folder.claim(block):
                return None
        except OSError as error:
            return self._give_up(error)
        if not self._read(block):
            return False
        self._folder.release([block])
        return True

    def _is_wasted(self, block: CacheBlock) -> bool:
        """Return True if fetching the whole block would cost more traffic than caching it saves.

        If the cache is smaller than the shuffle window, blocks are evicted before their remaining parts are read.
        """
        process = self._process()
        if not process.counts["evicted"] or block.num_bytes_wanted >= block.size:
            return False
        return process.recently_fetched > _MOST_FETCHED * process.recently_wanted

    def _count(self, wanted: int, fetched: int) -> None:
        """Add bytes to the decaying counts of recent traffic. The caller must hold the process lock."""
        process = self._process()
        process.recently_wanted += wanted
        process.recently_fetched += fetched
        if process.recently_wanted + process.recently_fetched > 2 * self._folder.max_bytes:
            process.recently_wanted /= 2
            process.recently_fetched /= 2

    def _wait(self, block: CacheBlock, deadline: float) -> bool:
        """Wait while another reader fetches the block, then read or claim the block as `_try` does.

        Return True if the block was read. Return False if it must be fetched or the deadline has passed.
        """
        delay = 0.001
        while not self._read(block):
            got = self._try(block)
            if got is not None:
                return got
            if time.monotonic() >= deadline:
                return False
            if not is_wanted():
                raise StorageError(f"{block.path}: {CANCELLED}")
            time.sleep(delay)
            delay = min(delay * 1.5, 0.02)
        return True

    def _bring(
        self, blocks: list[CacheBlock], fetch: Fetch, get: Callable[[CacheBlock], bool | None]
    ) -> list[CacheBlock]:
        """Read or fetch the blocks. Return the blocks that other readers are fetching.

        This method is called at most twice per read. Readers cannot deadlock: the first call never waits, and the
        second call acquires locks in ascending order.
        """
        missing: list[CacheBlock] = []
        busy: list[CacheBlock] = []
        try:
            for block in blocks:
                got = get(block)
                if got is None:
                    busy.append(block)
                elif not got:
                    missing.append(block)
            if missing:
                self._reserve([block for block in missing if block.lock is not None])
                self._fetch(missing, fetch)
        finally:
            self._folder.release(blocks)
        return busy

    def _reserve(self, claimed: list[CacheBlock]) -> None:
        """Reserve space for the claimed blocks, and release the claims on blocks that do not fit."""
        process, without_room = self._process(), claimed
        if claimed:
            try:
                without_room, evicted = self._folder.reserve(claimed)
                with process.lock:
                    process.counts["evicted"] += evicted
            except OSError as error:
                self._give_up(error)
        self._folder.release(without_room)

    def _fetch(self, missing: list[CacheBlock], fetch: Fetch) -> None:
        """Fetch missing blocks: all bytes of claimed blocks, and only the wanted bytes of other blocks."""
        process = self._process()
        asked: list[tuple[int, memoryview]] = []
        whole: list[tuple[CacheBlock, memoryview]] = []
        for block in missing:
            if block.lock is not None:
                whole.append((block, block.whole()))
                asked.append((block.offset, whole[-1][1]))
            else:
                asked += [(block.offset + start, buffer) for start, buffer in block.pieces]
        fetch(asked)
        with process.lock:
            process.counts["misses"] += len(missing)
            num_fetched = sum(len(buffer) for _, buffer in asked)
            process.counts["bytes_fetched"] += num_fetched
            self._count(sum(block.num_bytes_wanted for block in missing), num_fetched)
        for block, memory in whole:
            for start, buffer in block.pieces:
                if buffer is not memory:
                    buffer[:] = memory[start : start + len(buffer)]
        if whole:
            self._keep(whole)

    def _keep(self, whole: list[tuple[CacheBlock, memoryview]]) -> None:
        try:
            for block, memory in whole:
                done = 0
                while done < len(memory):
                    done += os.pwrite(block.descriptor, memory[done:], done)
            self._folder.commit([block for block, _ in whole])
        except OSError as error:
            self._give_up(error)
        else:
            self._process().wrong.difference_update(block.path for block, _ in whole)

    def _give_up(self, error: OSError) -> Literal[False]:
        """Stop using the disk for a while. Log a warning once per process."""
        process = self._process()
        process.is_open = False
        process.paused_until = time.monotonic() + _PAUSE_SECONDS
        if not process.has_warned:
            process.has_warned = True
            _log.warning(
                "the cache in %s cannot be used (%s); reads go to the store, and the cache is retried every %.0f s. "
                "Free disk space, fix the folder's permissions, or choose another cache_dir",
                self._folder.folder,
                error,
                _PAUSE_SECONDS,
            )
        return False


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise StorageError(f"object name {name[:80]!r} is not a SHA-256 checksum of 64 hex digits; verify the dataset")
