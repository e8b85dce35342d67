"""First stage of split training (task "sft:data_process"): store the outputs of a module's `encode`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import attrgetter

import torch

from streamvid.cluster.lease import held
from streamvid.cluster.options import ClusterOptions
from streamvid.cluster.ray import TaskNeeds, run_on_ray
from streamvid.cluster.share import Share
from streamvid.dataset.features.writer import STAGING
from streamvid.dataset.sealed_json import MANIFEST
from streamvid.errors import StreamvidError
from streamvid.loader.by_shard import ByShard
from streamvid.loader.mix import open_configs
from streamvid.loader.stores import Stores
from streamvid.modules.build import build_module
from streamvid.modules.encode_dataset import EncodeJob, EncodeResult, encode_dataset, num_finished
from streamvid.modules.encoding import Encoder, facts
from streamvid.plan.position import World
from streamvid.storage import open_store
from streamvid.trainer.config import TrainConfig
from streamvid.trainer.data import audio_facts, loader_options, without_ledger
from streamvid.trainer.launch import accelerating, stop_requests


def encode(
    config: TrainConfig, world: World | None = None, progress: Callable[[str, int, int], object] | None = None
) -> EncodeResult:
    """Encode the dataset in `config.data` with all ranks of this launch, and return once the features are sealed.

    To resume an encoding that was stopped, call the function again.
    world: position among independent processes, such as the processes of a job array. It replaces the rank in this
        launch, and the last process seals the features.
    progress: called with "encode", the number of samples that this process has encoded, and the number of samples that
        it must encode.
    Raises ConfigError for an invalid configuration, SampleError for too many bad samples, and errors from the loader
    and the writer.
    """
    source = source_of(config)
    features, audio = config.data.features, audio_facts(config)
    with stop_requests() as stop, accelerating(config) as here:
        module = build_module(config.model, task="sft:data_process", seed=config.seed)
        made_with = {
            **facts(module, config.model),
            "view": source.view_facts(),
            "batch_sizes": dict(source.batch_sizes),
            "encode_dtype": features.dtype,
            **({} if audio is None else {"audio": audio}),
        }
        dtype = None if features.dtype is None else getattr(torch, features.dtype)
        encoder = Encoder(module.eval().to(here.device), here.device, dtype, config.seed)
        job = EncodeJob(encoder, source, str(features.url), config.data.storage, made_with, features.num_visits)
        wait_for_all = here.wait_for_everyone if world is None else None
        world = world or World(here.process_index, here.num_processes)
        return encode_dataset(job, world, wait_for_all, lambda: stop.signal_number, progress)


def encode_on_ray(
    config: TrainConfig, cluster: ClusterOptions, progress: Callable[[str, int, int], object]
) -> EncodeResult:
    """Encode with tasks on a Ray cluster, and return once the features are sealed.

    Each task has one GPU if the cluster has GPUs and `config.accelerate.cpu` is False. Each task has
    `config.data.num_workers` CPUs. If this number is None, the CPUs of a machine are divided equally among its GPUs; a
    task without a GPU has all CPUs of its machine.
    progress: called with "encode", the number of samples in finished shards, and the total number of samples.
    Raises the same errors as `encode`. Also raises ConfigError for an unsuitable cluster, DatasetError if another
    process is running tasks for the same features, and StreamvidError if tasks are lost repeatedly. Finished shards are
    kept.
    """
    shards, data = source_of(config).dataset.shards, config.data
    total = sum(shard.num_samples for shard in shards)
    store = open_store(str(data.features.url), data.storage)

    def report() -> None:
        progress("encode", num_finished(shards, str(data.features.url), data.storage), total)
        if store.size(MANIFEST) is None:  # sealing removes the lease
            lease.check()

    num_cpus = None if data.num_workers is None else max(1, data.num_workers)
    needs = TaskNeeds(num_cpus, "data.num_workers", uses_gpu=not config.accelerate.cpu, max_tasks=len(shards))
    with held(store, f"{STAGING}/leases", "run") as lease:
        results = run_on_ray(partial(_encode_share, config), attrgetter("is_sealed"), needs, cluster, report)
    if not any(result.is_sealed for result in results):
        raise StreamvidError(
            "the features are not complete, because the Ray cluster lost tasks too often. Finished shards are kept. "
            "Run the same command again to resume"
        )
    return EncodeResult(
        num_shards=sum(result.num_shards for result in results),
        num_samples=sum(result.num_samples for result in results),
        num_missing=sum(result.num_missing for result in results),
        is_sealed=True,
    )


def _encode_share(config: TrainConfig, share: Share, num_cpus: int) -> EncodeResult:
    num_workers = num_cpus if config.data.num_workers is None else config.data.num_workers
    config = replace(config, data=replace(config.data, num_workers=num_workers))
    return encode(config, World(share.number, share.num_shares))


def source_of(config: TrainConfig) -> ByShard:
    """Open the dataset to encode. Raises ConfigError for several datasets or for a dataset that contains only text."""
    sources = open_configs(config.data.dataset, Stores.of(config.data.storage))
    options = loader_options(config, sources)
    return ByShard.of(sources, options | {"output": without_ledger(options)})
