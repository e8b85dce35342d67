"""Staging folder of an unfinished dataset. It contains a lock, findings, shard markers and lists of file names.

The folder is on this machine. `.staging/` in the store contains what other machines and later runs need: the leases of
running processes, the build, the names of each plan's files, and the markers of finished shards. For a dataset in a
folder, both are the same folder.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamvid.cluster.lease import Lease, acquire, remove_empty, wait_until_free
from streamvid.cluster.share import WHOLE, Share
from streamvid.dataset.manifest import LARGE_FOLDERS
from streamvid.dataset.sealed_json import MANIFEST
from streamvid.dataset.versions.open import kept_files
from streamvid.dataset.versions.publish import LEASES, RUN, Writing
from streamvid.errors import DatasetError, StorageError
from streamvid.host.lock import FileLock, try_lock, wait_for_lock
from streamvid.sharder.options import ShardOptions
from streamvid.sharder.work.clips import ClipFolder
from streamvid.sharder.work.destination import STAGING, Destination
from streamvid.sharder.work.shared_journal import SharedJournal
from streamvid.sharder.work.tasks import TASKS, task_folder
from streamvid.storage import LocalStore, Store

MAX_NOTE_BYTES = 2**30
LOCK_WAIT_SECONDS = 5.0
EMBEDDED = "embedded"
"""Folder for files that are extracted from the cells of metadata files."""
LOCK = "lock"
JOURNALS = PROBES, FIGURES, ENCODES = ("probes.jsonl", "figures.jsonl", "encodes.jsonl")
"""Journals of the findings of probing, curation and encoding."""
_TASKS_LOCK = "tasks.lock"
_BUILD = f"{STAGING}/build.json"
BASE = "base"
"""Name of a field that only appends have: the fingerprint of the samples in the existing dataset."""
_NAMES = "files.json"
_OVERWRITTEN = "overwritten"
#: Notes may be forged. Therefore, only folders and files whose names a sharder could have chosen are removed (SAFE-1).
_PLAN = re.compile(rf"[0-9a-f]{{32}}|{_OVERWRITTEN}")
_FILES = re.compile(
    r"shards/([^/]+)/\1-\d{6,}(-[0-9a-f]{8})?\.tar(\.idx)?|index/[a-z]+-\d{5,}-[0-9a-f]{12}\.\w+"
    rf"|\.nv-meta/[\w.-]+|versions/manifest-\d{{6,}}\.json|{MANIFEST}"
)
_READS_AT_ONCE = 16
_logger = logging.getLogger(__name__)


def put_note(store: Store, file: Path, data: bytes) -> None:
    """Write a note to the store if it is remote, then to the plan's folder.

    Every local note is therefore also in the store.
    """
    if not store.is_local:
        store.put(f"{STAGING}/{file.parent.name}/{file.name}", data)
    LocalStore(file.parent).put(file.name, data)


@dataclass(frozen=True)
class Staging:
    """Unfinished work on the dataset in `store`.

    folder: staging folder on this machine, shared by all tasks.
    lock_fd: file descriptor of the lock on the folder `own`.
    lease: lease of this run or task, visible to all machines.
    """

    store: Store
    folder: Path
    lock_fd: int
    lease: Lease
    share: Share = WHOLE

    @property
    def own(self) -> Path:
        """Folder of this run or task: `folder` itself for a run without tasks, otherwise a folder inside `folder`."""
        return self.folder / task_folder(self.share)

    def journal(self, name: str, header: Mapping[str, Any]) -> SharedJournal:
        """Open the journal `name` of this task with the findings of all tasks."""
        return SharedJournal(self.folder, name, header, self.store, self.share)

    def clips(self, options: ShardOptions) -> ClipFolder:
        """Return the folder of encoded and cut clips that are not in a shard yet."""
        is_shared = not self.store.is_local and not self.share.is_whole
        return ClipFolder(self.folder, self.store.url, options.worker_storage, is_shared)

    def plan_folder(self, plan_sha256: str) -> Path:
        """Return the folder for one plan's markers and temporary files."""
        return self.folder / plan_sha256[:32]

    def check_verb(self, *, is_append: bool) -> None:
        """Raise DatasetError if the unfinished work is from the other command (`shard` or `append`)."""
        data = _read_if_there(self.store, _BUILD)
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            if data and (BASE in json.loads(data)) != is_append:
                verb, other = ("append", "shard") if is_append else ("shard", "append")
                raise DatasetError(
                    f"there is unfinished work from `streamvid {other}` at {self.store.url}, so `streamvid {verb}` "
                    f"cannot begin; run the same `streamvid {other}` command again to finish the work, or run it "
                    "with --abandon (streamvid.sharder.sharder.abandon) to remove the work"
                )

    def announce(self, build: Mapping[str, object]) -> None:
        """Record the build. A run without tasks replaces unfinished work from a different build.

        Raises DatasetError if this is a task and there is unfinished work from a different build.
        """
        data = json.dumps(build, sort_keys=True).encode()
        if self.share.is_whole:
            self.store.put(_BUILD, data)
        elif not self.store.create(_BUILD, data) and self.store.read(_BUILD) != data:
            raise self._other_work()

    def _other_work(self) -> DatasetError:
        return DatasetError(
            f"there is unfinished work on a different dataset at {self.store.url}; run all tasks with the same input "
            "and options, or run the command with --abandon (streamvid.sharder.sharder.abandon) to remove the work, "
            "then run the tasks again"
        )

    def open_plan(self, plan_sha256: str, paths: Iterable[str]) -> Path:
        """Remove the files of other plans, then record the names of this plan's files. Return the plan's folder."""
        folder = self.plan_folder(plan_sha256)
        if not self.share.is_whole:
            self._join_plan(folder, paths)
            return folder
        self._discard_plans(self._plan_names() - {folder.name})
        for torn in folder.glob("*.tmp"):
            torn.unlink()
        self.name_files(folder, paths)
        return folder

    def _join_plan(self, folder: Path, paths: Iterable[str]) -> None:
        """Record the names of the plan's files, unless another task has done so. Tasks do not remove files."""
        with self.exclusive():
            if self._plan_names() - {folder.name}:
                raise self._other_work()
            if not (folder / _NAMES).exists():
                self.name_files(folder, paths)

    def exclusive(self) -> FileLock:
        """Return a lock that excludes other tasks on this machine and on machines that share its file locks."""
        return wait_for_lock(self.folder / _TASKS_LOCK)

    def _plan_names(self) -> set[str]:
        names = {entry.name for entry in self.folder.iterdir() if entry.is_dir()}
        if not self.store.is_local:
            names |= {path.split("/")[1] for path in self._notes()}
        return set(filter(_PLAN.fullmatch, names))

    def _notes(self, folder: str = STAGING) -> list[str]:
        """Return the paths of the notes that a folder in the store contains.

        Paths with ".." or a backslash are omitted.
        """
        paths = (state.path for state in self.store.files(folder))
        return [path for path in paths if ".." not in path.split("/") and "\\" not in path]

    def name_files(self, folder: Path, paths: Iterable[str]) -> None:
        """Record the paths of the dataset files that belong to `folder`. Call this before writing the first file."""
        put_note(self.store, folder / _NAMES, json.dumps(sorted(paths)).encode())

    def notes_of(self, folder: Path) -> set[str]:
        """Return the names of the notes in a plan's folder, including notes from other machines."""
        return {state.path.rpartition("/")[2] for state in self.store.files(f"{STAGING}/{folder.name}")}

    def fetch_markers(self, folder: Path, stems: Sequence[str]) -> None:
        """Copy the markers of shards that other machines finished into the plan's folder."""
        if self.store.is_local:
            return
        prefix = f"{STAGING}/{folder.name}"
        there = {state.path for state in self.store.files(prefix) if state.num_bytes <= MAX_NOTE_BYTES}
        names = [f"{stem}{suffix}" for stem in stems for suffix in (".packets", ".json")]
        wanted = [name for name in names if f"{prefix}/{name}" in there and not (folder / name).exists()]
        with ThreadPoolExecutor(_READS_AT_ONCE) as threads:
            for name, data in threads.map(lambda name: (name, self.store.read(f"{prefix}/{name}")), wanted):
                LocalStore(folder).put(name, data)

    def condemn(self, paths: Iterable[str]) -> None:
        """Record an old dataset's files for removal, then remove its manifest, which invalidates the old dataset."""
        folder = self.folder / _OVERWRITTEN
        folder.mkdir(exist_ok=True)
        self.name_files(folder, paths)
        self.store.remove(MANIFEST)

    def _discard_plans(self, plans: Collection[str]) -> None:
        """Remove the files of these plans, except files that belong to a version of the dataset."""
        kept: set[str] = set()
        if plans and self.store.size(MANIFEST) is not None:
            kept = kept_files(self.store, Writing(self.store, self.lease).newest)
        for name in plans:
            self._discard(name, kept)

    def _discard(self, name: str, kept: Collection[str]) -> None:
        names: list[str] = []
        data = _read_if_there(self.store, f"{STAGING}/{name}/{_NAMES}")
        # The names are missing if the sharder was killed before it wrote them.
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            names = [path for path in map(str, json.loads(data)) if _FILES.fullmatch(path) and path not in kept]
        if names:
            _logger.info("removing up to %d files from an earlier build with different input or options", len(names))
        _remove_all(self.store, names)
        if not self.store.is_local:
            notes = self._notes(f"{STAGING}/{name}")
            # The list of file names is removed last, because it is needed as long as any of the files remain.
            _remove_all(self.store, sorted(notes, key=lambda path: path.endswith(f"/{_NAMES}")))
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.folder / name)

    def leave(self) -> None:
        """Remove this task's files from this machine if the task stores its work in a remote store."""
        if self.store.is_local or self.share.is_whole:
            return
        shutil.rmtree(self.own)
        lock = try_lock(self.folder / LOCK)
        if lock is not None:
            with lock:
                is_last = not any((self.folder / TASKS).iterdir())
                if is_last and not any((self.folder / name).exists() for name in JOURNALS):
                    shutil.rmtree(self.folder)

    def abandon(self) -> None:
        """Remove all unfinished work; all versions of a sealed dataset are kept."""
        try:
            self._discard_plans(self._plan_names())
        except DatasetError as error:
            _logger.warning("keeping the files from the unfinished work, because the dataset cannot be read: %s", error)
        self.remove()

    def remove(self) -> None:
        """Remove the staging folder, on this machine and in the store."""
        self.lease.stop()  # a renewal would create the folder again
        if not self.store.is_local:
            for folder in (*LARGE_FOLDERS, STAGING):
                self.store.abort_uploads(folder)
            # The lease is removed last, because it shows that remaining files belong to a dataset.
            _remove_all(self.store, sorted(self._notes(), key=lambda path: path == self.lease.path))
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.folder)


