"""Rank loads in an epoch: samples, tokens and costs per step, and bytes per epoch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from streamvid.plan.epoch import EpochPlan
from streamvid.plan.step import Step

Int64Array: TypeAlias = npt.NDArray[np.int64]

ClipBytes: TypeAlias = Callable[[str, Int64Array, Int64Array], Int64Array]
"""Function that takes (bucket id, shards, indices in shards) and returns clip sizes, all int64 with shape (n,)."""

_SLICE_STEPS = 256  # each slice costs one search of the order, regardless of its length
_MAX_STEPS = 1 << 14
_MAX_SAMPLES = 1 << 22


@dataclass(frozen=True, slots=True)
class LoadSummary:
    """Loads in the first epoch: tokens per rank per step, totals by rank, and imbalance between ranks.

    imbalance_tokens, imbalance_costs: load of the busiest rank divided by the mean load of all ranks, averaged over
        steps; 1.0 if all ranks have equal loads.
    member_bytes_by_rank: total size, in bytes, of each rank's clips as stored in the tars; None if sizes are unknown.
    is_estimate: True if only some steps were computed.
    bytes_are_estimate: True if only some steps were computed or clip sizes are not exact.
    """

    num_steps_looked_at: int
    is_estimate: bool
    tokens_mean: float
    tokens_min: int
    tokens_max: int
    imbalance_tokens: float
    imbalance_costs: float
    samples_by_rank: tuple[int, ...]
    member_bytes_by_rank: tuple[int, ...] | None
    bytes_are_estimate: bool


@dataclass(frozen=True)
class RankLoads:
    """Loads of each rank at the computed steps, which are all steps of an epoch or evenly spread slices of it.

    num_steps: number of steps in the epoch.
    samples, tokens, costs: int64 with shape (computed steps, ranks). Costs are in the plan's unit.
    num_bytes: clip bytes of the computed steps, as int64 with shape (ranks,), or None if sizes are unknown.
    """

    num_steps: int
    samples: Int64Array
    tokens: Int64Array
    costs: Int64Array
    num_bytes: Int64Array | None

    @property
    def is_sampled(self) -> bool:
        """True if only some steps were computed, so that totals for the epoch are extrapolated."""
        return len(self.tokens) < self.num_steps

    @property
    def scale(self) -> float:
        """Number of steps in the epoch divided by the number of computed steps."""
        return self.num_steps / max(1, len(self.tokens))

    @property
    def step_costs(self) -> float:
        """Cost of the epoch. The costliest rank determines the cost of each step, because ranks wait for each other."""
        return float(self.costs.max(axis=1, initial=0).sum()) * self.scale

    def summary(self, sizes_are_exact: bool = True) -> LoadSummary:
        """Return the loads for the entire epoch.

        sizes_are_exact: False if clip sizes are estimates.
        """
        present = self.tokens[self.tokens > 0]
        return LoadSummary(
            num_steps_looked_at=len(self.tokens),
            is_estimate=self.is_sampled,
            tokens_mean=float(present.mean()) if present.size else 0.0,
            tokens_min=int(present.min()) if present.size else 0,
            tokens_max=int(present.max(initial=0)),
            imbalance_tokens=imbalance(self.tokens),
            imbalance_costs=imbalance(self.costs),
            samples_by_rank=self._of_epoch(self.samples.sum(axis=0)),
            member_bytes_by_rank=None if self.num_bytes is None else self._of_epoch(self.num_bytes),
            bytes_are_estimate=self.is_sampled or not sizes_are_exact,
        )

    def _of_epoch(self, by_rank: Int64Array) -> tuple[int, ...]:
        return tuple(round(count * self.scale) for count in by_rank.tolist())


def imbalance(loads: Int64Array) -> float:
    """Return the ratio of the busiest rank's load to the mean load of all ranks, averaged over steps.

    loads: int64 with shape (steps, ranks).
    """
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
    clip_bytes: ClipBytes | None = None,
) -> RankLoads:
    """Return the loads for the plan's epoch.

    Only some of the epoch's steps are computed if computing every step would take too long.
    """
    widest = max(batch_sizes.values()) * plan.num_ranks
    most = max(_SLICE_STEPS, min(_MAX_STEPS, _MAX_SAMPLES // widest))
    samples: list[list[int]] = []
    token_rows: list[list[int]] = []
    cost_rows: list[list[int]] = []
    num_bytes = None if clip_bytes is None else np.zeros(plan.num_ranks, np.int64)
    for start, stop in _slices(plan.num_steps_left, most):
        for step in plan.steps(start, stop):
            counts = np.diff(step.bounds).tolist()
            named = list(zip(step.bucket_ids, counts, strict=True))
            samples.append(counts)
            token_rows.append([count * tokens[name] for name, count in named])
            cost_rows.append([costs[name] * count // batch_sizes[name] for name, count in named])
            if clip_bytes is not None and num_bytes is not None:
                num_bytes += _bytes_by_rank(step, clip_bytes)
    shape = (len(samples), plan.num_ranks)
    taken, token_loads, cost_loads = (
        np.array(rows, np.int64).reshape(shape) for rows in (samples, token_rows, cost_rows)
    )
    return RankLoads(plan.num_steps_left, taken, token_loads, cost_loads, num_bytes)


def _slices(num_steps: int, most: int) -> list[tuple[int, int]]:
    if num_steps <= most:
        return [(first, min(first + _SLICE_STEPS, num_steps)) for first in range(0, num_steps, _SLICE_STEPS)]
    count = max(1, most // _SLICE_STEPS)
    return [(first, first + _SLICE_STEPS) for first in (i * (num_steps - _SLICE_STEPS) // count for i in range(count))]


def _bytes_by_rank(step: Step, clip_bytes: ClipBytes) -> Int64Array:
    names, bounds = step.bucket_ids, step.bounds
    if len(set(names)) == 1:
        totals = np.concatenate([[0], np.cumsum(clip_bytes(names[0], step.shards, step.indices))])
        return totals[bounds[1:]] - totals[bounds[:-1]]  # type: ignore[no-any-return]
    parts = zip(names, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    return np.array(
        [int(clip_bytes(name, step.shards[first:last], step.indices[first:last]).sum()) for name, first, last in parts],
        np.int64,
    )
