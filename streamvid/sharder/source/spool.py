"""Seekable file over a remote object. Requested bytes are fetched once and stored in an unlinked temporary file.

A reader may seek freely, because no byte is fetched more than once. Only one batch of fetched bytes is in memory at a
time. The temporary file disappears with the process, even if the process is killed.
"""

from __future__ import annotations

import os
import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import BinaryIO

from streamvid.errors import StorageError, StreamvidError
from streamvid.sharder.source.media import Media
from streamvid.video.container import FarFile

FIRST_BYTES = 256 * 2**10
MOST_BYTES = 8 * 2**20


@contextmanager
def opened(
    media: Media, folder: Path | None, waiting: Callable[[], AbstractContextManager[None]]
) -> Iterator[str | BinaryIO | SpooledFile]:
    """Open a local or remote file for decoding. Yield its path or a file object. folder, waiting: see SpooledFile.

    If reading from the store failed, raises the store's error when the `with` block ends, even if the demuxer mistook
    the failure for the end of the file.
    """
    if not media.is_remote:
        with media.opened() as local:
            yield local
        return
    with SpooledFile(media, folder, waiting) as file:
        yield file
        if file.error is not None:
            raise file.error


class Spans:
    """Set of byte ranges in a file. Adjacent and overlapping ranges are merged."""

    def __init__(self, spans: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for span in sorted(spans):
            self.add(*span)

    def add(self, start: int, end: int) -> None:
        if start >= end:
            return
        first, last = bisect_left(self._ends, start), bisect_right(self._starts, end)
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._starts[first:last], self._ends[first:last] = [start], [end]

    def all(self) -> list[tuple[int, int]]:
        return list(zip(self._starts, self._ends, strict=True))

    def missing(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return the parts of a range that the spans do not cover."""
        found, at = [], start
        for index in range(bisect_right(self._ends, start), bisect_left(self._starts, end)):
            if at < self._starts[index]:
                found.append((at, self._starts[index]))
            at = max(at, self._ends[index])
        return [*found, (at, end)] if at < end else found


class SpooledFile(FarFile):
    """Seekable binary file that reads the remote file `media` on demand.

    folder: directory of the temporary file; None for the system's temporary directory.
    waiting: context manager entered during each wait for the store, to exclude the wait from the reader's time limit.
    first_bytes: minimum size of a fetch; sequential reads fetch more.
    error: last error from the store or the temporary file; None if no error has occurred.
    """

    def __init__(
        self,
        media: Media,
        folder: Path | None,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
        first_bytes: int = FIRST_BYTES,
    ) -> None:
        super().__init__(media.num_bytes)
        self.error: StreamvidError | None = None
        self._media, self._waiting, self._folder = media, waiting, folder
        self._store = media.place[0]
        self._bytes_before = self._store.stats().num_bytes_read
        self._first_bytes = first_bytes
        self._run_start, self._last_end = 0, -1
        self._there, self._left_out = Spans(), Spans()
        try:
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 — closed by close()
            self._file.truncate(media.num_bytes)
        except OSError as error:
            raise self._no_room(error) from error

    @property
    def bytes_read(self) -> int:
        """Number of bytes read from the store so far."""
        return self._store.stats().num_bytes_read - self._bytes_before

    def fill(self, start: int, buffer: memoryview) -> int:
        for missing in self._there.missing(start, start + len(buffer)):
            for span in self._left_out.missing(*missing):
                self._fetch([self._with_ahead(*span)])
        return os.preadv(self._file.fileno(), [buffer], start)

    def close(self) -> None:
        super().close()
        if hasattr(self, "_file"):  # the file is missing if the temporary directory is full
            self._file.close()

    def leave_out(self, bodies: Iterable[tuple[int, int]], heads: Iterable[tuple[int, int]]) -> None:
        wanted = Spans((max(0, start), min(end, self.num_bytes)) for start, end in heads)
        self._fetch([part for span in wanted.all() for part in self._there.missing(*span)])
        self._left_out = Spans(bodies)

    def leave_out_nothing(self) -> None:
        self._left_out = Spans()

    def _with_ahead(self, start: int, end: int) -> tuple[int, int]:
        """Return the range, extended by a read-ahead that grows while reads are sequential."""
        if start != self._last_end:
            self._run_start = start
        ahead = min(MOST_BYTES, max(self._first_bytes, (start - self._run_start) // 4))
        most = min(self.num_bytes, max(end, start + ahead))
        free = [span for part in self._there.missing(start, most) for span in self._left_out.missing(*part)]
        return start, max(end, free[0][1])

    def _fetch(self, spans: list[tuple[int, int]]) -> None:
        """Fetch ranges into the temporary file. Only a bounded number of bytes is in memory at a time."""
        batch: list[tuple[int, bytearray]] = []
        size = 0
        for start, end in spans:
            for at in range(start, end, MOST_BYTES):
                data = bytearray(min(end, at + MOST_BYTES) - at)
                if size + len(data) > MOST_BYTES:
                    self._read(batch)
                    batch, size = [], 0
                batch.append((at, data))
                size += len(data)
        self._read(batch)

    def _read(self, batch: list[tuple[int, bytearray]]) -> None:
        if not batch:
            return
        try:
            with self._waiting():
                self._media.read_ranges([(at, memoryview(data)) for at, data in batch])
            for at, data in batch:
                self._write(data, at)
                self._there.add(at, at + len(data))
                self._last_end = at + len(data)
        except StreamvidError as error:
            self.error = error
            raise

    def _write(self, data: bytearray, at: int) -> None:
        view = memoryview(data)
        try:
            while view:
                done = os.pwrite(self._file.fileno(), view, at)
                view, at = view[done:], at + done
        except OSError as error:
            raise self._no_room(error) from error

    def _no_room(self, error: OSError) -> StorageError:
        return StorageError(
            f"cannot store parts of {self._media.source} in {self._folder or 'the temporary directory'}: "
            f"{error.strerror or error}; free some space on its disk, or use another disk (work.work_dir, --work-dir, "
            "for unfinished work; TMPDIR for temporary files)"
        )
