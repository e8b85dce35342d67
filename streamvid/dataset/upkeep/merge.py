"""Merging datasets: the samples of other datasets are added to one dataset."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from streamvid.dataset.draws import StoredSet, kept_sets
from streamvid.dataset.index import named_by_content
from streamvid.dataset.integrity import check_size, read_verified
from streamvid.dataset.manifest import Change, FileInfo, Manifest
from streamvid.dataset.passes import DEFAULT_WORKERS, Progress, check_workers, no_progress
from streamvid.dataset.reader import Dataset
from streamvid.dataset.removed import RemovedSample, encode_removed, read_removed
from streamvid.dataset.sealed_json import MANIFEST
from streamvid.dataset.upkeep.copy import copy_dataset
from streamvid.dataset.upkeep.copy_file import scratch_folder
from streamvid.dataset.upkeep.merge_checks import (
    OnDuplicate,
    Rows,
    check_alike,
    left_out,
    merged_buckets,
    merged_groups,
)
from streamvid.dataset.upkeep.new_index import NewIndex
from streamvid.dataset.upkeep.new_shards import (
    NewShard,
    Part,
    ShardChange,
    build_id_of,
    dead_shards,
    store_shards,
    taken_names,
)
from streamvid.dataset.versions.moved import NOWHERE, MovedShard, encode_moved
from streamvid.dataset.versions.open import check_newest, history, open_dataset
from streamvid.dataset.versions.publish import Writing, put_file, writing
from streamvid.errors import ConfigError
from streamvid.storage import StorageOptions, open_store

_DIGITS = 16


@dataclass(frozen=True, slots=True)
class MergeReport:
    """Result of a merge.

    state: "merged", or "already merged" if an earlier merge has added all sources.
    version: number of the new version; None if nothing was added.
    num_added: number of samples added.
    num_replaced: number of samples in `dataset` that were replaced by samples from the same source file.
    num_duplicates: number of samples in the sources that were not added, because samples from the same source file
        already exist.
    num_kept_out: number of samples in the sources that were not added, because they had been removed from `dataset`.
    num_samples: number of samples in the dataset.
    num_bytes: total size of the added tars.
    """

    dataset: str
    state: str
    version: int | None
    num_added: int
    num_replaced: int
    num_duplicates: int
    num_kept_out: int
    num_samples: int
    num_bytes: int

    def to_json(self) -> dict[str, object]:
        """Return the report as a JSON-serializable dictionary."""
        return asdict(self)


def merge(
    dataset: str | Path,
    *sources: str | Path,
    on_duplicate: OnDuplicate = "error",
    storage: StorageOptions | Mapping[str, Any] | None = None,
    source_storage: StorageOptions | Mapping[str, Any] | None = None,
    workers: int = DEFAULT_WORKERS,
    temp_dir: str | Path | None = None,
    journal: str | Path | None = None,
    progress: Progress | None = None,
) -> MergeReport:
    """Add the samples of the sealed datasets `sources` to the dataset at `dataset`, by publishing a new version.

    If there is no dataset at `dataset`, it starts as a copy of the first source. The sources do not change. All
    datasets must have the same kind of clips, frame rate, model, conditioning inputs and encoding, and buckets with
    equal ids must have equal shapes. Columns that a dataset lacks are null for its samples. Within one local file
    system, tars are linked; within one S3 store, the store copies them. Tars are not verified in these two cases.
    Otherwise, tars are read, verified and written. Tars that contain duplicates or removed samples are rewritten
    without these samples.
    Merging is idempotent: if it is interrupted, run it again.

    on_duplicate: "error" refuses to merge datasets that have samples from the same source file (`record_key`); "first"
        keeps the samples of the first such dataset; "last" keeps the samples of the last one. The order is `dataset`,
        then the sources as given.
    storage: options for `dataset` and, unless `source_storage` is given, for the sources.
    journal: see `copy_dataset`.

    Raises ConfigError for invalid options, DatasetError if the datasets are incompatible or another process is changing
    the dataset, IntegrityError for a damaged source, and StorageError if a store fails.
    """
    check_workers(workers)
    if on_duplicate not in get_args(OnDuplicate):
        raise ConfigError(f"on_duplicate={on_duplicate!r}: must be one of {', '.join(get_args(OnDuplicate))}")
    if not sources:
        raise ConfigError("sources is empty; pass at least one dataset to add")
    options = StorageOptions.of(storage)
    of_sources = options if source_storage is None else StorageOptions.of(source_storage)
    opened = [_open_source(source, of_sources) for source in sources]
    store = open_store(check_newest(dataset), options)
    if store.state(MANIFEST) is None:
        copy_dataset(
            sources[0],  # the URL, because it may name a version
            store,
            source_storage=of_sources,
            workers=workers,
            temp_dir=temp_dir,
            journal=journal,
            progress=progress,
        )
    with writing(store) as held:
        done = _merged_before(held)
        new = [source for source in opened if source.manifest.fingerprints.content not in done]
        if not new:
            samples = held.newest.counts.samples
            return MergeReport(store.url, "already merged", None, 0, 0, 0, 0, samples, 0)
        return _Merge(held, new, opened, on_duplicate).run(temp_dir, workers, progress or no_progress)


def _open_source(url: str | Path, options: StorageOptions) -> Dataset:
    source = open_dataset(url, storage=options)
    if source.where is not None:
        raise ConfigError(f"source {str(url)!r} refers to a view, but only whole datasets can be merged; omit the view")
    return source


def _merged_before(held: Writing) -> set[str]:
    """Return the content fingerprints of all datasets whose samples the newest version already contains."""
    kept = (manifest.fingerprints.content for manifest in history(held.store, held.newest))
    return {*held.newest.merged, *kept}


class _Merge:
    """Merge in progress. The constructor decides which samples to keep; `run` writes the new version."""

    def __init__(
        self, held: Writing, sources: Sequence[Dataset], named: Sequence[Dataset], on_duplicate: OnDuplicate
    ) -> None:
        """Decide which samples to keep. named: all sources that were requested, including those merged earlier."""
        self.held, self.dest, self.sources = held, held.dataset, sources
        contents = (source.manifest.fingerprints.content for source in named)
        self.merged = tuple(dict.fromkeys((*held.newest.merged, *contents)))
        check_alike(self.dest, sources)
        self.dead = dead_shards(self.dest)
        self.left_out = left_out(self.dest, sources, on_duplicate)
        self.taken = taken_names(self.dest, self.dead)
        self.next_numbers: Counter[str] = Counter()
        for shard in (*self.dest.shards, *self.dead):
            self.next_numbers[shard.bucket_id] = max(self.next_numbers[shard.bucket_id], shard.number + 1)
        self.moved = [MovedShard.of(shard, (NOWHERE, 0), is_deleted=True) for shard in self.dead]

    def run(self, temp_dir: str | Path | None, workers: int, progress: Progress) -> MergeReport:
        """Write the shards and the index, and publish the version. Return the report."""
        store, old, everything = self.held.store, self.held.newest, [self.dest, *self.sources]
        affected = self._affected()
        own, draws = self._own_shards(affected)
        added: list[NewShard] = []
        for source, rows in zip(self.sources, self.left_out.of_sources, strict=True):
            shards, sets = self._shards_of(source, rows)
            added += shards
            draws += sets
        shards = [*own, *added]
        with scratch_folder(store, old.fingerprints.content, temp_dir) as folder:
            facts = store_shards(store, shards, folder, workers, progress)
        rows = next((one.stored_schema for one in everything if one.manifest.files.samples), self.dest.stored_schema)
        groups, has_packets = merged_groups(self.dest, self.sources, rows), any(_has_packets(one) for one in everything)
        index = NewIndex(self.dest, affected, merged_buckets(everything), rows, groups, has_packets)
        draft, table = index.write(shards, facts)
        num_added = sum(shard.num_samples for shard in added)
        note = ", ".join(source.manifest.fingerprints.content[:_DIGITS] for source in self.sources)
        draft = replace(self._with_files(draft), draws=tuple(draws), merged=self.merged)
        new = self.held.publish(draft, Change("merge", num_added, self.left_out.num_replaced, note), table)
        return MergeReport(
            dataset=store.url,
            state="merged",
            version=new.version,
            num_added=num_added,
            num_replaced=self.left_out.num_replaced,
            num_duplicates=self.left_out.num_duplicates,
            num_kept_out=self.left_out.num_kept_out,
            num_samples=new.counts.samples,
            num_bytes=sum(fact.num_bytes for fact in facts[len(own) :]),
        )

    def _affected(self) -> frozenset[str]:
        """Return the paths of the dataset's sample files from which samples are removed."""
        replaced = {self.dest.shards[number].index_path for number in self.left_out.of_dest}
        return frozenset(replaced | {shard.index_path for shard in self.dead})

    def _own_shards(self, affected: frozenset[str]) -> tuple[list[NewShard], list[StoredSet]]:
        """Return the shards that a merge keeps from the affected sample files, and the remaining draw sets.

        The shards no longer contain the replaced samples.
        """
        shards, there = [], set()
        for number, shard in enumerate(self.dest.shards):
            part = _without(Part.whole(self.dest, shard), self.left_out.of_dest.get(number))
            if len(part.rows):
                there.add((shard.bucket_id, shard.number))
            if shard.index_path not in affected:
                continue
            if part.is_whole:
                shards.append(NewShard.kept(self.dest, shard))
                continue
            new = (NOWHERE, 0)
            if len(part.rows):
                shards.append(self._named(part, shard.number, "written"))
                new = (shard.number, shards[-1].build_id)
            self.moved.append(MovedShard.of(shard, new, is_deleted=True))
        return shards, list(kept_sets(self.dest.manifest.draws, there))

    def _shards_of(self, source: Dataset, left_out: Mapping[int, Rows]) -> tuple[list[NewShard], list[StoredSet]]:
        """Return the shards that a source adds, and the source's draw sets with new shard numbers."""
        shards, numbers = [], dict[tuple[str, int], int]()
        for place, shard in enumerate(source.shards):
            part = _without(Part.whole(source, shard), left_out.get(place))
            if not len(part.rows):
                continue
            number = self.next_numbers[shard.bucket_id]
            self.next_numbers[shard.bucket_id] += 1
            numbers[shard.bucket_id, shard.number] = number
            shards.append(self._named(part, number, "copied" if part.is_whole else "written"))
        sets = [
            replace(one, buckets=tuple((name, weight, numbers[name, first]) for name, weight, first in one.buckets))
            for one in kept_sets(source.manifest.draws, numbers)
        ]
        return shards, sets

    def _named(self, part: Part, number: int, change: ShardChange) -> NewShard:
        build_id = build_id_of([part], number, self.taken)
        return NewShard(part.shard.bucket_id, number, build_id, part.shard.split, (part,), change)

    def _with_files(self, draft: Manifest) -> Manifest:
        """Return `draft` with tables for moved shards and for the sources' removed samples, rejections and records."""
        files, counts = draft.files, draft.counts
        removed = [one for source in self.sources for one in _removed_of(source, draft.version + 1)]
        new_removed = [self._put("removed", len(files.removed), encode_removed(removed))] if removed else []
        new_moved = [self._put("moved", len(files.moved), encode_moved(self.moved))] if self.moved else []
        rejections, records = list(files.rejections), list(files.records)
        has_records = bool(records) or not self.dest.manifest.counts.samples
        for source in self.sources:
            theirs = source.manifest
            if theirs.counts.rejections:
                rejections += [self._copied(source, file) for file in theirs.files.rejections]
            records += [self._copied(source, file) for file in theirs.files.records if file not in records]
            has_records = has_records and (bool(theirs.files.records) or not theirs.counts.samples)
            counts = replace(
                counts,
                records=counts.records + theirs.counts.records,
                rejections=counts.rejections + theirs.counts.rejections,
            )
        files = replace(
            files,
            rejections=tuple(rejections),
            records=tuple(records) if has_records else (),
            removed=(*files.removed, *new_removed),
            moved=(*files.moved, *new_moved),
        )
        return replace(draft, files=files, counts=counts)

    def _put(self, stem: str, number: int, data: bytes) -> FileInfo:
        file = named_by_content(stem, number, data)
        put_file(self.held.store, file.path, data)
        return file

    def _copied(self, source: Dataset, file: FileInfo) -> FileInfo:
        """Copy an index file under the same name. The name contains the file's checksum."""
        check_size(source.store, file)
        put_file(self.held.store, file.path, bytes(read_verified(source.store, file)))
        return file


def _has_packets(dataset: Dataset) -> bool:
    return bool(dataset.manifest.files.packets)


def _without(part: Part, rows: Rows | None) -> Part:
    """Return a part without the given samples of its shard."""
    return part if rows is None else replace(part, rows=np.setdiff1d(part.rows, rows))


def _removed_of(source: Dataset, version: int) -> Iterator[RemovedSample]:
    """Yield the removed samples of a source, so that they are not added again.

    The yielded entries do not refer to a shard.
    """
    for row in read_removed(source.store, source.manifest.files.removed).to_pylist():
        yield RemovedSample(**{**row, "number": NOWHERE, "build_id": 0, "version": version})
