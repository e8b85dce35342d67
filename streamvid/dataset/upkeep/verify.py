"""A whole dataset against its manifest: every file by size, and for a deep check every byte."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from streamvid.dataset.manifest import MANIFEST, FileInfo, ShardInfo
from streamvid.dataset.passes import (
    DEFAULT_WORKERS,
    Progress,
    check_workers,
    count_files,
    dataset_files,
    in_parallel,
)
from streamvid.dataset.reader import Dataset
from streamvid.dataset.upkeep.finished import FinishedFiles
from streamvid.dataset.upkeep.verify_report import CHECKSUM, MAX_EXTRA, Findings, Problem, VerifyReport
from streamvid.dataset.upkeep.verify_shard import ShardFindings, check_bytes, check_file, check_states
from streamvid.errors import StorageError, StreamvidError
from streamvid.storage import StorageOptions, Store, open_store

_JOURNALS = "verify"


def verify_dataset(
    url: str | Path,
    *,
    deep: bool = False,
    storage: StorageOptions | Mapping[str, Any] | None = None,
    workers: int = DEFAULT_WORKERS,
    fresh: bool = False,
    journal: str | Path | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Check the sealed dataset at `url`; reads only.

    Manifest and index are proved by their checksums, shards by their sizes; with `deep` every byte of every shard,
    clip, caption and packet table too. workers: files at a time, each with 16 MiB of memory. A deep check that was
    interrupted goes on with the shards that it has not read, as lines in the folder `journal` say (None: of the user's
    caches); `fresh` reads all of them.

    Raises DatasetError where there is no dataset, StorageError where the store is away. Damage is no error but in the
    report.
    """
    return verify_store(
        open_store(url, StorageOptions.of(storage)),
        deep=deep,
        workers=workers,
        fresh=fresh,
        journal=journal,
        progress=progress,
    )


