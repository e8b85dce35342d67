"""How fast a loader is on this machine and over this store: `streamvid bench` as a function."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from streamvid.bench.figures import BucketRun, LoaderRun, Setting, StoreRun
from streamvid.bench.store import Clock, Progress, measure_store, num_fetch_threads
from streamvid.bench.verdict import FEW_STEPS, Need, Verdict, judge, need_of, warnings_of
from streamvid.buckets.batch_size import batch_sizes
from streamvid.dataset.reader import Dataset, open_dataset
from streamvid.errors import ConfigError
from streamvid.host.resources import usable_cores
from streamvid.loader.arguments import memory_options
from streamvid.loader.delivery.requests import Selection
from streamvid.loader.loader import _DEFAULT_PREFETCH_BYTES, VideoLoader
from streamvid.loader.mix import Mix, as_configs, open_mix
from streamvid.loader.stats import LoaderStats
from streamvid.plan import PlanOptions, World
from streamvid.plan.cost import default_costs
from streamvid.video.picture import Accuracy, PictureFormat, Pixels

DEFAULT_BATCH_SIZE = 4

_WARM_UP, _MOST_WARM_UP = 0.2, 1.0  # in each measurement's seconds, before they begin
_MOST = 2.0  # of these seconds, where batches are few
_MAX_SECONDS = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What to measure; names that VideoLoader has too mean what they mean there.

    num_workers: one run with each of these numbers; none: 1, 2, 4 … up to the cores there are.
    seconds: of each run, twice that where batches are few, and at most of each of two passes over the store.
    step_seconds: how long a training step takes, None to leave the question open; num_local_ranks: ranks, so GPUs, that
    share this machine.

    Raises ConfigError for values that cannot be.
    """

    batch_size: int | Mapping[str, int] | None = None
    max_tokens_per_batch: int | None = None
    num_workers: tuple[int, ...] = ()
    seconds: float = 5.0
    split: str = "train"
    where: str | None = None
    seed: int = 0
    pixels: Pixels | None = None
    accuracy: Accuracy | None = None
    device: str | None = None
    prefetch_bytes: int = _DEFAULT_PREFETCH_BYTES
    step_seconds: float | None = None
    num_local_ranks: int = 1

    def __post_init__(self) -> None:
        for name, value in (("seconds", self.seconds), ("step_seconds", self.step_seconds)):
            # `not`, as no comparison holds of NaN.
            if value is not None and not 0 < value <= _MAX_SECONDS:
                raise ConfigError(f"{name}={value!r}: allowed are numbers above 0 and up to {_MAX_SECONDS:.0f}")
        if self.num_local_ranks < 1:
            raise ConfigError(f"num_local_ranks={self.num_local_ranks}: allowed are whole numbers of 1 or more")
        if any(number < 0 for number in self.num_workers) or len(set(self.num_workers)) < len(self.num_workers):
            raise ConfigError(f"num_workers={list(self.num_workers)}: give each number once, none below 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """What was measured, in order: two passes over the store, then a run for each number of workers.

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
        """All of it as JSON has it, with the rates and shares that follow from it."""
        record = asdict(self)
        for kind, ones in (("store", self.store), ("runs", self.runs)):
            for row, one in zip(record[kind], ones, strict=True):
                names = [name for name, value in vars(type(one)).items() if isinstance(value, property)]
                row.update({name: getattr(one, name) for name in names})
        return record


def bench(
    dataset: str | Path | Dataset, options: BenchOptions | None = None, progress: Progress | None = None
) -> BenchReport:
    """Measure how many samples a second this machine and this store give, and say what limits it.

    Nothing is written. Caches are as they are found; the first pass over the store, and what the kernel says that it
    read from a disk meanwhile, tell how warm they were.

    Raises what opening and iterating a VideoLoader raises.
    """
    options, progress = options or BenchOptions(), progress or (lambda phase, done, total: None)
    opened = dataset if isinstance(dataset, Dataset) else open_dataset(dataset)
    if opened.manifest.clips == "text":
        raise ConfigError(f"{opened.url} holds texts alone: no clip can be read or decoded")
    num_cores = usable_cores()
    selection = _select(opened, options)
    # A loader that cannot be is refused now, and not after the store was read.
    _loader(opened, options, 0, selection.batch_sizes).close()
    samples = _samples_of_buckets(selection.mix)
    store = measure_store(selection, options.seconds, progress)
    with _loader(opened, options, 0, selection.batch_sizes) as loader:
        next(iter(loader))  # imports what the first batch of a process needs: no part of what is measured
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
    return {name: sum(int(part.counts[name].sum()) for part in mix.parts) for name in mix.buckets}


def _select(dataset: Dataset, options: BenchOptions) -> Selection:
    """What a loader with these options would plan over."""
    mix = open_mix(
        as_configs(dataset), split=options.split, where=options.where, columns=(), seed=options.seed,
        samples_per_epoch=None, by="samples",
    )  # fmt: skip
    buckets = tuple(mix.buckets.values())
    size = options.batch_size
    if size is None and options.max_tokens_per_batch is None:
        size = DEFAULT_BATCH_SIZE
    sizes = batch_sizes(buckets, size, options.max_tokens_per_batch)
    costs = default_costs(buckets).costs(sizes)
    return Selection(mix, sizes, PlanOptions(seed=options.seed, tail="uneven"), World(), costs)


# The loader.


def _loader(dataset: Dataset, options: BenchOptions, num_workers: int, sizes: Mapping[str, int]) -> VideoLoader:
    # One rank, whatever launcher this runs under: others are no part of what is measured. Whole batches of all buckets,
    # however few samples they have.
    return VideoLoader(
        dataset, batch_size=sizes, world=World(), num_epochs=None, tail="pad", seed=options.seed, split=options.split,
        where=options.where, device=options.device, pixels=options.pixels, accuracy=options.accuracy,
        num_workers=num_workers, prefetch_bytes=options.prefetch_bytes,
    )  # fmt: skip


def _measure_loader(
    dataset: Dataset,
    options: BenchOptions,
    num_workers: int,
    selection: Selection,
    setting: Setting,
    progress: Progress,
) -> LoaderRun:
    clock = Clock(options.seconds, f"{num_workers} worker{'s' if num_workers != 1 else ''}", progress)
    since = time.perf_counter()
    with _loader(dataset, options, num_workers, selection.batch_sizes) as loader:
        batches = iter(loader)
        next(batches)
        first_batch_seconds = time.perf_counter() - since
        clock.start()
        # Batches that lie ready were made before: handed over within the time they would count as made in it.
        while clock.share < _WARM_UP or (loader.stats().queue_depth and clock.share < _MOST_WARM_UP):
            next(batches)
        clock.start()
        start, buckets = _Mark.of(loader), dict[str, tuple[int, float]]()
        num_steps = 0
        while not (clock.share >= 1 and (num_steps >= FEW_STEPS or clock.share >= _MOST)) or not num_steps:
            bucket_id, last = next(batches).bucket.id, loader.stats().last
            assert last is not None
            num_samples, seconds = buckets.get(bucket_id, (0, 0.0))
            buckets[bucket_id] = num_samples + last.num_samples, seconds + last.decode_seconds
            num_steps += 1
        end = _Mark.of(loader)
    clock.end()
    run = _run_between(start, end, num_workers, first_batch_seconds, buckets)
    room = _room(run, selection, options.prefetch_bytes, setting.pixels)
    return replace(run, room=room, num_fetch_threads=num_fetch_threads(selection.mix))


def _room(run: LoaderRun, selection: Selection, prefetch_bytes: int, pixels: Pixels) -> float:
    """Samples that may be under way, of the mean size of those that came: frames in the ring, clips read ahead."""
    mix = selection.mix
    memory = memory_options(
        prefetch_bytes, mix.max_clip_bytes, selection.batch_sizes, tuple(mix.buckets.values()), pixels
    )
    frame_bytes = 0
    for one in run.buckets:
        bucket = mix.buckets[one.bucket_id]
        size = bucket.num_frames * PictureFormat(bucket.height, bucket.width, pixels).num_bytes
        frame_bytes += one.num_samples * size
    return run.num_samples * min(memory["frame_bytes"] / frame_bytes, memory["clip_bytes"] / run.num_bytes)


@dataclass(frozen=True, slots=True)
class _Mark:
    """Where a loader stands: on the clock, its sums, CPU seconds of this process and of the workers."""

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


def _run_between(
    start: _Mark, end: _Mark, num_workers: int, first_batch_seconds: float, buckets: Mapping[str, tuple[int, float]]
) -> LoaderRun:
    spent = end.stats.since(start.stats)
    cpu = None
    if start.worker_cpu_seconds is not None and end.worker_cpu_seconds is not None:
        cpu = end.worker_cpu_seconds - start.worker_cpu_seconds
    return LoaderRun(
        num_workers=num_workers,
        num_fetch_threads=0,
        first_batch_seconds=first_batch_seconds,
        seconds=end.clock - start.clock,
        room=0.0,
        num_steps=spent.num_steps,
        num_samples=spent.num_samples,
        num_bytes=spent.num_bytes_fetched,
        num_substituted=spent.num_substituted,
        decode_seconds=spent.decode_seconds,
        fetch_seconds=spent.fetch_seconds,
        buckets=tuple(
            BucketRun(bucket_id=name, num_samples=number, decode_seconds=seconds)
            for name, (number, seconds) in sorted(buckets.items())
        ),
        worker_cpu_seconds=cpu,
        # Without workers it decodes too: what is left of it without that, nobody can tell.
        main_cpu_seconds=end.main_cpu_seconds - start.main_cpu_seconds if num_workers else None,
    )


def _cpu_seconds(pid: int) -> float | None:
    """CPU seconds of a process, all its threads; None where the kernel does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
