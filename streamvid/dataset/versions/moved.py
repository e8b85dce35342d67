"""Shards that later versions replaced: where their samples are now, and which of their tars are deleted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from streamvid.dataset.index import encode_table, schema
from streamvid.dataset.integrity import read_table
from streamvid.dataset.manifest import FileInfo, ManifestFiles, ShardInfo, shard_path
from streamvid.dataset.removed import read_removed
from streamvid.errors import IntegrityError
from streamvid.storage import Store

MOVED_TYPES = {
    "bucket_id": "string",
    "number": "int32",
    "build_id": "uint32",
    "sha256": "sha256",
    "num_bytes": "int64",
    "new_number": "int32",
    "new_build_id": "uint32",
    "is_deleted": "bool",
}
NOWHERE = -1
"""Number of the new shard if none of a shard's samples were kept."""


@dataclass(frozen=True, slots=True)
class MovedShard:
    """Shard that no longer exists in the newest version, and a shard to which some of its samples were moved.

    Both shards are in the same bucket.

    sha256, num_bytes: checksum and size of the old tar. Caches use the checksum in the names of blocks.
    is_deleted: True if the old tar contains samples that were removed or replaced. `compact` deletes it, even if
        earlier versions refer to it. Other tars remain as long as a kept version refers to them.
    """

    bucket_id: str
    number: int
    build_id: int
    sha256: bytes
    num_bytes: int
    new_number: int
    new_build_id: int
    is_deleted: bool

    @staticmethod
    def of(shard: ShardInfo, new: tuple[int, int], is_deleted: bool) -> MovedShard:
        """Return the table row for a moved shard. new: number and build id of the new shard."""
        digest = bytes.fromhex(shard.sha256)
        return MovedShard(shard.bucket_id, shard.number, shard.build_id, digest, shard.num_bytes, *new, is_deleted)

    @property
    def path(self) -> str:
        return shard_path(self.bucket_id, self.number, self.build_id)

    @property
    def new_path(self) -> str | None:
        """Path of the new shard, or None if no sample of the old shard was kept."""
        return None if self.new_number == NOWHERE else shard_path(self.bucket_id, self.new_number, self.new_build_id)


def encode_moved(rows: Sequence[MovedShard]) -> bytes:
    """Return the Parquet bytes of a table of moved shards."""
    return encode_table({name: [getattr(row, name) for row in rows] for name in MOVED_TYPES}, MOVED_TYPES)


def read_moved(store: Store, files: Sequence[FileInfo]) -> list[MovedShard]:
    """Return all moved shards, in the order in which they were moved. Raises IntegrityError for a damaged file."""
    target = schema(MOVED_TYPES)
    rows: list[MovedShard] = []
    for file in files:
        table = read_table(store, file)
        if not table.schema.equals(target) or any(column.null_count for column in table.columns):
            raise IntegrityError(
                f"{store.url}: {file.path} must have the columns {', '.join(target.names)} without missing values; "
                "copy the dataset again"
            )
        rows += [MovedShard(**row) for row in table.to_pylist()]
    return rows


def deleted_shards(moved: Sequence[MovedShard]) -> dict[str, MovedShard]:
    """Return the tars that must be deleted, as a mapping from path to shard.

    These tars contain samples that were removed or replaced, or are earlier tars from which such tars were made.
    """
    doomed: dict[str, MovedShard] = {}
    for row in reversed(moved):  # a shard is listed before the shards that its samples are moved to later
        if row.is_deleted or row.new_path in doomed:
            doomed[row.path] = row
    return doomed


def tars_with_removed(store: Store, files: ManifestFiles, paths: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the paths of all tars in the store that contain removed samples, including tars of earlier versions.

    paths: tars from which samples are about to be removed.
    """
    table = read_removed(store, files.removed)
    names = zip(*(table.column(name).to_pylist() for name in ("bucket_id", "number", "build_id")), strict=True)
    found = {*paths, *(shard_path(*name) for name in set(names) if name[1] != NOWHERE)}
    moved = read_moved(store, files.moved)
    for row in reversed(moved):
        if row.new_path in found:
            found.add(row.path)
    found |= deleted_shards(moved).keys()
    return tuple(sorted(path for path in found if store.state(path) is not None))
