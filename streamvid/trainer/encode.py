"""First stage of split training (task "sft:data_process"): store the outputs of a module's `encode`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from streamvid.loader.by_shard import ByShard
from streamvid.loader.mix import open_configs
from streamvid.loader.stores import Stores
from streamvid.modules.build import build_module
from streamvid.modules.encode_dataset import EncodeJob, EncodeResult, encode_dataset
from streamvid.modules.encoding import Encoder, facts
from streamvid.plan.position import World
from streamvid.trainer.config import TrainConfig
from streamvid.trainer.data import loader_options
from streamvid.trainer.launch import accelerating, stop_requests


def encode(
    config: TrainConfig, world: World | None = None, progress: Callable[[str, int, int], object] | None = None
) -> EncodeResult:
    """Write the features of `config.data` with all ranks of this launch, and return once they are sealed.

    To resume a stopped encoding, run it again.
    world: position among independent processes, such as those of a job array, which replaces the rank in this launch;
        the last process seals the features.
    progress: called with "encode", the number of samples encoded so far, and the total of this process.
    Raises ConfigError for an invalid configuration, SampleError for too many bad samples, and errors from the loader
    and the writer.
    """
    source = source_of(config)
    features = config.data.features
    with stop_requests() as stop, accelerating(config) as here:
        module = build_module(config.model, task="sft:data_process", seed=config.seed)
        made_with = {
            **facts(module, config.model),
            "view": source.view_facts(),
            "batch_sizes": dict(source.batch_sizes),
            "encode_dtype": features.dtype,
        }
        dtype = None if features.dtype is None else getattr(torch, features.dtype)
        encoder = Encoder(module.eval().to(here.device), here.device, dtype, config.seed)
        job = EncodeJob(encoder, source, str(features.url), config.data.storage, made_with, features.num_visits)
        wait_for_all = here.wait_for_everyone if world is None else None
        world = world or World(here.process_index, here.num_processes)
        return encode_dataset(job, world, wait_for_all, lambda: stop.signal_number, progress)


def source_of(config: TrainConfig) -> ByShard:
    """Open the dataset to encode. Raises ConfigError if there are several, or if the dataset holds only texts."""
    sources = open_configs(config.data.dataset, Stores.of(config.data.storage))
    return ByShard.of(sources, loader_options(config, sources))
