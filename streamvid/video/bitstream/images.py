"""Structure of image files: the blocks in a GIF, and the compression of a TIFF."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from typing import Protocol

GIF_IMAGE = b","
_GIF_EXTENSION = b"!"
_COMPRESSION, _SHORT = 259, 3
_MAX_ENTRIES = 4096


class _Readable(Protocol):
    @property
    def read(self) -> Callable[[int], bytes]: ...

    @property
    def seek(self) -> Callable[[int, int], int]: ...


def gif_blocks(file: _Readable) -> Iterator[bytes]:
    """Yield the first byte of each block in a GIF, or in part of a GIF (GIF89a, appendix B).

    The last item is the first byte (such as the trailer) that starts neither an extension nor an image, or b"" at the
    end of the file.
    """

    def skip_colors(flags: int) -> None:
        file.seek(3 << (flags & 0b111) + 1 if flags & 0x80 else 0, os.SEEK_CUR)

    block = file.read(1)
    if block == b"G":
        skip_colors(file.read(12).ljust(12, b"\0")[9])
        block = file.read(1)
    while block in (_GIF_EXTENSION, GIF_IMAGE):
        yield block
        if block == GIF_IMAGE:
            skip_colors(file.read(9).ljust(9, b"\0")[8])
        file.seek(1, os.SEEK_CUR)  # the label of an extension, or the code size of an image
        while size := file.read(1).rstrip(b"\0"):
            file.seek(size[0], os.SEEK_CUR)
        block = file.read(1)
    yield block


def tiff_compression(data: memoryview) -> int:
    """Return the compression number of a TIFF's first picture (TIFF 6.0, sections 2 and 8), or 0 if it is not found."""
    order = {b"II": "<", b"MM": ">"}.get(bytes(data[:2]))
    if order is None:
        return 0
    try:
        (start,) = struct.unpack_from(f"{order}I", data, 4)
        (count,) = struct.unpack_from(f"{order}H", data, start)
        for number in range(min(count, _MAX_ENTRIES)):
            tag, kind, _, value = struct.unpack_from(f"{order}HHI4s", data, start + 2 + 12 * number)
            if tag == _COMPRESSION:
                return int(struct.unpack_from(f"{order}{'H' if kind == _SHORT else 'I'}", value)[0])
    except struct.error:
        pass  # a truncated file, which FFmpeg reports
    return 0
