"""metrics.jsonl: one JSON object per line, at most one line per step, without gaps or repeats across resumes."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

METRICS_FILE = "metrics.jsonl"

MetricLine: TypeAlias = dict[str, Any]
"""One line of metrics.jsonl: maps names to numbers, or to one number per bucket."""


@dataclass(frozen=True, order=True)
class BucketLoss:
    """Mean loss of one batch, and the numbers of samples and tokens in the batch."""

    bucket_id: str
    loss: float
    num_samples: int
    num_tokens: int


@dataclass(frozen=True)
class RankReport:
    """Report from one rank on the steps since the last metrics line.

    figures: additional values that the module returned.
    spent: elapsed seconds, and the loader's statistics.
    num_samples, num_tokens: totals since the start of the run.
    """

    loss: float
    figures: Mapping[str, float]
    batches: Sequence[BucketLoss]
    spent: Mapping[str, float]
    num_samples: int
    num_tokens: int


def merge_reports(reports: Sequence[RankReport]) -> MetricLine:
    """Merge the reports of all ranks into one line.

    Losses are averaged, and counts are summed. The time spent waiting for data is the maximum over all ranks. All other
    times are taken from the first rank.
    """
    batches = sorted(batch for report in reports for batch in report.batches)
    of_bucket: dict[str, list[BucketLoss]] = {}
    for batch in batches:
        of_bucket.setdefault(batch.bucket_id, []).append(batch)
    figures: dict[str, list[float]] = {}  # a module may report a figure for some batches only
    for name, value in itertools.chain.from_iterable(report.figures.items() for report in reports):
        figures.setdefault(name, []).append(value)
    spent = dict(reports[0].spent)
    seconds = max(spent["seconds"], 1e-9)
    spent["data_substituted"] = sum(report.spent.get("data_substituted", 0) for report in reports)
    # All ranks wait for the slowest one.
    for name in ("data_wait_seconds", "data_wait_share"):
        spent[name] = max(report.spent[name] for report in reports)
    return {
        "loss": sum(report.loss for report in reports) / len(reports),
        **{name: statistics.fmean(several) for name, several in figures.items()},
        "loss_of_bucket": {name: _mean_loss(some) for name, some in of_bucket.items()},
        "samples": sum(report.num_samples for report in reports),
        "tokens": sum(report.num_tokens for report in reports),
        **spent,
        "samples_per_second": round(sum(batch.num_samples for batch in batches) / seconds, 4),
        "tokens_per_second": round(sum(batch.num_tokens for batch in batches) / seconds, 4),
    }


def _mean_loss(batches: Sequence[BucketLoss]) -> float:
    return sum(one.loss * one.num_samples for one in batches) / sum(one.num_samples for one in batches)


def append_metrics(folder: Path, line: MetricLine) -> None:
    """Append one line to metrics.jsonl. Numbers that JSON cannot represent become null."""
    text = json.dumps(_finite(line), allow_nan=False) + "\n"
    with (folder / METRICS_FILE).open("a", encoding="utf-8") as file:
        file.write(text)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def flat(line: MetricLine) -> dict[str, float]:
    """Flatten a line of metrics for trackers: per-bucket values are named "name/bucket"."""
    found: dict[str, float] = {}
    for name, value in line.items():
        if isinstance(value, dict):
            found |= {f"{name}/{key}": one for key, one in value.items()}
        elif value is not None and name != "step":
            found[name] = value
    return found


def readable(line: MetricLine, num_steps: int) -> str:
    """Format the step and the most important metrics as a log line, with three significant digits per metric."""
    hidden = ("step", "samples", "tokens", "tokens_per_second", "seconds", "step_seconds")
    shown = {
        name: value
        for name, value in line.items()
        if isinstance(value, int | float) and name not in hidden and not name.startswith("data_")
    }
    if "data_wait_share" in line:
        shown["data_wait"] = line["data_wait_share"]
    return ", ".join([f"step {line['step']}/{num_steps}", *(f"{name} {value:.3g}" for name, value in shown.items())])


def drop_metrics_after(folder: Path, step: int) -> None:
    """Remove the lines for steps after `step`, and any incomplete last line left by a killed run."""
    path = folder / METRICS_FILE
    if not path.exists():
        return
    kept = [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if _is_up_to(line, step)]
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    temporary.replace(path)


def _is_up_to(line: str, step: int) -> bool:
    try:
        return bool(json.loads(line)["step"] <= step)
    except (ValueError, KeyError, TypeError):
        return False
