"""Staging folder of an unfinished dataset. It contains its lock, findings, shard markers and the names of files.

The folder is on this machine. For a dataset in an object store, `.staging/` in the store also holds what other machines
and later runs need: the owners of the build, the names of each plan's files, and the markers of finished shards.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import shutil
import socket
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamvid.dataset.manifest import LARGE_FOLDERS, MANIFEST
from streamvid.errors import DatasetError, StorageError
from streamvid.host.lock import FileLock, wait_for_lock
from streamvid.sharder.work.destination import STAGING, Destination
from streamvid.storage import LocalStore, Store

MAX_NOTE_BYTES = 2**30
LOCK_WAIT_SECONDS = 5.0
EMBEDDED = "embedded"
"""Folder of the files that are extracted from cells of metadata files."""
LOCK = "lock"
JOURNALS = ("probes.jsonl", "encodes.jsonl")
"""Journals of the findings of probing and encoding."""
_OWNERS = "owners"
_NAMES = "files.json"
_OVERWRITTEN = "overwritten"
#: Notes may be forged. Therefore, only folders and files whose names a sharder could have chosen are removed (SAFE-1).
_PLAN = re.compile(rf"[0-9a-f]{{32}}|{_OVERWRITTEN}")
_FILES = re.compile(
    rf"shards/([^/]+)/\1-\d{{6,}}\.tar(\.idx)?|index/[a-z]+-\d{{5,}}-[0-9a-f]{{12}}\.\w+|\.nv-meta/[\w.-]+|{MANIFEST}"
)
_READS_AT_ONCE = 16
_logger = logging.getLogger(__name__)


def put_note(store: Store, file: Path, data: bytes) -> None:
    """Write a note to a remote store first, then to a plan's folder, so that every local note is also in the store."""
    if not store.is_local:
        store.put(f"{STAGING}/{file.parent.name}/{file.name}", data)
    LocalStore(file.parent).put(file.name, data)


@dataclass(frozen=True)
class Staging:
    """Unfinished work on the dataset in `store`. folder: staging folder on this machine, locked through `lock_fd`."""

    store: Store
    folder: Path
    lock_fd: int

    @property
    def journal(self) -> Path:
        return self.folder / JOURNALS[0]

    @property
    def encode_journal(self) -> Path:
        return self.folder / JOURNALS[1]

    @property
    def clips(self) -> Path:
        """Folder of encoded clips that are not in a shard yet."""
        return self.folder / "clips"

    def plan_folder(self, plan_sha256: str) -> Path:
        """Return the folder of one plan's markers and temporary files."""
        return self.folder / plan_sha256[:32]

    def announce(self, build: Mapping[str, object], plan_sha256: str = "") -> None:
        """Announce this machine's build in a remote store, then check the builds of other machines.

        Machines with the same build write the same bytes and need no lock between them. Raises DatasetError if another
        machine has an unfinished build of a different dataset; a dead machine cannot be distinguished from a slow one.
        Each machine writes before it reads, so at least one of two machines that start together is refused.
        """
        if self.store.is_local:
            return
        own = self._owner_path()
        mine = {"build": json.dumps(build, sort_keys=True), "plan_sha256": plan_sha256, "host": socket.gethostname()}
        self.store.put(own, json.dumps(mine).encode())
        for path in [state.path for state in self.store.files(f"{STAGING}/{_OWNERS}")]:
            other = {} if path == own else _owner(self.store, path)
            plans = {plan_sha256, other.get("plan_sha256", "")} - {""}
            if other and (other.get("build") != mine["build"] or len(plans) > 1):
                self.store.remove(own)
                raise DatasetError(
                    f"a sharder on {other.get('host')!r} is building a different dataset at {self.store.url}, or left "
                    "it unfinished. Wait until it ends, or run its command again. If no sharder is running, --abandon "
                    "(streamvid.sharder.sharder.abandon) removes the unfinished work"
                )

    def _owner_path(self) -> str:
        """Return the path of this folder's owner note, which stays the same when a build is resumed."""
        file = self.folder / "owner"
        if not file.exists():
            LocalStore(self.folder).put(file.name, uuid.uuid4().hex.encode())
        return f"{STAGING}/{_OWNERS}/{file.read_text()}.json"

    def open_plan(self, plan_sha256: str, paths: Iterable[str]) -> Path:
        """Remove the files of other plans, then record the names of this plan's files. Return the plan's folder."""
        folder = self.plan_folder(plan_sha256)
        for name in self._plan_names() - {folder.name}:
            self._discard(name)
        for torn in folder.glob("*.tmp"):
            torn.unlink()
        self.name_files(folder, paths)
        return folder

    def _plan_names(self) -> set[str]:
        names = {entry.name for entry in self.folder.iterdir() if entry.is_dir()}
        if not self.store.is_local:
            names |= {path.split("/")[1] for path in self._notes()}
        return set(filter(_PLAN.fullmatch, names))

    def _notes(self, folder: str = STAGING) -> list[str]:
        """Return the paths of a folder's notes in the store. Paths with ".." or a backslash are omitted."""
        paths = (state.path for state in self.store.files(folder))
        return [path for path in paths if ".." not in path.split("/") and "\\" not in path]

    def name_files(self, folder: Path, paths: Iterable[str]) -> None:
        """Record the paths of the dataset files that belong to `folder`. Call this before the first one is written."""
        put_note(self.store, folder / _NAMES, json.dumps(sorted(paths)).encode())

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

    def _discard(self, name: str) -> None:
        names: list[str] = []
        data = _read_names(self.store, f"{STAGING}/{name}/{_NAMES}")
        # The names are missing if the sharder was killed before it wrote them.
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            names = [path for path in map(str, json.loads(data)) if _FILES.fullmatch(path)]
        if names:
            _logger.info("removing up to %d files of an earlier build with different input or options", len(names))
        _remove_all(self.store, names)
        if not self.store.is_local:
            notes = self._notes(f"{STAGING}/{name}")
            # The list of file names is removed last, because it is needed as long as any of the files remain.
            _remove_all(self.store, sorted(notes, key=lambda path: path.endswith(f"/{_NAMES}")))
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.folder / name)

    def abandon(self) -> None:
        """Remove all unfinished work; a sealed dataset is kept."""
        if self.store.size(MANIFEST) is None:
            for name in self._plan_names():
                self._discard(name)
        self.remove()

    def remove(self) -> None:
        """Remove the staging folder, on this machine and in the store."""
        if not self.store.is_local:
            for folder in (*LARGE_FOLDERS, STAGING):
                self.store.abort_uploads(folder)
            # The owners are removed last, because they show that remaining files belong to a dataset.
            _remove_all(self.store, sorted(self._notes(), key=lambda path: path.startswith(f"{STAGING}/{_OWNERS}/")))
        shutil.rmtree(self.folder)


