"""Copying datasets between stores. Files are verified in transit, and the manifest is written last."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from streamvid.dataset.manifest import LARGE_FOLDERS, FileInfo, Manifest, manifest_from_json, read_manifest
from streamvid.dataset.passes import (
    DEFAULT_WORKERS,
    Progress,
    check_workers,
    count_files,
    dataset_files,
    in_parallel,
    no_progress,
)
from streamvid.dataset.reader import Dataset
from streamvid.dataset.sealed_json import MANIFEST
from streamvid.dataset.tar import energon_files
from streamvid.dataset.upkeep.copy_file import SCRATCH, FileCopier, scratch_folder
from streamvid.dataset.upkeep.finished import FinishedFiles
from streamvid.dataset.upkeep.verify_shard import check_file
from streamvid.dataset.versions.moved import deleted_shards, read_moved
from streamvid.dataset.versions.open import DatasetRef, resolve, version_path
from streamvid.errors import ConfigError, DatasetError, SealedError, StorageError, StreamvidError
from streamvid.storage import FileState, LocalStore, StorageOptions, Store, WrongReads, open_store


@dataclass(frozen=True, slots=True)
class CopyReport:
    """Result of a copy.

    state: "copied"; "repaired" if `dest` already contained the same dataset and some of its files were written again;
        "already there" if nothing was written.
    num_files, num_bytes: number and total size of the dataset's files.
    num_copied, num_bytes_copied: number and total size of the files that this run wrote.
    num_kept: number of files that were already correct.
    num_uploads_aborted: number of unfinished uploads that killed writers had left at `dest` and that this run removed.
    """

    source: str
    dest: str
    state: str
    num_files: int
    num_bytes: int
    num_copied: int
    num_bytes_copied: int
    num_kept: int
    num_uploads_aborted: int

    def to_json(self) -> dict[str, object]:
        """Return the report as a JSON-serializable dictionary."""
        return asdict(self)


def copy_dataset(
    source: str | Path | Store,
    dest: str | Path | Store,
    *,
    storage: StorageOptions | Mapping[str, Any] | None = None,
    source_storage: StorageOptions | Mapping[str, Any] | None = None,
    dest_storage: StorageOptions | Mapping[str, Any] | None = None,
    check_existing: bool = False,
    workers: int = DEFAULT_WORKERS,
    temp_dir: str | Path | None = None,
    journal: str | Path | None = None,
    progress: Progress | None = None,
) -> CopyReport:
    """Copy the sealed dataset at `source` to `dest`. Both are URLs or open stores. Copying is idempotent.

    A copy contains one version: the newest, or the version that `source` names, such as "s3://bucket/ds@7".

    The SHA-256 of every file is verified in transit, and the manifest is written last. An interrupted copy resumes: a
    journal in the `journal` folder (by default the user's cache) lists the finished files. If the same dataset is at
    `dest`, files that are missing or have the wrong size are copied again. With `check_existing`, existing files are
    also read, and copied again if their content is wrong.

    storage: options for both stores.
    source_storage, dest_storage: options for one store, instead of `storage`.
    workers: number of files copied at a time. Each needs 16 MiB of memory and, unless `dest` is a local folder, room
        for a tar in `temp_dir` (by default the system's temporary directory).

    Raises DatasetError if there is no dataset at `source`, if `dest` contains other files, or if the same copy is
    already running; SealedError if another dataset is at `dest`; IntegrityError if the source is damaged; StorageError
    if a store fails.
    """
    check_workers(workers)
    ref = DatasetRef.parse(source) if isinstance(source, str | Path) else DatasetRef("")
    if ref.view is not None:
        raise ConfigError(
            f"source {str(source)!r} refers to a view, but only whole datasets can be copied; omit the view"
        )
    if isinstance(source, str | Path):
        source = open_store(ref.url, StorageOptions.of(storage if source_storage is None else source_storage))
    if isinstance(dest, str | Path):
        dest = open_store(dest, StorageOptions.of(storage if dest_storage is None else dest_storage))
    _check_places(source, dest)
    newest = read_manifest(source)
    number = resolve(newest, ref.version, source.url)
    manifest = _read_twice(source, MANIFEST if number == newest.version else version_path(number))
    dataset = Dataset(source, manifest=manifest_from_json(manifest))
    if dataset.manifest.version != number:
        raise DatasetError(f"{source.url}: {MANIFEST} has just been replaced; run the same command again")
    made = {} if number == newest.version else _reader_files(dataset, newest)
    files = [[file.path, file.sha256] for file in dataset.manifest.files]  # these files determine all other files
    about = {"dest": dest.url, "content": dataset.manifest.fingerprints.content, "files": files}
    with FinishedFiles(journal, "copy", about) as done:
        copy = _Copy(dataset, manifest, dest, done, check_existing, workers, progress or no_progress, made)
        return copy.run(temp_dir)


def _reader_files(dataset: Dataset, newest: Manifest) -> dict[str, bytes]:
    """Return the `.nv-meta/` files for an earlier version, as a mapping from path to content.

    The store contains these files only for the newest version.

    Raises DatasetError if shards of the version were deleted.
    """
    deleted = deleted_shards(read_moved(dataset.store, newest.files.moved))
    gone = [shard.path for shard in dataset.shards if shard.path in deleted]
    if gone:
        raise DatasetError(
            f"{dataset.url}: version {dataset.manifest.version} cannot be copied, because `streamvid compact` has "
            f"deleted {len(gone)} of its shards, which contained removed samples; copy the newest version"
        )
    return energon_files(dataset.shards)


def _read_twice(store: Store, path: str) -> bytes:
    """Read a file until two reads agree, and return the bytes. This detects a manifest that was damaged in transit."""
    reads = WrongReads()
    while (verdict := reads.judge(data := store.read(path))) != "unproven":
        if verdict == "stored":
            return data
    raise StorageError(
        f"{store.url}: every read of {path} returned different bytes; check the network, and stop other processes "
        "that write to this location"
    )


def _check_places(source: Store, dest: Store) -> None:
    same = source.url.rstrip("/") == dest.url.rstrip("/")
    if isinstance(source, LocalStore) and isinstance(dest, LocalStore):
        same = os.path.realpath(source.root) == os.path.realpath(dest.root)
        if dest.root.exists() and not dest.root.is_dir():
            raise DatasetError(f"destination {dest.url} is a file; choose a folder that is empty or does not exist yet")
    if same:
        raise ConfigError(f"source and dest are both {dest.url}; choose another destination")


@dataclass
class _Copy:
    """Copy in progress: source, destination, and the journal of finished files.

    made: contents of the files that are not copied from the source, keyed by path.
    """

    dataset: Dataset
    manifest: bytes
    dest: Store
    journal: FinishedFiles
    check_existing: bool
    workers: int
    progress: Progress
    made: Mapping[str, bytes]

    def run(self, temp_dir: str | Path | None) -> CopyReport:
        there, sealed = self._look()
        with scratch_folder(self.dest, self.journal.name, temp_dir) as folder:
            if sealed is None and MANIFEST in there:
                # The manifest is damaged. It is removed first, so that no reader opens a half-repaired dataset.
                self.dest.remove(MANIFEST)
            copier = FileCopier(self.dataset.store, self.dest, folder)
            num_copied, num_bytes_copied = self._copy_files(copier, there, self._other_files(sealed))
            is_sealing = sealed != self.manifest
            if is_sealing:
                copier.put(MANIFEST, self.manifest)
        num_aborted = sum(map(self.dest.abort_uploads, LARGE_FOLDERS))
        copied = "copied" if sealed is None else "repaired" if num_copied or is_sealing else "already there"
        num_files = count_files(self.dataset) + 1
        num_copied += is_sealing
        return CopyReport(
            source=self.dataset.url,
            dest=self.dest.url,
            state=copied,
            num_files=num_files,
            num_bytes=sum(file.num_bytes for file in dataset_files(self.dataset)) + len(self.manifest),
            num_copied=num_copied,
            num_bytes_copied=num_bytes_copied + is_sealing * len(self.manifest),
            num_kept=num_files - num_copied,
            num_uploads_aborted=num_aborted,
        )

    def _look(self) -> tuple[dict[str, FileState], bytes | None]:
        """Return a mapping from the paths at `dest` to file states, and the manifest at `dest`.

        The manifest is None if it is missing or invalid.

        Raises SealedError if the manifest describes another dataset, and DatasetError if there are unrelated files but
        no valid manifest.
        """
        names = {MANIFEST, *(file.path for file in dataset_files(self.dataset))}
        there: dict[str, FileState] = {}
        foreign = ""
        for state in self.dest.files():
            if state.path in names:
                there[state.path] = state
            elif not state.path.startswith(f"{SCRATCH}/"):
                # A damaged listing can contain files that do not exist.
                foreign = foreign or (state.path if self.dest.state(state.path) else "")
        sealed = self._sealed_there() if MANIFEST in there else None
        if sealed is None and foreign:
            raise DatasetError(
                f"destination {self.dest.url} contains {foreign!r}, which does not belong to this dataset; choose a "
                "destination that is empty, does not exist yet, or contains the same dataset"
            )
        return there, sealed

    def _other_files(self, sealed: bytes | None) -> set[str] | None:
        """Return the paths of files that the manifest at `dest` describes differently; None if any file may differ."""
        if sealed is None:
            return None
        if sealed == self.manifest:
            return set()
        theirs = manifest_from_json(sealed)
        if theirs.files.shards != self.dataset.manifest.files.shards:
            return None
        same = set(theirs.files)
        return {file.path for file in self.dataset.manifest.files if file not in same}

    def _sealed_there(self) -> bytes | None:
        data = _read_twice(self.dest, MANIFEST)
        try:
            manifest = manifest_from_json(data)
        except StreamvidError:
            return None  # the manifest is damaged; _look then checks whether other files are in the way
        mine, theirs = self.dataset.manifest, manifest.fingerprints
        # `content` may differ because of columns that were added later.
        if (theirs.plan, theirs.base) != (mine.fingerprints.plan, mine.fingerprints.base):
            raise SealedError(
                f"destination {self.dest.url} contains another sealed dataset (content fingerprint "
                f"{theirs.content[:16]}…, not {mine.fingerprints.content[:16]}…); choose another destination"
            )
        # Columns added to the source since the last copy are copied, but columns added only at dest must not be lost.
        if manifest.columns != mine.columns[: len(manifest.columns)]:
            raise SealedError(
                f"destination {self.dest.url} contains the same dataset with different columns, added by `streamvid "
                "annotate`; annotate the source in the same way, or choose another destination"
            )
        return data

    def _copy_files(self, copier: FileCopier, there: dict[str, FileState], others: set[str] | None) -> tuple[int, int]:
        """Copy the files that are missing or wrong at `dest`.

        Return the number and the total size in bytes of the copied files.
        """
        total, num_copied, num_bytes = count_files(self.dataset), 0, 0
        files: Iterator[FileInfo] = dataset_files(self.dataset)
        job = partial(self._copy_file, copier, there, others)
        with contextlib.closing(in_parallel(job, files, self.workers)) as results:
            for number, num_bytes_put in enumerate(results, 1):
                num_copied += num_bytes_put is not None
                num_bytes += num_bytes_put or 0
                self.progress("copy", number, total)
        return num_copied, num_bytes

    def _copy_file(
        self,
        copier: FileCopier,
        there: dict[str, FileState],
        others: set[str] | None,
        file: FileInfo,
        stop: threading.Event,
    ) -> int | None:
        """Copy one file unless the existing copy is correct.

        Return the number of bytes written, or None if nothing was written.
        """
        state, is_sealed = there.get(file.path), others is not None and file.path not in others
        if state is not None and self._is_right(file, state, is_sealed, stop):
            return None
        if file.path in self.made:
            copier.put(file.path, self.made[file.path])
        else:
            copier.copy(file, stop)
        state = self.dest.state(file.path)
        if state is None or state.num_bytes != file.num_bytes:
            raise StorageError(
                f"{self.dest.url}: {file.path} was {file.num_bytes} bytes long when it was written, but is now "
                f"{f'{state.num_bytes} bytes long' if state else 'missing'}; stop other processes that write to this "
                "location"
            )
        self.journal.add(file.path, state)
        return file.num_bytes

    def _is_right(self, file: FileInfo, state: FileState, is_sealed: bool, stop: threading.Event) -> bool:
        if state.num_bytes != file.num_bytes:
            return False
        if self.journal.is_done(file.path, state):
            return True
        if not self.check_existing:
            return is_sealed
        if check_file(self.dest, file, stop, known=state) is not None:
            return False
        self.journal.add(file.path, state)
        return True
