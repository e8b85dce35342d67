"""Metadata and media as a sealed dataset in a folder of this machine: sharded when first asked for, then only streamed.

    CACHE/KEY/         the dataset
    CACHE/KEY.part/    while it is built; a run that was killed goes on there
    CACHE/KEY.lock     whoever holds it builds; in it, for those who wait, how far that is

KEY is made of the options and of what the input is: the rows of the metadata as they are read, and of each file its
name, bytes and time of modification (of an object its version). So a clip or a caption that changes makes another
dataset, and files that were copied with new times are sharded again.
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

from streamvid.dataset.manifest import MANIFEST
from streamvid.errors import SourceError, StorageError
from streamvid.host.lock import FileLock, wait_for_lock
from streamvid.host.resources import user_cache

if TYPE_CHECKING:
    from streamvid.sharder.options import ShardOptions
    from streamvid.sharder.report import ShardReport

    Progress = Callable[[str, int, int], None]

VARIABLE = "STREAMVID_CACHE"
_VERSION = 1  # of the key
_TOLD_SECONDS = 10.0
_NOTE_BYTES = 1000


def cache_folder() -> Path:
    """$STREAMVID_CACHE, or the folder of the user's caches; it may not be there yet."""
    place = os.environ.get(VARIABLE, "")
    return Path(place).expanduser().absolute() if place else user_cache("train")


def cached_dataset(
    source: str, options: ShardOptions, progress: Progress, tell: Callable[[str], None]
) -> tuple[Path, ShardReport | None]:
    """The dataset of that input and these options, and the report where it was built now.

    Of several processes the first to come builds it, and the others wait, however long that takes. Raises what `shard`
    does, and SourceError for input that changes meanwhile.
    """
    key = content_key(source, options)
    folder = cache_folder() / key
    if _is_sealed(folder):
        return folder, None
    with _lock(folder.with_name(f"{key}.lock"), tell) as lock:
        # Once more, now that nobody else is at it.
        if _is_sealed(folder):
            return folder, None
        return folder, _build(source, options, key, folder, _noting(progress, lock.descriptor))


def content_key(source: str, options: ShardOptions) -> str:
    """What decides the dataset, as a name for a folder."""
    from streamvid.sharder.source.records import read_records

    records = read_records(source, options)
    facts = {"version": _VERSION, "input": records.sha256(), "options": options.to_json()}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for record in records.records:
        digest.update(json.dumps([record.version, *(file.version for file in record.extra)]).encode())
    return digest.hexdigest()[:32]


def _build(source: str, options: ShardOptions, key: str, folder: Path, progress: Progress) -> ShardReport:
    from streamvid.sharder.sharder import shard

    part = folder.with_name(f"{key}.part")
    report = shard(source, part, options, progress)
    if content_key(source, options) != key:
        shutil.rmtree(part)
        raise SourceError(f"files of {source} changed while they were sharded; run the same command again")
    part.rename(folder)
    return report


def _is_sealed(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def _lock(path: Path, tell: Callable[[str], None]) -> FileLock:
    """Wait for the right to build, and tell now and then how far its present holder is."""
    told = float("-inf")

    def tell_holder() -> None:
        nonlocal told
        if time.monotonic() - told > _TOLD_SECONDS:
            note = path.read_text(errors="replace").strip()
            tell(f"waiting for the process that shards {path.stem}{': ' if note else ''}{note}")
            told = time.monotonic()

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = wait_for_lock(path, on_wait=tell_holder)
    except OSError as error:
        raise StorageError(
            f"cannot lock {path}: {error.strerror}; set {VARIABLE} to a folder on a local disk that you may write to"
        ) from error
    os.ftruncate(lock.descriptor, 0)
    return lock


def _noting(progress: Progress, lock: int) -> Progress:
    """As `progress`, and told in the lock's file too."""

    def note(phase: str, done: int, total: int) -> None:
        progress(phase, done, total)
        text = f"process {os.getpid()}, {phase} {done}/{total}"
        os.pwrite(lock, text.ljust(_NOTE_BYTES).encode(), 0)

    return note
