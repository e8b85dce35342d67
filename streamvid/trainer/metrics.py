"""metrics.jsonl: one JSON object a line, a line a step at most, without gap or repeat over any number of resumes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"


def append_metrics(folder: Path, record: dict[str, Any]) -> None:
    """Add one line. A number that JSON has no word for is a ValueError, not a line that no reader takes."""
    line = json.dumps(record, allow_nan=False) + "\n"
    with (folder / METRICS_FILE).open("a", encoding="utf-8") as file:
        file.write(line)


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
