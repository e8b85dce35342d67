"""Local engine that runs independent units of work in worker processes.

A unit that kills its worker does not affect others. Each worker has one unit at a time. Units are pickled, because a
worker trusts its caller. Results are JSON, so that a compromised decoder cannot attack the caller.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

from streamvid import errors
from streamvid.host.processes import end_workers, start_worker

_ENTRY = "streamvid.sharder.work.worker:main"
# Each thread of a decoder reserves address space for malloc arenas, which counts toward the worker's memory limit.
_ENVIRONMENT = {"MALLOC_ARENA_MAX": "2"}
_READY = object()


@dataclass(frozen=True, slots=True)
class Crash:
    """Result of a unit that killed its worker twice, the second time while no other unit was running."""

    signal_number: int

    def __str__(self) -> str:
        return f"signal {self.signal_number}" if self.signal_number else "an unexpected exit"


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    unit: int | None = None
    is_ready: bool = False


class Pool:
    """Pool of worker processes for one kind of unit. The workers end when the `with` block ends.

    handler: function that workers call with a unit, as "module:function". It returns a JSON value.
    held_fd: file descriptor of a lock. Every worker keeps the descriptor open, so that the lock is held until the last
        worker has ended.
    opens_stores: True if units read or write object stores; see `start_worker`.
    timeout_seconds: time limit per unit; 0 for no limit.
    memory_bytes: memory limit per worker; 0 for no limit.
    """

    def __init__(
        self,
        handler: str,
        num_workers: int,
        held_fd: int,
        *,
        opens_stores: bool = False,
        timeout_seconds: float = 0.0,
        memory_bytes: int = 0,
    ) -> None:
        self._num_workers = num_workers
        self._held_fd = held_fd
        self._opens_stores = opens_stores
        self._arguments = (handler, str(timeout_seconds), str(memory_bytes))
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

    def run(self, num_units: int, make_unit: Callable[[int], Any]) -> Iterator[tuple[int, Any]]:
        """Yield (unit number, result) as units finish. The result is a Crash if the unit killed its worker.

        `make_unit(number)` is called just before the unit is sent. If a unit raises an error, this method raises the
        same error, and the run ends.
        """
        suspects: list[int] = []
        for number, result in self._run(iter(range(num_units)), make_unit, self._num_workers):
            if isinstance(result, Crash):
                suspects.append(number)
            else:
                yield number, result
        for number in sorted(suspects):
            # Another unit may have caused the crash through memory use or load, so the unit runs once more, alone.
            yield from self._run(iter([number]), make_unit, 1)

    def _run(
        self, numbers: Iterator[int], make_unit: Callable[[int], Any], num_workers: int
    ) -> Iterator[tuple[int, Any]]:
        busy: dict[Connection, _Worker] = {}
        while True:
            while len(busy) < num_workers and (following := next(numbers, None)) is not None:
                worker = self._idle_worker()
                worker.unit = following
                busy[worker.connection] = worker
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # reading detects a dead worker
                    worker.connection.send(make_unit(worker.unit))
            if not busy:
                return
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                worker, number = busy[ready], busy[ready].unit
                assert number is not None
                message = self._receive(worker)
                if message is not _READY:
                    del busy[ready]
                    worker.unit = None
                    yield number, message

    def _receive(self, worker: _Worker) -> Any:
        """Return the result of the worker's unit, a Crash if the worker died, or _READY if it has just started."""
        try:
            answer = json.loads(worker.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            self._workers.remove(worker)
            worker.connection.close()
            code = worker.process.wait()
            if not worker.is_ready and code >= 0:
                raise errors.StreamvidError(
                    f"a worker process ended with exit code {code} before its first unit of work; see its messages on "
                    "stderr, and increase work.worker_memory_bytes (--worker-memory) if it ran out of memory"
                ) from None
            return Crash(max(0, -code))
        if "ready" in answer:
            worker.is_ready = True
            return _READY
        return _result(answer)

    def _idle_worker(self) -> _Worker:
        for worker in self._workers:
            if worker.unit is None:
                return worker
        self._workers.append(self._start_worker())
        return self._workers[-1]

    def _start_worker(self) -> _Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            fds = (theirs.fileno(), self._held_fd)
            process = start_worker(_ENTRY, fds, self._arguments, _ENVIRONMENT, opens_stores=self._opens_stores)
        return _Worker(process, Connection(ours.detach()))


def _result(answer: Mapping[str, Any]) -> Any:
    if "error" not in answer:
        return answer["result"]
    kind = getattr(errors, answer["error"], None)
    raise (kind or RuntimeError)(answer["message"])


def timed_out(crash: Crash) -> bool:
    """Return True if the unit exceeded its time limit."""
    return crash.signal_number == signal.SIGALRM
