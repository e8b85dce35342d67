"""Exclusive file locks between the processes of one machine.

The kernel holds the locks (flock) and releases a lock when the last process that holds its descriptor ends for any
reason. Forked children close their copies of the descriptor, so that a lock never outlives the process that acquired
it. On NFS, locks apply only between the processes of one machine, and only if the mount supports them (not `nolock`).
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import stat
import time
import weakref
from collections.abc import Callable
from pathlib import Path

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.0002, 0.2


class FileLock:
    """Lock that is held until `release` is called or the `with` block ends.

    descriptor: file descriptor of the locked file.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        _held.add(self)

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()  # an interrupt may come between locking and `with`

    def release(self) -> None:
        """Release the lock. Further calls have no effect."""
        if self.descriptor < 0:
            return
        try:
            # Closing is not enough: a process that was forked outside Python may hold a copy of the descriptor. And an
            # interrupt may lose the descriptor between the next two steps, but not the lock, which is released here.
            with contextlib.suppress(OSError):
                _flock(self.descriptor, wanted=False)
        finally:
            descriptor, self.descriptor = self.descriptor, -1
            os.close(descriptor)

    def is_at(self, path: str | Path) -> bool:
        """Return True if the locked file is the regular file at this path."""
        try:
            there = os.lstat(path)
        except FileNotFoundError:
            return False
        return stat.S_ISREG(there.st_mode) and os.path.samestat(there, os.fstat(self.descriptor))


_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _close_in_child() -> None:
    for lock in list(_held):
        descriptor, lock.descriptor = lock.descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def wait_for_lock(
    path: str | Path, wait_seconds: float = math.inf, on_wait: Callable[[], object] | None = None, mode: int = 0o666
) -> FileLock:
    """Lock a file, creating it if necessary. Symbolic links are not followed.

    on_wait: function that is called before each pause between two attempts.
    Raises TimeoutError if another process still holds the lock after `wait_seconds`, and OSError if the file cannot be
    opened or locked.
    """
    since, pause = time.monotonic(), _FIRST_PAUSE_SECONDS
    while True:
        lock = FileLock(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, mode))
        try:
            while not _flock(lock.descriptor, wanted=True):
                waited = time.monotonic() - since
                if waited >= wait_seconds:
                    raise TimeoutError(
                        errno.ETIMEDOUT,
                        f"another process still holds the lock after {wait_seconds:.0f} s; wait "
                        "until that process ends, or end it",
                        str(path),
                    )
                if on_wait is not None:
                    on_wait()
                time.sleep(pause)
                pause = min(1.5 * pause, max(0.01, waited / 20), _LONGEST_PAUSE_SECONDS)
            # The last holder may have removed the file; a lock on a removed file excludes no other process.
            if lock.is_at(path):
                return lock
        except BaseException:
            lock.release()
            raise
        lock.release()


def try_lock(path: str | Path, mode: int = 0o666) -> FileLock | None:
    """Lock a file without waiting, creating it if necessary. Return None if another process holds the lock."""
    try:
        return wait_for_lock(path, 0.0, mode=mode)
    except TimeoutError:
        return None


def _flock(descriptor: int, *, wanted: bool) -> bool:
    """Acquire the lock if `wanted`; otherwise, release it. Return False if another process holds the lock."""
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB if wanted else fcntl.LOCK_UN)
    except BlockingIOError:
        return False
    return True
