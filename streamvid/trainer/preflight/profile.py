"""Measured seconds per bucket, as the cost table that `sync=cost` and `streamvid plan --costs` read."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from streamvid.loader.view.model_rule import rule_of
from streamvid.plan.cost import CostTable, fit_costs
from streamvid.trainer.config import TrainConfig
from streamvid.trainer.preflight.trial import open_trial

COSTS_FILE = "costs.json"
_WARMUP = 1


@dataclass(frozen=True)
class MeasuredCosts:
    """Result of `profile`.

    seconds: maps (bucket id, batch size) to the median number of seconds per step.
    costs: cost table, with predictions for buckets that were not measured.
    """

    seconds: dict[tuple[str, int], float]
    costs: CostTable

    def write(self, path: Path) -> None:
        """Write the cost table."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.costs.to_json(), indent=1) + "\n", encoding="utf-8")


def profile(
    config: TrainConfig, num_steps: int = 3, progress: Callable[[str, int, int], object] | None = None
) -> MeasuredCosts:
    """Measure `num_steps` steps of each bucket, after one warm-up step. Nothing is saved.

    Data loading is not part of the measurement, because ranks wait for each other's steps, not for prefetched batches.
    progress: called with ("profile", number of measured buckets, number of buckets).
    """
    measured: list[tuple[str, int, float]] = []
    with open_trial(config) as trial:
        batches = trial.batches()
        for number, batch in enumerate(batches):
            size = len(batch.sample_keys)
            for _ in range(_WARMUP):
                trial.step(batch)
            measured += [(batch.bucket.id, size, trial.seconds(batch)) for _ in range(num_steps)]
            if progress is not None:
                progress("profile", number + 1, len(batches))
        costs = fit_costs(measured, trial.loader.buckets, rule_of(config.data.loader.get("preset")))
    groups: dict[tuple[str, int], list[float]] = {}
    for name, size, seconds in measured:
        groups.setdefault((name, size), []).append(seconds)
    return MeasuredCosts({group: median(values) for group, values in groups.items()}, costs)
