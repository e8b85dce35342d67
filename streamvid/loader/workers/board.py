"""Shared memory in which each decode worker records its current task, so that reporting it needs no message."""

from __future__ import annotations

import time
from collections.abc import Iterator

_ENTRY_BYTES = 16  # two 64-bit integers: the start of the task in monotonic nanoseconds, then its id
_NO_TASK = -1


class Board:
    """Current task of each of several workers.

    memory: `Board.num_bytes(num_workers)` bytes of shared memory. A worker writes only its own entry, but a worker that
        a hostile clip has taken over may write anything anywhere (SAFE-1).
    """

    def __init__(self, memory: memoryview) -> None:
        self._cells = memory.cast("q")

    @staticmethod
    def num_bytes(num_workers: int) -> int:
        """Return the size in bytes of the memory for `num_workers` workers."""
        return num_workers * _ENTRY_BYTES

    def begin(self, worker: int, task_id: int) -> None:
        """Record a task that a worker is starting, and the current time."""
        self._cells[2 * worker] = time.monotonic_ns()
        self._cells[2 * worker + 1] = task_id  # last, so that no reader sees the id with an earlier start

    def end(self, worker: int) -> None:
        """Record that a worker has no task."""
        self._cells[2 * worker + 1] = _NO_TASK

    def tasks(self) -> Iterator[tuple[int, int, float]]:
        """Yield (worker, task id, start of the task in monotonic seconds) for each worker that has a task."""
        for worker in range(len(self._cells) // 2):
            task_id = self._cells[2 * worker + 1]
            if task_id != _NO_TASK:
                yield worker, task_id, self._cells[2 * worker] / 1e9
