"""Samples that were removed from a dataset after it was sealed.

A removal adds a small table of the removed samples to the index. Tars and other index files do not change, and readers
omit the samples. The table is kept even after a compaction deletes the bytes. It prevents removed records from being
added again, and lets runs that began with an earlier version omit the samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from streamvid.dataset.arrow import numbers_of
from streamvid.dataset.index import encode_table, schema
from streamvid.dataset.integrity import read_table
from streamvid.dataset.manifest import FileInfo, ShardInfo
from streamvid.dataset.shard_table import ShardTable
from streamvid.errors import IntegrityError
from streamvid.storage import Store

if TYPE_CHECKING:
    import pyarrow as pa

Int32s: TypeAlias = npt.NDArray[np.int32]
ShardName: TypeAlias = tuple[str, int, int]
"""(bucket id, number, build id) of a shard."""

REMOVED_TYPES = {
    "key": "string",
    "record_key": "string",
    "bucket_id": "string",
    "number": "int32",
    "build_id": "uint32",
    "row": "int32",
    "clip_sha256": "sha256",
    "version": "int32",
}


@dataclass(frozen=True, slots=True)
class RemovedSample:
    """One removed sample.

    bucket_id, number, build_id: identity of the shard that contains the sample.
    row: row of the sample in that shard.
    version: number of the first version without the sample.
    """

    key: str
    record_key: str
    bucket_id: str
    number: int
    build_id: int
    row: int
    clip_sha256: bytes
    version: int


def encode_removed(samples: Sequence[RemovedSample]) -> bytes:
    """Return the Parquet bytes of a table of removed samples."""
    return encode_table({name: [getattr(one, name) for one in samples] for name in REMOVED_TYPES}, REMOVED_TYPES)


def read_removed(store: Store, files: Sequence[FileInfo]) -> pa.Table:
    """Return all removed samples, one row per sample. Raises IntegrityError for a damaged file."""
    import pyarrow as pa

    target = schema(REMOVED_TYPES)
    tables = []
    for file in files:
        table = read_table(store, file)
        if not table.schema.equals(target) or any(column.null_count for column in table.columns):
            raise IntegrityError(
                f"{store.url}: {file.path} must have the columns {', '.join(target.names)} without missing values; "
                "copy the dataset again"
            )
        tables.append(table)
    return pa.concat_tables(tables) if tables else target.empty_table()


@dataclass(frozen=True)
class Removals:
    """Mapping from each shard to the rows of its removed samples, as ascending int32 numbers."""

    rows: Mapping[ShardName, Int32s] = field(default_factory=dict)

    @staticmethod
    def read(store: Store, files: Sequence[FileInfo]) -> Removals:
        """Read the tables of removed samples."""
        if not files:
            return Removals()
        table = read_removed(store, files)
        names = zip(*(table.column(name).to_pylist() for name in ("bucket_id", "number", "build_id")), strict=True)
        codes: dict[ShardName, int] = {}
        of_rows = np.array([codes.setdefault(name, len(codes)) for name in names], np.int64)
        rows = numbers_of(table.column("row").combine_chunks())
        order = np.lexsort((rows, of_rows))
        ends = np.searchsorted(of_rows[order], np.arange(1, len(codes)))
        parts = np.split(rows[order], ends) if codes else []
        return Removals({name: np.unique(part) for name, part in zip(codes, parts, strict=True)})

    def of(self, shard: ShardInfo) -> Int32s | None:
        """Return the rows that readers omit from a shard, or None if no sample was removed from it."""
        return self.rows.get((shard.bucket_id, shard.number, shard.build_id))

    def applied(self, shards: ShardTable) -> ShardTable:
        """Return the shard table without the removed samples. Shards with no samples left are dropped."""
        num_samples = shards.num_samples.astype(np.int64)
        places = places_of(shards, list(self.rows))
        for place, rows in zip(places.tolist(), self.rows.values(), strict=True):
            if place >= 0:
                num_samples[place] -= len(rows)
        if not (places >= 0).any():
            return shards
        kept = np.flatnonzero(num_samples > 0).astype(np.int64)
        return shards.taken(kept, num_samples[kept])


def places_of(shards: ShardTable, names: Sequence[ShardName]) -> npt.NDArray[np.int64]:
    """Return the row of each named shard in the table, or -1 for a shard that the table does not contain."""
    found = np.full(len(names), -1, np.int64)
    wanted = np.array([number << 32 | build_id for _, number, build_id in names], np.int64)
    buckets = np.array([name for name, _, _ in names])
    for bucket_id in {name for name, _, _ in names} & set(shards.bucket_id.names):
        mine = np.flatnonzero(shards.bucket_id.codes == shards.bucket_id.names.index(bucket_id))
        keys = shards.number[mine].astype(np.int64) << 32 | shards.build_id[mine].astype(np.int64)
        order = np.argsort(keys)
        asked = np.flatnonzero(buckets == bucket_id)
        at = np.minimum(np.searchsorted(keys[order], wanted[asked]), len(keys) - 1)
        is_there = keys[order][at] == wanted[asked]
        found[asked[is_there]] = mine[order][at[is_there]]
    return found
