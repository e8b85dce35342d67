"""Access to files by URL. This is the only package that uses fsspec and S3.

It may import errors, credentials, config and host.

Higher layers call `open_store(url)` to get a `Store`, and identify files by their paths in this store. Read store.py,
url.py and local.py first, then remote.py, requests.py and transport.py for object stores, then s3/ and cache/.
"""

from __future__ import annotations

from streamvid.storage.cache.blocks import BlockCache, CacheStats
from streamvid.storage.cache.store import CachedStore, Content, read_content
from streamvid.storage.local import LocalStore
from streamvid.storage.options import MAX_RANGE_BYTES, StorageOptions
from streamvid.storage.ranges import near_spans
from streamvid.storage.reread import MAX_READS, UNPROVEN, WrongReads
from streamvid.storage.store import DeniedError, FileState, Ranges, ShortFileError, Store, StoreStats, check_relative
from streamvid.storage.url import OBJECT_SCHEMES, file_url_path, open_store, redact
from streamvid.storage.wanted import is_wanted, wait_while_wanted, while_wanted

__all__ = [
    "MAX_RANGE_BYTES",
    "MAX_READS",
    "OBJECT_SCHEMES",
    "UNPROVEN",
    "BlockCache",
    "CacheStats",
    "CachedStore",
    "Content",
    "DeniedError",
    "FileState",
    "LocalStore",
    "Ranges",
    "ShortFileError",
    "StorageOptions",
    "Store",
    "StoreStats",
    "WrongReads",
    "check_relative",
    "file_url_path",
    "is_wanted",
    "near_spans",
    "open_store",
    "read_content",
    "redact",
    "wait_while_wanted",
    "while_wanted",
]
