"""Shared memory in which each decode worker writes what it works on, so that this takes no messages."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator

_ENTRY = struct.Struct("<qd")  # task id, and its start by the monotonic clock, which all processes share
_NO_TASK = -1


class Board:
    """Current task of each of several workers.

    memory: `Board.num_bytes(num_workers)` bytes of shared memory. A worker writes only its own entry, but a worker that
        a hostile clip has taken over may write anything anywhere (SAFE-1).
    """

    def __init__(self, memory: memoryview, num_workers: int) -> None:
        self._memory, self._num_workers = memory, num_workers

    @staticmethod
    def num_bytes(num_workers: int) -> int:
        """Return the size in bytes of the memory for so many workers."""
        return num_workers * _ENTRY.size

    def begin(self, worker: int, task_id: int) -> None:
        """Write that a worker begins a task now."""
        _ENTRY.pack_into(self._memory, worker * _ENTRY.size, task_id, time.monotonic())

    def end(self, worker: int) -> None:
        """Write that a worker has no task."""
        self.begin(worker, _NO_TASK)

    def tasks(self) -> Iterator[tuple[int, int, float]]:
        """Yield (worker, task id, start of the task) for each worker that has a task."""
        for worker in range(self._num_workers):
            task_id, since = _ENTRY.unpack_from(self._memory, worker * _ENTRY.size)
            if task_id != _NO_TASK:
                yield worker, task_id, since
