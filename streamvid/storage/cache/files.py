"""Files of the local cache: block storage, claims on blocks, total size, and eviction.

    <folder>/streamvid-cache-1/.streamvid-cache          marks this folder as a streamvid cache
                              /.ledger                   total size of the files below, with a checksum
                              /ab/<sha256>-<block>       a block; its mtime is the approximate time of its last use
                              /ab/<sha256>-<block>.part  a block in progress, locked by its writer

The files are authoritative. The ledger stores their total size, so that the total need not be recomputed. If the
ledger's writer is killed, the total may be too high, but never too low, because bytes are added before a file grows and
subtracted after it is removed. The files are recounted when a process starts, when the cache is full, once an hour, and
after a reboot. A lock is released when its holder exits (host/lock.py).
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import stat
import struct
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from streamvid.errors import ConfigError
from streamvid.host.lock import FileLock, try_lock, wait_for_lock

_SUBFOLDER = "streamvid-cache-1"
_MARKER = ".streamvid-cache"
_LEDGER = ".ledger"
_PART = ".part"
_BLOCK_NAME = re.compile(r"[0-9a-f]{64}-(?:0|[1-9][0-9]{0,11})(\.part)?")
_RECORD = struct.Struct("<8sqdI")
_MAGIC = b"svcache1"
_FILE_MODE = 0o600
_LOCK_SECONDS = 10.0
_RECOUNT_SECONDS, _RECOUNT_AT_OPEN_SECONDS = 3600.0, 10.0
_FUTURE_SECONDS = 60.0
_SLACK = 16  # a full cache frees an additional 1/16 of its size, so that files are rarely listed


@dataclass(slots=True, eq=False)
class CacheBlock:
    """Block-aligned part of an object.

    pieces: wanted parts of the block, as (offset in the block, buffer) pairs.
    lock: claim that allows its holder to write the block. The locked `.part` file later becomes the
        block.
    """

    path: str
    offset: int
    size: int
    pieces: list[tuple[int, memoryview]] = field(default_factory=list)
    lock: FileLock | None = None

    @property
    def num_bytes_wanted(self) -> int:
        return sum(len(buffer) for _, buffer in self.pieces)

    @property
    def descriptor(self) -> int:
        """File descriptor of the open `.part` file of a claimed block."""
        assert self.lock is not None
        return self.lock.descriptor

    def whole(self) -> memoryview:
        """Return memory for the whole block: the buffer of a piece that covers the block, or new memory."""
        for start, buffer in self.pieces:
            if start == 0 and len(buffer) == self.size:
                return buffer
        return memoryview(bytearray(self.size))

    def release(self) -> None:
        """Release the claim on the block, if any."""
        lock, self.lock = self.lock, None
        if lock is not None:
            lock.release()


@dataclass(frozen=True, slots=True)
class CacheFolder:
    """Cache folder on a local disk. Methods raise OSError if a disk operation or a lock fails."""

    folder: Path
    max_bytes: int

    @property
    def root(self) -> str:
        return os.path.join(self.folder, _SUBFOLDER)  # noqa: PTH118 - text is faster than Path in frequent calls

    def path(self, name: str, block: int) -> str:
        return f"{self.root}/{name[:2]}/{name}-{block}"

    def open(self) -> int:
        """Create or validate the folder, and recount its files if necessary. Return the number of evicted blocks.

        Raises ConfigError if the folder is not a cache.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.root, 0o700)  # noqa: PTH102
        status = os.lstat(self.root)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise self._foreign("the subfolder is a symbolic link or a file, or belongs to another user")
        if not self._is_marked() and os.listdir(self.root) and not self._is_marked():  # noqa: PTH208
            raise self._foreign(f"the subfolder is not empty and does not contain {_MARKER}")
        os.chmod(self.root, 0o700)  # noqa: PTH101
        if not self._is_marked():
            flags = os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
            os.close(os.open(f"{self.root}/{_MARKER}", flags, 0o600))
        with self._ledger() as ledger:
            if abs(time.time() - ledger.counted_at) > _RECOUNT_AT_OPEN_SECONDS or ledger.total > self.max_bytes:
                return self._make_room(ledger, 0)
        return 0

    def _is_marked(self) -> bool:
        try:
            return stat.S_ISREG(os.lstat(f"{self.root}/{_MARKER}").st_mode)
        except FileNotFoundError:
            return False

    def _foreign(self, why: str) -> ConfigError:
        return ConfigError(
            f"cache_dir={str(self.folder)!r}: its subfolder {_SUBFOLDER} is not a streamvid cache ({why}). Nothing in "
            "the subfolder was changed. Choose another cache_dir, or move the subfolder elsewhere"
        )

    def claim(self, block: CacheBlock) -> bool:
        """Claim a block. Return False if another reader has claimed the block.

        The caller must release the claim after use.
        """
        part = block.path + _PART
        _check_folder(part)
        try:
            block.lock = try_lock(part, _FILE_MODE)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                os.mkdir(os.path.dirname(part), 0o700)  # noqa: PTH102, PTH120
            block.lock = try_lock(part, _FILE_MODE)
        return block.lock is not None

    def reserve(self, blocks: Sequence[CacheBlock]) -> tuple[list[CacheBlock], int]:
        """Reserve space for claimed blocks. Return (blocks that do not fit, number of evicted blocks)."""
        without_room, evicted = [], 0
        with self._ledger() as ledger:
            needs = [block.size - os.fstat(block.descriptor).st_size for block in blocks]
            if ledger.total + sum(needs) > self.max_bytes:
                evicted = self._make_room(ledger, min(sum(needs), self.max_bytes))
            for block, need in zip(blocks, needs, strict=True):
                if ledger.total + need <= self.max_bytes:
                    ledger.add(max(need, 0))
                    os.ftruncate(block.descriptor, block.size)
                    ledger.add(min(need, 0))
                else:
                    without_room.append(block)
        return without_room, evicted

    def commit(self, blocks: Sequence[CacheBlock]) -> None:
        """Rename the written `.part` files of these blocks to their final names, and release the claims."""
        with self._ledger() as ledger:
            for block in blocks:
                replaced = _size(block.path)
                os.rename(block.path + _PART, block.path)  # noqa: PTH104
                ledger.add(-replaced)
                block.release()

    def release(self, blocks: Sequence[CacheBlock]) -> None:
        """Release claims that were not committed. Never raises OSError: leftover files are removed later."""
        held = [block for block in blocks if block.lock is not None]
        if not held:
            return
        try:
            with contextlib.suppress(OSError):
                # After an interrupted `commit`, a claimed file may already have its final name.
                left = [block for block in held if block.lock and block.lock.is_at(block.path + _PART)]
                if not any(os.fstat(block.descriptor).st_size for block in left):
                    for block in left:
                        os.unlink(block.path + _PART)  # noqa: PTH108
                else:
                    with self._ledger() as ledger:
                        for block in left:
                            self._remove(ledger, block.path + _PART)
        finally:
            for block in held:
                block.release()

    def forget(self, paths: Sequence[str]) -> list[str]:
        """Remove the blocks at `paths`. Return the paths that could not be removed."""
        kept = []
        with self._ledger() as ledger:
            for path in paths:
                try:
                    self._remove(ledger, path)
                except OSError:
                    kept.append(path)
        return kept

    def num_bytes(self) -> int:
        """Return the total size of the cached files according to the ledger, or 0 if there is no valid ledger.

        This method does not wait for the ledger's lock.
        """
        try:
            descriptor = os.open(f"{self.root}/{_LEDGER}", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return 0
        try:
            ledger = _Ledger(descriptor)
            return ledger.total if ledger.read() else 0
        finally:
            os.close(descriptor)

    def _remove(self, ledger: _Ledger, path: str) -> None:
        _check_folder(path)
        size = _size(path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # noqa: PTH108
            ledger.add(-size)

    @contextlib.contextmanager
    def _ledger(self) -> Iterator[_Ledger]:
        """Lock the ledger, and yield it.

        Wait only a few seconds for the lock, because a stopped process may hold it.
        """
        with wait_for_lock(f"{self.root}/{_LEDGER}", _LOCK_SECONDS, mode=_FILE_MODE) as lock:
            ledger = _Ledger(lock.descriptor)
            if not ledger.read() or abs(time.time() - ledger.counted_at) > _RECOUNT_SECONDS:
                ledger.set(sum(size for _, size, _ in self._files()))
            yield ledger

    def _make_room(self, ledger: _Ledger, need: int) -> int:
        """Recount the files, and evict blocks if `need` more bytes do not fit. Return the number of evicted blocks."""
        files = list(self._files())
        total = sum(size for _, size, _ in files)
        ledger.set(total)
        if total + need <= self.max_bytes:
            return 0
        most = max(0, self.max_bytes - need - self.max_bytes // _SLACK)
        evicted = 0
        for _, size, path in _by_worth(file for file in files if not file[2].endswith(_PART)):
            if total <= most:
                break
            with contextlib.suppress(OSError):
                os.unlink(path)  # noqa: PTH108
                total -= size
                evicted += 1
        ledger.set(total)
        return evicted

    def _files(self) -> Iterator[tuple[float, int, str]]:
        """Yield (last use, size in bytes, path) for each file in the cache. Remove `.part` files without a writer."""
        now = time.time()
        for folder in os.scandir(self.root):
            if not re.fullmatch("[0-9a-f]{2}", folder.name) or not folder.is_dir(follow_symlinks=False):
                continue
            for entry in os.scandir(folder.path):
                match = _BLOCK_NAME.fullmatch(entry.name)
                if not match or entry.name[:2] != folder.name:
                    continue
                if match[1] and _remove_dead(entry.path):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        # A time in the future, from a clock that was wrong, must not protect a block forever.
                        used = status.st_mtime if status.st_mtime < now + _FUTURE_SECONDS else 0.0
                        yield used, status.st_size, entry.path


def _by_worth(files: Iterable[tuple[float, int, str]]) -> list[tuple[float, int, str]]:
    """Return the files in the order in which they are evicted.

    The least recently used files come first, in random order. The most recently used quarter (at least four
    files) comes last. storage/README.md compares this order with LRU.
    """
    ordered = sorted(files)
    older = max(0, len(ordered) - 4) * 3 // 4
    return random.sample(ordered[:older], older) + ordered[older:]


class _Ledger:
    """Total size of all cached files, stored in a ledger file that is locked during each change."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.total, self.counted_at = 0, 0.0

    def read(self) -> bool:
        """Read the total from the ledger file.

        Return False if the file is damaged, or was written before the last boot. A power failure may lose writes, so a
        total from before the last boot may be wrong."""
        data = os.pread(self._descriptor, _RECORD.size + 1, 0)
        if len(data) != _RECORD.size or data != _record(*_RECORD.unpack(data)[1:3]):
            return False
        _, self.total, self.counted_at, _ = _RECORD.unpack(data)
        return self.total >= 0

    def add(self, num_bytes: int) -> None:
        if num_bytes:
            self.total += num_bytes
            self._write()

    def set(self, total: int) -> None:
        self.total, self.counted_at = total, time.time()
        self._write()

    def _write(self) -> None:
        os.ftruncate(self._descriptor, _RECORD.size)
        os.pwrite(self._descriptor, _record(self.total, self.counted_at), 0)


def _record(total: int, counted_at: float) -> bytes:
    body = _RECORD.pack(_MAGIC, total, counted_at, 0)[:-4]
    return body + struct.pack("<I", zlib.crc32(body, _boot()))


@cache
def _boot() -> int:
    try:
        return zlib.crc32(Path("/proc/sys/kernel/random/boot_id").read_bytes())
    except OSError:
        return 0


def _check_folder(path: str) -> None:
    """Raise NotADirectoryError if the folder that contains `path` is a symbolic link."""
    folder = os.path.dirname(path)  # noqa: PTH120
    if os.path.islink(folder):  # noqa: PTH114
        raise NotADirectoryError(errno.ENOTDIR, "a folder in the cache is a symbolic link", folder)


def _remove_dead(part: str) -> bool:
    """Remove a `.part` file whose writer has exited. Return False if the file is locked or cannot be removed."""
    try:
        with try_lock(part, _FILE_MODE) or contextlib.nullcontext() as lock:
            if lock is None:
                return False
            os.unlink(part)  # noqa: PTH108
    except OSError:
        return False
    return True


def _size(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except FileNotFoundError:
        return 0
