"""What a run would deliver, told before it starts: steps and tails exactly, loads of ranks, and time as an estimate."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from streamvid.errors import ConfigError, PlanError
from streamvid.plan.options import PlanOptions, Tail
from streamvid.plan.plan import EpochPlan

Int64Array = npt.NDArray[np.int64]

COUNTS = ("num_delivered", "num_carried", "num_dropped", "num_repeated")

_SLICE_STEPS = 256  # a slice of steps costs a search of the order, whatever its length
_WALKED_STEPS = 1 << 14
_WALKED_SAMPLES = 1 << 22


# ------------------------------------------------------------------------------------------------- counts: exact


def run_epochs(plan: EpochPlan, num_epochs: int) -> list[dict[str, Any]]:
    """Steps and reports of the epochs of a run that is never broken off."""
    epochs = []
    for _ in range(num_epochs):
        epochs.append({"steps": plan.num_steps_left, "report": plan.report()})
        plan = plan.at(plan.next_epoch())
    return epochs


def bucket_rows(epochs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row a bucket, summed over the epochs; what is carried is what the last one carries, none being left for it.

    samples: stored. due: what the epochs take of them all together: more or fewer where samples are repeated, or drawn.
    """
    rows = []
    for of_epochs in zip(*(epoch["report"] for epoch in epochs), strict=True):
        last = of_epochs[-1]
        sums = {name: sum(getattr(report, name) for report in of_epochs) for name in COUNTS}
        sums["num_carried"] = last.num_carried
        rows.append(
            {
                "bucket": last.bucket_id,
                "samples": last.num_samples,
                "due": sums["num_delivered"] - sums["num_repeated"] + sums["num_carried"] + sums["num_dropped"],
                "global_batch": last.global_batch,
                "steps": sum(report.num_steps_left for report in of_epochs),
                **sums,
            }
        )
    return rows


