"""Time of `streamvid shard` for copies and native clips, depending on the number of workers.

    python -m tools.bench_shard [--source DIR] [--workers 1,2] [--clips copy,native] [--copies 8] [--repeats 5]
    [--json]

--source is a folder of videos. By default, it contains --copies copies of the demo corpus. Each run is the whole
command in a separate process, with an empty output folder. Within each repeat, the runs take turns. Wall seconds are
medians over the repeats, with the lowest and the highest. CPU seconds are medians. The speedup is the median of the
paired ratios to the first number of workers.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tools.make_corpus import make_corpus

LAYOUT = ("--layout", "folder")
BUCKETS = ("--resolution", "128px,256px", "--num-frames", "1,5,17", "--shard-size", "2MB")


def make_source(folder: Path, copies: int) -> Path:
    """Create a folder with several copies of the corpus, but without captions.

    One metadata file cannot name several copies.
    """
    make_corpus(folder / "0")
    for number in range(1, copies):
        shutil.copytree(folder / "0", folder / str(number), copy_function=os.link)
    return folder


def seconds_of(source: Path, clips: str, workers: int) -> tuple[float, float]:
    """Return (wall seconds, CPU seconds) of one run."""
    with tempfile.TemporaryDirectory(prefix="bench-shard-") as folder:
        words = ["shard", str(source), f"{folder}/ds", *LAYOUT, *BUCKETS, "--clips", clips, "--workers", str(workers)]
        before, since = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        subprocess.run([sys.executable, "-m", "streamvid", "--quiet", *words], check=True, stdout=subprocess.DEVNULL)
        after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - since
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(source: Path, kinds: list[str], workers: list[int], repeats: int) -> list[dict[str, Any]]:
    """Return one row per kind of clips and number of workers."""
    runs = [(clips, number) for clips in kinds for number in workers]
    found: dict[tuple[str, int], list[tuple[float, float]]] = {run: [] for run in runs}
    for _ in range(repeats):
        for run in runs:
            found[run].append(seconds_of(source, *run))
    rows = []
    for clips, number in runs:
        wall, cpu = zip(*found[clips, number], strict=True)
        first = [one for one, _ in found[clips, workers[0]]]
        rows.append(
            {
                "clips": clips,
                "workers": number,
                "wall_seconds": statistics.median(wall),
                "lowest": min(wall),
                "highest": max(wall),
                "cpu_seconds": statistics.median(cpu),
                "speedup": statistics.median(a / b for a, b in zip(first, wall, strict=True)),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path)
    parser.add_argument("--workers", default="1,2")
    parser.add_argument("--clips", default="copy,native")
    parser.add_argument("--copies", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    workers = [int(word) for word in given.workers.split(",")]
    with tempfile.TemporaryDirectory(prefix="bench-shard-source-") as folder:
        source = given.source or make_source(Path(folder), given.copies)
        rows = measure(source, given.clips.split(","), workers, given.repeats)
    if given.json:
        print(json.dumps(rows, indent=1))
        return
    print("clips   workers   wall seconds (lowest to highest)   CPU seconds   speedup")
    for row in rows:
        wall = "{wall_seconds:.2f} ({lowest:.2f} to {highest:.2f})".format(**row)
        print(f"{row['clips']:7} {row['workers']:7}   {wall:32} {row['cpu_seconds']:13.1f} {row['speedup']:9.2f}")


if __name__ == "__main__":
    main()
