"""Verification of a whole dataset against its manifest: file sizes and, in a deep check, every byte."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from streamvid.dataset.manifest import Manifest, ShardInfo, read_manifest
from streamvid.dataset.passes import (
    DEFAULT_WORKERS,
    Progress,
    check_workers,
    count_files,
    in_parallel,
    no_progress,
)
from streamvid.dataset.reader import Dataset
from streamvid.dataset.removed import read_removed
from streamvid.dataset.sealed_json import MANIFEST
from streamvid.dataset.upkeep.finished import FinishedFiles
from streamvid.dataset.upkeep.verify_shard import (
    CHECKSUM,
    CONTENT,
    MISSING,
    SIZE,
    Problem,
    ShardFindings,
    check_bytes,
    check_file,
    check_states,
)
from streamvid.dataset.versions.moved import deleted_shards, read_moved, tars_with_removed
from streamvid.dataset.versions.open import (
    DatasetRef,
    find_version,
    kept_files,
    resolve,
    version_path,
    view_of,
    without_reader_files,
)
from streamvid.errors import IntegrityError, StorageError, StreamvidError
from streamvid.storage import StorageOptions, Store, open_store

T = TypeVar("T")

MAX_PROBLEMS = 1000
MAX_EXTRA = 1000


@dataclass(frozen=True, slots=True)
class DatasetTotals:
    """Numbers of files, shards, samples and bytes in a dataset."""

    num_files: int = 0
    num_shards: int = 0
    num_samples: int = 0
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Result of a verification.

    is_complete: False if the manifest or the shard table is damaged, so that shards could not be verified.
    num_shards_resumed: number of shards that were not read again, because an interrupted run had verified them.
    problems: first 1000 problems.
    extra: paths of the first 1000 files that are not part of the dataset.
    num_problems, num_extra: total numbers of problems and extra files; `num_extra` is None if the store does not list
        its files.
    num_moved, num_removed: for an earlier version whose shards a later version deleted, the number of samples that are
        now stored elsewhere, and the number of samples that were removed. Neither is a problem.
    removed_in: tars that still contain bytes of removed samples, in all versions; only a deep check looks for them.
    """

    url: str
    is_deep: bool
    is_complete: bool = False
    totals: DatasetTotals = field(default_factory=DatasetTotals)
    num_bytes_read: int = 0
    num_shards_resumed: int = 0
    num_problems: int = 0
    num_files_wrong: int = 0
    problems: tuple[Problem, ...] = ()
    num_extra: int | None = None
    extra: tuple[str, ...] = ()
    num_moved: int = 0
    num_removed: int = 0
    removed_in: tuple[str, ...] = ()

    @property
    def is_right(self) -> bool:
        """True if the check is complete and found no problems."""
        return self.is_complete and not self.num_problems

    @property
    def remedy(self) -> str:
        """Advice on how to fix the problems, or "" if there are none."""
        if self.is_right:
            return ""
        whats = {problem.what for problem in self.problems}
        if CONTENT in whats:
            return "rebuild the dataset or, if it is a copy, verify the original; an exact copy has the same damage"
        check = "" if whats <= {MISSING, SIZE} else " --check-existing"
        return f"copy the damaged files again from an intact dataset: streamvid copy SRC {self.url}{check}"

    def to_json(self) -> dict[str, object]:
        """Return the report as a JSON-serializable dictionary, including `is_right` and `remedy`."""
        return {**asdict(self), "is_right": self.is_right, "remedy": self.remedy}


