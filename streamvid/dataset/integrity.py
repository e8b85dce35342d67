"""Verified reading of index files: no byte of a file is used before the file's checksum is verified.

Arrow errors are converted to IntegrityErrors that name the file.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from streamvid.dataset.arrow import check_footer
from streamvid.dataset.index import SHARD_TYPES, schema
from streamvid.dataset.manifest import FileInfo, ShardInfo
from streamvid.dataset.shard_table import ShardTable, ShardTableBuilder
from streamvid.errors import IntegrityError, StreamvidError
from streamvid.host.range_file import RangeFile
from streamvid.storage import MAX_READS, Store, WrongReads, is_wanted, read_content

if TYPE_CHECKING:
    import pyarrow as pa

_BLOCK_BYTES = 2**20
_REMOTE_BLOCK_BYTES = 16 * 2**20
_FOOTER_END_BYTES = 8  # a Parquet file ends with the size of its footer and a magic number
_ROWS_AT_ONCE = 1 << 14
_SHARD_COLUMNS = [field.name for field in fields(ShardInfo)]


def verify(store: Store, file: FileInfo, tail: bytearray) -> None:
    """Verify the checksum of a file, reading one block at a time. Raises IntegrityError if the checksum does not match.

    tail: buffer that receives the last bytes of the file. The caller must have checked the size of the file.
    """
    end, end_start = memoryview(tail), file.num_bytes - len(tail)
    size = min(file.num_bytes, _BLOCK_BYTES if store.is_local else _REMOTE_BLOCK_BYTES)
    buffer = memoryview(bytearray(size))

    def read() -> bytes:
        digest = hashlib.sha256()
        for start in range(0, file.num_bytes, max(1, size)):
            block = buffer[: min(size, file.num_bytes - start)]
            store.read_ranges(file.path, [(start, block)])
            digest.update(block)
            if (first := max(start, end_start)) < start + len(block):
                end[first - end_start : start + len(block) - end_start] = block[first - start :]
        return digest.digest()

    _check_digest(store, file, until_right(store, file.path, bytes.fromhex(file.sha256), read))


def until_right(store: Store, path: str, sha256: bytes, read: Callable[[], bytes]) -> bytes:
    """Call `read` until it returns the digest `sha256`, or until another attempt would not help.

    Return the last digest.
    """
    wrong = WrongReads()
    while (digest := read()) != sha256 and wrong.judge(digest) == "again":
        store.forget(path)
    return digest


def read_range(store: Store, path: str, offset: int, num_bytes: int, sha256: bytes) -> bytes:
    """Read a byte range, and reread it if its checksum does not match.

    The bytes may still be wrong: the caller must verify them.
    """
    data = bytearray(num_bytes)

    def read() -> bytes:
        store.read_ranges(path, [(offset, memoryview(data))])
        return hashlib.sha256(data).digest()

    until_right(store, path, sha256, read)
    return bytes(data)


def read_table(store: Store, file: FileInfo) -> pa.Table:
    """Read and verify a whole index file, and return it as a table."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    check_size(store, file)
    data = read_verified(store, file)
    with naming_arrow_errors(f"{store.url}: {file.path}"):
        # Reading from a buffer in this thread ensures that no Arrow thread holds a Python object when Python exits.
        parquet = pq.ParquetFile(pa.BufferReader(data))
        check_footer(parquet.metadata, len(data))
        table = parquet.read(use_threads=False)
        table.validate(full=True)
    return table


def read_tables(store: Store, files: Sequence[FileInfo]) -> pa.Table:
    """Read and verify index files of one kind, and concatenate them in the given order into one table."""
    import pyarrow as pa

    tables = [read_table(store, file) for file in files]
    with naming_arrow_errors(f"{store.url}: {', '.join(file.path for file in files) or 'an index without files'}"):
        return pa.concat_tables(tables)


