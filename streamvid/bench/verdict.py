"""What measured figures of a loader mean: what limits it, what would help, how many workers a step time needs. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from streamvid.bench.figures import LoaderRun, Setting, StoreRun, share

MARGIN = 0.2
"""More than the mean that workers are asked to do: steps differ in cost, and machines have other things to do."""

FEW_STEPS = 10
"""Batches: fewer say little."""

_BUSY = 0.85  # of the time: what is at work as much as this is what the rest waits for
_ROOM = 2  # samples for each decoder: one that it decodes, and one that waits for it
_TELLING_SECONDS = 0.5  # of a pass over a store: a shorter one mostly opens files
_ALIKE = 0.95  # of a rate: less is slower
_STARVED = 0.7  # CPU seconds for each second that decoders were at work: less, and others had the cores

# decoders: the workers there are, with cores left for more; cores: the workers have them all; main: the caller's
# process; ring: there is no room for as many samples under way as decoders could be at work on.
Limit = Literal["decoders", "cores", "store", "main", "ring"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What limits a run, the figures that say so, and what would help, best first."""

    limit: Limit
    reasons: tuple[str, ...]
    advice: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a rank needs to have a batch ready every `step_seconds`, on average over the steps of an epoch.

    num_workers: a rank's, `margin` more than the mean asks for. heaviest_workers: if all steps were of that bucket.
    num_cores: of all ranks of the machine, for their workers and for what their main processes do for data, with the
    margin. samples_per_second: of all these ranks.
    fastest_step_seconds: the shortest that this machine and store can feed, with the margin.
    obstacles: why it cannot be had here; none where it can.
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
    """What everything else waited for. store: a pass with as much in the cache as the run had."""
    decoding: Limit = "cores" if max(1, run.num_workers) >= num_cores else "decoders"
    if run.decoders_busy >= _BUSY:
        return decoding
    if run.cpu_seconds is not None and run.cpu_seconds >= _BUSY * num_cores * run.seconds:
        return "cores"
    shares: dict[Limit, float] = {
        # A store whose reads overlap gives no more alone than here, however little each thread waits.
        "store": max(run.readers_busy, min(1.0, share(run.samples_per_second, store.samples_per_second))),
        "main": run.main_busy or 0.0,
    }
    busiest = max(shares, key=lambda name: shares[name])
    if shares[busiest] >= _BUSY:
        return busiest
    # With work waiting for them all the time, what decoders do between two samples is their cost too.
    return "ring" if run.room < _ROOM * max(1, run.num_workers) else decoding


def judge(runs: Sequence[LoaderRun], passes: Sequence[StoreRun], setting: Setting) -> Verdict:
    """What limits the fastest of these runs, which came after the passes over the store."""
    best = _best(runs)
    slow, fast = slowest(passes), max(passes, key=lambda one: one.samples_per_second)
    limit = limit_of(best, fast, setting.num_cores)
    more = max((run for run in runs if run.num_workers > best.num_workers), key=_rate, default=None)
    if more is not None and limit == "decoders":
        limit = "cores"  # more workers were tried, and found no core that was free
    reasons = [
        f"{best.num_workers} worker(s) gave {best.samples_per_second:.1f} samples/s; decoders were at work "
        f"{best.decoders_busy:.0%} of the time",
        f"the store alone gave {fast.samples_per_second:.1f} samples/s; the threads that read were at work "
        f"{best.readers_busy:.0%} of the time",
    ]
    if more is not None:
        reasons.append(f"{more.num_workers} workers gave less, {more.samples_per_second:.1f} samples/s")
    if limit != "store" and slow.samples_per_second < best.samples_per_second:
        reasons.append(
            f"but its slowest pass gave {slow.samples_per_second:.1f} samples/s: what is not cached yet comes no faster"
        )
    if best.main_busy is not None and best.main_cpu_a_step is not None:
        reasons.append(f"the main process took {best.main_cpu_a_step * 1000:.2f} ms CPU a batch, {best.main_busy:.1%}")
    if best.cpu_a_decode is not None and best.cpu_a_decode < _STARVED:
        reasons.append(
            f"decoders had a core for {best.cpu_a_decode:.0%} of the time that they were at work: other processes, a "
            "container's limit or a host that is shared took the rest"
        )
    return Verdict(limit, tuple(reasons), _advice(limit, best, setting))


def _rate(run: LoaderRun) -> float:
    return run.samples_per_second


def _best(runs: Sequence[LoaderRun]) -> LoaderRun:
    """The fastest; of those about as fast the one with the most workers, as it shows what more of them do not help."""
    most = max(run.samples_per_second for run in runs)
    return max((run for run in runs if run.samples_per_second >= _ALIKE * most), key=lambda run: run.num_workers)


