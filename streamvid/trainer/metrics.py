"""metrics.jsonl: one JSON object a line, a line a step at most, without gap or repeat over any number of resumes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"


def append_metrics(folder: Path, record: dict[str, Any]) -> None:
    """Add one line. A number that JSON has no word for is a ValueError, not a line that no reader takes."""
    line = json.dumps(record, allow_nan=False) + "\n"
    with (folder / METRICS_FILE).open("a", encoding="utf-8") as file:
        file.write(line)


def merge_told(told: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One record of what each rank tells: losses and figures averaged, counts added up, times of the first."""
    of_bucket: dict[str, list[float]] = {}
    for name, loss, count, of_sample in sorted(entry for one in told for entry in one["buckets"]):
        sums = of_bucket.setdefault(name, [0.0, 0.0, 0.0])
        sums[0], sums[1], sums[2] = sums[0] + loss * count, sums[1] + count, sums[2] + of_sample * count
    of_figure: dict[str, list[float]] = {}  # which a module may tell of some batches alone
    for name, value in (entry for one in told for entry in one["figures"].items()):
        of_figure.setdefault(name, []).append(value)
    samples, tokens = sum(one["samples"] for one in told), sum(one["tokens"] for one in told)
    spent, seconds = dict(told[0]["spent"]), max(told[0]["spent"]["seconds"], 1e-9)
    spent["data_substituted"] = sum(one["spent"].get("data_substituted", 0) for one in told)
    # The slowest rank's wait is everybody's.
    for name in ("data_wait_seconds", "data_wait_share"):
        spent[name] = max(one["spent"][name] for one in told)
    return {
        "loss": sum(one["loss"] for one in told) / len(told),
        **{name: sum(values) / len(values) for name, values in of_figure.items()},
        "loss_of_bucket": {name: sums[0] / sums[1] for name, sums in of_bucket.items()},
        "samples": samples,
        "tokens": tokens,
        **spent,
        "samples_per_second": round(sum(sums[1] for sums in of_bucket.values()) / seconds, 4),
        "tokens_per_second": round(sum(sums[2] for sums in of_bucket.values()) / seconds, 4),
    }


def plain(value: Any) -> Any:
    """As JSON has it, with None for a number that it has no word for."""
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def flat(record: dict[str, Any]) -> dict[str, float]:
    """A record as trackers take it: numbers by name, those of buckets by "name/bucket"."""
    parts = {name: value for name, value in record.items() if isinstance(value, dict)}
    nested = {f"{name}/{key}": value for name, values in parts.items() for key, value in values.items()}
    return {name: value for name, value in record.items() if name != "step" and name not in parts} | nested


def drop_metrics_after(folder: Path, step: int) -> None:
    """Cut off what a lost stretch of the run wrote: lines of later steps, and a last line that a kill tore."""
    path = folder / METRICS_FILE
    if not path.exists():
        return
    kept = [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if _is_up_to(line, step)]
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    os.replace(temporary, path)  # noqa: PTH105  # the atomic one


def _is_up_to(line: str, step: int) -> bool:
    try:
        return bool(json.loads(line)["step"] <= step)
    except (ValueError, KeyError, TypeError):
        return False
