"""The local engine: independent tasks on worker processes, where a task that kills its worker costs nobody else's.

A worker is a fresh interpreter, so that nothing of the caller's (threads, locks, an unguarded `__main__`) is in it.
Each has one task at a time, and messages are JSON, so that what a decoder may have been talked into stays there.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

from streamvid import errors
from streamvid.host.processes import end_workers, start_worker

_ENTRY = "streamvid.sharder.work.worker:main"
# A decoder reserves address space for each of its threads, which counts against the limit on a worker's memory.
_ENVIRONMENT = {"MALLOC_ARENA_MAX": "2"}
_READY = object()


@dataclass(frozen=True, slots=True)
class Crash:
    """A task took its worker with it, twice: the second time with no other task running."""

    signal_number: int

    def __str__(self) -> str:
        return f"signal {self.signal_number}" if self.signal_number else "an unexpected exit"


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What one task may take; 0 is no limit."""

    timeout_seconds: float = 0.0
    memory_bytes: int = 0


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    task: int | None = None
    is_ready: bool = False


class Pool:
    """Worker processes for one kind of task. Use it in `with`: leaving ends them all.

    `handler` is "module:function": what workers call with a task's JSON value, for a result that is one too.

    `held_fd` is kept open by every worker: a lock on it lasts until the last of them is gone.
    """

    def __init__(self, handler: str, num_workers: int, limits: WorkerLimits, held_fd: int) -> None:
        self._handler, self._num_workers, self._limits, self._held_fd = handler, num_workers, limits, held_fd
        self._workers: list[_Worker] = []

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.connection.close()
        end_workers([worker.process for worker in self._workers])
        self._workers.clear()

    def run(self, num_tasks: int, make_task: Callable[[int], Any]) -> Iterator[tuple[int, Any]]:
        """(task number, result) in the order of finishing; the result is a Crash where the task kills its worker.

        `make_task(number)` gives a task as JSON values, when its turn comes. A StreamvidError that a task raises is
        raised here, and ends the run.
        """
        suspects: list[int] = []
        for number, result in self._run(deque(range(num_tasks)), make_task, self._num_workers):
            if isinstance(result, Crash):
                suspects.append(number)
            else:
                yield number, result
        for number in sorted(suspects):
            # Its worker died, but perhaps of what another one did to the machine's memory or time: once more, alone.
            yield from self._run(deque([number]), make_task, 1)

    def _run(self, queue: deque[int], make_task: Callable[[int], Any], num_workers: int) -> Iterator[tuple[int, Any]]:
        busy: dict[Connection, _Worker] = {}
        while queue or busy:
            while queue and len(busy) < num_workers:
                worker = self._idle_worker()
                worker.task = queue.popleft()
                busy[worker.connection] = worker
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # dead: its end of file is read next
                    worker.connection.send_bytes(json.dumps(make_task(worker.task)).encode())
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                worker, number = busy[ready], busy[ready].task
                assert number is not None
                message = self._receive(worker)
                if message is not _READY:
                    del busy[ready]
                    worker.task = None
                    yield number, message

    def _receive(self, worker: _Worker) -> Any:
        """The result of the worker's task, a Crash where it died of it, or _READY."""
        try:
            answer = json.loads(worker.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            self._workers.remove(worker)
            worker.connection.close()
            code = worker.process.wait()
            if not worker.is_ready and code >= 0:
                raise errors.StreamvidError(
                    f"a worker process ended with exit code {code} before it could work; what it wrote on the error "
                    "stream says why. Is worker_memory_bytes too low?"
                ) from None
            return Crash(max(0, -code))
        if "ready" in answer:
            worker.is_ready = True
            return _READY
        return _result(answer)

    def _idle_worker(self) -> _Worker:
        for worker in self._workers:
            if worker.task is None:
                return worker
        self._workers.append(self._start_worker())
        return self._workers[-1]

    def _start_worker(self) -> _Worker:
        ours, theirs = socket.socketpair()
        limits = (str(self._limits.timeout_seconds), str(self._limits.memory_bytes))
        with theirs:
            fds = (theirs.fileno(), self._held_fd)
            process = start_worker(_ENTRY, fds, (self._handler, *limits), _ENVIRONMENT)
        return _Worker(process, Connection(ours.detach()))


def _result(answer: dict[str, Any]) -> Any:
    if "error" not in answer:
        return answer["result"]
    kind = getattr(errors, answer["error"], None)
    raise (kind or RuntimeError)(answer["message"])


def timed_out(crash: Crash) -> bool:
    """Whether the worker was ended by its own clock."""
    return crash.signal_number == signal.SIGALRM
