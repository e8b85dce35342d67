"""`streamvid bench` as a function: how fast a loader is on this machine and with this store."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from streamvid.bench.options import BenchOptions
from streamvid.bench.store import MeasureTimer, Progress, measure_store, num_fetch_threads
from streamvid.bench.verdict import (
    FEW_STEPS,
    BucketRun,
    LoaderRun,
    Need,
    Setting,
    StoreRun,
    Verdict,
    judge,
    need_of,
    warnings_of,
)
from streamvid.buckets.batch_size import batch_sizes
from streamvid.dataset.reader import Dataset, open_dataset
from streamvid.errors import ConfigError
from streamvid.host.resources import usable_cores
from streamvid.loader.delivery.requests import Selection
from streamvid.loader.loader import VideoLoader
from streamvid.loader.mix import DataArguments, Mix, open_mix
from streamvid.loader.options import LimitOptions, OutputOptions
from streamvid.loader.setup import loader_memory
from streamvid.loader.stats import LoaderStats
from streamvid.loader.stores import Stores
from streamvid.plan import PlanOptions, World
from streamvid.plan.cost import default_costs
from streamvid.video.picture import PictureFormat, Pixels

DEFAULT_BATCH_SIZE = 4

# Shares of a measurement's seconds: before it begins, and at most in all where batches are few.
_WARM_UP, _MAX_WARM_UP = 0.2, 1.0
_MAX_SHARE = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """Measurements in order: two passes over the store, then one run per number of workers.

    num_samples: of the split, those that pass `where`.
    """

    dataset: str
    split: str
    num_samples: int
    batch_sizes: Mapping[str, int]
    setting: Setting
    store: tuple[StoreRun, StoreRun]
    runs: tuple[LoaderRun, ...]
    verdict: Verdict
    need: Need | None
    warnings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON, including the derived rates and shares."""
        record = asdict(self)
        for kind, ones in (("store", self.store), ("runs", self.runs)):
            for row, one in zip(record[kind], ones, strict=True):
                names = [name for name, value in vars(type(one)).items() if isinstance(value, property)]
                row.update({name: getattr(one, name) for name in names})
        return record


def bench(
    dataset: str | Path | Dataset, options: BenchOptions | None = None, progress: Progress | None = None
) -> BenchReport:
    """Measure how many samples per second this machine and this store give, and what limits them.

    Nothing is written. Caches are used as they are; the first pass over the store, and the bytes that the kernel read
    from a disk meanwhile, show how warm they were. Raises what opening and iterating a VideoLoader raises.
    """
    options, progress = options or BenchOptions(), progress or (lambda phase, done, total: None)
    opened = dataset if isinstance(dataset, Dataset) else open_dataset(dataset)
    if opened.manifest.clips == "text":
        raise ConfigError(f"{opened.url} holds only texts: there is no clip to read or decode")
    num_cores = usable_cores()
    selection = _select(opened, options)
    # Invalid loader options raise now, not after the store was read.
    _loader(opened, options, 0, selection.batch_sizes).close()
    samples = _samples_of_buckets(selection.mix)
    store = measure_store(selection, options.seconds, progress)
    with _loader(opened, options, 0, selection.batch_sizes) as loader:
        next(iter(loader))  # imports what the first batch of a process needs
    setting = _setting(opened, options, selection.mix, num_cores)
    numbers = options.num_workers or _numbers_of_workers(num_cores)
    runs = tuple(_measure_loader(opened, options, number, selection, setting, progress) for number in numbers)
    need = None
    if options.step_seconds is not None:
        sizes = selection.batch_sizes
        need = need_of(
            runs,
            store,
            steps={name: number / sizes[name] for name, number in samples.items()},
            batch_sizes=sizes,
            step_seconds=options.step_seconds,
            num_local_ranks=options.num_local_ranks,
            num_cores=num_cores,
        )
    return BenchReport(
        dataset=opened.url,
        split=options.split,
        num_samples=sum(samples.values()),
        batch_sizes=dict(selection.batch_sizes),
        setting=setting,
        store=store,
        runs=runs,
        verdict=judge(runs, store, setting),
        need=need,
        warnings=warnings_of(runs, store, selection.batch_sizes),
    )


def _numbers_of_workers(num_cores: int) -> tuple[int, ...]:
    if sys.platform != "linux":
        return (0,)  # no workers there
    return tuple(sorted({2**power for power in range(num_cores.bit_length())} | {num_cores}))


def _setting(dataset: Dataset, options: BenchOptions, mix: Mix, num_cores: int) -> Setting:
    clips = dataset.manifest.clips
    can_yuv = all(bucket.height % 2 == bucket.width % 2 == 0 for bucket in mix.buckets.values())
    on_cuda = (options.device or "").startswith("cuda")
    return Setting(
        num_cores=num_cores,
        clips=clips,
        pixels=options.pixels or ("yuv420p" if on_cuda and can_yuv else "rgb24"),
        accuracy=options.accuracy or ("exact" if clips == "copy" else "fast"),
    )


def _samples_of_buckets(mix: Mix) -> dict[str, int]:
    return {name: sum(int(part.subset.counts[name].sum()) for part in mix.parts) for name in mix.buckets}


