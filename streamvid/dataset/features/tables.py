"""Tables of features, stored as small Parquet files: one table of all shards, and one table of members per shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from streamvid.dataset.arrow import check_unpacked, chunk_of, numbers_of
from streamvid.dataset.index import encode_table, schema
from streamvid.dataset.integrity import naming_arrow_errors
from streamvid.dataset.manifest import FileInfo, ShardInfo, shard_path
from streamvid.dataset.tar import BLOCK_BYTES
from streamvid.errors import IntegrityError

if TYPE_CHECKING:
    import pyarrow as pa

_SHA256_BYTES = 32
_MEMBER_ROW_BYTES, _EMPTY_FILE_BYTES = 512, 2**16  # upper limits on the sizes of a row and of a file without rows

_SHARD_TYPES = {
    "bucket_id": "string",
    "number": "int32",
    "build_id": "uint32",
    "base_sha256": "sha256",
    "num_bytes": "int64",
    "sha256": "sha256",
    "max_member_bytes": "int64",
    "index_num_bytes": "int64",
    "index_sha256": "sha256",
    "num_missing": "int64",
}
_MEMBER_TYPES = {"key": "string", "visit": "int32", "offset": "int64", "num_bytes": "int64", "sha256": "sha256"}


@dataclass(frozen=True, slots=True)
class SidecarShard:
    """Shard of features that were encoded from the dataset's shard with the same bucket and number.

    base_sha256: checksum of the dataset's tar.
    num_missing: number of visits that could not be encoded.
    """

    bucket_id: str
    number: int
    build_id: int
    base_sha256: str
    num_bytes: int
    sha256: str
    max_member_bytes: int
    index_num_bytes: int
    index_sha256: str
    num_missing: int = 0

    @property
    def path(self) -> str:
        """Path of the features tar. The matching tar in the dataset has the same path."""
        return shard_path(self.bucket_id, self.number, self.build_id)

    @property
    def max_clip_bytes(self) -> int:
        """Size in bytes of the largest member. A loader reads members in the same way as clips."""
        return self.max_member_bytes

    @property
    def index_file(self) -> FileInfo:
        """Description of the file with the shard's table of members."""
        return FileInfo(index_path(self.bucket_id, self.number), self.index_num_bytes, self.index_sha256)


def index_path(bucket_id: str, number: int) -> str:
    """Return the path of a shard's table of members."""
    return f"index/{bucket_id}-{number:06d}.parquet"


def encode_shards(shards: Sequence[SidecarShard]) -> bytes:
    """Return the Parquet bytes of the table of shards. `shards` must be in the order of the dataset."""
    columns: dict[str, list[Any]] = {name: [getattr(one, name) for one in shards] for name in _SHARD_TYPES}
    digests = {name: list(map(bytes.fromhex, columns[name])) for name, kind in _SHARD_TYPES.items() if kind == "sha256"}
    return encode_table(columns | digests, _SHARD_TYPES)