def warnings_of(runs: Sequence[LoaderRun], passes: Sequence[StoreRun], bucket_ids: Collection[str]) -> tuple[str, ...]:
    """What makes figures doubtful, and what should not be in a dataset."""
    found = []
    if num_bad := passes[0].num_bad:
        found.append(
            f"{num_bad} of {passes[0].num_samples} samples have other bytes than the index says; copy them again"
        )
    if num_substituted := sum(run.num_substituted for run in runs):
        found.append(f"{num_substituted} bad samples were replaced by others meanwhile")
    if passes[0].seconds < _TELLING_SECONDS:
        found.append(f"the first pass took {passes[0].seconds:.2f} s, too short to tell what the store gives uncached")
    if rough := ", ".join(str(run.num_workers) for run in runs if run.num_steps < FEW_STEPS):
        found.append(f"fewer than {FEW_STEPS} batches with {rough} worker(s): rough figures; measure for more seconds")
    seen = {bucket.bucket_id for run in runs for bucket in run.buckets}
    if missing := sorted(set(bucket_ids) - seen):
        found.append(f"no sample came of {', '.join(missing)}: not measured; measure for more seconds")
    return tuple(found)


def slowest(passes: Sequence[StoreRun]) -> StoreRun:
    """The pass that says what the store gives where it has cached least, of those that took long enough to tell."""
    telling = [one for one in passes if one.seconds >= _TELLING_SECONDS]
    return min(telling or passes, key=lambda one: one.samples_per_second)


def _advice(limit: Limit, run: LoaderRun, setting: Setting) -> tuple[str, ...]:
    native = (
        "shard with --clips native: clips of the bucket's size, made for decoding, a fraction of the work and bytes"
    )
    cheaper = [native] if setting.clips != "native" else []
    if setting.pixels == "rgb24":
        cheaper.append("pixels='yuv420p', the default with device='cuda': the GPU makes RGB of half the bytes")
    if setting.pixels == "rgb24" and setting.accuracy == "exact":
        cheaper.append("accuracy='fast', if 1 to 3 levels too dark is good enough")
    if limit == "decoders":
        return (f"more workers: {setting.num_cores} cores are there, {max(1, run.num_workers)} decoded", *cheaper)
    if limit == "cores":
        return (*cheaper, "more cores: decoding grows with them")
    if limit == "store":
        near = "a faster store, or a copy of the dataset on a disk of this machine"
        return (near, *([native] if setting.clips != "native" else []))
    if limit == "main":
        return (
            "larger batches, as each costs the main process about the same",
            "more ranks, each with its own process",
        )
    enough = max(1, math.ceil(run.decoders_busy * max(1, run.num_workers)))
    return ("more prefetch_bytes, so that more samples are under way", f"no more than {enough} worker(s) had work")


def decoder_seconds(run: LoaderRun, limit: Limit) -> dict[str, float]:
    """Bucket id → seconds that a sample keeps one decoder; where decoders limit, with what lies between two samples."""
    # Decoders that wait for the store or the ring would make this dearer than it is.
    between = 1 / run.decoders_busy if limit in ("decoders", "cores") and run.decoders_busy else 1.0
    return {b.bucket_id: between * b.decode_seconds / b.num_samples for b in run.buckets if b.num_samples}


def workers_for(busy_seconds: float, step_seconds: float, margin: float = MARGIN) -> int:
    """Workers that have `busy_seconds` of decoding done every `step_seconds`, with a margin; at least 1."""
    # Not one worker more for the last digit of a float.
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
    """What a step time needs, as decoders cost with as many of them at work as there are cores, or runs.

    steps: bucket id → how many of an epoch's steps are its. Buckets that the run had no sample of are left out of the
    mean, and named.
    """
    # With more workers than cores they wait for each other, which would look like work.
    run = max((run for run in runs if run.num_workers <= num_cores), key=lambda run: run.num_workers, default=runs[0])
    store, fast = slowest(passes), max(passes, key=lambda one: one.samples_per_second)
    costs = decoder_seconds(run, limit_of(run, fast, num_cores))
    busy = {name: batch_sizes[name] * costs[name] for name, number in steps.items() if number and name in costs}
    num_steps = sum(steps[name] for name in busy)
    mean_busy = share(sum(steps[name] * busy[name] for name in busy), num_steps)
    mean_samples = share(sum(steps[name] * batch_sizes[name] for name in busy), num_steps)
    heaviest = max(busy, key=lambda name: busy[name])
    num_workers = workers_for(mean_busy, step_seconds, margin)
    main_seconds = run.main_cpu_a_step or 0.0
    cores = (1 + margin) * num_local_ranks * (mean_busy + main_seconds) / step_seconds
    rate = num_local_ranks * mean_samples / step_seconds
    fastest = {
        "cores": cores * step_seconds / num_cores,
        "store": (1 + margin) * share(num_local_ranks * mean_samples, store.samples_per_second),
        "main": (1 + margin) * main_seconds,
    }
    obstacles = []
    if fastest["cores"] > step_seconds:
        obstacles.append(f"{num_local_ranks} rank(s) want {cores:.1f} cores for their data, {num_cores} are there")
    if fastest["store"] > step_seconds:
        obstacles.append(
            f"the store gives {store.samples_per_second:.1f} samples/s, {rate * (1 + margin):.1f} are wanted"
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
