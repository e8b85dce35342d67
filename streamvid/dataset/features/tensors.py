"""Tensors in the safetensors format, written and read without torch.

This module implements the layout because the safetensors library's API for raw bytes differs between versions, whereas
the stored bytes must stay the same. The stored bytes are identical to the output of `safetensors.torch.save`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamvid.errors import ConfigError, IntegrityError

DTYPES = {
    "I64": 8,
    "F64": 8,
    "F32": 4,
    "I32": 4,
    "BF16": 2,
    "F16": 2,
    "I16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
"""Number of bytes per element for each safetensors type.

Files store tensors in the order of these types, so that wide types are aligned.
"""

MAX_DIMENSIONS = 8
MAX_HEADER_BYTES = 2**20
_MAX_TENSORS = 256
_LENGTH_BYTES = _ALIGN_BYTES = 8
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,62}")
_ORDER = list(DTYPES)


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as little-endian bytes in C order.

    dtype: one of DTYPES.
    is_ragged: True if the size of the first dimension can differ between samples.
    Raises ConfigError for a tensor that cannot be stored.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview
    is_ragged: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype={self.dtype!r} cannot be stored; use one of {', '.join(DTYPES)}")
        if problem := _wrong_shape(self.shape):
            raise ConfigError(f"shape={self.shape!r}: {problem}")
        if self.is_ragged and not self.shape:
            raise ConfigError("a tensor with shape=() cannot be ragged; add a dimension")
        if (found := memoryview(self.data).nbytes) != self.num_bytes:
            raise ConfigError(
                f"the data is {found} bytes long, but a {self.dtype} tensor of shape {self.shape} needs "
                f"{self.num_bytes} bytes"
            )

    @property
    def num_bytes(self) -> int:
        """Size of the data in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype]


def _wrong_shape(shape: object) -> str | None:
    if not isinstance(shape, tuple | list) or len(shape) > MAX_DIMENSIONS:
        return f"must be a list of at most {MAX_DIMENSIONS} sizes"
    # The number of bytes in the data confirms the sizes, unless one size is 0: the other sizes could then be arbitrary.
    if any(isinstance(size, bool) or not isinstance(size, int) or not 0 <= size < 1 << 48 for size in shape):
        return "sizes must be integers from 0 to 2**48 - 1"
    if 0 in shape[1:]:
        return "only the first dimension may have size 0"
    if shape and shape[0] == 0 and math.prod(shape[1:]) > 1 << 40:
        return "if the first size is 0, the product of the other sizes must be at most 2**40"
    return None


def check_name(name: str) -> str:
    """Return `name`. Raises ConfigError if it is not valid as the name of a tensor and of a batch field."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"tensor {name!r}: the name must be an ASCII letter followed by at most 62 ASCII letters, digits or '_'"
        )
    return name


def encode_tensors(tensors: Mapping[str, RawTensor]) -> bytes:
    """Return the bytes of a safetensors file. Raises ConfigError for an invalid name or number of tensors."""
    if not 1 <= len(tensors) <= _MAX_TENSORS:
        raise ConfigError(f"cannot store {len(tensors)} tensors; 1 to {_MAX_TENSORS} are allowed")
    order = sorted(tensors, key=lambda name: (_ORDER.index(tensors[name].dtype), check_name(name)))
    header: dict[str, Any] = {}
    end = 0
    for name in order:
        one = tensors[name]
        start, end = end, end + one.num_bytes
        header[name] = {"dtype": one.dtype, "shape": list(one.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN_BYTES)
    return b"".join([len(text).to_bytes(_LENGTH_BYTES, "little"), text, *(tensors[name].data for name in order)])


def decode_tensors(data: bytes | memoryview, where: str) -> dict[str, RawTensor]:
    """Return the tensors in a safetensors file as views of `data`.

    Raises IntegrityError if the file is invalid (SAFE-1). where: name of the file in the message.
    """
    view = memoryview(data).cast("B")
    try:
        size = int.from_bytes(view[:_LENGTH_BYTES], "little")
        limit = min(MAX_HEADER_BYTES, len(view) - _LENGTH_BYTES)
        if not 2 <= size <= limit:
            raise ValueError(
                f"the header is {size} bytes long; in a {len(view)}-byte file, 2 to {limit} bytes are allowed"
            )
        header = json.loads(bytes(view[_LENGTH_BYTES : _LENGTH_BYTES + size]))
        body = view[_LENGTH_BYTES + size :]
        header.pop("__metadata__", None)
        if not 1 <= len(header) <= _MAX_TENSORS:
            raise ValueError(f"the file has {len(header)} tensors; 1 to {_MAX_TENSORS} are allowed")
        return _cut(header, body)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise IntegrityError(
            f"{where} is not a readable safetensors file ({type(error).__name__}: {error}); copy the file again"
        ) from error


def _cut(header: dict[str, Any], body: memoryview) -> dict[str, RawTensor]:
    tensors: dict[str, RawTensor] = {}
    places = []
    for name, told in header.items():
        start, end = told["data_offsets"]
        if type(start) is not int or type(end) is not int or not 0 <= start <= end <= len(body):
            raise ValueError(
                f"tensor {name[:40]!r} spans bytes {start} to {end}, but the data is {len(body)} bytes long"
            )
        tensors[check_name(name)] = RawTensor(str(told["dtype"]), tuple(told["shape"]), body[start:end])
        places.append((start, end))
    ends = [0, *(end for _, end in sorted(places))]
    # Files from `encode_tensors` have neither gaps nor overlaps.
    if [start for start, _ in sorted(places)] != ends[:-1] or ends[-1] != len(body):
        raise ValueError("the tensors overlap or have gaps between them")
    return tensors
