"""Split training's first stage: what a module's `encode` makes of each sample, once, in a sidecar that training reads.

A unit of work is a shard, in the dataset's order, in batches of one size from its first sample on, each seeded by
itself: its bytes hang neither on ranks, nor on what was encoded before, nor on a run that was killed.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial

import torch
from accelerate import Accelerator

from streamvid.dataset.manifest import MANIFEST, ShardInfo
from streamvid.dataset.sidecar_writer import SidecarWriter
from streamvid.errors import StreamvidError
from streamvid.loader.by_shard import ByShard
from streamvid.loader.plain import open_datasets
from streamvid.loader.stores import Stores
from streamvid.models.build import build_module
from streamvid.models.encoding import Encoder, facts
from streamvid.plan.world import World
from streamvid.storage import open_store
from streamvid.trainer.config import TrainConfig
from streamvid.trainer.data import loader_options
from streamvid.trainer.launch import make_accelerator
from streamvid.trainer.stop import stop_requests

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


def encode(
    config: TrainConfig, world: World | None = None, progress: Callable[[str, int, int], object] | None = None
) -> EncodeResult:
    """Write `config.sidecar` with all ranks of this launch, back once it is sealed; run again, go on where it was.

    world: instead, one of so many processes that do not know each other, as an array's jobs; the last of them seals.
    progress: told ("encode", samples done, samples of this process).
    Raises ConfigError, what loader and writer raise, and SampleError for too many bad samples.
    """
    result, source = EncodeResult(), source_of(config)
    with stop_requests() as stop:
        here, encoder, open_writer = _begin(config, source)
        writer = open_writer()
        mine = _dealt(writer, source.dataset.shards, here, world)

        def told(num_samples: int, num_missing: int) -> None:
            result.num_samples, result.num_missing = result.num_samples + num_samples, result.num_missing + num_missing
            if progress is not None and num_samples:
                progress("encode", result.num_samples, sum(shard.num_samples for shard in mine))
            if stop.signal_number is not None:
                result.stopped_by = signal.Signals(stop.signal_number)
                raise _Stopped

        with suppress(_Stopped):
            for result.num_shards, shard in enumerate(mine):
                with closing(encoder.shard(source, shard, config.num_visits, told)) as samples:
                    writer.write_shard(shard, samples)
                _log.info("%s is encoded, %d of %d", shard.path, result.num_shards + 1, len(mine))
            result.num_shards = len(mine)
            result.is_sealed = _finish(config, source, encoder, open_writer, (here, world), partial(told, 0, 0))
    return result


def source_of(config: TrainConfig) -> ByShard:
    """The dataset to encode. Raises ConfigError where there are several, or it holds texts."""
    configs, datasets = open_datasets(config.dataset, Stores.of(config.storage, config.cache_dir, config.cache_bytes))
    return ByShard.of(configs, loader_options(config, datasets))


class _Stopped(Exception):
    pass


def _begin(config: TrainConfig, source: ByShard) -> tuple[Accelerator, Encoder, Callable[[], SidecarWriter]]:
    here = make_accelerator(config)
    module = build_module(config.model, config.lora, config.recompute, task="sft:data_process", seed=config.seed)
    made_with = {
        **facts(module, config.model), "view": source.view_facts(), "batch_sizes": dict(source.batch_sizes),
        "encode_dtype": config.encode_dtype, "mixed_precision": here.mixed_precision,
    }  # fmt: skip
    dtype = None if config.encode_dtype is None else getattr(torch, config.encode_dtype)
    encoder = Encoder(module.eval().to(here.device), here.device, dtype, config.seed, here.autocast)
    where = str(config.sidecar), source.dataset, made_with, config.num_visits, config.storage
    return here, encoder, lambda: SidecarWriter(*where)


def _dealt(
    writer: SidecarWriter, shards: Sequence[ShardInfo], here: Accelerator, world: World | None
) -> list[ShardInfo]:
    """The shards that this process makes, of those that are not done."""
    if world is not None:  # the others may have begun, so that what is left is not the same for all
        return [shard for shard in shards[world.rank :: world.num_ranks] if not writer.is_done(shard)]
    left = [shard for shard in shards if not writer.is_done(shard)]
    here.wait_for_everyone()  # all have looked before the first one writes
    return left[here.process_index :: here.num_processes]


def _finish(
    config: TrainConfig, source: ByShard, encoder: Encoder, open_writer: Callable[[], SidecarWriter],
    place: tuple[Accelerator, World | None], check_stop: Callable[[], None],
) -> bool:  # fmt: skip
    """Wait for the other ranks, but not for strangers, and seal; whether that is done."""
    here, world = place
    store = open_store(str(config.sidecar), config.storage)
    while store.size(MANIFEST) is None:
        try:
            writer = open_writer() if world is not None or here.is_main_process else None
            if writer is not None and all(map(writer.is_done, source.dataset.shards)):
                writer.seal(encoder.null())
                return True
            if world is not None:
                return False
        except StreamvidError:
            if store.size(MANIFEST) is None:  # else another part was the last too, and has tidied up
                raise
            continue
        check_stop()
        time.sleep(_POLL_SECONDS)
    return True
