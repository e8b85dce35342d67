"""The only room that touches a file system or an object store.

Everything above asks `open_store(url)` for a `Store` and names files by paths relative to it.
"""

from __future__ import annotations

from streamvid.storage.cache import BlockCache, CacheStats
from streamvid.storage.cached import CachedStore, Content, read_content
from streamvid.storage.local import LocalStore
from streamvid.storage.options import MAX_RANGE_BYTES, StorageOptions
from streamvid.storage.ranges import GAP_BYTES
from streamvid.storage.store import FileState, Ranges, ShortFileError, Store, StoreStats, check_relative
from streamvid.storage.url import open_store, redact
from streamvid.storage.wanted import is_wanted, while_wanted

__all__ = [
    "GAP_BYTES",
    "MAX_RANGE_BYTES",
    "BlockCache",
    "CacheStats",
    "CachedStore",
    "Content",
    "FileState",
    "LocalStore",
    "Ranges",
    "ShortFileError",
    "StorageOptions",
    "Store",
    "StoreStats",
    "check_relative",
    "is_wanted",
    "open_store",
    "read_content",
    "redact",
    "while_wanted",
]
