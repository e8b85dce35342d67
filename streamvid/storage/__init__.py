"""The only room that touches a file system or an object store.

Everything above asks `open_store(url)` for a `Store` and names files by paths relative to it.
"""

from __future__ import annotations

from streamvid.storage.cache import BlockCache, CacheStats
from streamvid.storage.cached import CachedStore
from streamvid.storage.local import LocalStore
from streamvid.storage.options import StorageOptions
from streamvid.storage.store import FileState, Ranges, Store, StoreStats, check_relative
from streamvid.storage.url import open_store, redact
from streamvid.storage.wanted import while_wanted

__all__ = [
    "BlockCache",
    "CacheStats",
    "CachedStore",
    "FileState",
    "LocalStore",
    "Ranges",
    "StorageOptions",
    "Store",
    "StoreStats",
    "check_relative",
    "open_store",
    "redact",
    "while_wanted",
]
