"""A dataset encoded into a sidecar by any number of processes.

A unit of work is a shard, in the dataset's order, in batches of one size from its first sample on, each seeded by
itself: its bytes hang neither on ranks, nor on what was encoded before, nor on a run that was killed.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

from streamvid.dataset.features.writer import SidecarWriter
from streamvid.dataset.manifest import MANIFEST, ShardInfo
from streamvid.errors import StreamvidError
from streamvid.loader.by_shard import ByShard
from streamvid.modules.encoding import Encoder
from streamvid.storage import StorageOptions, open_store

_log = logging.getLogger(__name__)
_POLL_SECONDS = 2.0


@dataclass
class EncodeResult:
    """What this process did. num_missing: visits of bad samples, which have no tensors: readers take another sample.

    is_sealed: whether the sidecar is complete. stopped_by: the signal that ended this before it was.
    """

    num_shards: int = 0
    num_samples: int = 0
    num_missing: int = 0
    is_sealed: bool = False
    stopped_by: signal.Signals | None = None


@dataclass(frozen=True)
class Ranks:
    """This process among those that encode. wait_for_all: until each of them is here, with all of whom it ends; None:
    they do not know each other, as the jobs of an array, and the last one seals."""

    rank: int
    num_ranks: int
    wait_for_all: Callable[[], object] | None = None


@dataclass(frozen=True)
class Work:
    """What is to be made: by which encoder, of which dataset, where, and how often of each sample."""

    encoder: Encoder
    source: ByShard
    url: str
    storage: StorageOptions
    made_with: Mapping[str, Any]
    num_visits: int

    def writer(self) -> SidecarWriter:
        """Refuses, naming what differs, a place where something else is begun."""
        return SidecarWriter(self.url, self.source.dataset, self.made_with, self.num_visits, self.storage)


class _Stopped(Exception):
    pass


def encode_dataset(
    work: Work,
    ranks: Ranks,
    signal_number: Callable[[], int | None],
    progress: Callable[[str, int, int], object] | None = None,
) -> EncodeResult:
    """Make this rank's shards, of those that no earlier run has finished, and seal once all are there.

    signal_number: asked between two batches: of the signal that ends the work.   progress: told ("encode", samples
    done, samples of this process). Raises what encoder, loader and writer raise.
    """
    result, writer = EncodeResult(), work.writer()
    mine = _dealt(work, writer, ranks)
    total = sum(shard.num_samples for shard in mine)

    def told(num_samples: int, num_missing: int) -> None:
        result.num_samples += num_samples
        result.num_missing += num_missing
        if progress is not None and num_samples:
            progress("encode", result.num_samples, total)
        if (number := signal_number()) is not None:
            result.stopped_by = signal.Signals(number)
            raise _Stopped

    with suppress(_Stopped):
        for shard in mine:
            with closing(work.encoder.shard(work.source, shard, work.num_visits, told)) as samples:
                writer.write_shard(shard, samples)
            result.num_shards += 1
            _log.info("%s is encoded, %d of %d", shard.path, result.num_shards, len(mine))
        result.is_sealed = _finish(work, ranks, lambda: told(0, 0))
    return result


def _dealt(work: Work, writer: SidecarWriter, ranks: Ranks) -> list[ShardInfo]:
    shards = work.source.dataset.shards
    if ranks.wait_for_all is None:  # the others may have begun, so that what is left is not the same for all
        return [shard for shard in shards[ranks.rank :: ranks.num_ranks] if not writer.is_done(shard)]
    left = [shard for shard in shards if not writer.is_done(shard)]
    ranks.wait_for_all()  # all have looked before the first one writes
    return left[ranks.rank :: ranks.num_ranks]


def _finish(work: Work, ranks: Ranks, check_stop: Callable[[], None]) -> bool:
    """Wait for the other ranks, but not for strangers, and seal; whether that is done.

    By looking, not by a collective: ranks may end hours apart, and a signal ends the wait.
    """
    store, are_strangers = open_store(work.url, work.storage), ranks.wait_for_all is None
    while store.size(MANIFEST) is None:
        try:
            writer = work.writer() if are_strangers or ranks.rank == 0 else None
            if writer is not None and all(map(writer.is_done, work.source.dataset.shards)):
                writer.seal(work.encoder.null())
                return True
            if are_strangers:
                return False
        except StreamvidError:
            if store.size(MANIFEST) is None:  # else another one was the last too, and has tidied up
                raise
            continue
        check_stop()
        time.sleep(_POLL_SECONDS)
    return True