@contextmanager
def locked_staging(dest: Destination) -> Iterator[Staging]:
    """Open the unfinished build at `dest`, or start one. Raises DatasetError if another sharder holds its lock.

    Workers hold the lock too, so this function waits briefly for the workers of a sharder that was just killed.
    """
    try:
        lock = _lock(dest.folder)
    except TimeoutError:
        raise DatasetError(
            f"another sharder is working on {dest.url}; wait until it ends, or choose another destination"
        ) from None
    except OSError as error:
        raise StorageError(
            f"cannot write to {dest.folder.parent}: {error.strerror}; choose a destination (or a work_dir) that "
            "you can write to"
        ) from error
    with lock:
        yield Staging(dest.store, dest.folder, lock.descriptor)


def _lock(folder: Path) -> FileLock:
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # a sharder that just ended removed the folder
            return wait_for_lock(folder / LOCK, LOCK_WAIT_SECONDS)


def _read_names(store: Store, path: str) -> bytes:
    try:
        return store.read(path) if store.size(path) is not None else b""
    except StorageError:
        if store.is_local:
            return b""
        raise


def _owner(store: Store, path: str) -> Mapping[str, Any]:
    """Return the owner note of another machine; an empty mapping if that machine has just finished."""
    try:
        value = json.loads(store.read(path))
    except ValueError:
        value = None
    except StorageError:
        if store.size(path) is None:
            return {}
        raise
    return value if isinstance(value, dict) else {"build": "", "host": "unknown"}


def _remove_all(store: Store, paths: Sequence[str]) -> None:
    if isinstance(store, LocalStore):
        for path in paths:
            store.remove(path)
            with contextlib.suppress(OSError):
                store.path(path).parent.rmdir()
        return
    # Files are removed in parallel. The last one is removed only after all others.
    with ThreadPoolExecutor(_READS_AT_ONCE) as threads:
        list(threads.map(store.remove, paths[:-1]))
    for path in paths[-1:]:
        store.remove(path)
