"""Decode workers of one loader, as seen from the loader's process.

All workers receive tasks from one socket and answer on another: the kernel passes each task to a free worker. A worker
is a fresh interpreter that inherits no state from the caller. It ends when the loader closes its ends of the sockets,
which also happens when the loader's process dies.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TypeAlias

from streamvid.errors import LoaderError, WorkerError
from streamvid.host.processes import describe_exit, end_workers, start_worker
from streamvid.host.worker import SHOW_STACK
from streamvid.loader.workers.arena import Arena
from streamvid.loader.workers.board import Board
from streamvid.loader.workers.messages import MAX_MESSAGE_BYTES, Answer, Task, parse_answers, task_messages
from streamvid.loader.workers.worker import TaskRunner

# Function that the serving thread calls for each task that is finished.
Heard = Callable[[Answer], None]

_ENTRY = "streamvid.loader.workers.worker:main"
_END_SECONDS = 5.0
_SHOW_SECONDS = 0.5  # for a worker on a busy machine to print its stack
# Otherwise glibc would keep the picture memory of a closed decoder for reuse and fragment it.
_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(2**18), "MALLOC_TRIM_THRESHOLD_": str(2**24)}


class DecodePool:
    """Pool of `num_workers` decode processes that read clips from one shared arena and write frames to another.

    opens_stores: True if the workers read from object stores themselves.
    is_ready: True once a worker has started.

    Raises LoaderError if workers cannot be started.
    """

    def __init__(self, num_workers: int, clips: Arena, ring: Arena, *, opens_stores: bool = False) -> None:
        self._closed = self.is_ready = False
        self._workers: list[subprocess.Popen[bytes]] = []
        self._pidfds: dict[int, subprocess.Popen[bytes]] = {}
        self._sockets: list[socket.socket] = []
        self._left: deque[bytes] = deque()  # tasks for which the socket had no room; the serving thread sends them
        self._poller = select.poll()
        num_bytes = Board.num_bytes(num_workers)
        self._shared = Arena("tasks", num_bytes)
        self._board = Board(self._shared.view[:num_bytes])
        for number in range(num_workers):
            self._board.end(number)
        try:
            self._start(num_workers, clips, ring, opens_stores)
        except BaseException as error:
            self.close()
            if not isinstance(error, OSError):
                raise
            raise LoaderError(
                f"cannot start {num_workers} decode workers: {error}; lower num_workers, or set it to 0 to decode in "
                "a thread of this process"
            ) from error

    def _start(self, num_workers: int, clips: Arena, ring: Arena, opens_stores: bool) -> None:
        with contextlib.ExitStack() as theirs:
            ends = []
            for _ in range(2):
                mine, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self._sockets.append(mine)
                ends.append(theirs.enter_context(end).fileno())
            self._answers, self._tasks = self._sockets
            self._poller.register(self._answers, select.POLLIN)
            descriptors = (*ends, clips.fd, ring.fd, self._shared.fd)
            for number in range(num_workers):
                worker = start_worker(
                    _ENTRY, descriptors, [str(number)], environment=_ENVIRONMENT, opens_stores=opens_stores
                )
                self._workers.append(worker)
                pidfd = os.pidfd_open(worker.pid)
                self._pidfds[pidfd] = worker
                self._poller.register(pidfd, select.POLLIN)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process IDs of the workers."""
        return tuple(worker.pid for worker in self._workers)

    def submit(self, tasks: Sequence[Task]) -> None:
        """Queue tasks for the next free worker, without waiting. Workers receive tasks in the order of submission."""
        for message in task_messages(tasks):
            if self._left or not self._send(message):
                self._left.append(message)

    def _send(self, message: bytes) -> bool:
        """Send a message to the next free worker. Return False if the socket has no room."""
        try:
            self._tasks.send(message, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:  # no worker is left; `serve` reports how they died
            pass
        return True

    def _send_left(self) -> None:
        while self._left and self._send(self._left[0]):
            self._left.popleft()

    def serve(self, timeout_seconds: float, heard: Heard) -> None:
        """Pass the answers in one message to `heard`, waiting up to `timeout_seconds` for it.

        Raises WorkerError if a worker died.
        """
        ready = {fd for fd, _ in self._poller.poll(timeout_seconds * 1000)}
        if self._answers.fileno() in ready:
            self._receive(heard)
        self._send_left()
        for pidfd in ready & self._pidfds.keys():
            worker = self._pidfds[pidfd]
            if not self._closed and worker.poll() is not None:
                raise self._death(worker)

    def _receive(self, heard: Heard) -> None:
        # One message: a second call would usually find none, and raising its exception takes longer than polling again.
        try:
            message = self._answers.recv(MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        for answer in parse_answers(message) if message else ():
            if answer.kind == "ready":
                self.is_ready = True
            else:
                heard(answer)

    def begun(self) -> dict[int, float]:
        """Return a mapping from the id of each task in progress to the task's start time."""
        return {task_id: since for _, task_id, since in self._board.tasks()}

    def _current(self) -> dict[int, int]:
        """Return a mapping from the process ID of each busy worker to the ID of the worker's task."""
        return {self._workers[number].pid: task_id for number, task_id, _ in self._board.tasks()}

    def kill(self, task_id: int) -> None:
        """Kill the worker that is running a stuck task, or all workers if no worker is running the task.

        Before that, workers that are running a task print their stack traces to standard error. This method acquires no
        lock and never raises.
        """
        current = self._current()
        stuck = [pid for pid, its_task in current.items() if its_task == task_id] or self.pids
        # A worker that has not started yet does not handle this signal, and would leave a core file.
        self._signal(SHOW_STACK, [pid for pid in stuck if pid in current])
        time.sleep(_SHOW_SECONDS)
        self._signal(signal.SIGKILL, stuck)

    def _signal(self, number: signal.Signals, pids: Sequence[int]) -> None:
        for pidfd, worker in list(self._pidfds.items()):
            if worker.pid in pids:
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(pidfd, number)

    def _death(self, worker: subprocess.Popen[bytes]) -> WorkerError:
        cause = "It crashed; see standard error for the cause"
        if worker.returncode == -signal.SIGKILL:
            cause = "The machine has probably run out of memory; lower num_workers or limits.prefetch_bytes"
        error = WorkerError(
            f"decode worker {worker.pid} {describe_exit(worker.returncode)}. {cause}. This loader cannot "
            "continue: create a new loader and load the last state"
        )
        error.task_id = self._current().get(worker.pid)
        return error

    def close(self) -> None:
        """End all workers and wait for them. A waiting call to `serve` also ends. Idempotent."""
        self._closed = True
        for end in self._sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # reaches workers even if a forked child holds a copy of this end
        end_workers(self._workers, _END_SECONDS)
        for end in self._sockets:
            end.close()
        while self._pidfds:
            os.close(self._pidfds.popitem()[0])
        self._board = Board(memoryview(b""))
        self._shared.close()


class InlineDecoder:
    """Decoder for num_workers=0, with the methods of DecodePool. The thread that calls `serve` decodes the tasks."""

    is_ready = False
    pids: tuple[int, ...] = ()

    def __init__(self, clips: Arena, ring: Arena) -> None:
        self._runner: TaskRunner | None = TaskRunner(clips.view, ring.map)
        self._queue: SimpleQueue[Task | None] = SimpleQueue()  # None: end
        self._begun: dict[int, float] = {}

    def begun(self) -> dict[int, float]:
        return self._begun

    def submit(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            self._queue.put(task)

    def serve(self, timeout_seconds: float, heard: Heard) -> None:
        try:
            task = self._queue.get(timeout=timeout_seconds)
        except Empty:
            return
        runner = self._runner
        if task is not None and runner is not None:
            self._begun = {task.task_id: time.monotonic()}
            answer = runner.run(task)
            self._begun = {}
            heard(answer)

    def kill(self, task_id: int) -> None:
        """Do nothing: a thread cannot be killed, and continues until its decoder returns."""

    def close(self) -> None:
        self._runner = None  # a reference to the loader must not keep its memory alive
        self._queue.put(None)


Decoder: TypeAlias = DecodePool | InlineDecoder