def _select(dataset: Dataset, options: BenchOptions) -> Selection:
    """Return what a loader with these options would plan over."""
    mix = open_mix(DataArguments(dataset, split=options.split, where=options.where), Stores.of())
    buckets = tuple(mix.buckets.values())
    size = options.batch_size
    if size is None and options.max_tokens_per_batch is None:
        size = DEFAULT_BATCH_SIZE
    sizes = batch_sizes(buckets, size, options.max_tokens_per_batch)
    costs = default_costs(buckets).costs(sizes)
    return Selection(mix, sizes, PlanOptions(tail="uneven"), World(), costs)


# The loader.


def _loader(dataset: Dataset, options: BenchOptions, num_workers: int, sizes: Mapping[str, int]) -> VideoLoader:
    # One rank, whatever launcher this runs under, and whole batches of all buckets, however few samples they have.
    return VideoLoader(
        dataset,
        batch_size=sizes,
        world=World(),
        num_epochs=None,
        tail="pad",
        split=options.split,
        where=options.where,
        device=options.device,
        output=OutputOptions(pixels=options.pixels, accuracy=options.accuracy),
        limits=LimitOptions(prefetch_bytes=options.prefetch_bytes),
        num_workers=num_workers,
    )


def _measure_loader(
    dataset: Dataset,
    options: BenchOptions,
    num_workers: int,
    selection: Selection,
    setting: Setting,
    progress: Progress,
) -> LoaderRun:
    timer = MeasureTimer(options.seconds, f"{num_workers} worker{'s' if num_workers != 1 else ''}", progress)
    since = time.perf_counter()
    with _loader(dataset, options, num_workers, selection.batch_sizes) as loader:
        batches = iter(loader)
        next(batches)
        first_batch_seconds = time.perf_counter() - since
        timer.start()
        # Batches that are ready were made earlier and must not count as made within the time.
        while timer.share < _WARM_UP or (loader.stats().queue_depth and timer.share < _MAX_WARM_UP):
            next(batches)
        timer.start()
        start, buckets = _Mark.of(loader), dict[str, tuple[int, float]]()
        num_steps = 0
        while not (timer.share >= 1 and (num_steps >= FEW_STEPS or timer.share >= _MAX_SHARE)) or not num_steps:
            bucket_id, last = next(batches).bucket.id, loader.stats().last
            assert last is not None
            num_samples, seconds = buckets.get(bucket_id, (0, 0.0))
            buckets[bucket_id] = num_samples + last.num_samples, seconds + last.work.decode_seconds
            num_steps += 1
        end = _Mark.of(loader)
    timer.end()
    spent, of_buckets = end.stats.since(start.stats), _bucket_runs(buckets)
    return LoaderRun(
        num_workers=num_workers,
        num_fetch_threads=num_fetch_threads(selection.mix),
        first_batch_seconds=first_batch_seconds,
        seconds=end.clock - start.clock,
        room=_room(selection, options.prefetch_bytes, setting.pixels, of_buckets, spent.work.num_bytes_fetched),
        num_steps=spent.num_steps,
        num_bytes=spent.work.num_bytes_fetched,
        num_substituted=spent.work.num_substituted,
        fetch_seconds=spent.work.fetch_seconds,
        buckets=of_buckets,
        worker_cpu_seconds=end.worker_cpu_since(start),
        # Without workers this process decodes too, and its share cannot be told apart.
        main_cpu_seconds=end.main_cpu_seconds - start.main_cpu_seconds if num_workers else None,
    )


def _bucket_runs(buckets: Mapping[str, tuple[int, float]]) -> tuple[BucketRun, ...]:
    return tuple(
        BucketRun(bucket_id=name, num_samples=number, decode_seconds=seconds)
        for name, (number, seconds) in sorted(buckets.items())
    )


def _room(
    selection: Selection, prefetch_bytes: int, pixels: Pixels, buckets: Sequence[BucketRun], num_bytes: int
) -> float:
    """Return how many samples of the measured mean size fit: as frames in the ring, and as clips read ahead."""
    mix = selection.mix
    memory = loader_memory(
        prefetch_bytes, mix.max_clip_bytes, selection.batch_sizes, tuple(mix.buckets.values()), pixels
    )
    frame_bytes = num_samples = 0
    for one in buckets:
        bucket = mix.buckets[one.bucket_id]
        size = bucket.num_frames * PictureFormat(bucket.height, bucket.width, pixels).num_bytes
        frame_bytes += one.num_samples * size
        num_samples += one.num_samples
    return num_samples * min(memory.frame_bytes / frame_bytes, memory.clip_bytes / num_bytes)


@dataclass(frozen=True, slots=True)
class _Mark:
    """A moment of a loader: the clock, its sums, and CPU seconds of this process and of the workers."""

    clock: float
    stats: LoaderStats
    main_cpu_seconds: float
    worker_cpu_seconds: float | None

    @staticmethod
    def of(loader: VideoLoader) -> _Mark:
        cpu = [_cpu_seconds(pid) for pid in loader.worker_pids]
        known = [one for one in cpu if one is not None]
        workers = sum(known) if known and len(known) == len(cpu) else None
        return _Mark(time.perf_counter(), loader.stats(), time.process_time(), workers)

    def worker_cpu_since(self, start: _Mark) -> float | None:
        """Return CPU seconds of the workers; None where the kernel does not say."""
        if self.worker_cpu_seconds is None or start.worker_cpu_seconds is None:
            return None
        return self.worker_cpu_seconds - start.worker_cpu_seconds


def _cpu_seconds(pid: int) -> float | None:
    """Return CPU seconds of a process and all its threads; None where the kernel does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
