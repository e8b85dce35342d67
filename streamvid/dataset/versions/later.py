"""What later versions did to the samples of an earlier version: which were removed, and which tars hold the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from streamvid.dataset.manifest import Manifest, ShardInfo
from streamvid.dataset.reader import Dataset
from streamvid.dataset.removed import ShardName, places_of, read_removed
from streamvid.dataset.versions.moved import NOWHERE, read_moved


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
