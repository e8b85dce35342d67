"""Append-only files of checksummed frames. A frame is a JSON value; bytes after the last whole frame are ignored.

frame     = num_bytes (uint32) | crc32 of the stored bytes (uint32) | stored bytes
stored    = "j" JSON | "z" zlib-compressed JSON
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

_HEAD = struct.Struct("<II")
MAX_STORED_BYTES = 16 * 2**20
MAX_JSON_BYTES = 64 * 2**20
_RAW, _ZLIB = b"j", b"z"
_LEVEL = 1  # of zlib: a third of the time of the default, for 5 % more bytes
_to_json = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


def frame(value: Any, *, is_compressed: bool) -> bytes:
    """Return a frame that contains a JSON value."""
    data = _to_json(value).encode()
    stored = _ZLIB + zlib.compress(data, _LEVEL) if is_compressed else _RAW + data
    return _HEAD.pack(len(stored), zlib.crc32(stored)) + stored


def read_frames(file: BinaryIO) -> Iterator[Any]:
    """Yield the value in each frame of a file, up to the first incomplete or damaged frame (SAFE-1)."""
    while len(head := file.read(_HEAD.size)) == _HEAD.size:
        num_bytes, checksum = _HEAD.unpack(head)
        if not 0 < num_bytes <= MAX_STORED_BYTES:
            return
        stored = file.read(num_bytes)
        if len(stored) < num_bytes or zlib.crc32(stored) != checksum:
            return
        try:
            data = _opened(stored)
            value = None if data is None else json.loads(data)
        except (ValueError, RecursionError, zlib.error):  # intact, but not written by us
            return
        if value is None:
            return
        yield value


def _opened(stored: bytes) -> bytes | None:
    """Return the JSON text in stored bytes, or None if the text is too long or the bytes are of an unknown kind."""
    if stored[:1] == _RAW:
        return stored[1:]
    if stored[:1] != _ZLIB:
        return None
    reader = zlib.decompressobj()
    data = reader.decompress(stored[1:], MAX_JSON_BYTES)
    return data if reader.eof else None
