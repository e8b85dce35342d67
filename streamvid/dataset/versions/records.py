"""Tables of input rows that a dataset has already processed, so that an append recognizes rows without opening files.

A table has one entry per input row, sorted by file name (as a hash), in blocks of BLOCK_ROWS entries. It is stored as
two files: the blocks, and a directory with the first and last name and the checksum of each block. A lookup reads the
directory and the blocks that can contain the requested names, so its cost is proportional to the number of these names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from streamvid.dataset.arrow import numbers_of
from streamvid.dataset.index import encode_table, named_by_content, schema
from streamvid.dataset.integrity import naming_arrow_errors, read_range, read_table
from streamvid.dataset.manifest import FileInfo
from streamvid.dataset.passes import in_parallel
from streamvid.errors import IntegrityError
from streamvid.storage import Store

BLOCK_ROWS = 256
ROW = np.dtype([("name", "<u8"), ("row", "<u8"), ("num_bytes", "<i8")])
"""Entry of a table. name: hash of the file's name. row: hash of everything that identifies the row. num_bytes: size of
the file, or -1 minus this size if the row was rejected."""
InputRows: TypeAlias = npt.NDArray[Any]
"""Array of ROW entries."""

_DIRECTORY = {"first_name": "uint64", "last_name": "uint64", "num_rows": "int32", "sha256": "sha256"}
_READS_AT_ONCE = 16


def rejected_rows(rows: InputRows) -> npt.NDArray[np.bool_]:
    """Return a mask of the entries whose rows were rejected."""
    is_rejected: npt.NDArray[np.bool_] = rows["num_bytes"] < 0
    return is_rejected


def encode_records(rows: InputRows, number: int) -> list[tuple[FileInfo, bytes]]:
    """Return the two files that store a table, as in `ManifestFiles.records`: first the directory, then the blocks.

    number: number of the table in the dataset.
    """
    rows = rows[np.lexsort((rows["num_bytes"], rows["row"], rows["name"]))]
    blocks = [rows[start : start + BLOCK_ROWS] for start in range(0, len(rows), BLOCK_ROWS)]
    directory = encode_table(
        {
            "first_name": [int(block["name"][0]) for block in blocks],
            "last_name": [int(block["name"][-1]) for block in blocks],
            "num_rows": list(map(len, blocks)),
            "sha256": [hashlib.sha256(block.tobytes()).digest() for block in blocks],
        },
        _DIRECTORY,
    )
    data = rows.tobytes()
    return [
        (named_by_content("records", number, directory), directory),
        (named_by_content("records", number, data, "rows"), data),
    ]


def find_records(store: Store, files: Sequence[FileInfo], names: npt.NDArray[np.uint64]) -> InputRows:
    """Return all known rows whose file names have these hashes. Raises IntegrityError for damaged files.

    files: `ManifestFiles.records`.
    """
    names = np.unique(names)
    if not len(names):
        return np.empty(0, ROW)
    found = [_find(store, directory, blocks, names) for directory, blocks in zip(files[::2], files[1::2], strict=True)]
    return np.concatenate([np.empty(0, ROW), *found])


def _find(store: Store, directory: FileInfo, blocks: FileInfo, names: npt.NDArray[np.uint64]) -> InputRows:
    table = read_table(store, directory)
    where = f"{store.url}: {directory.path}"
    with naming_arrow_errors(where):
        table = table.cast(schema(_DIRECTORY)).combine_chunks()
        first, last, counts = (numbers_of(table.column(name).combine_chunks()) for name in list(_DIRECTORY)[:3])
        sha256 = table.column("sha256").to_pylist()
    ends = np.cumsum(counts.astype(np.int64)) * ROW.itemsize
    if (counts < 1).any() or (counts > BLOCK_ROWS).any() or blocks.num_bytes != (int(ends[-1]) if len(ends) else 0):
        raise IntegrityError(f"{where} does not match {blocks.path}; copy the dataset again")
    # A block is wanted if a name lies between its first and its last one.
    wanted = np.searchsorted(names, last, side="right") > np.searchsorted(names, first, side="left")

    def read(number: int, _: object) -> InputRows:
        size = int(counts[number]) * ROW.itemsize
        data = read_range(store, blocks.path, int(ends[number]) - size, size, sha256[number])
        if hashlib.sha256(data).digest() != sha256[number]:
            raise IntegrityError(
                f"{store.url}: checksum mismatch in block {number} of {blocks.path}; copy the file again"
            )
        block = np.frombuffer(data, ROW)
        return block[np.isin(block["name"], names)]

    numbers = np.flatnonzero(wanted).tolist()
    return np.concatenate([np.empty(0, ROW), *in_parallel(read, numbers, _READS_AT_ONCE)])
