"""Loader statistics as JSON lines, in one file per rank."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from streamvid.errors import StorageError
from streamvid.loader.stats import LoaderStats

_EVERY_SECONDS = 10.0


class MetricsLog:
    """Metrics file of one rank, such as `metrics-rank00000.jsonl`.

    A line is written every 10 seconds and at the end. Each line contains the fields of `LoaderStats.to_json()`, the
    Unix time, the rank and the split.
    """

    def __init__(self, folder: Path, rank: int, split: str) -> None:
        self._path = folder / f"metrics-rank{rank:05d}.jsonl"
        self._labels = {"rank": rank, "split": split}
        self._due, self._num_steps = 0.0, 0

    def write(self, stats: Callable[[], LoaderStats], *, is_last: bool = False) -> None:
        """Append a line if one is due.

        If `is_last`, also append a line if batches were handed out since the previous line.

        Raises StorageError if the file cannot be written.
        """
        now = time.monotonic()
        if now < self._due and not is_last:
            return
        self._due, found = now + _EVERY_SECONDS, stats()
        if is_last and found.num_steps == self._num_steps:
            return
        self._num_steps = found.num_steps
        line = json.dumps({"time": round(time.time(), 3), **self._labels, **found.to_json()}) + "\n"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:
                file.write(line.encode())
        except OSError as error:
            raise StorageError(
                f"output.metrics_folder: cannot write {self._path}: {error.strerror or error}; choose a writable folder"
            ) from error
