"""Encoding a dataset into precomputed features, in any number of processes.

The unit of work is a shard. Each shard is encoded from its first sample, in batches of a fixed size, and each batch has
its own seed. The resulting bytes do not depend on the number of ranks, on earlier shards or on interrupted runs.
Finished shards are recorded in the feature store, so processes need no shared disk.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

from streamvid.dataset.features.writer import SidecarWriter
from streamvid.dataset.manifest import ShardInfo
from streamvid.dataset.sealed_json import MANIFEST
from streamvid.errors import StreamvidError
from streamvid.loader.by_shard import ByShard
from streamvid.modules.encoding import Encoder
from streamvid.plan.position import World
from streamvid.storage import StorageOptions, open_store

_log = logging.getLogger(__name__)
_POLL_SECONDS = 2.0


@dataclass
class EncodeResult:
    """Result of encoding a dataset in this process.

    num_missing: number of visits that have no tensors because the sample is bad; readers substitute another sample.
    is_sealed: True if the features are complete.
    stopped_by: signal that ended the work early, or None.
    """

    num_shards: int = 0
    num_samples: int = 0
    num_missing: int = 0
    is_sealed: bool = False
    stopped_by: signal.Signals | None = None


@dataclass(frozen=True)
class EncodeJob:
    """Specification of an encoding job: its encoder, dataset, destination and number of visits per sample."""

    encoder: Encoder
    source: ByShard
    url: str
    storage: StorageOptions
    made_with: Mapping[str, Any]
    num_visits: int

    def writer(self) -> SidecarWriter:
        """Open the features for writing. Raises ConfigError if the destination contains features from another job."""
        return SidecarWriter(self.url, self.source.dataset, self.made_with, self.num_visits, self.storage)


class _Stopped(Exception):
    pass


def encode_dataset(
    job: EncodeJob,
    world: World,
    wait_for_all: Callable[[], object] | None,
    signal_number: Callable[[], int | None],
    progress: Callable[[str, int, int], object] | None = None,
) -> EncodeResult:
    """Encode this rank's share of the unfinished shards, and seal the features once all shards are complete.

    world: position of this process among all encoding processes.
    wait_for_all: barrier over all ranks of a launch; None for independent processes, such as the processes of a job
        array. The last independent process to finish seals the features.
    signal_number: called between batches; returns the number of a signal that ends the work, or None.
    progress: called with "encode", the number of samples that this process has encoded, and the total number that it
        must encode.
    Raises errors from the encoder, the loader and the writer.
    """
    result, writer = EncodeResult(), job.writer()
    mine = _own_shards(job, writer, world, wait_for_all)
    total = sum(shard.num_samples for shard in mine)

    def on_batch(num_samples: int, num_missing: int) -> None:
        result.num_samples += num_samples
        result.num_missing += num_missing
        if progress is not None and num_samples:
            progress("encode", result.num_samples, total)
        if (number := signal_number()) is not None:
            result.stopped_by = signal.Signals(number)
            raise _Stopped

    with suppress(_Stopped):
        for shard in mine:
            with closing(job.encoder.shard(job.source, shard, job.num_visits, on_batch)) as samples:
                writer.write_shard(shard, samples)
            result.num_shards += 1
            _log.info("encoded shard %s (%d of %d)", shard.path, result.num_shards, len(mine))
        result.is_sealed = _finish(job, None if wait_for_all is None else world.rank, lambda: on_batch(0, 0))
    return result


def num_finished(shards: Sequence[ShardInfo], url: str, storage: StorageOptions) -> int:
    """Return the number of samples in the shards whose features are stored at `url`."""
    there = {file.path for file in open_store(url, storage).files("shards")}
    return sum(shard.num_samples for shard in shards if shard.path in there)


def _own_shards(
    job: EncodeJob, writer: SidecarWriter, world: World, wait_for_all: Callable[[], object] | None
) -> list[ShardInfo]:
    shards = job.source.dataset.shards
    if wait_for_all is None:  # other processes may have started, so each sees different unfinished shards
        return [shard for shard in shards[world.rank :: world.num_ranks] if not writer.is_done(shard)]
    unfinished = [shard for shard in shards if not writer.is_done(shard)]
    wait_for_all()  # no rank writes before every rank has checked
    return unfinished[world.rank :: world.num_ranks]


def _finish(job: EncodeJob, rank: int | None, check_stop: Callable[[], None]) -> bool:
    """Wait for the other ranks of the launch, if any, and seal the features. Return whether the features are sealed.

    rank: rank in the launch; None for an independent process, which does not wait.
    Ranks poll the store instead of using a collective operation, because ranks may finish hours apart, and a signal
    must be able to end the wait.
    """
    store = open_store(job.url, job.storage)
    while store.size(MANIFEST) is None:
        try:
            if not rank:
                writer = job.writer()
                if all(map(writer.is_done, job.source.dataset.shards)):
                    writer.seal(job.encoder.null())
                    return True
            if rank is None:
                return False
        except StreamvidError:
            if store.size(MANIFEST) is None:  # otherwise another process has already sealed the features
                raise
            continue
        check_stop()
        time.sleep(_POLL_SECONDS)
    return True
