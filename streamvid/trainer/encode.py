"""Split training's first stage, task "sft:data_process": what a module's `encode` makes of samples, in a sidecar."""

from __future__ import annotations

from collections.abc import Callable

import torch

from streamvid.loader.by_shard import ByShard
from streamvid.loader.plain import open_datasets
from streamvid.loader.stores import Stores
from streamvid.modules.build import build_module
from streamvid.modules.encode_dataset import EncodeResult, Ranks, Work, encode_dataset
from streamvid.modules.encoding import Encoder, facts
from streamvid.plan.position import World
from streamvid.trainer.config import TrainConfig
from streamvid.trainer.data import loader_options
from streamvid.trainer.launch import make_accelerator
from streamvid.trainer.stop import stop_requests


def encode(
    config: TrainConfig, world: World | None = None, progress: Callable[[str, int, int], object] | None = None
) -> EncodeResult:
    """Write `config.sidecar` with all ranks of this launch, back once it is sealed; run again, go on where it was.

    world: instead, one of so many processes that do not know each other, as an array's jobs; the last of them seals.
    progress: told ("encode", samples done, samples of this process).
    Raises ConfigError, what loader and writer raise, and SampleError for too many bad samples.
    """
    source = source_of(config)
    with stop_requests() as stop:
        here = make_accelerator(config)
        module = build_module(config.model, config.lora, config.recompute, task="sft:data_process", seed=config.seed)
        made_with = {
            **facts(module, config.model), "view": source.view_facts(), "batch_sizes": dict(source.batch_sizes),
            "encode_dtype": config.encode_dtype, "mixed_precision": here.mixed_precision,
        }  # fmt: skip
        dtype = None if config.encode_dtype is None else getattr(torch, config.encode_dtype)
        encoder = Encoder(module.eval().to(here.device), here.device, dtype, config.seed, here.autocast)
        work = Work(encoder, source, str(config.sidecar), config.storage, made_with, config.num_visits)
        ranks = Ranks(here.process_index, here.num_processes, here.wait_for_everyone)
        if world is not None:
            ranks = Ranks(world.rank, world.num_ranks)
        return encode_dataset(work, ranks, lambda: stop.signal_number, progress)


def source_of(config: TrainConfig) -> ByShard:
    """The dataset to encode. Raises ConfigError where there are several, or it holds texts."""
    configs, datasets = open_datasets(config.dataset, Stores.of(config.storage, config.cache_dir, config.cache_bytes))
    return ByShard.of(configs, loader_options(config, datasets))
