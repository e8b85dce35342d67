"""Measurements of a store and a loader, and their interpretation: what limits the loader, and what would help.

All functions are pure, and all values are frozen.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from streamvid.loader.verdict import FEW_STEPS, Limit, Setting, Usage, Verdict, advice, limit_of

MARGIN = 0.2
"""Margin added to the mean work, because steps differ in cost and machines also do other work."""

_MIN_PASS_SECONDS = 0.5  # a shorter pass over a store mostly spends its time opening files
_ALIKE = 0.95  # a run counts as slower below this share of the highest rate
_STARVED = 0.7  # CPU seconds per second of decoding below which other processes used the cores

# ------------------------------------------------------------------------------------------------- measured figures


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRun:
    """Result of one pass over the store. A pass reads and verifies byte ranges of clips, but does not decode them.

    num_bytes: number of bytes read.
    num_stored_bytes: total stored size, in bytes, of all clips that were read in full or in part.
    num_bad: number of samples with a checksum mismatch.
    num_disk_bytes: number of bytes that the kernel read from disk during the pass; None if unknown.
    """

    num_samples: int
    num_bytes: int
    num_stored_bytes: int
    seconds: float
    num_bad: int = 0
    num_disk_bytes: int | None = None

    @property
    def samples_per_second(self) -> float:
        return share(self.num_samples, self.seconds)

    @property
    def bytes_per_second(self) -> float:
        return share(self.num_bytes, self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketRun:
    """Figures for one bucket in a LoaderRun.

    decode_seconds: wall time spent decoding, summed over decoders.
    """

    bucket_id: str
    num_samples: int
    decode_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderRun:
    """One run of a loader whose batches are discarded.

    first_batch_seconds: time from creating the loader (with its dataset already open) to the first batch.
        The other figures cover the time after the warm-up.
    fetch_seconds: wall time spent reading, summed over threads.
    room: number of samples of the measured mean size that fit into prefetch_bytes at the same time.
    worker_cpu_seconds: CPU time of the workers; None if unknown.
    main_cpu_seconds: CPU time of this process; None if unknown.
    """

    num_workers: int
    num_fetch_threads: int
    first_batch_seconds: float
    seconds: float
    room: float
    num_steps: int
    num_bytes: int
    num_substituted: int
    fetch_seconds: float
    buckets: tuple[BucketRun, ...]
    worker_cpu_seconds: float | None = None
    main_cpu_seconds: float | None = None

    @property
    def num_samples(self) -> int:
        return sum(bucket.num_samples for bucket in self.buckets)

    @property
    def decode_seconds(self) -> float:
        """Wall time spent decoding, summed over decoders."""
        return sum(bucket.decode_seconds for bucket in self.buckets)

    @property
    def samples_per_second(self) -> float:
        return share(self.num_samples, self.seconds)

    @property
    def decoders_busy(self) -> float:
        """Fraction of the time that the decoders were busy, from 0 to 1."""
        return min(1.0, share(self.decode_seconds, max(1, self.num_workers) * self.seconds))

    @property
    def readers_busy(self) -> float:
        """Fraction of the time that the reader threads were busy, from 0 to 1."""
        return min(1.0, share(self.fetch_seconds, self.num_fetch_threads * self.seconds))

    @property
    def main_busy(self) -> float | None:
        """Fraction of one core that this process used, from 0 to 1, or None if unknown."""
        return None if self.main_cpu_seconds is None else min(1.0, share(self.main_cpu_seconds, self.seconds))

    @property
    def main_cpu_per_step(self) -> float | None:
        """CPU seconds of this process per batch, or None if unknown."""
        return None if self.main_cpu_seconds is None else share(self.main_cpu_seconds, self.num_steps)

    @property
    def cpu_seconds(self) -> float | None:
        """CPU seconds that all of the run's processes used, or None if unknown."""
        if self.worker_cpu_seconds is None or self.main_cpu_seconds is None:
            return None
        return self.worker_cpu_seconds + self.main_cpu_seconds

    @property
    def cpu_per_decode(self) -> float | None:
        """CPU seconds that the workers used per second of decoding; below 1 if they had to wait for a core."""
        return None if self.worker_cpu_seconds is None else share(self.worker_cpu_seconds, self.decode_seconds)


def share(part: float, whole: float) -> float:
    """Return `part` divided by `whole`, or 0 if `whole` is 0."""
    return part / whole if whole > 0 else 0.0


