"""Benchmark of a loader with this machine and this store, used by `streamvid bench`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from streamvid.bench.options import BenchOptions
from streamvid.bench.store import MeasureTimer, Progress, measure_store
from streamvid.bench.verdict import BucketRun, LoaderRun, Need, StoreRun, judge, need_of, warnings_of
from streamvid.dataset.reader import Dataset
from streamvid.dataset.versions.open import open_dataset
from streamvid.errors import ConfigError
from streamvid.host.resources import usable_cores
from streamvid.loader.loader import VideoLoader
from streamvid.loader.mix import DataArguments
from streamvid.loader.options import LimitOptions, OutputOptions
from streamvid.loader.setup import DeliveryArguments, PlanArguments, Setup, set_up
from streamvid.loader.stats import LoaderStats
from streamvid.loader.verdict import FEW_STEPS, Setting, Verdict
from streamvid.plan import World
from streamvid.video.picture import PictureFormat

DEFAULT_BATCH_SIZE = 4

# Shares of a measurement's seconds: warm-up, maximum warm-up, and maximum measurement if there are few batches.
_WARM_UP, _MAX_WARM_UP = 0.2, 1.0
_MAX_SHARE = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """Result of a benchmark: two passes over the store, then a loader run for each number of workers.

    num_samples: number of samples in the split that satisfy `where`.
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
        """Return a JSON-serializable dict that includes derived rates and shares."""
        record = asdict(self)
        for kind, ones in (("store", self.store), ("runs", self.runs)):
            for row, one in zip(record[kind], ones, strict=True):
                names = [name for name, value in vars(type(one)).items() if isinstance(value, property)]
                row.update({name: getattr(one, name) for name in names})
        return record


def bench(
    dataset: str | Path | Dataset, options: BenchOptions | None = None, progress: Progress | None = None
) -> BenchReport:
    """Measure how many samples per second this machine and this store deliver, and what limits this rate.

    Nothing is written, and caches are not dropped. The speed of the first pass over the store, and the bytes that the
    kernel reads from disk during that pass, show how warm the caches were. Raises the same errors as creating a
    VideoLoader and iterating over it.
    """
    options, progress = options or BenchOptions(), progress or (lambda phase, done, total: None)
    opened = dataset if isinstance(dataset, Dataset) else open_dataset(dataset)
    num_cores = usable_cores()
    setup = _set_up(opened, options)
    sizes = setup.selection.batch_sizes
    samples = {name: sum(int(part.subset.counts[name].sum()) for part in setup.mix.parts) for name in setup.mix.buckets}
    store = measure_store(setup, options.seconds, progress)
    with _loader(opened, options, 0, sizes) as loader:
        next(iter(loader))  # do the imports that the first batch of a process needs
    numbers = options.num_workers or _numbers_of_workers(num_cores)
    runs = tuple(_measure_loader(opened, options, number, setup, progress) for number in numbers)
    clips = opened.manifest.clips
    accuracy = options.accuracy or ("exact" if clips == "copy" else "fast")
    setting = Setting(num_cores=num_cores, clips=clips, pixels=setup.pipeline.pixels, accuracy=accuracy)
    need = None
    if options.step_seconds is not None:
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
        batch_sizes=dict(sizes),
        setting=setting,
        store=store,
        runs=runs,
        verdict=judge(runs, store, setting),
        need=need,
        warnings=warnings_of(runs, store, sizes),
    )


def _numbers_of_workers(num_cores: int) -> tuple[int, ...]:
    if sys.platform != "linux":
        return (0,)  # no workers on this platform
    return tuple(sorted({2**power for power in range(num_cores.bit_length())} | {num_cores}))


