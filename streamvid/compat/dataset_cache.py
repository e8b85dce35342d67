"""Local cache of sealed datasets: metadata and media are sharded on first use and only streamed afterwards.

    CACHE/KEY/         the dataset
    CACHE/KEY.part/    the dataset while it is built; if a run is killed, the next one resumes there
    CACHE/KEY.lock     held by the building process; contains its progress, for waiting processes

KEY depends on the options and the input: the rows of the metadata, and the name, size and modification time of each
file (for an object, its version). A changed clip or caption, or a new modification time, leads to a new dataset.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from streamvid.dataset.sealed_json import MANIFEST
from streamvid.errors import SourceError, StorageError
from streamvid.host.lock import FileLock, wait_for_lock
from streamvid.host.resources import user_cache

if TYPE_CHECKING:
    from streamvid.sharder.options import ShardOptions
    from streamvid.sharder.report import ShardReport

    ShardProgress = Callable[[str, int, int], None]

VARIABLE = "STREAMVID_CACHE"
_VERSION = 1  # version of the key
_REPORT_SECONDS = 10.0
_NOTE_BYTES = 1000


def cache_folder() -> Path:
    """Return $STREAMVID_CACHE or, by default, a folder in the user's cache directory. The folder need not exist."""
    place = os.environ.get(VARIABLE, "")
    return Path(place).expanduser().absolute() if place else user_cache("train")


def cached_dataset(
    source: str, options: ShardOptions, progress: ShardProgress, report: Callable[[str], None]
) -> tuple[Path, ShardReport | None]:
    """Return the dataset's folder and build report for this input and these options. Build the dataset if necessary.

    The report is None if the dataset already existed or another process built it. If several processes call this
    function at the same time, one of them builds the dataset, and the others wait. Raises the same errors as `shard`,
    and SourceError if the input changes while it is being sharded.
    """
    key = content_key(source, options)
    folder = cache_folder() / key
    if _is_sealed(folder):
        return folder, None
    with _lock(folder.with_name(f"{key}.lock"), report) as lock:
        # Another process may have built it while this one waited.
        if _is_sealed(folder):
            return folder, None
        return folder, _build(source, options, key, folder, _noted(progress, lock.descriptor))


def content_key(source: str, options: ShardOptions) -> str:
    """Return a digest of everything that determines the dataset, for use as a folder name."""
    from streamvid.sharder.source.records import read_records

    records = read_records(source, options)
    facts = {"version": _VERSION, "input": records.sha256(), "options": options.to_json()}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for record in records.records:
        digest.update(json.dumps([record.version, *(file.version for file in record.extra)]).encode())
    return digest.hexdigest()[:32]


def _build(source: str, options: ShardOptions, key: str, folder: Path, progress: ShardProgress) -> ShardReport:
    from streamvid.sharder.sharder import shard

    part = folder.with_name(f"{key}.part")
    report = shard(source, part, options, progress)
    if content_key(source, options) != key:
        shutil.rmtree(part)
        raise SourceError(f"files in {source} changed while they were being sharded; run the same command again")
    part.rename(folder)
    return report


def _is_sealed(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def _lock(path: Path, report: Callable[[str], None]) -> FileLock:
    """Acquire the lock. While waiting for it, report the holder's progress from time to time."""
    reported = float("-inf")

    def report_holder() -> None:
        nonlocal reported
        if time.monotonic() - reported > _REPORT_SECONDS:
            note = path.read_text(errors="replace").strip()
            report(f"waiting for the process that is building dataset {path.stem}{': ' if note else ''}{note}")
            reported = time.monotonic()

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = wait_for_lock(path, on_wait=report_holder)
    except OSError as error:
        raise StorageError(
            f"cannot create or lock {path}: {error.strerror}; set {VARIABLE} to a writable folder on a local disk"
        ) from error
    os.ftruncate(lock.descriptor, 0)
    return lock


def _noted(progress: ShardProgress, lock: int) -> ShardProgress:
    """Return a progress function that calls `progress` and also writes the progress to the lock file."""

    def note(phase: str, done: int, total: int) -> None:
        progress(phase, done, total)
        text = f"process {os.getpid()}, {phase} {done}/{total}"
        os.pwrite(lock, text.ljust(_NOTE_BYTES).encode(), 0)

    return note
