"""Effects of later versions on an earlier version: which samples were removed, and which tars contain the remaining
samples.

A run that stays on an earlier version does not deliver samples that were removed later, although it plans them.
Remaining samples whose tars `streamvid compact` has deleted are read from the tars that replaced them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from streamvid.dataset.manifest import Manifest, ShardInfo, read_manifest
from streamvid.dataset.reader import Dataset
from streamvid.dataset.removed import ShardName, places_of, read_removed
from streamvid.dataset.versions.moved import NOWHERE, read_moved
from streamvid.errors import StreamvidError

if TYPE_CHECKING:
    import pyarrow as pa

_log = logging.getLogger("streamvid.loader")


@dataclass(frozen=True)
class Later:
    """Changes between a version and the newest version.

    newest: the newest version.
    removed: keys of samples that the version contains but the newest version does not.
    moved: for each shard that was replaced, the shards to which its samples were moved.
    """

    newest: Dataset
    removed: frozenset[str] = frozenset()
    moved: Mapping[ShardName, Sequence[ShardName]] = field(default_factory=dict)

    @staticmethod
    def of(dataset: Dataset, newest: Manifest) -> Later:
        """Read the tables of removed samples and moved shards, and return the changes from `dataset` to `newest`.

        Raises IntegrityError for damaged tables, and StorageError if the store cannot be read.
        """
        later = Dataset(dataset.store, manifest=newest)
        known = {file.path for file in dataset.manifest.files}
        # Tables that the earlier version also lists contain nothing later.
        removed = read_removed(dataset.store, [file for file in newest.files.removed if file.path not in known])
        moved: dict[ShardName, list[ShardName]] = {}
        for row in read_moved(dataset.store, [file for file in newest.files.moved if file.path not in known]):
            found = moved.setdefault((row.bucket_id, row.number, row.build_id), [])
            if row.new_number != NOWHERE:
                found.append((row.bucket_id, row.new_number, row.new_build_id))
        gone = _by_shard(removed, dataset.manifest.version)
        return Later(later, frozenset(_removed_from(dataset, gone, moved)), moved)

    def shards_of(self, shard: ShardInfo) -> list[ShardInfo] | None:
        """Return the shards in the newest version that can contain samples from an earlier shard.

        The result is None if the newest version still contains the earlier shard.
        """
        name = (shard.bucket_id, shard.number, shard.build_id)
        if name not in self.moved:
            return None
        seen = _reached(name, self.moved)
        table = self.newest.shards
        places = places_of(table, sorted(seen - self.moved.keys()))
        return [table[int(place)] for place in places if place >= 0]


def _by_shard(removed: pa.Table, version: int) -> dict[ShardName, set[str]]:
    """Map each shard to the keys of the samples that were removed from it after the given version."""
    found: dict[ShardName, set[str]] = {}
    columns = (removed.column(name).to_pylist() for name in ("version", "key", "bucket_id", "number", "build_id"))
    for since, key, *name in zip(*columns, strict=True):
        if since > version:
            found.setdefault((name[0], name[1], name[2]), set()).add(key)
    return found


def _removed_from(
    dataset: Dataset, gone: Mapping[ShardName, set[str]], moved: Mapping[ShardName, Sequence[ShardName]]
) -> set[str]:
    """Return the removed keys that `dataset` contains. The index is read only for shards that were replaced."""
    found: set[str] = set()
    before: dict[ShardName, list[ShardName]] = {}
    for old, several in moved.items():
        for new in several:
            before.setdefault(new, []).append(old)
    moved_keys: dict[ShardName, set[str]] = {}  # shard of the version → keys that may have been moved from it
    names = list(gone)
    for name, place in zip(names, places_of(dataset.shards, names).tolist(), strict=True):
        if place >= 0:
            found |= gone[name]
            continue
        for old in _reached(name, before):
            moved_keys.setdefault(old, set()).update(gone[name])
    names = list(moved_keys)
    for name, place in zip(names, places_of(dataset.shards, names).tolist(), strict=True):
        if place >= 0:
            keys = dataset.samples(dataset.shards[place], ["key"]).column("key").to_pylist()
            found.update(moved_keys[name].intersection(keys))
    return found


def _reached(first: ShardName, following: Mapping[ShardName, Sequence[ShardName]]) -> set[ShardName]:
    """Return a set with a shard and all shards to which its samples were moved, directly or indirectly."""
    waiting, seen = [first], set[ShardName]()
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += following.get(name, ())
    return seen


_announced: dict[tuple[str, int], int] = {}  # (dataset, version) → number of removed samples that was logged last


class LaterVersions:
    """Tracks the samples that later versions removed or moved, for a run on earlier versions. Thread-safe.

    datasets: maps numbers to datasets. Methods accept these numbers, and ignore other numbers.
    silent: numbers of datasets whose removed samples are not logged.
    is_new: True if the datasets were opened for the first epoch, so that their manifests need not be read again.
    """

    def __init__(
        self, datasets: Mapping[int, Dataset] | None = None, *, silent: Collection[int] = (), is_new: bool = True
    ) -> None:
        self._datasets, self._silent = datasets or {}, silent
        self._later: dict[int, Later] = {}
        self._lock = threading.Lock()
        self._is_new = is_new

    def begin_epoch(self) -> None:
        """Find the samples that were removed since the last call.

        On failure, log a warning and keep the earlier findings. The number of removed samples is logged once per
        process, and again when it changes.
        """
        try:
            self.refresh(is_opening=self._is_new)
        except StreamvidError as error:
            _log.warning(
                "cannot determine which samples later versions of the datasets have removed (%s); removed samples may "
                "still be delivered",
                error,
            )
        self._is_new = False
        for number, dataset in self._datasets.items():
            later = self._later.get(number)
            count, place = 0 if later is None else len(later.removed), (dataset.url, dataset.manifest.version)
            if later is not None and count and number not in self._silent and _announced.get(place) != count:
                _announced[place] = count
                _log.warning(
                    "%s: %d samples of version %d have been removed as of version %d; other samples from their "
                    "buckets take their places and are marked is_repeat",
                    dataset.url,
                    count,
                    dataset.manifest.version,
                    later.newest.manifest.version,
                )

    def refresh(self, *, is_opening: bool = False) -> bool:
        """Read the newest version of each dataset. Return True if a dataset has a newer version than before.

        is_opening: True to use the manifests that were read when the datasets were opened.
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
        """Return True if samples of a dataset were removed in a later version."""
        later = self._later.get(number)
        return later is not None and bool(later.removed)

    def is_removed(self, number: int, key: str) -> bool:
        """Return True if the sample with this key was removed in a later version."""
        later = self._later.get(number)
        return later is not None and key in later.removed

    def shards_of(self, number: int, shard: ShardInfo) -> Iterator[tuple[Later, ShardInfo]] | None:
        """Return a (changes, shard) pair for each shard that replaces `shard`, or None if `shard` still exists."""
        later = self._later.get(number)
        shards = None if later is None else later.shards_of(shard)
        return None if later is None or shards is None else ((later, one) for one in shards)
