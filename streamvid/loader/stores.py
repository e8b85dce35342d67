"""Access to the stores that hold a loader's datasets: settings, this rank's share of requests, and the cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from pathlib import Path
from typing import Any

from streamvid.dataset.features.sidecar import Sidecar
from streamvid.dataset.reader import Dataset
from streamvid.dataset.versions.open import DatasetRef, open_cache, open_ref
from streamvid.loader.world import num_local_ranks
from streamvid.storage import (
    MAX_RANGE_BYTES,
    BlockCache,
    CachedStore,
    CacheStats,
    StorageOptions,
    Store,
    StoreStats,
    open_store,
)

_OF_SLOWEST = ("p50_seconds", "p99_seconds")
_NUM_LOCAL_THREADS, _MAX_FETCH_THREADS = 4, 128


@dataclass(frozen=True)
class Stores:
    """One rank's access to the stores.

    options: storage options, with limits divided by the number of local ranks.
    """

    options: StorageOptions
    cache: BlockCache | None
    _open: dict[str, Store] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(storage: StorageOptions | Mapping[str, Any] | None = None) -> Stores:
        """Create this rank's Stores from VideoLoader's `storage` argument. Raises ConfigError for invalid options."""
        options, num_ranks = StorageOptions.of(storage), num_local_ranks()
        share = replace(
            options,
            max_requests=max(1, options.max_requests // num_ranks),
            max_bytes_in_flight=max(MAX_RANGE_BYTES, options.max_bytes_in_flight // num_ranks),
        )
        return Stores(share, open_cache(options))

    def open(self, url: str | Path, version: int | None = None) -> Dataset:
        """Open a dataset. Raises the same errors as `open_dataset`.

        version: number of the version to open; None for the version that the URL names.
        """
        ref = DatasetRef.parse(url)
        store = self._open.get(ref.url)
        if store is None:
            store = self._open[ref.url] = open_store(ref.url, self.options)
        return open_ref(ref, store, self.cache, version)

    def num_fetch_threads(self, datasets: Iterable[Dataset | Sidecar]) -> int:
        """Return the number of threads for reading datasets.

        The number is 4 if all datasets are local. Otherwise, there is one thread per concurrent request.
        """
        is_local = all(dataset.store.is_local for dataset in datasets)
        return _NUM_LOCAL_THREADS if is_local else min(_MAX_FETCH_THREADS, self.options.max_requests)


def store_stats(datasets: Iterable[Dataset | Sidecar]) -> tuple[StoreStats | None, CacheStats | None]:
    """Return (object store statistics, cache statistics) for this process.

    The first is None if no object store is used, and the second is None if no cache is used.
    """
    stores = {id(_origin(dataset.store)): dataset.store for dataset in datasets if not dataset.store.is_local}
    if not stores:
        return None, None
    cached = [store.cache for store in stores.values() if isinstance(store, CachedStore)]
    return reduce(_sum, [store.stats() for store in stores.values()]), cached[0].stats() if cached else None


def _origin(store: Store) -> Store:
    """Return the store behind a cache. Several datasets may share this store."""
    return store.origin if isinstance(store, CachedStore) else store


def _sum(one: StoreStats, other: StoreStats) -> StoreStats:
    def joined(name: str, mine: Any, theirs: Any) -> Any:
        if isinstance(mine, dict):
            return dict(Counter(mine) + Counter(theirs))
        return max(mine, theirs) if name in _OF_SLOWEST else mine + theirs

    names = [one.name for one in fields(StoreStats)]
    return StoreStats(**{name: joined(name, getattr(one, name), getattr(other, name)) for name in names})
