"""metrics.jsonl: one JSON object a line, a line a step at most, without gap or repeat over any number of resumes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamvid.loader.stats import LoaderStats

METRICS_FILE = "metrics.jsonl"


def append_metrics(folder: Path, record: dict[str, Any]) -> None:
    """Add one line. A number that JSON has no word for is a ValueError, not a line that no reader takes."""
    line = json.dumps(record, allow_nan=False) + "\n"
    with (folder / METRICS_FILE).open("a", encoding="utf-8") as file:
        file.write(line)


def data_fields(spent: LoaderStats) -> dict[str, float]:
    """What a line says of the loader, on this rank and since the line before: fields named data_*.

    fetch and decode seconds are summed over samples, which are worked on at the same time while the model computes:
    they tell where to look once data_wait_seconds is high, not how long a step took.
    """
    return {
        "data_batch_seconds": round(spent.batch_seconds, 4),
        "data_fetch_seconds": round(spent.fetch_seconds, 4),
        "data_decode_seconds": round(spent.decode_seconds, 4),
        "data_bytes": spent.num_bytes_fetched,
        "data_retries": spent.num_retries,
        "data_substituted": spent.num_substituted,
        "data_queue_depth": round(spent.mean_queue_depth, 2),
    }


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