def tail_row(tail: str, epochs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a tail policy makes of all buckets together."""
    rows = bucket_rows(epochs)
    totals = {name: sum(row[name] for row in rows) for name in ("due", *COUNTS)}
    left_out = totals["num_dropped"] + totals["num_carried"]
    return {
        "tail": tail,
        "steps": sum(epoch["steps"] for epoch in epochs),
        **{name: totals[name] for name in COUNTS},
        "share_left_out": left_out / max(1, totals["due"]),
        "share_repeated": totals["num_repeated"] / max(1, totals["num_delivered"]),
        "starved_buckets": sum(is_starved(row) for row in rows),
    }


def is_starved(row: Mapping[str, Any]) -> bool:
    """Whether nothing is delivered of a bucket (of `bucket_rows`) that has samples in these epochs."""
    return bool(row["due"]) and not row["num_delivered"]


def starved_row(
    row: Mapping[str, Any], batch_size: int, options: PlanOptions, num_ranks: int, num_epochs: int
) -> dict[str, Any]:
    """A starved bucket, what an epoch has of it, and what would change that."""
    samples, remedies = -(-row["due"] // num_epochs), []
    if options.sync == "bucket" and samples >= num_ranks:
        remedies.append(f"batch size {samples // num_ranks}")
    if options.sync == "bucket" and samples >= batch_size:
        remedies.append(f"{samples // batch_size} rank(s)")
    if options.sync == "bucket" and samples and options.tail == "carry":
        remedies.append(f"{-(-row['global_batch'] // samples)} epochs")
    if samples:
        remedies.append("--tail pad or shrink")
    return {"bucket": row["bucket"], "samples": samples, "global_batch": row["global_batch"], "remedies": remedies}


def forecast_counts(
    plan_of: Callable[[PlanOptions], EpochPlan],
    batch_sizes: Mapping[str, int],
    options: PlanOptions,
    num_epochs: int,
) -> tuple[dict[str, Any], PlanError | None]:
    """(steps, buckets, starved buckets and all tails as plain values, the error that such a run would end with).

    plan_of: the plan of epoch 0 under options that differ from `options` in their tail alone.
    """
    tails = [tail for tail in get_args(Tail) if tail != "uneven" or options.accumulate == 1]
    plans = {tail: plan_of(replace(options, tail=tail)) for tail in tails}
    plan = plans[options.tail]
    epochs = {tail: run_epochs(each, num_epochs) for tail, each in plans.items()}
    rows = bucket_rows(epochs[options.tail])
    facts = {
        **{name: getattr(options, name) for name in ("tail", "sync", "accumulate")},
        "num_ranks": plan.num_ranks,
        "num_epochs": num_epochs,
        "steps": [epoch["steps"] for epoch in epochs[options.tail]],
        "buckets": [{**row, "batch_size": batch_sizes[row["bucket"]]} for row in rows],
        "starved": [
            starved_row(row, batch_sizes[row["bucket"]], options, plan.num_ranks, num_epochs)
            for row in rows
            if is_starved(row)
        ],
        "tails": [tail_row(tail, of_tail) for tail, of_tail in epochs.items()],
    }
    try:
        plan.check(num_epochs)
    except PlanError as error:
        return facts, error
    return facts, None


# -------------------------------------------------------------------------------------------------- loads of ranks


@dataclass(frozen=True)
class Loads:
    """What ranks take at the steps that were looked at: all of an epoch, or slices spread evenly over it.

    num_steps: of the epoch.   samples, tokens, costs: int64 (steps looked at, ranks), costs in the unit of the plan's
    costs.   num_bytes: int64 (ranks,), of the clips of these steps; None where nobody knows the clips' sizes.
    """

    num_steps: int
    samples: Int64Array
    tokens: Int64Array
    costs: Int64Array
    num_bytes: Int64Array | None

    @property
    def is_sampled(self) -> bool:
        """Whether some steps were not looked at, so that figures of the epoch are scaled."""
        return len(self.tokens) < self.num_steps

    @property
    def scale(self) -> float:
        """Steps of the epoch for each that was looked at."""
        return self.num_steps / max(1, len(self.tokens))

    def samples_by_rank(self) -> list[int]:
        """Of the epoch, by rank."""
        return [round(count * self.scale) for count in self.samples.sum(axis=0).tolist()]

    def bytes_by_rank(self) -> list[int] | None:
        """Bytes of the clips of the epoch, whole, by rank."""
        return None if self.num_bytes is None else [round(count * self.scale) for count in self.num_bytes.tolist()]

    def step_costs(self) -> float:
        """Of the epoch: the sum over steps of the costliest rank's cost, as ranks wait for each other."""
        return float(self.costs.max(axis=1, initial=0).sum()) * self.scale

    def to_json(self) -> dict[str, Any]:
        """Tokens that a rank takes at a step, and by how much the busiest rank has more than the mean one."""
        present = self.tokens[self.tokens > 0]
        return {
            "steps_looked_at": len(self.tokens),
            "is_estimate": self.is_sampled,
            "tokens_per_rank_and_step": {
                "mean": float(present.mean()) if present.size else 0.0,
                "min": int(present.min(initial=0 if not present.size else present.max())),
                "max": int(present.max(initial=0)),
            },
            "imbalance_tokens": imbalance(self.tokens),
            "imbalance_costs": imbalance(self.costs),
        }


def imbalance(loads: Int64Array) -> float:
    """The mean over steps of (busiest rank / mean rank), 1.0 where all are alike. loads: (steps, ranks)."""
    if not loads.size:
        return 1.0
    means = loads.mean(axis=1)
    busy = means > 0
    return float((loads.max(axis=1)[busy] / means[busy]).mean()) if busy.any() else 1.0


def rank_loads(
    plan: EpochPlan,
    batch_sizes: Mapping[str, int],
    tokens: Mapping[str, int],
    costs: Mapping[str, int],
    clip_bytes: Callable[[str, Int64Array, Int64Array], Int64Array] | None = None,
) -> Loads:
    """Walk the steps of the plan's epoch, all of them or as many as take a few seconds.

    clip_bytes: (bucket id, shards, places) of samples → their clips' bytes, all int64 (n,).
    """
    widest = max(batch_sizes.values()) * plan.num_ranks
    most = max(_SLICE_STEPS, min(_WALKED_STEPS, _WALKED_SAMPLES // widest))
    per_step: list[tuple[list[int], list[int], list[int]]] = []
    num_bytes = None if clip_bytes is None else np.zeros(plan.num_ranks, np.int64)
    for start, stop in _slices(plan.num_steps_left, most):
        for step in plan.steps(start, stop):
            bounds = np.diff(step.bounds).tolist()
            named = list(zip(step.bucket_ids, bounds, strict=True))
            per_step.append(
                (
                    bounds,
                    [count * tokens[name] for name, count in named],
                    [costs[name] * count // batch_sizes[name] for name, count in named],
                )
            )
            if clip_bytes is not None and num_bytes is not None:
                num_bytes += _bytes_of(step.bucket_ids, step.bounds, step.shards, step.indices, clip_bytes)
    shape = (len(per_step), plan.num_ranks)
    columns = [np.array([row[i] for row in per_step], np.int64).reshape(shape) for i in range(3)]
    return Loads(plan.num_steps_left, columns[0], columns[1], columns[2], num_bytes)


def _slices(num_steps: int, most: int) -> list[tuple[int, int]]:
    if num_steps <= most:
        return [(first, min(first + _SLICE_STEPS, num_steps)) for first in range(0, num_steps, _SLICE_STEPS)]
    count = max(1, most // _SLICE_STEPS)
    return [(first, first + _SLICE_STEPS) for first in (i * (num_steps - _SLICE_STEPS) // count for i in range(count))]


def _bytes_of(
    names: tuple[str, ...],
    bounds: Int64Array,
    shards: Int64Array,
    places: Int64Array,
    clip_bytes: Callable[[str, Int64Array, Int64Array], Int64Array],
) -> Int64Array:
    if len(set(names)) == 1:
        return _sums(clip_bytes(names[0], shards, places), bounds)
    parts = zip(names, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    return np.array(
        [int(clip_bytes(name, shards[first:last], places[first:last]).sum()) for name, first, last in parts], np.int64
    )


def _sums(values: Int64Array, bounds: Int64Array) -> Int64Array:
    totals = np.concatenate([[0], np.cumsum(values)])
    return totals[bounds[1:]] - totals[bounds[:-1]]  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------------ time: an estimate


@dataclass(frozen=True, slots=True)
class HostCosts:
    """What a machine and a store give, for estimates of time. The defaults come from streamvid's own benchmarks (one
    core of a Zen 4 server; a store in the same region) and are no measurement of yours.

    decode_ms: CPU milliseconds a sample, by bucket id, WxH@F or glob. For buckets that it does not name:
    decode_ns_per_pixel: for each pixel of each frame that is decoded, wanted or not; make_ns_per_pixel: for each pixel
        that is delivered (scaled, turned to RGB); sample_ms: for each sample besides.
    num_workers: decode workers a rank.   ranks_per_node: ranks of a machine, which share its link.
    worker_bytes: memory of one decode worker.
    request_ms: from a request to its first byte.   requests_in_flight: of a rank.   link_mb_per_second: of a machine.
    """

    decode_ms: Mapping[str, float] | None = None
    decode_ns_per_pixel: float = 2.0
    make_ns_per_pixel: float = 3.0
    sample_ms: float = 0.5
    num_workers: int = 8
    ranks_per_node: int = 8
    worker_bytes: int = 42 * 2**20
    request_ms: float = 30.0
    requests_in_flight: int = 8
    link_mb_per_second: float = 1000.0

    def __post_init__(self) -> None:
        for name in ("decode_ns_per_pixel", "make_ns_per_pixel", "sample_ms", "request_ms"):
            self._check(name, getattr(self, name), 0)
        for name in ("num_workers", "ranks_per_node", "requests_in_flight", "worker_bytes"):
            self._check(name, getattr(self, name), 1)
        if not self.link_mb_per_second > 0:
            raise ConfigError(f"cost table link_mb_per_second={self.link_mb_per_second!r}: allowed is above 0")
        for name, milliseconds in (self.decode_ms or {}).items():
            self._check(f"decode_ms[{name!r}]", milliseconds, 0)

    def _check(self, name: str, value: float, least: float) -> None:
        if not least <= value < math.inf:
            raise ConfigError(f"cost table {name}={value!r}: allowed are numbers of at least {least}")


@dataclass(frozen=True, slots=True)
class RankWork:
    """What the busiest rank does in an epoch. gpu_seconds: None where the steps' costs were not measured."""

    decode_cpu_seconds: float
    num_requests: float
    num_bytes: float
    gpu_seconds: float | None


def epoch_seconds(work: RankWork, costs: HostCosts, num_ranks: int) -> dict[str, Any]:
    """How long an epoch takes by each of its parts, which overlap, and which of them is the longest: estimates."""
    on_node = min(num_ranks, costs.ranks_per_node)
    parts: dict[str, float | None] = {
        "decode": work.decode_cpu_seconds / costs.num_workers,
        "link": work.num_bytes * on_node / (costs.link_mb_per_second * 1e6),
        "requests": work.num_requests * costs.request_ms / 1000 / costs.requests_in_flight,
        "gpu": work.gpu_seconds,
    }
    known = {name: seconds for name, seconds in parts.items() if seconds is not None}
    bound = max(known, key=lambda name: known[name])
    return {"seconds": known[bound], "bound_by": bound, "parts": parts}