def _set_up(dataset: Dataset, options: BenchOptions) -> Setup:
    """Create the parts of a loader that delivers each sample once. Raises the same errors as VideoLoader."""
    if dataset.manifest.clips in ("text", "audio"):
        raise ConfigError(
            f"{dataset.url} contains {dataset.manifest.clips} but no pictures; use a dataset of videos or images"
        )
    size = options.batch_size
    if size is None and options.max_tokens_per_batch is None:
        size = DEFAULT_BATCH_SIZE
    return set_up(
        DataArguments(dataset, split=options.split, where=options.where),
        PlanArguments(size, options.max_tokens_per_batch, world=World(), tail="uneven"),
        DeliveryArguments(*_delivery(options), device=options.device, num_workers=0),
    )


def _delivery(options: BenchOptions) -> tuple[OutputOptions, LimitOptions]:
    output = OutputOptions(pixels=options.pixels, accuracy=options.accuracy)
    return output, LimitOptions(prefetch_bytes=options.prefetch_bytes)


def _loader(dataset: Dataset, options: BenchOptions, num_workers: int, sizes: Mapping[str, int]) -> VideoLoader:
    output, limits = _delivery(options)
    # A single rank under any launcher, and full batches in every bucket, however few samples it has.
    return VideoLoader(
        dataset,
        batch_size=sizes,
        world=World(),
        num_epochs=None,
        tail="pad",
        split=options.split,
        where=options.where,
        device=options.device,
        output=output,
        limits=limits,
        num_workers=num_workers,
    )


def _measure_loader(
    dataset: Dataset,
    options: BenchOptions,
    num_workers: int,
    setup: Setup,
    progress: Progress,
) -> LoaderRun:
    timer = MeasureTimer(options.seconds, f"{num_workers} worker{'s' if num_workers != 1 else ''}", progress)
    since = time.perf_counter()
    with _loader(dataset, options, num_workers, setup.selection.batch_sizes) as loader:
        batches = iter(loader)
        next(batches)
        first_batch_seconds = time.perf_counter() - since
        timer.start()
        # Batches that are already in the queue must not count as produced during the measurement.
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
        num_fetch_threads=setup.pipeline.num_fetch_threads,
        first_batch_seconds=first_batch_seconds,
        seconds=end.clock - start.clock,
        room=_room(setup, of_buckets, spent.work.num_bytes_fetched),
        num_steps=spent.num_steps,
        num_bytes=spent.work.num_bytes_fetched,
        num_substituted=spent.work.num_substituted,
        fetch_seconds=spent.work.fetch_seconds,
        buckets=of_buckets,
        worker_cpu_seconds=end.worker_cpu_since(start),
        # Without workers, this process also decodes, and the two parts of its time cannot be separated.
        main_cpu_seconds=end.main_cpu_seconds - start.main_cpu_seconds if num_workers else None,
    )


def _bucket_runs(buckets: Mapping[str, tuple[int, float]]) -> tuple[BucketRun, ...]:
    return tuple(
        BucketRun(bucket_id=name, num_samples=number, decode_seconds=seconds)
        for name, (number, seconds) in sorted(buckets.items())
    )


def _room(setup: Setup, buckets: Sequence[BucketRun], num_bytes: int) -> float:
    """Return the number of samples of the measured mean size for which the ring and the read-ahead memory have room."""
    frame_bytes = num_samples = 0
    for one in buckets:
        bucket = setup.mix.buckets[one.bucket_id]
        picture = PictureFormat(bucket.height, bucket.width, setup.pipeline.pixels)
        frame_bytes += one.num_samples * bucket.num_frames * picture.num_bytes
        num_samples += one.num_samples
    return num_samples * min(setup.pipeline.frame_bytes / frame_bytes, setup.pipeline.clip_bytes / num_bytes)


@dataclass(frozen=True, slots=True)
class _Mark:
    """Snapshot of a loader: time, cumulative statistics, and CPU seconds used by this process and by the workers."""

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
        """Return the CPU seconds that workers have used since `start`, or None if the kernel does not report them."""
        if self.worker_cpu_seconds is None or start.worker_cpu_seconds is None:
            return None
        return self.worker_cpu_seconds - start.worker_cpu_seconds


def _cpu_seconds(pid: int) -> float | None:
    """Return the CPU seconds used across all threads of a process, or None if the kernel does not report them."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
