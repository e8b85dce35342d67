"""Tensors as sidecars store them: safetensors, written and read without torch.

The layout is written out here, as the library's own way to raw bytes differs between its versions and a sidecar's bytes
must not: they are those that `safetensors.torch.save` writes.
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
    "I64": 8, "F64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Names of safetensors and bytes of an element, in the order in which a file has them: wide ones are aligned so."""

MAX_DIMENSIONS = 8
MAX_HEADER_BYTES = 2**20
_MAX_TENSORS = 256
_LENGTH_BYTES = _ALIGN_BYTES = 8
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,62}")
_ORDER = list(DTYPES)


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as bytes, little-endian, in C order. is_ragged: its first size differs from sample to sample.

    dtype: one of DTYPES. Raises ConfigError for what cannot be.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview
    is_ragged: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype={self.dtype!r} cannot be stored; allowed are {', '.join(DTYPES)}")
        if problem := _wrong_shape(self.shape):
            raise ConfigError(f"shape={self.shape!r}: {problem}")
        if self.is_ragged and not self.shape:
            raise ConfigError("a ragged tensor needs a first dimension; shape=() has none")
        if len(memoryview(self.data).cast("B")) != self.num_bytes:
            raise ConfigError(
                f"{len(self.data)} bytes of data; {self.dtype} of shape {self.shape} has {self.num_bytes}"
            )

    @property
    def num_bytes(self) -> int:
        """Of its data."""
        return math.prod(self.shape) * DTYPES[self.dtype]


def _wrong_shape(shape: object) -> str | None:
    if not isinstance(shape, tuple | list) or len(shape) > MAX_DIMENSIONS:
        return f"a list of {MAX_DIMENSIONS} sizes at most is allowed"
    # Bytes prove sizes, but where one is 0: it would let the others be anything.
    if any(isinstance(size, bool) or not isinstance(size, int) or not 0 <= size < 1 << 48 for size in shape):
        return "sizes are whole numbers from 0 on"
    if 0 in shape[1:] or (shape and shape[0] == 0 and math.prod(shape[1:]) > 1 << 40):
        return "no size but the first may be 0"
    return None


def check_name(name: str) -> str:
    """A tensor's name, which becomes a field of batches; ConfigError for what none can be called."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"tensor {name!r}: letters, digits and '_' are allowed, 63 at most, a letter first")
    return name


def encode_tensors(tensors: Mapping[str, RawTensor]) -> bytes:
    """The bytes of a safetensors file, the same for the same tensors in any order. Raises ConfigError."""
    if not 1 <= len(tensors) <= _MAX_TENSORS:
        raise ConfigError(f"{len(tensors)} tensors; 1 to {_MAX_TENSORS} are allowed")
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
    """What a safetensors file holds, as views of `data`. IntegrityError naming `where` for anything else (SAFE-1)."""
    view = memoryview(data).cast("B")
    try:
        size = int.from_bytes(view[:_LENGTH_BYTES], "little")
        if not 2 <= size <= min(MAX_HEADER_BYTES, len(view) - _LENGTH_BYTES):
            raise ValueError(f"a header of {size} bytes in {len(view)}")
        header = json.loads(bytes(view[_LENGTH_BYTES : _LENGTH_BYTES + size]))
        body = view[_LENGTH_BYTES + size :]
        header.pop("__metadata__", None)
        if not 1 <= len(header) <= _MAX_TENSORS:
            raise ValueError(f"{len(header)} tensors")
        return _cut(header, body)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise IntegrityError(
            f"{where} is no safetensors file that can be read ({type(error).__name__}: {error}); copy it again"
        ) from error


def _cut(header: dict[str, Any], body: memoryview) -> dict[str, RawTensor]:
    tensors: dict[str, RawTensor] = {}
    places = []
    for name, told in header.items():
        start, end = told["data_offsets"]
        if type(start) is not int or type(end) is not int or not 0 <= start <= end <= len(body):
            raise ValueError(f"{name[:40]!r} from {start} to {end} of {len(body)} bytes")
        tensors[check_name(name)] = RawTensor(str(told["dtype"]), tuple(told["shape"]), body[start:end])
        places.append((start, end))
    ends = [0, *(end for _, end in sorted(places))]
    # Without gaps: what two tensors share, or nobody has, is no file of ours.
    if [start for start, _ in sorted(places)] != ends[:-1] or ends[-1] != len(body):
        raise ValueError("tensors that do not lie end to end")
    return tensors