def verify_dataset(
    url: str | Path | Store,
    *,
    deep: bool = False,
    storage: StorageOptions | Mapping[str, Any] | None = None,
    workers: int = DEFAULT_WORKERS,
    fresh: bool = False,
    journal: str | Path | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Verify the sealed dataset at `url`, a URL or an open store, without changing it.

    The manifest and the index are verified by checksum, and shards by size. With `deep`, every byte of every shard,
    clip, caption and packet table is also verified. An interrupted deep check resumes: a journal in the `journal`
    folder (by default the user's cache) lists the verified shards. With `fresh`, all shards are read again.

    workers: number of files read at a time; each needs 16 MiB of memory.

    Raises ConfigError for an unknown version or view, DatasetError if the dataset does not exist or the version was
    deleted, and StorageError if the store is unreachable. Damage does not raise an error; the report lists it.
    """
    check_workers(workers)
    ref = DatasetRef.parse(url) if isinstance(url, str | Path) else DatasetRef("")
    store = open_store(ref.url, StorageOptions.of(storage)) if isinstance(url, str | Path) else url
    newest = _intact(store, MANIFEST, lambda: read_manifest(store))
    if isinstance(newest, Problem):
        return _ended_by(newest, store, deep)
    number = resolve(newest, ref.version, store.url)
    path = MANIFEST if number == newest.version else version_path(number)
    dataset = _intact(store, path, lambda: _open(store, newest, number))
    if isinstance(dataset, Problem):
        return _ended_by(dataset, store, deep)
    view_of(dataset.manifest, newest, ref.view, store.url)  # a view changes nothing but must exist
    check = _Check(dataset, newest, deep, workers, progress or no_progress)
    if not deep:
        return check.run(None)
    # These files determine what a correct shard contains.
    files = [[file.path, file.num_bytes, file.sha256] for file in dataset.manifest.files]
    about = {"url": store.url, "content": dataset.manifest.fingerprints.content, "manifest": files}
    with FinishedFiles(journal, "verify", about) as done:
        if fresh:
            done.forget()
        return check.run(done)


def _intact(store: Store, path: str, read: Callable[[], T]) -> T | Problem:
    """Return the result of `read`. If the manifest at `path` exists but is damaged, return the problem instead."""
    try:
        return read()
    except StorageError:
        raise
    except StreamvidError as error:
        if store.state(path) is None:
            raise
        return Problem(path, CHECKSUM, "a valid manifest", f"an error ({error})")


def _ended_by(problem: Problem, store: Store, deep: bool) -> VerifyReport:
    return VerifyReport(store.url, deep, num_problems=1, num_files_wrong=1, problems=(problem,))


def _open(store: Store, newest: Manifest, number: int) -> Dataset:
    manifest = find_version(store, newest, number)
    return Dataset(store, manifest=without_reader_files(manifest) if _is_publishing(store, newest) else manifest)


def _is_publishing(store: Store, newest: Manifest) -> bool:
    """Return True if a writer is replacing the `.nv-meta/` files, or was killed while doing so.

    The next writer completes the replacement. Return False if the store cannot report whether a file exists, for
    example because the access keys do not permit listing.
    """
    try:
        return store.size(version_path(newest.version + 1)) is not None
    except StorageError:
        return False


@dataclass
class _Check:
    """Verification in progress, with its findings. All problems are counted, but only the first 1000 are kept."""

    dataset: Dataset
    newest: Manifest
    is_deep: bool
    workers: int
    progress: Progress
    problems: list[Problem] = field(default_factory=list)
    num_problems: int = 0
    wrong_paths: set[str] = field(default_factory=set)
    num_bytes_read: int = 0
    num_resumed: int = 0
    num_moved: int = 0
    num_removed: int = 0

    def run(self, journal: FinishedFiles | None) -> VerifyReport:
        found = self._check_files()
        is_complete = self._has_shards(found)
        self._add(map(self._with_samples, found) if is_complete else found)
        totals, num_extra, extra = DatasetTotals(), None, tuple[str, ...]()
        if is_complete:
            self._check_shards(journal)
            totals, (num_extra, extra) = self._totals(), self._extra()
        return VerifyReport(
            url=self.dataset.url,
            is_deep=self.is_deep,
            is_complete=is_complete,
            totals=totals,
            num_bytes_read=self.num_bytes_read,
            num_shards_resumed=self.num_resumed,
            num_problems=self.num_problems,
            num_files_wrong=len(self.wrong_paths),
            problems=tuple(self.problems),
            num_extra=num_extra,
            extra=extra,
            num_moved=self.num_moved,
            num_removed=self.num_removed,
            removed_in=self._removed_in() if is_complete and self.is_deep else (),
        )

    def _removed_in(self) -> tuple[str, ...]:
        try:
            return tars_with_removed(self.dataset.store, self.newest.files)
        except IntegrityError:  # a damaged table is a problem of the newest version
            return ()

    def _add(self, problems: Iterable[Problem]) -> None:
        for problem in problems:
            self.num_problems += 1
            self.wrong_paths.add(problem.path)
            if len(self.problems) < MAX_PROBLEMS:
                self.problems.append(problem)

    def _has_shards(self, found: list[Problem]) -> bool:
        """Return True if the shard table can be used.

        If the table does not match the manifest, add a problem to `found`.
        """
        if {file.path for file in self.dataset.manifest.files.shards} & {problem.path for problem in found}:
            return False
        try:
            _ = self.dataset.shards
        except StorageError:
            raise
        except StreamvidError as error:
            found.append(Problem(MANIFEST, CHECKSUM, "a manifest that matches its shard table", f"an error ({error})"))
            return False
        return True

    def _totals(self) -> DatasetTotals:
        shards, files = self.dataset.shards, self.dataset.manifest.files
        num_shard_bytes = int(shards.num_bytes.sum()) + int(shards.offsets_num_bytes.sum())
        return DatasetTotals(
            num_files=count_files(self.dataset) + 1,
            num_shards=len(shards),
            num_samples=int(shards.num_samples.sum()),
            num_bytes=num_shard_bytes + sum(file.num_bytes for file in files),
        )

    def _check_files(self) -> list[Problem]:
        """Verify the files that the manifest lists, and return the problems."""
        files = tuple(self.dataset.manifest.files)
        found: list[Problem] = []
        job = partial(check_file, self.dataset.store)
        with contextlib.closing(in_parallel(job, files, self.workers)) as results:
            for number, (file, problem) in enumerate(zip(files, results, strict=True), 1):
                self.num_bytes_read += file.num_bytes
                found += [] if problem is None else [problem]
                self.progress("index", number, len(files))
        return found

    def _with_samples(self, problem: Problem) -> Problem:
        """Add the number of affected samples to a problem, unless the shard checks report these samples."""
        manifest, shards = self.dataset.manifest, self.dataset.shards
        for place, samples in enumerate(manifest.files.samples):
            packets = manifest.files.packets_of(samples.path)
            is_packets = packets is not None and packets.path == problem.path
            of_groups = (group.files[place] for group in manifest.columns)
            paths = {samples.path, *(file.path for file in of_groups if file is not None)}
            if problem.path in paths or (is_packets and not (self.is_deep and problem.what == CHECKSUM)):
                if samples.path not in shards.index_path.names:
                    return problem
                rows = shards.index_path.codes == shards.index_path.names.index(samples.path)
                return replace(problem, num_keys=int(shards.num_samples[rows].sum()))
        return problem

    def _check_shards(self, journal: FinishedFiles | None) -> None:
        shards = self.dataset.shards
        store, later = self.dataset.store, self.newest.files
        is_earlier = self.dataset.manifest.version < self.newest.version
        deleted = frozenset(deleted_shards(read_moved(store, later.moved))) if is_earlier else frozenset[str]()
        removed = set(read_removed(store, later.removed).column("key").to_pylist()) if deleted else set()
        job = partial(_check_shard, self.dataset, journal, frozenset(self.wrong_paths), deleted)
        with contextlib.closing(in_parallel(job, iter(shards), self.workers)) as results:
            for number, (found, is_resumed) in enumerate(results, 1):
                self._add(found.problems)
                self.num_bytes_read += found.num_bytes_read
                self.num_resumed += is_resumed
                if found.keys is not None:
                    num_removed = len(removed.intersection(found.keys))
                    self.num_removed += num_removed
                    self.num_moved += found.shard.num_samples - num_removed
                self.progress("shards", number, len(shards))

    def _extra(self) -> tuple[int | None, tuple[str, ...]]:
        """Return the number of extra files in the store (None if unknown) and the paths of the first extra files."""
        count, first = 0, []
        try:
            known = kept_files(self.dataset.store, self.newest)
            for state in self.dataset.store.files():
                if state.path not in known:
                    count += 1
                    first += [state.path] if count <= MAX_EXTRA else []
        except StorageError:
            return None, ()
        return count, tuple(first)


def _check_shard(
    dataset: Dataset,
    journal: FinishedFiles | None,
    wrong: frozenset[str],
    deleted: frozenset[str],
    shard: ShardInfo,
    stop: threading.Event,
) -> tuple[ShardFindings, bool]:
    """Verify a shard, or only its file sizes if there is no journal.

    Return the findings, and True if an earlier run has verified the shard.
    """
    is_index_right = wrong.isdisjoint((shard.index_path, *dataset.column_paths(shard)))
    found = check_states(dataset, shard, is_index_right, deleted)
    if journal is None or found.keys is not None:
        return found, False
    if found.states and journal.is_done(shard.path, *found.states):
        return found, True
    check_bytes(dataset, found, is_index_right, stop)
    if not found.problems and is_index_right:
        journal.add(shard.path, *found.states)
    return found, False
