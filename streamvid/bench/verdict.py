"""Measured figures of a store and a loader, and their verdict: the limit, what would help, the workers needed.

Pure functions of frozen values.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from streamvid.video.picture import Pixels

MARGIN = 0.2
"""Margin on top of the mean work, because steps differ in cost and machines have other work."""

FEW_STEPS = 10
"""With fewer batches, figures are only rough."""

_BUSY = 0.85  # share of the time: a part that is this busy is what the others wait for
_ROOM = 2  # samples per decoder: one being decoded, and one waiting
_MIN_PASS_SECONDS = 0.5  # a shorter pass over a store mostly spends its time opening files
_ALIKE = 0.95  # share of a rate below which another counts as slower
_STARVED = 0.7  # CPU seconds per second of decoding, below which other processes had the cores

# ------------------------------------------------------------------------------------------------- measured figures


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRun:
    """One pass over ranges of clips. Each is read and verified by its checksum; nothing is decoded.

    num_bytes: bytes read.   num_stored_bytes: bytes of the whole clips.   num_bad: samples with a checksum mismatch.
    num_disk_bytes: bytes that the kernel fetched from disks meanwhile; None if it does not report them.
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
    """Samples of one bucket within a LoaderRun. decode_seconds: wall time, summed over decoders."""

    bucket_id: str
    num_samples: int
    decode_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderRun:
    """One run of a loader whose caller only takes batches.

    first_batch_seconds: from creating the loader, with its dataset open, to its first batch.
    All other figures are for the time after a warm-up. fetch_seconds: wall time, summed over the threads that read.
    room: samples of this mean size that prefetch_bytes admits at a time.
    worker_cpu_seconds, main_cpu_seconds: of the workers and of this process; None if they cannot be separated.
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
        """Share of the time in which decoders were working: 0..1."""
        return min(1.0, share(self.decode_seconds, max(1, self.num_workers) * self.seconds))

    @property
    def readers_busy(self) -> float:
        """Share of the time in which threads were reading: 0..1."""
        return min(1.0, share(self.fetch_seconds, self.num_fetch_threads * self.seconds))

    @property
    def main_busy(self) -> float | None:
        """Share of one core that this process used: 0..1."""
        return None if self.main_cpu_seconds is None else min(1.0, share(self.main_cpu_seconds, self.seconds))

    @property
    def main_cpu_per_step(self) -> float | None:
        """CPU seconds of this process per batch."""
        return None if self.main_cpu_seconds is None else share(self.main_cpu_seconds, self.num_steps)

    @property
    def cpu_seconds(self) -> float | None:
        """CPU seconds of all processes of the run."""
        if self.worker_cpu_seconds is None or self.main_cpu_seconds is None:
            return None
        return self.worker_cpu_seconds + self.main_cpu_seconds

    @property
    def cpu_per_decode(self) -> float | None:
        """CPU seconds of the workers per second of decoding; below 1 if other processes had the cores."""
        return None if self.worker_cpu_seconds is None else share(self.worker_cpu_seconds, self.decode_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Conditions of the runs, as far as advice depends on them. clips: the form in which the dataset stores them."""

    num_cores: int
    clips: str
    pixels: Pixels
    accuracy: str | None


def share(part: float, whole: float) -> float:
    """Return `part` divided by `whole`; 0 if `whole` is 0."""
    return part / whole if whole > 0 else 0.0


# --------------------------------------------------------------------------------------------------------- verdicts


