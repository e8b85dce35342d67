"""Conversions between Arrow and NumPy, and size limits for Parquet files.

Unlike pyarrow's own conversions, these do not import pandas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import pyarrow as pa

_UNPACKED_BYTES, _UNPACKED_RATIO = 2**26, 256


def check_unpacked(footer: Any, num_bytes: int) -> None:
    """Raise ValueError if a Parquet file of `num_bytes` would need a disproportionate amount of memory (SAFE-1)."""
    unpacked = sum(footer.row_group(number).total_byte_size for number in range(footer.num_row_groups))
    limit = _UNPACKED_BYTES + _UNPACKED_RATIO * num_bytes
    if not 0 <= unpacked <= limit:
        raise ValueError(
            f"the {num_bytes}-byte file unpacks to {unpacked} bytes; at most {limit} bytes are allowed for a file of "
            "this size"
        )


def check_footer(footer: Any, num_bytes: int) -> None:
    """Raise ValueError if an index file of `num_bytes` declares more rows or data than it can contain (SAFE-1).

    Each row of an index contains a unique name or checksum and therefore occupies at least one byte.
    """
    num_rows = sum(footer.row_group(number).num_rows for number in range(footer.num_row_groups))
    if num_rows != footer.num_rows or num_rows > num_bytes:
        raise ValueError(
            f"the footer declares {footer.num_rows} rows, and the row groups declare {num_rows} rows; the two numbers "
            f"must be equal and must not exceed the size of the file ({num_bytes} bytes)"
        )
    check_unpacked(footer, num_bytes)


def numbers_of(array: pa.Array) -> npt.NDArray[Any]:
    """Return a NumPy view of a numeric Arrow array. Raises ValueError if it contains nulls."""
    if array.null_count:
        raise ValueError(f"{array.null_count} of {len(array)} values are missing")
    kind = np.dtype(str(array.type))
    if not len(array):
        return np.empty(0, kind)
    return np.frombuffer(array.buffers()[1], kind, len(array), array.offset * kind.itemsize)


def values_of(array: pa.Array) -> Sequence[Any]:
    """Return the values of an Arrow array as a sequence of Python objects, which are created when they are read.

    Numbers, texts and binary values without nulls are read several times as fast as through pyarrow's scalars. Indices
    must not be negative.
    """
    import pyarrow as pa

    kind, count, first = array.type, len(array), array.offset
    if array.null_count or not count:
        return _Scalars(array)
    if pa.types.is_integer(kind) or pa.types.is_float64(kind):
        return numbers_of(array).data
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        edges = np.frombuffer(array.buffers()[1], np.int32, count + 1, first * 4).data
        return _Binaries(edges, array.buffers()[2], is_text=pa.types.is_string(kind))
    if pa.types.is_fixed_size_binary(kind) and kind.byte_width:
        size = kind.byte_width
        return _Binaries(range(first * size, (first + count) * size + 1, size), array.buffers()[1], is_text=False)
    return _Scalars(array)


class _Scalars(Sequence[Any]):
    """Values of any Arrow array."""

    def __init__(self, array: pa.Array) -> None:
        self._array = array

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, number: Any) -> Any:
        return self._array[number].as_py()


class _Binaries(Sequence[Any]):
    """Binary values or UTF-8 texts without nulls: value i consists of bytes edges[i] to edges[i + 1] of `data`."""

    def __init__(self, edges: Sequence[int] | memoryview, data: pa.Buffer | None, *, is_text: bool) -> None:
        self._edges, self._data, self._is_text = edges, memoryview(b"" if data is None else data), is_text

    def __len__(self) -> int:
        return len(self._edges) - 1

    def __getitem__(self, number: Any) -> Any:
        value = self._data[self._edges[number] : self._edges[number + 1]]
        return str(value, "utf-8") if self._is_text else value.tobytes()


def chunk_of(table: pa.Table, name: str) -> pa.Array:
    """Return a column as one array. The caller must have combined the table's chunks."""
    column = table.column(name)
    return column.chunk(0) if column.num_chunks else column.combine_chunks()


def array_of(values: npt.NDArray[Any]) -> pa.Array:
    """Return an Arrow array that shares memory with `values`, or contains a copy if `values` is not contiguous."""
    import pyarrow as pa

    values = np.ascontiguousarray(values)
    return pa.Array.from_buffers(pa.type_for_alias(str(values.dtype)), len(values), [None, pa.py_buffer(values)])


def texts_of(texts: Sequence[str]) -> pa.Array:
    """Return `texts` as an Arrow string array."""
    import pyarrow as pa

    encoded = [text.encode() for text in texts]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(encoded), buffers)