@contextmanager
def leased(dest: Destination, share: Share = WHOLE, *, admits_tasks: bool = False) -> Iterator[Lease]:
    """Hold the lease for a run or task at `dest`. The lease also excludes other machines.

    A run without tasks excludes all other runs. A task excludes only other runs of the same task.
    admits_tasks: True for a run that first lets other machines run tasks.
    Raises DatasetError if another process is working at `dest`.
    """
    is_new = isinstance(dest.store, LocalStore) and not dest.store.root.exists()
    if dest.store.is_local:
        with _writing_to(dest):
            dest.folder.mkdir(parents=True, exist_ok=True)
    if share.is_whole:
        lease = acquire(dest.store, LEASES, RUN, lambda _: not admits_tasks, admits_tasks)
    else:
        name = Path(task_folder(share)).name
        lease = acquire(dest.store, LEASES, name, lambda other: other.name == RUN and not other.note.admits_tasks)
    try:
        yield lease
    finally:
        lease.release()
        remove_empty(dest.store, LEASES, and_root=is_new)


def check_unused(dest: Destination) -> None:
    """Raise DatasetError if a run or a task is working at `dest`."""
    wait_until_free(dest.store, LEASES, lambda _: True)


def end_tasks(dest: Destination, lease: Lease) -> None:
    """Stop admitting tasks, and wait until the leases of lost tasks have expired.

    Raises DatasetError if a task is running.
    """
    lease.close_to_tasks()
    wait_until_free(dest.store, LEASES, lambda other: other.name != RUN)