# decoders: the workers, with cores left for more.   cores: the workers use all cores.   main: the caller's process.
# ring: prefetch_bytes has no room for as many samples as decoders could work on.
Limit = Literal["decoders", "cores", "store", "main", "ring"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Limit of a run, the figures that show it, and remedies, best first."""

    limit: Limit
    reasons: tuple[str, ...]
    advice: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Needs of a rank that has a batch ready every `step_seconds`, on average over the steps of an epoch.

    num_workers: per rank, with `margin` on top of the mean.   heaviest_workers: if all steps had that bucket.
    num_cores: cores for the workers and the main processes' data work of all ranks of the machine, with the margin.
    samples_per_second: over all these ranks.
    fastest_step_seconds: shortest step that this machine and store can feed, with the margin.
    obstacles: why this machine cannot feed these steps; empty if it can.
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


def limit_of(run: LoaderRun, store: StoreRun, num_cores: int) -> Limit:
    """Return what everything else waited for. store: a pass with the same share of cached data as the run."""
    decoding: Limit = "cores" if max(1, run.num_workers) >= num_cores else "decoders"
    if run.decoders_busy >= _BUSY:
        return decoding
    if run.cpu_seconds is not None and run.cpu_seconds >= _BUSY * num_cores * run.seconds:
        return "cores"
    shares: dict[Limit, float] = {
        # A store with overlapping reads delivers no more alone than here, however little each thread waits.
        "store": max(run.readers_busy, min(1.0, share(run.samples_per_second, store.samples_per_second))),
        "main": run.main_busy or 0.0,
    }
    busiest = max(shares, key=lambda name: shares[name])
    if shares[busiest] >= _BUSY:
        return busiest
    # Decoders that always have work waiting spend their remaining time between samples: that is their cost too.
    return "ring" if run.room < _ROOM * max(1, run.num_workers) else decoding


def judge(runs: Sequence[LoaderRun], passes: Sequence[StoreRun], setting: Setting) -> Verdict:
    """Return what limits the fastest of these runs, which followed the passes over the store."""
    best = _best(runs)
    slow, fast = slowest(passes), max(passes, key=lambda one: one.samples_per_second)
    limit = limit_of(best, fast, setting.num_cores)
    with_more = [run for run in runs if run.num_workers > best.num_workers]
    more = max(with_more, key=lambda run: run.samples_per_second, default=None)
    if more is not None and limit == "decoders":
        limit = "cores"  # more workers were tried, but no core was free
    reasons = [
        f"{best.num_workers} worker(s) delivered {best.samples_per_second:.1f} samples/s; decoders were busy "
        f"{best.decoders_busy:.0%} of the time",
        f"the store alone delivered {fast.samples_per_second:.1f} samples/s; reading threads were busy "
        f"{best.readers_busy:.0%} of the time",
    ]
    if more is not None:
        reasons.append(f"{more.num_workers} workers delivered less, {more.samples_per_second:.1f} samples/s")
    if limit != "store" and slow.samples_per_second < best.samples_per_second:
        reasons.append(
            f"but its slowest pass delivered {slow.samples_per_second:.1f} samples/s: uncached reads may be as slow"
        )
    if best.main_busy is not None and best.main_cpu_per_step is not None:
        reasons.append(
            f"the main process took {best.main_cpu_per_step * 1000:.2f} ms of CPU per batch, {best.main_busy:.1%}"
        )
    if best.cpu_per_decode is not None and best.cpu_per_decode < _STARVED:
        reasons.append(
            f"decoders had a core for {best.cpu_per_decode:.0%} of their working time: other processes, a "
            "container limit or a shared host took the rest"
        )
    return Verdict(limit, tuple(reasons), _advice(limit, best, setting))


def _best(runs: Sequence[LoaderRun]) -> LoaderRun:
    """Return the fastest run; among runs of about the same speed, the one with the most workers."""
    most = max(run.samples_per_second for run in runs)
    return max((run for run in runs if run.samples_per_second >= _ALIKE * most), key=lambda run: run.num_workers)


def warnings_of(runs: Sequence[LoaderRun], passes: Sequence[StoreRun], bucket_ids: Collection[str]) -> tuple[str, ...]:
    """Return what makes figures doubtful, and problems of the dataset."""
    found = []
    if num_bad := passes[0].num_bad:
        found.append(f"{num_bad} of {passes[0].num_samples} samples have a checksum mismatch; copy them again")
    if num_substituted := sum(run.num_substituted for run in runs):
        found.append(f"{num_substituted} bad samples were replaced by others")
    if passes[0].seconds < _MIN_PASS_SECONDS:
        found.append(f"the first pass took {passes[0].seconds:.2f} s, too short to measure uncached reads")
    if rough := ", ".join(str(run.num_workers) for run in runs if run.num_steps < FEW_STEPS):
        found.append(f"fewer than {FEW_STEPS} batches with {rough} worker(s): rough figures; raise --seconds")
    seen = {bucket.bucket_id for run in runs for bucket in run.buckets}
    if missing := sorted(set(bucket_ids) - seen):
        found.append(f"no sample of {', '.join(missing)} was measured; raise --seconds")
    return tuple(found)


def slowest(passes: Sequence[StoreRun]) -> StoreRun:
    """Return the pass with the fewest cached reads, among those that took long enough."""
    long_enough = [one for one in passes if one.seconds >= _MIN_PASS_SECONDS]
    return min(long_enough or passes, key=lambda one: one.samples_per_second)


def _advice(limit: Limit, run: LoaderRun, setting: Setting) -> tuple[str, ...]:
    native = "shard with --clips native: clips of the bucket's size, a fraction of the decoding work and bytes"
    cheaper = [native] if setting.clips != "native" else []
    if setting.pixels == "rgb24":
        cheaper.append("pixels='yuv420p', the default with device='cuda': the GPU converts half the bytes to RGB")
    if setting.pixels == "rgb24" and setting.accuracy == "exact":
        cheaper.append("accuracy='fast', if pictures may be 1 to 3 levels too dark")
    if limit == "decoders":
        return (f"more workers: there are {setting.num_cores} cores, {max(1, run.num_workers)} decoded", *cheaper)
    if limit == "cores":
        return (*cheaper, "more cores: decoding scales with them")
    if limit == "store":
        near = "a faster store, or a copy of the dataset on a disk of this machine"
        return (near, *([native] if setting.clips != "native" else []))
    if limit == "main":
        return (
            "larger batches, because each batch costs the main process about the same",
            "more ranks, each with its own process",
        )
    enough = max(1, math.ceil(run.decoders_busy * max(1, run.num_workers)))
    return ("more prefetch_bytes, so that more samples are in flight", f"no more than {enough} worker(s) had work")


def decoder_seconds(run: LoaderRun, limit: Limit) -> dict[str, float]:
    """Return bucket id → seconds of one decoder per sample, with the time between samples if decoders are the limit."""
    # If decoders wait for the store or the ring, that time is not their cost.
    between = 1 / run.decoders_busy if limit in ("decoders", "cores") and run.decoders_busy else 1.0
    return {b.bucket_id: between * b.decode_seconds / b.num_samples for b in run.buckets if b.num_samples}


def workers_for(busy_seconds: float, step_seconds: float, margin: float = MARGIN) -> int:
    """Return the number of workers for `busy_seconds` of decoding per `step_seconds`, with a margin; at least 1."""
    # Rounded, because the last digit of a float could cost one more worker.
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
    """Return the needs for a step time, by the cost of decoders in the run with the most workers that had a core each.

    steps: bucket id → its steps in an epoch. Buckets without a measured sample are excluded from the mean and reported.
    """
    # More workers than cores would wait for each other, which would look like work.
    run = max((run for run in runs if run.num_workers <= num_cores), key=lambda run: run.num_workers, default=runs[0])
    store, fast = slowest(passes), max(passes, key=lambda one: one.samples_per_second)
    costs = decoder_seconds(run, limit_of(run, fast, num_cores))
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
    obstacles = []
    if fastest["cores"] > step_seconds:
        obstacles.append(f"{num_local_ranks} rank(s) need {cores:.1f} cores for their data; there are {num_cores}")
    if fastest["store"] > step_seconds:
        obstacles.append(
            f"the store delivers {store.samples_per_second:.1f} samples/s; {rate * (1 + margin):.1f} are needed"
        )
    if fastest["main"] > step_seconds:
        obstacles.append(f"a batch costs the main process {main_seconds:.3f} s of CPU")
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
        obstacles=tuple(obstacles),
    )
