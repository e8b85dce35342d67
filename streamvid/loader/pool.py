"""The decode workers of one loader, seen from the loader's process.

All workers take tasks from one socket and answer on another: the kernel hands each task to whoever is free. A worker
is a fresh interpreter with nothing of the caller's in it; it ends when the loader closes its ends of the sockets,
which the loader's own death does too.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Protocol

from streamvid.errors import StreamvidError, WorkerError
from streamvid.loader.arena import Arena
from streamvid.loader.worker import MAX_MESSAGE_BYTES, DecodeTask, decode_task

# Called with (task id, error text or None) for each finished task, from whichever thread serves answers.
Done = Callable[[int, str | None], None]

_START = "import sys, json; sys.path[:] = json.loads(sys.argv.pop(1)); from streamvid.loader.worker import main; "
_START += "main(*map(int, sys.argv[1:5]))"
_END_SECONDS = 5.0


class Decoder(Protocol):
    """What decodes tasks: a pool of processes, or the caller's own thread."""

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers, none for the caller's own thread."""
        ...

    def submit(self, task: DecodeTask) -> None:
        """Hand a task over; it is taken in order by whoever is free."""
        ...

    def serve(self, timeout_seconds: float, done: Done) -> None:
        """Report finished tasks, waiting for at most `timeout_seconds` for the first. Raises WorkerError."""
        ...

    def close(self) -> None: ...


class DecodePool:
    """`num_workers` decode processes over two shared arenas: clips in, frames out."""

    def __init__(self, num_workers: int, clips: Arena, ring: Arena) -> None:
        self._tasks, tasks_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._answers, answers_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._current: dict[int, int] = {}
        self._workers: list[subprocess.Popen[bytes]] = []
        self._closed = False
        try:
            with tasks_end, answers_end:
                fds = (tasks_end.fileno(), answers_end.fileno(), clips.fd, ring.fd)
                for _ in range(num_workers):
                    self._workers.append(_start_worker(fds))
            self._poller = select.poll()
            self._poller.register(self._answers, select.POLLIN)
            self._pidfds = {os.pidfd_open(worker.pid): worker for worker in self._workers}
            for pidfd in self._pidfds:
                self._poller.register(pidfd, select.POLLIN)
        except BaseException:
            self._pidfds = getattr(self, "_pidfds", {})
            self.close()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers."""
        return tuple(worker.pid for worker in self._workers)

    def submit(self, task: DecodeTask) -> None:
        """Hand a task to the next free worker; waits while very many are queued."""
        try:
            self._tasks.send(task.to_json())
        except OSError as error:
            if not self._closed:
                raise WorkerError(f"no decode worker takes tasks any more: {error}") from error

    def serve(self, timeout_seconds: float, done: Done) -> None:
        ready = {fd for fd, _ in self._poller.poll(timeout_seconds * 1000)}
        if self._answers.fileno() in ready:
            self._receive(done)
        for pidfd in ready & self._pidfds.keys():
            worker = self._pidfds[pidfd]
            if not self._closed and worker.poll() is not None:
                raise self._death(worker)

    def _receive(self, done: Done) -> None:
        while True:
            try:
                message = self._answers.recv(MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            if not message:
                return
            pid, task_id, kind, text = json.loads(message)
            if kind == "start":
                self._current[pid] = task_id
            else:
                self._current.pop(pid, None)
                done(task_id, text if kind == "error" else None)

    def _death(self, worker: subprocess.Popen[bytes]) -> WorkerError:
        code = worker.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        error = WorkerError(
            f"decode worker {worker.pid} {how}. SIGKILL mostly means that the machine ran out of memory: "
            "lower num_workers or prefetch_bytes; anything else is a crash in a decoder"
        )
        error.task_id = self._current.get(worker.pid)
        return error

    def close(self) -> None:
        """End all workers and wait for them; idempotent."""
        self._closed = True
        for end in (self._tasks, self._answers):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # reaches workers even where a forked child holds a copy of this end
            end.close()
        for worker in self._workers:
            try:
                worker.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
        for pidfd in self._pidfds:
            os.close(pidfd)
        self._pidfds = {}


def _start_worker(fds: tuple[int, int, int, int]) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    path = json.dumps([entry or str(Path.cwd()) for entry in sys.path])
    return subprocess.Popen(
        [sys.executable, "-c", _START, path, *map(str, fds)],
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        env=environment,
        process_group=0,  # a Ctrl-C in the terminal is the caller's to handle
    )


class InlineDecoder:
    """num_workers=0: tasks are decoded by whoever waits for a batch."""

    def __init__(self, clips: Arena, ring: Arena) -> None:
        self._clips, self._ring = clips, ring
        self._queue: SimpleQueue[DecodeTask] = SimpleQueue()

    @property
    def pids(self) -> tuple[int, ...]:
        return ()

    def submit(self, task: DecodeTask) -> None:
        self._queue.put(task)

    def serve(self, timeout_seconds: float, done: Done) -> None:
        try:
            task = self._queue.get(timeout=timeout_seconds)
        except Empty:
            return
        try:
            decode_task(task, self._clips.view, self._ring.map)
        except StreamvidError as error:
            done(task.task_id, f"{type(error).__name__}: {error}")
        else:
            done(task.task_id, None)

    def close(self) -> None:
        pass
