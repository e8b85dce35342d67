"""Removal of samples from a dataset: they leave the index immediately, and `compact` deletes their bytes later."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from streamvid.dataset.draws import kept_sets
from streamvid.dataset.index import named_by_content
from streamvid.dataset.manifest import Change, ShardInfo, read_manifest
from streamvid.dataset.passes import Progress, no_progress
from streamvid.dataset.reader import Dataset
from streamvid.dataset.removed import Removals, RemovedSample, encode_removed, read_removed
from streamvid.dataset.shard_table import ShardTable
from streamvid.dataset.upkeep.selection import SampleSelection, in_all_buckets, select
from streamvid.dataset.versions.moved import tars_with_removed
from streamvid.dataset.versions.open import check_newest
from streamvid.dataset.versions.publish import Writing, put_file, writing
from streamvid.storage import StorageOptions, open_store

NOTHING_SELECTED = "nothing selected"
_SHOWN = 100
_FACTS = ("key", "record_key", "source", "clip_sha256")


@dataclass(frozen=True, slots=True)
class RemovedClip:
    """Report entry for one removed sample.

    path: tar that contains the sample's bytes until `compact` deletes them.
    """

    key: str
    record_key: str
    source: str
    clip_sha256: str
    path: str


@dataclass(frozen=True, slots=True)
class RemoveReport:
    """Result of a removal, suitable for a takedown record.

    state: "removed", "would be removed" for a dry run, "already removed" if earlier commands removed all selected
        samples, or "nothing selected".
    version: number of the first version without the samples; None if nothing was removed.
    removed: the removed samples.
    num_left: number of samples that remain in the dataset.
    num_already_removed: number of selected keys whose samples an earlier command removed.
    unmatched: first 100 keys that match no sample in any version.
    num_unmatched: total number of such keys.
    stored_in: tars that still contain bytes of removed samples, including samples from earlier removals.
    same_clips: keys of the first 100 remaining samples whose clip has the same bytes as a removed clip.
    num_same_clips: total number of such samples.
    """

    dataset: str
    state: str
    reason: str
    version: int | None
    removed: tuple[RemovedClip, ...]
    num_left: int
    num_already_removed: int
    num_unmatched: int
    unmatched: tuple[str, ...]
    stored_in: tuple[str, ...]
    num_same_clips: int
    same_clips: tuple[str, ...]

    @property
    def next_steps(self) -> tuple[str, ...]:
        """Commands and actions that complete a takedown."""
        steps = []
        if self.stored_in:
            steps.append(f"streamvid compact {self.dataset} deletes the bytes of removed samples from all versions")
        if self.removed or self.num_already_removed:
            steps.append(
                f"streamvid compact {self.dataset} --expire AGE deletes earlier versions, whose indexes contain the "
                "captions"
            )
            steps.append(
                f"streamvid compact {self.dataset} --cache-dir DIR --cache-only removes the deleted tars from the "
                "cache on a machine"
            )
            steps.append(
                "repeat the removal in copies of the dataset, and encode features again if they include removed samples"
            )
        if self.num_same_clips:
            steps.append("remove the samples in same_clips too if the clip itself must be deleted")
        return tuple(steps)

    def to_json(self) -> dict[str, object]:
        """Return the report as a JSON-serializable dictionary, including `next_steps`."""
        return {**asdict(self), "next_steps": list(self.next_steps)}


def remove(
    dataset: str | Path,
    *,
    keys: str | Path | Collection[str] | None = None,
    where: str | None = None,
    source: str | None = None,
    reason: str = "",
    dry_run: bool = False,
    storage: StorageOptions | Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> RemoveReport:
    """Remove samples from a dataset by publishing a version without them.

    Exactly one of `keys`, `where` and `source` selects the samples.

    Readers of the new version neither plan nor read the samples. The bytes of the samples remain in the tars until
    `compact` rewrites the tars. Removing is idempotent: samples that were removed before are not removed again. A
    removed clip that is stored in several buckets is removed from all of them.

    keys: sample keys, record keys or source names, or the path of a file that lists them: a .txt file with one entry
        per line, or a table with a column named key, record_key or source.
    where: condition as in `VideoLoader(where=...)`.
    source: pattern that source names must match, such as "studio-7/*".
    reason: text that the version and the report record.
    dry_run: only report what would be removed.

    Raises ConfigError for an invalid selection, SourceError for an unreadable key file, DatasetError if another process
    changes the dataset, and StorageError if the store fails.
    """
    store = open_store(check_newest(dataset), StorageOptions.of(storage))
    progress = progress or no_progress
    if dry_run:
        return _Removal(Dataset(store, manifest=read_manifest(store)), keys, where, source, progress).report(reason)
    with writing(store) as held:
        removal = _Removal(held.dataset, keys, where, source, progress)
        if removal.samples:
            removal.publish(held, reason)
        return removal.report(reason, is_published=True)


class _Removal:
    """Samples selected for removal, and the shard table without them."""

    def __init__(
        self,
        dataset: Dataset,
        keys: str | Path | Collection[str] | None,
        where: str | None,
        source: str | None,
        progress: Progress,
    ) -> None:
        self.dataset, self.version = dataset, dataset.manifest.version + 1
        selection = select(dataset, keys, where, source)
        found = _matches(dataset, selection, progress)
        self.samples: list[RemovedSample] = []
        self.clips: list[RemovedClip] = []
        for number in sorted(found):
            self._add(dataset.shards[number], found[number])
        self.already, self.unmatched = _removed_before(dataset, selection)

    def _add(self, shard: ShardInfo, rows: npt.NDArray[np.int32]) -> None:
        table, kept = self.dataset.samples(shard, _FACTS), self.dataset.kept_rows(shard)
        columns = [table.column(name).take(rows).to_pylist() for name in _FACTS]
        for row, (key, record_key, source, digest) in zip(rows.tolist(), zip(*columns, strict=True), strict=True):
            place = row if kept is None else int(kept[row])
            name = (shard.bucket_id, shard.number, shard.build_id)
            self.samples.append(RemovedSample(key, record_key, *name, place, digest, self.version))
            self.clips.append(RemovedClip(key, record_key, source, digest.hex(), shard.path))

    def publish(self, held: Writing, reason: str) -> None:
        """Write the table of removed samples, and publish a version without these samples."""
        data, manifest = encode_removed(self.samples), self.dataset.manifest
        file = named_by_content("removed", len(manifest.files.removed), data)
        put_file(held.store, file.path, data)
        shards = self._left()
        there = set(zip((shard.bucket_id for shard in shards), shards.number.tolist(), strict=True))
        files = replace(manifest.files, removed=(*manifest.files.removed, file))
        draft = replace(manifest, files=files, draws=kept_sets(manifest.draws, there))
        held.publish(draft, Change("remove", num_removed=len(self.samples), note=reason), shards)

    def _left(self) -> ShardTable:
        rows: dict[tuple[str, int, int], list[int]] = defaultdict(list)
        for one in self.samples:
            rows[one.bucket_id, one.number, one.build_id].append(one.row)
        return Removals({name: np.array(places, np.int32) for name, places in rows.items()}).applied(
            self.dataset.shards
        )

    def report(self, reason: str, *, is_published: bool = False) -> RemoveReport:
        """Return the report."""
        done = "removed" if is_published else "would be removed"
        if not self.samples:
            done = "already removed" if self.already else NOTHING_SELECTED
        same = _same_clips(self.dataset, self.samples)
        return RemoveReport(
            dataset=self.dataset.url,
            state=done,
            reason=reason,
            version=self.version if self.samples else None,
            removed=tuple(self.clips),
            num_left=self.dataset.manifest.counts.samples - len(self.samples),
            num_already_removed=len(self.already),
            num_unmatched=len(self.unmatched),
            unmatched=tuple(self.unmatched[:_SHOWN]),
            stored_in=tars_with_removed(
                self.dataset.store, self.dataset.manifest.files, [clip.path for clip in self.clips]
            ),
            num_same_clips=len(same),
            same_clips=tuple(same[:_SHOWN]),
        )


def _matches(dataset: Dataset, selection: SampleSelection, progress: Progress) -> dict[int, npt.NDArray[np.int32]]:
    """Map rows of the shard table to the ascending rows of the samples selected in that shard.

    Shards without selected samples are omitted.
    """
    found: dict[int, npt.NDArray[np.int32]] = {}
    total = len(dataset.shards)
    for number, shard in enumerate(dataset.shards):
        rows = selection.matching(dataset.samples(shard, selection.columns))
        if len(rows):
            found[number] = rows
        progress("select", number + 1, total)
    return in_all_buckets(dataset, found)


def _removed_before(dataset: Dataset, selection: SampleSelection) -> tuple[list[str], list[str]]:
    """Return two lists of the selected keys that match no sample: keys of samples removed earlier, and unknown keys."""
    if not selection.unmatched:
        return [], []
    table = read_removed(dataset.store, dataset.manifest.files.removed)
    before = {*table.column("key").to_pylist(), *table.column("record_key").to_pylist()}
    missing = sorted(selection.unmatched)
    return [key for key in missing if key in before], [key for key in missing if key not in before]


def _same_clips(dataset: Dataset, samples: Sequence[RemovedSample]) -> list[str]:
    """Return the keys of other samples whose clips are byte-identical to the clip of a sample in `samples`."""
    removed, keys = {one.clip_sha256 for one in samples}, {one.key for one in samples}
    found: list[str] = []
    for shard in dataset.shards if removed else ():
        table = dataset.samples(shard, ("key", "clip_sha256"))
        pairs = zip(table.column("key").to_pylist(), table.column("clip_sha256").to_pylist(), strict=True)
        found += [key for key, digest in pairs if digest in removed and key not in keys]
    return found