# --------------------------------------------------------------------------------------------------------- verdicts


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Resources needed to deliver a batch to each rank every `step_seconds`, averaged over the steps in an epoch.

    num_workers: workers per rank for the average step, including `margin`.
    heaviest_workers: workers per rank if all steps used `heaviest_bucket`, including `margin`.
    num_cores: cores needed for decoding and for data handling in the main processes of all local ranks, including
        `margin`.
    samples_per_second: total rate of all local ranks.
    unmeasured: buckets without a measured sample.
    fastest_step_seconds: shortest step time that this machine and store can sustain, including `margin`.
    obstacles: reasons why this machine and store cannot sustain `step_seconds`; empty if they can.
    """

    step_seconds: float
    margin: float
    num_local_ranks: int
    num_workers: int
    heaviest_bucket: str
    heaviest_workers: int
    num_cores: float
    samples_per_second: float
    fastest_step_seconds: float
    unmeasured: tuple[str, ...]
    obstacles: tuple[str, ...]


def usage_of(run: LoaderRun, store: StoreRun, num_cores: int) -> Usage:
    """Return the resource usage of a run.

    store: pass over the store with the same share of cached data as the run.
    """
    cpu = run.cpu_seconds
    return Usage(
        num_workers=run.num_workers,
        decoders_busy=run.decoders_busy,
        # With overlapping reads, the store can be at its own maximum rate although the reading threads are often idle.
        store_busy=max(run.readers_busy, min(1.0, share(run.samples_per_second, store.samples_per_second))),
        main_busy=run.main_busy or 0.0,
        cores_busy=None if cpu is None else share(cpu, num_cores * run.seconds),
        room=run.room,
    )


def judge(runs: Sequence[LoaderRun], passes: Sequence[StoreRun], setting: Setting) -> Verdict:
    """Return the verdict on the fastest run: what limited it, the evidence, and advice.

    passes: passes over the store, measured before the runs.
    """
    best = _best(runs)
    slow, fast = slowest(passes), max(passes, key=lambda one: one.samples_per_second)
    usage = usage_of(best, fast, setting.num_cores)
    limit = limit_of(usage, setting.num_cores)
    with_more = [run for run in runs if run.num_workers > best.num_workers]
    more = max(with_more, key=lambda run: run.samples_per_second, default=None)
    if more is not None and limit == "decoders":
        limit = "cores"  # more workers were measured, but no core was free
    reasons = [
        f"with num_workers={best.num_workers}, the loader delivered {best.samples_per_second:.1f} samples/s; "
        f"decoders were busy {best.decoders_busy:.0%} of the time",
        f"the store alone delivered {fast.samples_per_second:.1f} samples/s; threads were reading "
        f"{best.readers_busy:.0%} of the time",
    ]
    if more is not None:
        reasons.append(f"{more.num_workers} workers delivered only {more.samples_per_second:.1f} samples/s")
    if limit != "store" and slow.samples_per_second < best.samples_per_second:
        reasons.append(
            f"the slowest pass over the store delivered {slow.samples_per_second:.1f} samples/s; uncached reads may "
            "be as slow"
        )
    if best.main_busy is not None and best.main_cpu_per_step is not None:
        reasons.append(
            f"the main process used {best.main_cpu_per_step * 1000:.2f} ms of CPU time per batch "
            f"({best.main_busy:.1%} of a core)"
        )
    if best.cpu_per_decode is not None and best.cpu_per_decode < _STARVED:
        reasons.append(
            f"decoders had a core for only {best.cpu_per_decode:.0%} of their working time; the remaining time "
            "was lost to other processes, a container limit or a shared host"
        )
    return Verdict(limit, tuple(reasons), advice(limit, usage, setting))


def _best(runs: Sequence[LoaderRun]) -> LoaderRun:
    """Return the fastest run. If several runs are about equally fast, return the run with the most workers."""
    most = max(run.samples_per_second for run in runs)
    return max((run for run in runs if run.samples_per_second >= _ALIKE * most), key=lambda run: run.num_workers)


def warnings_of(runs: Sequence[LoaderRun], passes: Sequence[StoreRun], bucket_ids: Collection[str]) -> tuple[str, ...]:
    """Return warnings about unreliable figures and about problems with the dataset."""
    found = []
    if num_bad := passes[0].num_bad:
        found.append(f"{num_bad} of {passes[0].num_samples} samples have a checksum mismatch; copy the dataset again")
    if num_substituted := sum(run.num_substituted for run in runs):
        found.append(f"{num_substituted} bad samples were replaced by other samples")
    if passes[0].seconds < _MIN_PASS_SECONDS:
        found.append(f"the first pass took {passes[0].seconds:.2f} s, which is too short to measure uncached reads")
    if rough := ", ".join(str(run.num_workers) for run in runs if run.num_steps < FEW_STEPS):
        found.append(
            f"fewer than {FEW_STEPS} batches were delivered with num_workers={rough}, so the figures are "
            "rough; raise --seconds"
        )
    seen = {bucket.bucket_id for run in runs for bucket in run.buckets}
    if missing := sorted(set(bucket_ids) - seen):
        found.append(f"no sample in {', '.join(missing)} was measured; raise --seconds")
    return tuple(found)


def slowest(passes: Sequence[StoreRun]) -> StoreRun:
    """Return the slowest pass that took long enough, or the slowest of all passes if all were too short."""
    long_enough = [one for one in passes if one.seconds >= _MIN_PASS_SECONDS]
    return min(long_enough or passes, key=lambda one: one.samples_per_second)


def decoder_seconds(run: LoaderRun, limit: Limit) -> dict[str, float]:
    """Map each bucket id to decoder seconds per sample. If decoders limit the run, include the time between samples."""
    # If decoders wait for the store or the ring, that time is not a cost of decoding.
    between = 1 / run.decoders_busy if limit in ("decoders", "cores") and run.decoders_busy else 1.0
    return {b.bucket_id: between * b.decode_seconds / b.num_samples for b in run.buckets if b.num_samples}


def workers_for(busy_seconds: float, step_seconds: float, margin: float = MARGIN) -> int:
    """Return the number of workers (at least 1) needed for `busy_seconds` of decoding per step, with a margin."""
    # Rounded, because a floating-point error could add one more worker.
    return max(1, math.ceil(round((1 + margin) * busy_seconds / step_seconds, 9)))


def need_of(
    runs: Sequence[LoaderRun],
    passes: Sequence[StoreRun],
    *,
    steps: Mapping[str, float],
    batch_sizes: Mapping[str, int],
    step_seconds: float,
    num_local_ranks: int,
    num_cores: int,
    margin: float = MARGIN,
) -> Need:
    """Return the resources needed to reach a step time. Decoding costs are taken from the run with the most workers.

    Only runs with at least one core per worker are considered.

    steps: bucket id → number of steps per epoch. Buckets without a measured sample are reported, but left out of
        averages.
    """
    # More workers than cores would wait for each other, which would look like work.
    run = max((run for run in runs if run.num_workers <= num_cores), key=lambda run: run.num_workers, default=runs[0])
    store, fast = slowest(passes), max(passes, key=lambda one: one.samples_per_second)
    costs = decoder_seconds(run, limit_of(usage_of(run, fast, num_cores), num_cores))
    busy = {name: batch_sizes[name] * costs[name] for name, number in steps.items() if number and name in costs}
    num_steps = sum(steps[name] for name in busy)
    mean_busy = share(sum(steps[name] * busy[name] for name in busy), num_steps)
    mean_samples = share(sum(steps[name] * batch_sizes[name] for name in busy), num_steps)
    heaviest = max(busy, key=lambda name: busy[name])
    num_workers = workers_for(mean_busy, step_seconds, margin)
    main_seconds = run.main_cpu_per_step or 0.0
    cores = (1 + margin) * num_local_ranks * (mean_busy + main_seconds) / step_seconds
    rate = num_local_ranks * mean_samples / step_seconds
    fastest = {
        "cores": cores * step_seconds / num_cores,
        "store": (1 + margin) * share(num_local_ranks * mean_samples, store.samples_per_second),
        "main": (1 + margin) * main_seconds,
    }
    needed = (1 + margin) * rate
    reasons = {
        "cores": f"loading data with num_local_ranks={num_local_ranks} takes {cores:.1f} cores, but only {num_cores} "
        "are available",
        "store": f"the store delivers {store.samples_per_second:.1f} samples/s, but {needed:.1f} are needed",
        "main": f"the main process needs {main_seconds:.3f} s of CPU time per batch, which is longer than a step",
    }
    return Need(
        step_seconds=step_seconds,
        margin=margin,
        num_local_ranks=num_local_ranks,
        num_workers=num_workers,
        heaviest_bucket=heaviest,
        heaviest_workers=workers_for(busy[heaviest], step_seconds, margin),
        num_cores=cores,
        samples_per_second=rate,
        fastest_step_seconds=max(fastest.values()),
        unmeasured=tuple(sorted(name for name, number in steps.items() if number and name not in costs)),
        obstacles=tuple(reasons[name] for name, seconds in fastest.items() if seconds > step_seconds),
    )
