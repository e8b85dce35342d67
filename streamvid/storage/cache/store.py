"""Store that caches files by content on the local disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from streamvid.storage.cache.blocks import BlockCache
from streamvid.storage.store import FileState, Ranges, ShortFileError, Store, StoreStats

Content = tuple[str, int]
"""(SHA-256 in hexadecimal, size in bytes) of a whole file, which identifies it in the cache."""


def read_content(store: Store, path: str, content: Content, ranges: Ranges, *, is_again: bool = False) -> None:
    """Read ranges of a file whose checksum is known, through the cache if the store has one.

    is_again: True if an earlier read returned wrong bytes. If so, the cached bytes are dropped before the read.
    """
    if not isinstance(store, CachedStore):
        store.read_ranges(path, ranges)
        return
    if is_again:
        store.cache.discard(content[0], [(offset, len(buffer)) for offset, buffer in ranges])
    store.read_content(path, content, ranges)


class CachedStore(Store):
    """Store that reads files with known checksums through `cache`, and other files directly from `store`.

    known: maps the path of each file with a known checksum to its SHA-256 and size. Cached bytes may be wrong, so
        readers verify them, just as they verify bytes from the store.
    """

    def __init__(self, store: Store, cache: BlockCache, known: Mapping[str, Content]) -> None:
        self._store = store
        self.cache = cache
        self._known = known

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def origin(self) -> Store:
        """The store behind the cache."""
        return self._store

    def disconnect(self) -> None:
        self._store.disconnect()

    def state(self, path: str) -> FileState | None:
        return self._store.state(path)

    def size(self, path: str) -> int | None:
        # No request is sent, so that cached files stay readable while the store is unreachable.
        return self._known[path][1] if path in self._known else self._store.size(path)

    def read(self, path: str) -> bytes:
        if path not in self._known:
            return self._store.read(path)
        data = bytearray(self._known[path][1])
        self.read_ranges(path, [(0, memoryview(data))])
        return bytes(data)

    def read_ranges(self, path: str, ranges: Ranges, version: str = "") -> None:
        if version or path not in self._known:
            self._store.read_ranges(path, ranges, version)
        else:
            self.read_content(path, self._known[path], ranges)

    def read_content(self, path: str, content: Content, ranges: Ranges) -> None:
        """Read ranges of a file through the cache. `content` identifies the bytes of the file."""
        try:
            self.cache.read_ranges(*content, ranges, partial(self._store.read_ranges, path))
        except ShortFileError:  # the file ends within a block, but may still contain the wanted bytes
            self._store.read_ranges(path, ranges)

    def forget(self, path: str) -> None:
        if path in self._known:
            self.cache.discard(self._known[path][0], [(0, self._known[path][1])])

    def files(self, folder: str = "") -> Iterator[FileState]:
        return self._store.files(folder)

    def put(self, path: str, data: bytes | Path) -> None:
        self._store.put(path, data)

    def create(self, path: str, data: bytes) -> bool:
        return self._store.create(path, data)

    def remove(self, path: str) -> None:
        self._store.remove(path)

    def abort_uploads(self, folder: str = "") -> int:
        return self._store.abort_uploads(folder)

    def stats(self) -> StoreStats:
        return self._store.stats()
