"""Anonymous memory shared with decode workers, and the allocator of its blocks.

One thread allocates; any thread may release, even during garbage collection, because a release only puts a block on a
queue. Memory comes from memfd: it is not limited by the size of /dev/shm, leaves no file behind, and returns to the
kernel when the last process releases it.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable
from queue import Empty, SimpleQueue

from streamvid.errors import LoaderError
from streamvid.host.resources import usable_bytes

ALIGN_BYTES = 4096


def align(num_bytes: int) -> int:
    """Round a number of bytes up to whole pages."""
    return -(-max(1, num_bytes) // ALIGN_BYTES) * ALIGN_BYTES


class Block:
    """Block of memory in an arena. It is released once, on request or when this object is freed."""

    def __init__(self, arena: Arena, offset: int) -> None:
        self.offset = offset  # no view of the memory: an interrupted destructor would keep it forever
        self._release = [arena.release]

    def release(self, when: Callable[[], None] | None = None) -> None:
        """Release the block; see Arena.release. Idempotent."""
        try:
            release = self._release.pop()
        except IndexError:
            return
        release(self.offset, when)

    def __del__(self) -> None:
        self.release()


class Arena:
    """Zeroed shared memory of `num_bytes` bytes with a first-fit allocator of page-aligned blocks.

    fd: file descriptor for child processes; -1 if the platform has no memfd.
    """

    def __init__(self, name: str, num_bytes: int) -> None:
        self.num_bytes = align(num_bytes)
        self.fd = -1
        try:
            usable = usable_bytes()
            if self.num_bytes > usable:  # the kernel grants the addresses, but kills processes as they fill them
                raise OSError(f"only {usable} bytes are available on this machine, or in this container or job")
            if sys.platform == "linux":
                self.fd = os.memfd_create(f"streamvid-{name}", os.MFD_CLOEXEC)
                os.ftruncate(self.fd, self.num_bytes)
            self.map = mmap.mmap(self.fd, self.num_bytes)
        except (OSError, ValueError) as error:
            if self.fd >= 0:
                os.close(self.fd)
            raise LoaderError(
                f"cannot allocate {self.num_bytes} bytes of memory for the {name}: {error}; "
                "lower limits.prefetch_bytes or the batch size of the largest bucket"
            ) from error
        self.view = memoryview(self.map)
        self._free: list[tuple[int, int]] = [(0, self.num_bytes)]  # (offset, size), by offset, never adjacent
        self._sizes: dict[int, int] = {}
        self._held: set[int] = set()  # offsets; changed in single steps, because a destructor may release in any thread
        self._released: SimpleQueue[tuple[int, Callable[[], None] | None] | None] = SimpleQueue()

    @property
    def num_allocated(self) -> int:
        """Number of blocks in use. Thread-safe."""
        return len(self._held)

    def allocate(self, num_bytes: int, timeout_seconds: float) -> int | None:
        """Allocate a block, waiting until one fits. Return its offset, or None on timeout or after `wake`."""
        while (offset := self._try_allocate(num_bytes)) is None:
            try:
                item = self._released.get(timeout=timeout_seconds)
            except Empty:
                return None
            if item is None:
                return None
            self._take_back(*item)
        return offset

    def release(self, offset: int, when: Callable[[], None] | None = None) -> None:
        """Release a block. `when` is called before the memory is reused, and may block."""
        self._held.discard(offset)  # first, because the block may be allocated again once it is in the queue
        self._released.put((offset, when))

    def wake(self) -> None:
        """Make any waiting call to `allocate` return None."""
        self._released.put(None)

    def close(self) -> None:
        """Release the memory. It stays mapped until the last array that uses it is freed.

        Another thread may still write the run number to the first page of `view`. After `close`, this has no effect.
        """
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self.view = memoryview(bytearray(ALIGN_BYTES))
        del self.map

    def _try_allocate(self, num_bytes: int) -> int | None:
        self._collect()
        needed = align(num_bytes)
        for place, (offset, size) in enumerate(self._free):
            if size >= needed:
                self._free[place : place + 1] = [(offset + needed, size - needed)] if size > needed else []
                self._sizes[offset] = needed
                self._held.add(offset)
                return offset
        return None

    def _collect(self) -> None:
        while True:
            try:
                item = self._released.get_nowait()
            except Empty:
                return
            if item is not None:
                self._take_back(*item)

    def _take_back(self, offset: int, when: Callable[[], None] | None) -> None:
        if when is not None:
            when()
        self._free.append((offset, self._sizes.pop(offset)))
        self._free.sort()
        merged: list[tuple[int, int]] = []
        for start, size in self._free:
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((start, size))
        self._free = merged
