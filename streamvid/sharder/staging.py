"""The staging folder in an unfinished dataset: who works on it, what was found, what is built, what may have to go."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from streamvid.dataset.manifest import MANIFEST
from streamvid.errors import DatasetError, StorageError
from streamvid.storage import LocalStore

STAGING = ".staging"
CLIPS_FOLDER = "clips"
LOCK_WAIT_SECONDS = 5.0
_OPEN_ATTEMPTS = 20
_NAMES = "files.json"
_OVERWRITTEN = "overwritten"
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Staging:
    """The staging folder of the dataset at `root`, locked: `lock_fd` keeps every other sharder out."""

    root: Path
    lock_fd: int

    @property
    def folder(self) -> Path:
        return self.root / STAGING

    @property
    def journal(self) -> Path:
        return self.folder / "probes.jsonl"

    @property
    def encode_journal(self) -> Path:
        return self.folder / "encodes.jsonl"

    @property
    def clips(self) -> Path:
        """Where encoded clips wait for their shard."""
        return self.folder / CLIPS_FOLDER

    def plan_folder(self, plan_sha256: str) -> Path:
        """Where one plan keeps its markers and temporary files."""
        return self.folder / plan_sha256[:32]

    def open_plan(self, plan_sha256: str, paths: Iterable[str]) -> Path:
        """Remove what other plans left here, then name what this one may write. Gives the plan's folder."""
        folder = self.plan_folder(plan_sha256)
        for other in self.folder.iterdir():
            if other.is_dir() and other not in (folder, self.clips):
                self._discard(other)
        for torn in folder.glob("*.tmp"):
            torn.unlink()
        self.name_files(folder, paths)
        return folder

    def name_files(self, folder: Path, paths: Iterable[str]) -> None:
        """Keep on disk which files of the dataset `folder` answers for, before the first of them is written."""
        LocalStore(folder).put(_NAMES, json.dumps(sorted(paths)).encode())

    def condemn(self, paths: Iterable[str]) -> None:
        """Name an old dataset's files for removal, then remove its manifest: from here on it is gone."""
        folder = self.folder / _OVERWRITTEN
        folder.mkdir(exist_ok=True)
        self.name_files(folder, paths)
        LocalStore(self.root).remove(MANIFEST)

    def _discard(self, folder: Path) -> None:
        store = LocalStore(self.root)
        names: list[str] = []
        with contextlib.suppress(FileNotFoundError, ValueError):  # killed before the names: nothing was written
            names = json.loads((folder / _NAMES).read_bytes())
        if names:
            _logger.info("removing up to %d files that an earlier build with other input or options left", len(names))
        for name in names:
            store.remove(name)
            with contextlib.suppress(OSError):
                store.path(name).parent.rmdir()
        shutil.rmtree(folder)

    def remove(self) -> None:
        """The dataset is sealed: nothing here is needed any more."""
        shutil.rmtree(self.folder)


def has_staging(root: Path) -> bool:
    return (root / STAGING).is_dir()


@contextmanager
def locked_staging(root: Path) -> Iterator[Staging]:
    """The staging folder at `root`, made where it is not. DatasetError while another sharder holds it.

    The lock is the kernel's: it ends with the last process that holds it, however that ends. Workers of a sharder that
    was just killed are waited for.
    """
    lock_fd = _lock(root / STAGING)
    try:
        yield Staging(root, lock_fd)
    finally:
        os.close(lock_fd)


def _lock(folder: Path) -> int:
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
                    f"another sharder is at work on {folder.parent}; wait for it, or give another destination"
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
        f"cannot write to {folder.parent}: {reason}; give a destination that you may write to"
    ) from problem
