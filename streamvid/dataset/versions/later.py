"""What later versions did to the samples of an earlier version: which were removed, and which tars hold the others.

A run that stays in an earlier version does not deliver samples that were removed later, although it plans them. The
tars of others can have been deleted by `streamvid compact`; they are read from the tars that replaced these.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from streamvid.dataset.manifest import Manifest, ShardInfo, read_manifest
from streamvid.dataset.reader import Dataset
from streamvid.dataset.removed import ShardName, places_of, read_removed
from streamvid.dataset.versions.moved import NOWHERE, read_moved
from streamvid.errors import StreamvidError

_log = logging.getLogger("streamvid.loader")


@dataclass(frozen=True)
class Later:
    """Changes between a version and the newest one.

    newest: the newest version.
    removed: keys of samples that the version has and the newest one lacks.
    moved: each shard that was replaced, and the shards to which its samples were moved.
    """

    newest: Dataset
    removed: frozenset[str] = frozenset()
    moved: Mapping[ShardName, Sequence[ShardName]] = field(default_factory=dict)

    @staticmethod
    def of(dataset: Dataset, newest: Manifest) -> Later:
        """Return the changes from `dataset` to `newest`, and read the tables that list them.

        Raises IntegrityError for damaged tables, and StorageError if the store cannot be read.
        """
        later = Dataset(dataset.store, manifest=newest)
        known = {file.path for file in dataset.manifest.files}
        # Tables that the earlier version also lists contain nothing later.
        removed = read_removed(dataset.store, [file for file in newest.files.removed if file.path not in known])
        since = [version > dataset.manifest.version for version in removed.column("version").to_pylist()]
        keys = removed.column("key").to_pylist()
        moved: dict[ShardName, list[ShardName]] = {}
        for row in read_moved(dataset.store, [file for file in newest.files.moved if file.path not in known]):
            found = moved.setdefault((row.bucket_id, row.number, row.build_id), [])
            if row.new_number != NOWHERE:
                found.append((row.bucket_id, row.new_number, row.new_build_id))
        return Later(later, frozenset(key for key, is_since in zip(keys, since, strict=True) if is_since), moved)

    def shards_of(self, shard: ShardInfo) -> list[ShardInfo] | None:
        """Return the newest version's shards that can contain the samples of an earlier shard; None if it remains."""
        name = (shard.bucket_id, shard.number, shard.build_id)
        if name not in self.moved:
            return None
        waiting, seen = [name], set[ShardName]()
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                waiting += self.moved.get(name, ())
        table = self.newest.shards
        places = places_of(table, sorted(seen - self.moved.keys()))
        return [table[int(place)] for place in places if place >= 0]


class LaterVersions:
    """What later versions did to the samples of several datasets, while a run stays in earlier versions. Thread-safe.

    datasets: number → dataset. Methods take these numbers, and know nothing about other datasets.
    silent: numbers of datasets whose removed samples are not logged.
    is_new: True if the datasets were opened for the first epoch, whose manifests need not be read again.
    """

    def __init__(
        self, datasets: Mapping[int, Dataset] | None = None, *, silent: Collection[int] = (), is_new: bool = True
    ) -> None:
        self._datasets, self._silent = datasets or {}, silent
        self._later: dict[int, Later] = {}
        self._lock = threading.Lock()
        self._is_new = is_new

    def begin_epoch(self) -> None:
        """Find samples that were removed meanwhile, and log their number. If this fails, log that and keep the old."""
        try:
            self.refresh(is_opening=self._is_new)
        except StreamvidError as error:
            _log.warning("samples that were removed from the datasets meanwhile cannot be found: %s", error)
        self._is_new = False
        for number, dataset in self._datasets.items():
            later = self._later.get(number)
            if later is not None and later.removed and number not in self._silent:
                _log.warning(
                    "%s: %d samples of version %d were removed until version %d; other samples of their buckets take "
                    "their places, marked is_repeat",
                    dataset.url,
                    len(later.removed),
                    dataset.manifest.version,
                    later.newest.manifest.version,
                )

    def refresh(self, *, is_opening: bool = False) -> bool:
        """Read the newest versions. Return True if there are newer ones than before.

        is_opening: use the manifests that were read when the datasets were opened.
        Raises the same errors as `Later.of`.
        """
        is_new = False
        with self._lock:
            for number, dataset in self._datasets.items():
                newest, known = dataset.newest if is_opening else read_manifest(dataset.store), self._later.get(number)
                if newest.version > (dataset if known is None else known.newest).manifest.version:
                    self._later[number] = Later.of(dataset, newest)
                    is_new = True
        return is_new

    def removes(self, number: int) -> bool:
        """Return True if a later version lacks any samples of a dataset."""
        later = self._later.get(number)
        return later is not None and bool(later.removed)

    def is_removed(self, number: int, key: str) -> bool:
        """Return True if a later version lacks the sample with this key."""
        later = self._later.get(number)
        return later is not None and key in later.removed

    def shards_of(self, number: int, shard: ShardInfo) -> Iterator[tuple[Later, ShardInfo]] | None:
        """Yield the shards that replace a shard, with the versions that have them. Return None if the shard remains."""
        later = self._later.get(number)
        shards = None if later is None else later.shards_of(shard)
        return None if later is None or shards is None else ((later, one) for one in shards)