@contextmanager
def locked_staging(dest: Destination, lease: Lease, share: Share = WHOLE) -> Iterator[Staging]:
    """Open the unfinished build at `dest`, or start a new one. Raises DatasetError if another sharder holds its lock.

    The workers of a sharder hold the lock too. This function therefore waits briefly for the workers of a killed
    sharder to end.
    """
    try:
        with _writing_to(dest), contextlib.ExitStack() as held:
            lock = held.enter_context(_lock(dest.folder, LOCK_WAIT_SECONDS))
            if share.is_whole:
                for path in sorted(dest.folder.glob(f"{TASKS}/*/{LOCK}")):
                    wait_for_lock(path, LOCK_WAIT_SECONDS).release()
                held.pop_all()
            else:
                lock = _lock(dest.folder / task_folder(share), LOCK_WAIT_SECONDS)
    except TimeoutError:
        raise DatasetError(
            f"{dest.folder} is in use by another sharder, or by a worker process that an earlier sharder left behind; "
            "wait until that process ends, or choose another destination"
        ) from None
    with lock:
        yield Staging(dest.store, dest.folder, lock.descriptor, lease, share)


@contextmanager
def _writing_to(dest: Destination) -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise
    except OSError as error:
        raise StorageError(
            f"cannot write to {dest.folder.parent}: {error.strerror}; choose a destination (for an object "
            "store, a work.work_dir) that you can write to"
        ) from error


def _lock(folder: Path, wait_seconds: float) -> FileLock:
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # a sharder that just ended removed the folder
            return wait_for_lock(folder / LOCK, wait_seconds)


def _read_if_there(store: Store, path: str) -> bytes:
    try:
        return store.read(path) if store.size(path) is not None else b""
    except StorageError:
        if store.is_local:
            return b""
        raise


def _remove_all(store: Store, paths: Sequence[str]) -> None:
    if isinstance(store, LocalStore):
        for path in paths:
            store.remove(path)
            with contextlib.suppress(OSError):  # not empty
                for folder in Path(path).parents[:-1]:
                    store.path(folder.as_posix()).rmdir()
        return
    # Files are removed in parallel. The last one is removed only after all others.
    with ThreadPoolExecutor(_READS_AT_ONCE) as threads:
        list(threads.map(store.remove, paths[:-1]))
    for path in paths[-1:]:
        store.remove(path)
