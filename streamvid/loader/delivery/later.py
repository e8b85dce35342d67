"""Later versions of the datasets of a run that stays in an earlier one.

Samples that were removed later are not delivered, although the run still plans them. The tars of others can have been
deleted by `streamvid compact`; their samples are read from the tars that replaced them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence

from streamvid.dataset.manifest import Manifest, ShardInfo, read_manifest
from streamvid.dataset.versions.later import Later
from streamvid.errors import StreamvidError
from streamvid.loader.mix import MixPart

_log = logging.getLogger("streamvid.loader")


class LaterVersions:
    """What later versions did to the samples of a loader's datasets. Thread-safe.

    Manifests are read at the start of each epoch, and when a tar is missing.

    is_new: True if the datasets were opened for the first epoch, whose manifests need not be read again.
    """

    def __init__(self, parts: Sequence[MixPart] = (), *, is_new: bool = True) -> None:
        self._parts = parts
        self._later: dict[int, Later] = {}
        self._lock = threading.Lock()
        self._is_new = is_new

    def begin_epoch(self) -> None:
        """Find samples that were removed meanwhile, and log their number. If this fails, log that and keep the old."""
        try:
            self.refresh(is_opening=self._is_new)
        except StreamvidError as error:
            _log.warning("samples that were removed from the datasets meanwhile cannot be found: %s", error)
        self._is_new = False
        for part in self._parts:
            later = self._later.get(part.number)
            # The plan leaves out the removed samples of earlier versions.
            if later is not None and later.removed and part.later is None:
                _log.warning(
                    "%s: %d samples of version %d were removed until version %d; other samples of their buckets take "
                    "their places, marked is_repeat",
                    part.dataset.url,
                    len(later.removed),
                    part.dataset.manifest.version,
                    later.newest.manifest.version,
                )

    def refresh(self, *, is_opening: bool = False) -> bool:
        """Read the newest versions. Return True if there are newer ones than before.

        is_opening: use the manifests that were read when the datasets were opened.
        Raises the same errors as `Later.of`.
        """
        is_new = False
        with self._lock:
            for part in self._parts:
                newest = part.dataset.newest if is_opening else read_manifest(part.dataset.store)
                if newest.version > self._known(part).version:
                    self._later[part.number] = Later.of(part.dataset, newest)
                    is_new = True
        return is_new

    def _known(self, part: MixPart) -> Manifest:
        later = self._later.get(part.number)
        return part.dataset.manifest if later is None else later.newest.manifest

    def removes(self, part: MixPart) -> bool:
        """Return True if a later version lacks any samples of a dataset."""
        later = self._later.get(part.number)
        return later is not None and bool(later.removed)

    def is_removed(self, part: MixPart, key: str) -> bool:
        """Return True if a later version lacks the sample with this key."""
        later = self._later.get(part.number)
        return later is not None and key in later.removed

    def shards_of(self, part: MixPart, shard: ShardInfo) -> Iterator[tuple[Later, ShardInfo]] | None:
        """Yield the shards that replace a shard, with the versions that have them. Return None if the shard remains."""
        later = self._later.get(part.number)
        shards = None if later is None else later.shards_of(shard)
        return None if later is None or shards is None else ((later, one) for one in shards)