def read_shards(store: Store, files: Sequence[FileInfo]) -> ShardTable:
    """Read and verify the shard table in batches, so that its strings are never all in memory at once (PLAN-6)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    builder = ShardTableBuilder()
    for file in files:
        where = f"{store.url}: {file.path}"
        check_size(store, file)
        data = read_verified(store, file)
        with naming_arrow_errors(where):
            parquet = pq.ParquetFile(pa.BufferReader(data))
            check_footer(parquet.metadata, len(data))
            # Add no rows first, so that the schema of a file without rows is checked too.
            _add_shards(builder, pa.Table.from_batches([], schema=parquet.schema_arrow), where)
            builder.expect(parquet.metadata.num_rows)
            for batch in parquet.iter_batches(_ROWS_AT_ONCE, columns=_SHARD_COLUMNS, use_threads=False):
                _add_shards(builder, pa.Table.from_batches([batch]), where)
    return builder.finish()


def _add_shards(builder: ShardTableBuilder, table: pa.Table, where: str) -> None:
    with naming_arrow_errors(where):
        table.validate(full=True)
        rows = table.select(_SHARD_COLUMNS).cast(schema({name: SHARD_TYPES[name] for name in _SHARD_COLUMNS}))
        if missing := [name for name in _SHARD_COLUMNS if rows.column(name).null_count]:
            raise ValueError(f"the table has missing values in {', '.join(missing)}")
        for batch in rows.combine_chunks().to_batches():
            builder.add(batch, where)


def read_verified(store: Store, file: FileInfo) -> memoryview:
    """Read a file and verify its checksum. Raises IntegrityError on a mismatch. Callers must check the size first."""
    data, is_again = bytearray(file.num_bytes), False

    def read() -> bytes:
        nonlocal is_again
        ranges = [(0, memoryview(data))] if data else []
        read_content(store, file.path, (file.sha256, file.num_bytes), ranges, is_again=is_again)
        is_again = True
        return hashlib.sha256(data).digest()

    _check_digest(store, file, until_right(store, file.path, bytes.fromhex(file.sha256), read))
    return memoryview(data)


def check_size(store: Store, file: FileInfo) -> None:
    """Raise IntegrityError unless a file has the expected size. Call this before allocating memory for the file."""
    found = store.size(file.path)
    if found != file.num_bytes:
        problem = "is missing" if found is None else f"has {found} bytes instead of {file.num_bytes}"
        raise IntegrityError(f"{store.url}: {file.path} {problem}; copy the file again")


def _check_digest(store: Store, file: FileInfo, digest: bytes) -> None:
    if digest.hex() != file.sha256:
        raise IntegrityError(f"{store.url}: checksum mismatch in {file.path}; copy the file again")


@contextlib.contextmanager
def naming_arrow_errors(where: str, remedy: str = "copy or rebuild the dataset") -> Iterator[None]:
    """Convert errors raised while parsing a table to IntegrityErrors.

    The message begins with `where` and ends with `remedy`.

    where: name of the file in the message.
    """
    import pyarrow as pa

    try:
        yield
    except StreamvidError:
        raise
    except (pa.ArrowException, OSError, ValueError, TypeError, LookupError, MemoryError) as error:
        raise IntegrityError(f"{where} cannot be read ({type(error).__name__}: {error}); {remedy}") from error


class StoreFile(RangeFile):
    """Seekable stream over a stored file, for pyarrow.

    Each read sends one request, unless `read_near` has already read these bytes.
    """

    def __init__(self, store: Store, path: str, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self._store, self._path = store, path
        self._start, self._near = 0, b""

    def read_near(self, start: int, end: int) -> None:
        """Read the bytes from `start` to `end` with one request. Later reads within this range need no request."""
        data = bytearray(end - start)
        self._store.read_ranges(self._path, [(start, memoryview(data))])
        self._start, self._near = start, bytes(data)

    def fill(self, start: int, buffer: memoryview) -> int:
        first = start - self._start
        if first >= 0 and first + len(buffer) <= len(self._near):
            buffer[:] = self._near[first : first + len(buffer)]
        else:
            self._store.read_ranges(self._path, [(start, buffer)])
        return len(buffer)


class SamplesFile:
    """Sample file that is verified on first use. Safe to use from several threads.

    The footer is kept in memory, but the file is not kept open. Parquet stores no checksum for the footer, so one is
    computed from the verified bytes, and is verified whenever the footer is read again. Page checksums detect later
    damage to the rows.
    """

    def __init__(self, store: Store, file: FileInfo) -> None:
        self._store, self._file = store, file
        self._where = f"{store.url}: {file.path}"
        self._lock = threading.Lock()
        self._tail: tuple[int, bytes] | None = None  # size and checksum of the footer, once the file is verified
        self._footer: Any = None
        self._failed: tuple[float, StreamvidError] | None = None

    def rows(self, row_group: int, columns: Sequence[str] | None) -> pa.Table:
        """Return one row group as a table, with one small read.

        columns: names of the columns to read; None reads all. Names that are not in the file are ignored.
        """
        with naming_arrow_errors(f"{self._where}, row group {row_group}"):
            footer = self._get_footer()
            if not 0 <= row_group < footer.num_row_groups:
                raise ValueError(
                    f"there is no such row group, because the file has only {footer.num_row_groups} row "
                    "groups, numbered from 0"
                )
        for num_reads_left in reversed(range(1 if self._store.is_local else MAX_READS)):
            try:
                return self._rows(footer, row_group, columns)
            except IntegrityError:
                # The file changed after its verification, or its bytes were damaged in transit. A local file cannot be
                # damaged in transit, so it is read only once.
                if not num_reads_left:
                    raise
                self._store.forget(self._file.path)
        raise AssertionError

    def _rows(self, footer: Any, row_group: int, columns: Sequence[str] | None) -> pa.Table:
        with naming_arrow_errors(f"{self._where}, row group {row_group}"):
            near = None if self._store.is_local else _extent(footer.row_group(row_group), columns)
            table = self._open(footer, near).read_row_group(row_group, columns=columns, use_threads=False)
            table.validate(full=True)
            return table

    def arrow_schema(self) -> pa.Schema:
        """Return the Arrow schema of the file."""
        with naming_arrow_errors(self._where):
            return self._get_footer().schema.to_arrow_schema()

    def num_row_groups(self) -> int:
        """Return the number of row groups in the file."""
        with naming_arrow_errors(self._where):
            return int(self._get_footer().num_row_groups)

    def forget(self) -> None:
        """Drop the footer from memory. The next use reads the footer again."""
        self._footer = None

    def _get_footer(self) -> Any:
        import pyarrow as pa
        import pyarrow.parquet as pq

        since = time.monotonic()
        with self._lock:
            if self._footer is not None:
                return self._footer
            if self._failed is not None and self._failed[0] >= since:
                # This thread waited for the lock while another thread failed. It fails too, because otherwise each
                # thread in turn would wait for an unreachable store.
                raise copy.copy(self._failed[1])
            try:
                footer = pq.read_metadata(pa.BufferReader(self._read_tail()))
                check_footer(footer, self._file.num_bytes)
                self._footer = footer
            except StreamvidError as error:
                if is_wanted():
                    self._failed = time.monotonic(), copy.copy(error)
                raise
            return self._footer

    def _read_tail(self) -> bytes:
        """Return the bytes from the footer to the end of the file."""
        store, file = self._store, self._file
        if self._tail is not None:
            size, sha256 = self._tail
            return read_range(store, file.path, file.num_bytes - size, size, sha256)
        check_size(store, file)
        end = bytearray(min(_FOOTER_END_BYTES, file.num_bytes))
        if end:
            store.read_ranges(file.path, [(file.num_bytes - len(end), memoryview(end))])
        tail = end
        for _ in range(2):  # the size of the footer may itself be wrong until it is verified
            tail = bytearray(min(file.num_bytes, int.from_bytes(end[:4], "little") + _FOOTER_END_BYTES))
            verify(store, file, tail)
            if tail[-_FOOTER_END_BYTES:] == end:
                break
            end = tail[-_FOOTER_END_BYTES:]
        self._tail = len(tail), hashlib.sha256(tail).digest()
        return bytes(tail)

    def _open(self, footer: Any, near: tuple[int, int] | None = None) -> Any:
        import pyarrow.parquet as pq

        source = StoreFile(self._store, self._file.path, self._file.num_bytes)
        if near is not None and 0 <= near[0] <= near[1] <= self._file.num_bytes:
            source.read_near(*near)
        # With pre_buffer, an Arrow thread reads the store and aborts the process if Python exits (arrow#34314).
        return pq.ParquetFile(source, metadata=footer, page_checksum_verification=True, pre_buffer=False)


def _extent(row_group: Any, columns: Sequence[str] | None) -> tuple[int, int]:
    """Return the byte range (start, end) of these columns in a row group."""
    places = []
    for number in range(row_group.num_columns):
        column = row_group.column(number)
        path = column.path_in_schema  # a list adds the path of its parts to the name, and names can contain dots
        if columns is None or any(path == name or path.startswith(f"{name}.") for name in columns):
            start = column.dictionary_page_offset or column.data_page_offset
            places.append((min(start, column.data_page_offset), start + column.total_compressed_size))
    return min((start for start, _ in places), default=0), max((end for _, end in places), default=0)
