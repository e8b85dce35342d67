"""Shared memory in which each decode worker records its current task, so that reporting it needs no message."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator

# Start of a task by the monotonic clock, which all processes share, and its id. The id is written last.
_ENTRY = struct.Struct("<dq")
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
        """Return the size in bytes of the memory for `num_workers` workers."""
        return num_workers * _ENTRY.size

    def begin(self, worker: int, task_id: int) -> None:
        """Record the task that a worker is starting, with the current time."""
        _ENTRY.pack_into(self._memory, worker * _ENTRY.size, time.monotonic(), task_id)

    def end(self, worker: int) -> None:
        """Record that a worker has no task."""
        self.begin(worker, _NO_TASK)

    def tasks(self) -> Iterator[tuple[int, int, float]]:
        """Yield (worker, task id, start of the task) for each worker that has a task."""
        for worker in range(self._num_workers):
            since, task_id = _ENTRY.unpack_from(self._memory, worker * _ENTRY.size)
            if task_id != _NO_TASK:
                yield worker, task_id, since