@dataclass(frozen=True, eq=False)
class SidecarShards:
    """Table of shards, stored as arrays. SidecarShard values are created on demand."""

    table: pa.Table
    rows: Mapping[str, range]
    """Maps each bucket id to the rows of the bucket's shards. The rows are consecutive and sorted by shard number."""

    @staticmethod
    def read(data: bytes | memoryview, where: str) -> SidecarShards:
        """Read a table of shards. Raises IntegrityError if it is invalid. where: name of the table in errors."""
        # Checksums cannot be compressed, so a file that declares more rows than it can hold checksums is hostile: the
        # rows could fill the memory.
        table = _read(data, _SHARD_TYPES, (0, len(data) // _SHA256_BYTES), where)
        names = chunk_of(table, "bucket_id")
        codes, firsts, counts = np.unique(numbers_of(names.indices), return_index=True, return_counts=True)
        found = zip(codes.tolist(), firsts.tolist(), counts.tolist(), strict=True)
        return SidecarShards(table, {names.dictionary[code].as_py(): range(n, n + count) for code, n, count in found})

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def shard(self, base: ShardInfo) -> SidecarShard | None:
        """Return the feature shard that matches a shard of the dataset, or None if there is no match."""
        rows = self.rows.get(base.bucket_id, range(0))
        numbers = numbers_of(chunk_of(self.table, "number"))[rows.start : rows.stop]
        row = rows.start + int(np.searchsorted(numbers, base.number))
        if row not in rows or row >= len(self):
            return None
        found = {name: self.table.column(name)[row].as_py() for name in _SHARD_TYPES}
        values: Mapping[str, Any] = {k: v.hex() if isinstance(v, bytes) else v for k, v in found.items()}
        one = SidecarShard(**values)
        is_right = (one.bucket_id, one.number, one.base_sha256) == (base.bucket_id, base.number, base.sha256)
        return one if is_right else None

    @property
    def max_member_bytes(self) -> int:
        """Size in bytes of the largest member, or 0 if there are no shards."""
        return int(numbers_of(chunk_of(self.table, "max_member_bytes")).max(initial=0))

    @property
    def base_sha256(self) -> npt.NDArray[np.uint8]:
        """SHA-256 digests of the dataset's tars, as an array with shape (number of shards, 32)."""
        return _digests(chunk_of(self.table, "base_sha256"))


@dataclass(frozen=True, eq=False, slots=True)
class MemberTable:
    """Locations of a shard's members in the tar, as arrays with num_samples * num_visits rows.

    Rows are ordered by sample, then by visit.
    offsets: byte offsets, or -1 for a visit that could not be encoded.
    sizes: sizes in bytes.
    sha256: SHA-256 digests, as a uint8 array with shape (number of rows, 32).
    """

    num_visits: int
    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    sha256: npt.NDArray[np.uint8]

    @staticmethod
    def read(
        data: bytes | memoryview, shard: SidecarShard, num_samples: int, num_visits: int, where: str
    ) -> MemberTable:
        """Read a table of members. Raises IntegrityError if it is invalid. where: name of the table in errors."""
        count = num_samples * num_visits
        # The keys are for other readers; the other columns have a fixed size per row.
        types = {name: kind for name, kind in _MEMBER_TYPES.items() if name != "key"}
        table = _read(data, types, (count, count), where)
        visits = numbers_of(chunk_of(table, "visit"))
        offsets = numbers_of(chunk_of(table, "offset").fill_null(-1))
        sizes = numbers_of(chunk_of(table, "num_bytes").fill_null(0))
        is_there = offsets >= 0
        is_wrong = (sizes <= 0) | (sizes > shard.max_member_bytes) | (offsets > shard.num_bytes - sizes)
        is_wrong |= offsets < BLOCK_BYTES
        in_order = np.array_equal(visits.reshape(-1, num_visits), np.tile(np.arange(num_visits), (num_samples, 1)))
        if not in_order or (is_wrong & is_there).any():
            problem = "a member with an invalid location or size" if in_order else "the visits of a sample out of order"
            raise IntegrityError(f"{where} lists {problem}; copy the features again")
        return MemberTable(
            num_visits, offsets, sizes, _digests(chunk_of(table, "sha256").fill_null(bytes(_SHA256_BYTES)))
        )

    @property
    def num_bytes(self) -> int:
        """Size of the arrays in memory, in bytes."""
        return self.offsets.nbytes + self.sizes.nbytes + self.sha256.nbytes

    def place(self, row: int, visit: int) -> tuple[int, int, bytes] | None:
        """Return the offset, size and SHA-256 of the member for `row` and `visit`, or None if it is missing."""
        place = row * self.num_visits + visit % self.num_visits
        if self.offsets[place] < 0:
            return None
        return int(self.offsets[place]), int(self.sizes[place]), self.sha256[place].tobytes()


def most_index_bytes(num_samples: int, num_visits: int) -> int:
    """Return the largest possible size of a shard's table of members, in bytes."""
    return num_samples * num_visits * _MEMBER_ROW_BYTES + _EMPTY_FILE_BYTES


def encode_members(rows: Sequence[tuple[str, int, int | None, int | None, bytes | None]]) -> bytes:
    """Return the Parquet bytes of a table of members.

    rows: (key, visit, offset, size, SHA-256) tuples; the last three are None if there is no member.
    """
    return encode_table(
        {name: [row[column] for row in rows] for column, name in enumerate(_MEMBER_TYPES)}, _MEMBER_TYPES
    )


def _read(data: bytes | memoryview, types: dict[str, str], num_rows: tuple[int, int], where: str) -> pa.Table:
    """Read a table. Raises IntegrityError if it has the wrong column types or the wrong number of rows.

    types: maps each column name to the required type.
    num_rows: minimum and maximum number of rows.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = [name for name, kind in types.items() if kind == "string"]
    may_miss = {"offset", "num_bytes", "sha256"} if "visit" in types else set[str]()
    with naming_arrow_errors(where, "copy the features again"):
        file = pq.ParquetFile(pa.BufferReader(data), read_dictionary=texts)
        if not num_rows[0] <= file.metadata.num_rows <= num_rows[1]:
            least, most = num_rows
            allowed = f"exactly {most} are required" if least == most else f"at most {most} are allowed"
            raise ValueError(f"the table has {file.metadata.num_rows} rows; {allowed}")
        check_unpacked(file.metadata, len(data))
        for field in schema(types):
            found = file.schema_arrow.field(field.name).type
            kind = pa.dictionary(pa.int32(), field.type) if field.name in texts else field.type
            if found != kind:
                raise ValueError(f"column {field.name} has type {found}, not {kind}")
        table = file.read(list(types), use_threads=False).combine_chunks()
        table.validate(full=True)
        if holes := [name for name in types if name not in may_miss and table.column(name).null_count]:
            raise ValueError(f"the table has missing values in {', '.join(holes)}")
        return table


def _digests(array: pa.Array) -> npt.NDArray[np.uint8]:
    start = _SHA256_BYTES * array.offset
    return np.frombuffer(array.buffers()[1], np.uint8)[start : start + _SHA256_BYTES * len(array)].reshape(-1, 32)