def verify_store(
    store: Store,
    *,
    deep: bool = False,
    workers: int = DEFAULT_WORKERS,
    fresh: bool = False,
    journal: str | Path | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """`verify_dataset` of a store that is open."""
    check_workers(workers)
    try:
        dataset = Dataset(store)
    except StorageError:
        raise
    except StreamvidError as error:
        if store.state(MANIFEST) is None:
            raise
        problem = Problem(MANIFEST, CHECKSUM, "the manifest of a dataset", str(error))
        return VerifyReport(store.url, deep, num_problems=1, num_files_wrong=1, problems=(problem,), num_extra=None)
    run = _Run(dataset, deep, workers, progress or _no_progress)
    if not deep:
        return run.check(None)
    about = {"url": store.url, "content": dataset.manifest.fingerprints.content, "manifest": _identity(dataset)}
    with FinishedFiles(journal, _JOURNALS, about) as found:
        if fresh:
            found.forget()
        return run.check(found)


def _identity(dataset: Dataset) -> list[list[str | int]]:
    """What of the manifest decides whether a shard is right."""
    return [[file.path, file.num_bytes, file.sha256] for file in dataset.manifest.files]


@dataclass
class _Run:
    """One check: what it is of, and what it found so far."""

    dataset: Dataset
    is_deep: bool
    workers: int
    progress: Progress
    findings: Findings = field(default_factory=Findings)
    num_bytes_read: int = 0
    num_resumed: int = 0

    def check(self, journal: FinishedFiles | None) -> VerifyReport:
        of_files = self._check_files()
        report = VerifyReport(self.dataset.url, self.is_deep)
        shard_paths = {file.path for file in self.dataset.manifest.files.shards}
        if shard_paths & {problem.path for problem in of_files}:
            self.findings.add(of_files)
            return self._counted(replace(report, num_extra=None))
        try:
            shards = self.dataset.shards
        except StorageError:
            raise
        except StreamvidError as error:
            self.findings.add(of_files)
            self.findings.add([Problem(MANIFEST, CHECKSUM, "a manifest that agrees with its shard table", str(error))])
            return self._counted(replace(report, num_extra=None))
        self.findings.add(map(self._with_hits, of_files))
        self._check_shards(journal)
        num_extra, extra = self._extra()
        return self._counted(
            replace(
                report,
                is_complete=True,
                num_files=count_files(self.dataset) + 1,
                num_shards=len(shards),
                num_samples=int(shards.num_samples.sum()),
                num_bytes=sum(int(column.sum()) for column in (shards.num_bytes, shards.offsets_num_bytes))
                + sum(file.num_bytes for file in self.dataset.manifest.files),
                num_extra=num_extra,
                extra=extra,
            )
        )

    def _counted(self, report: VerifyReport) -> VerifyReport:
        return replace(
            report,
            num_bytes_read=self.num_bytes_read,
            num_shards_resumed=self.num_resumed,
            num_problems=self.findings.num_problems,
            num_files_wrong=len(self.findings.paths),
            problems=tuple(self.findings.problems),
        )

    def _check_files(self) -> list[Problem]:
        """The files that the manifest names."""
        files = self.dataset.manifest.files
        job = partial(_check_named, self.dataset.store)
        found: list[Problem] = []
        with contextlib.closing(in_parallel(job, files, self.workers)) as results:
            for number, (file, problem) in enumerate(zip(files, results, strict=True), 1):
                self.num_bytes_read += file.num_bytes
                found += [] if problem is None else [problem]
                self.progress("index", number, len(files))
        return found

    def _with_hits(self, problem: Problem) -> Problem:
        """With the samples that a damaged file of the index has, but those that the check of each shard will name."""
        manifest, shards = self.dataset.manifest, self.dataset.shards
        for place, samples in enumerate(manifest.files.samples):
            packets = manifest.files.packets_of(samples.path)
            is_packets = packets is not None and packets.path == problem.path
            paths = {samples.path, *(group.files[place].path for group in manifest.columns)}
            if problem.path in paths or (is_packets and not (self.is_deep and problem.what == CHECKSUM)):
                if samples.path not in shards.index_path.names:
                    return problem
                rows = shards.index_path.codes == shards.index_path.names.index(samples.path)
                return replace(problem, num_keys=int(shards.num_samples[rows].sum()))
        return problem

    def _check_shards(self, journal: FinishedFiles | None) -> None:
        shards = self.dataset.shards
        job = partial(_check_shard, self.dataset, journal, frozenset(self.findings.paths))
        with contextlib.closing(in_parallel(job, iter(shards), self.workers)) as results:
            for number, (found, is_resumed) in enumerate(results, 1):
                self.findings.add(found.problems)
                self.num_bytes_read += found.num_bytes_read
                self.num_resumed += is_resumed
                self.progress("shards", number, len(shards))

    def _extra(self) -> tuple[int | None, tuple[str, ...]]:
        """How many files belong to no dataset, and the first of them; None where the store does not list."""
        known = {MANIFEST, *(file.path for file in dataset_files(self.dataset))}
        count, first = 0, []
        try:
            for state in self.dataset.store.files():
                if state.path not in known:
                    count += 1
                    first += [state.path] if count <= MAX_EXTRA else []
        except StorageError:
            return None, ()
        return count, tuple(first)


def _check_named(store: Store, file: FileInfo, stop: threading.Event) -> Problem | None:
    return check_file(store, file, stop)


def _check_shard(
    dataset: Dataset, journal: FinishedFiles | None, wrong: frozenset[str], shard: ShardInfo, stop: threading.Event
) -> tuple[ShardFindings, bool]:
    """What is wrong with a shard, and whether an interrupted run had proved it. journal: None: look at sizes alone."""
    is_index_right = wrong.isdisjoint((shard.index_path, *dataset.column_paths(shard)))
    found = check_states(dataset, shard, is_index_right)
    if journal is None:
        return found, False
    if found.states and journal.is_done(shard.path, *found.states):
        return found, True
    check_bytes(dataset, found, is_index_right, stop)
    if not found.problems and is_index_right:
        journal.add(shard.path, *found.states)
    return found, False


def _no_progress(phase: str, done: int, total: int) -> None:
    """Told to nobody."""
