"""Seekable binary file over any source that supports ranged reads."""

from __future__ import annotations

import io
import os
from typing import Any


class RangeFile(io.RawIOBase):
    """Read-only file of `num_bytes` bytes. Subclasses implement `fill`."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.num_bytes, self._position = num_bytes, 0

    def fill(self, start: int, buffer: memoryview) -> int:
        """Fill a buffer with the bytes of the file, starting at offset `start`. Return the number of bytes read."""
        raise NotImplementedError

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.num_bytes}[whence]
        self._position = max(0, origin + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self.num_bytes - self._position))
        done = self.fill(self._position, view[:count]) if count else 0
        self._position += done
        return done
