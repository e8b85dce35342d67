"""Convert Arrow arrays to numpy and back through their buffers. pyarrow's own way imports pandas, which takes 0.5 s."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import pyarrow as pa


def numbers_of(array: pa.Array) -> npt.NDArray[Any]:
    """Return the values of a numeric array without a copy. Raise ValueError if one is missing."""
    if array.null_count:
        raise ValueError(f"{array.null_count} of {len(array)} values are missing")
    kind = np.dtype(str(array.type))
    if not len(array):
        return np.empty(0, kind)
    return np.frombuffer(array.buffers()[1], kind, len(array), array.offset * kind.itemsize)


def chunk_of(table: pa.Table, name: str) -> pa.Array:
    """Return a column of a table whose chunks were combined as one array."""
    column = table.column(name)
    return column.chunk(0) if column.num_chunks else column.combine_chunks()


def array_of(values: npt.NDArray[Any]) -> pa.Array:
    """Return an Arrow array that shares the memory of the values."""
    import pyarrow as pa

    values = np.ascontiguousarray(values)
    return pa.Array.from_buffers(pa.type_for_alias(str(values.dtype)), len(values), [None, pa.py_buffer(values)])


def texts_of(texts: Sequence[str]) -> pa.Array:
    """Return an Arrow array of strings."""
    import pyarrow as pa

    encoded = [text.encode() for text in texts]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(encoded), buffers)
