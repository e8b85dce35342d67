"""A folder that one sharder of this machine works in at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from streamvid.errors import DatasetError, StorageError

LOCK_WAIT_SECONDS = 5.0
_OPEN_ATTEMPTS = 20


@contextmanager
def locked(folder: Path, what: str) -> Iterator[int]:
    """A descriptor that holds the lock on `folder`, which is made where it is not. DatasetError while another has it.

    what: how messages call what the folder is for.
    """
    lock_fd = _lock(folder, what)
    try:
        yield lock_fd
    finally:
        os.close(lock_fd)


def _lock(folder: Path, what: str) -> int:
    deadline = time.monotonic() + LOCK_WAIT_SECONDS
    while True:
        descriptor = _open_lock(folder)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The one who held it may have removed the folder since: then this is a lock on nothing.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), (folder / "lock").stat()):
                    return descriptor
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise DatasetError(
                    f"another sharder is at work on {what}; wait for it, or give another destination"
                ) from None
            time.sleep(0.05)
        os.close(descriptor)


def _open_lock(folder: Path) -> int:
    problem: OSError | None = None
    for _ in range(_OPEN_ATTEMPTS):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError as error:  # a sharder that has just ended removed the folder in between
            problem = error
        except OSError as error:
            problem = error
            break
    reason = problem.strerror if problem else ""
    raise StorageError(
        f"cannot write to {folder.parent}: {reason}; give a destination (or a work_dir) that you may write to"
    ) from problem
