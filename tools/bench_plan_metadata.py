"""Cost of `streamvid plan` on metadata with millions of rows, and the errors of its estimates.

    python tools/bench_plan_metadata.py [--rows 1e6,3e6,1e7] [--formats parquet,csv] [--preset opensora2-256] [--json F]
    python tools/bench_plan_metadata.py --shard [--rows …] [--formats …] [--preset …] [--json F]
    python tools/bench_plan_metadata.py --against CLIPS [--clips native] [--json F]

Rows are synthetic but similar to crawled metadata: a path, a caption of 200 characters (never loaded), frames, height,
width, fps, duration, bytes and a score, with 270 bytes per row as CSV. 97 % of the rows have one of 24 common sizes,
and 95 % have one of six common frame rates. Each plan is a separate process. The kernel reports its time, CPU seconds
and peak memory.

--shard measures `streamvid shard --dry-run --trust-metadata`: the whole way from metadata to the shard plan.

--against shards a folder of clips, estimates one epoch, streams this epoch once, and prints the error of each estimate.
The clips are in an in-memory store, which counts requests as an object store would.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

BLOCK_ROWS = 250_000
SIZES = [
    *((1080, 1920), (720, 1280), (1920, 1080), (1280, 720), (480, 854), (2160, 3840), (360, 640), (540, 960)),
    *((1440, 2560), (480, 640), (1080, 1080), (720, 720), (1350, 1080), (576, 1024), (800, 1920), (816, 1920)),
    *((1080, 1440), (960, 720), (640, 360), (854, 480), (240, 320), (1080, 608), (900, 1600), (768, 1366)),
]
RATES = [24.0, 25.0, 29.97, 30.0, 50.0, 60.0]
CAPTION = "a person walks along a street at dusk while cars pass and lights come on in the shops behind them, and "


def rows(num_rows: int, seed: int = 0) -> Iterator[pa.RecordBatch]:
    """Yield synthetic rows in blocks."""
    for first in range(0, num_rows, BLOCK_ROWS):
        count = min(BLOCK_ROWS, num_rows - first)
        rng = np.random.default_rng([seed, first])
        sizes = np.array(SIZES)[np.minimum(rng.geometric(0.15, count) - 1, len(SIZES) - 1)]
        odd = rng.random(count) < 0.03
        sizes[odd] = 2 * rng.integers(120, 1080, (int(odd.sum()), 2))
        fps = np.where(rng.random(count) < 0.95, rng.choice(RATES, count), np.round(rng.uniform(8, 60, count), 3))
        seconds = np.round(rng.lognormal(1.8, 0.8, count), 3)
        numbers = np.arange(first, first + count)
        yield pa.record_batch(
            {
                "path": pa.array([f"crawl/{n // 10_000:06d}/{n:012d}-clip.mp4" for n in numbers.tolist()]),
                "caption": pa.array([f"{CAPTION}{CAPTION}"[: 190 + n % 20] for n in numbers.tolist()]),
                "num_frames": np.maximum(1, np.rint(seconds * fps)).astype(np.int64),
                "height": sizes[:, 0],
                "width": sizes[:, 1],
                "fps": fps,
                "duration": seconds,
                "num_bytes": (seconds * 250_000).astype(np.int64),
                "aesthetic": np.round(rng.normal(5, 1, count), 3),
            }
        )


def write_rows(path: Path, num_rows: int) -> None:
    """Write a metadata file in blocks. The suffix determines its format."""
    blocks = rows(num_rows)
    first = next(blocks)
    writer: Any = (
        pa.csv.CSVWriter(path, first.schema) if path.suffix == ".csv" else pq.ParquetWriter(path, first.schema)
    )
    with writer:
        writer.write_batch(first)
        for block in blocks:
            writer.write_batch(block)


def run_measured(arguments: list[str], output: Path) -> dict[str, float]:
    """Run a process with its standard output in a file. Return (seconds, CPU seconds, peak bytes)."""
    since, peak = time.monotonic(), 0
    with output.open("wb") as file:
        process = subprocess.Popen([sys.executable, *arguments], stdout=file)
        # The kernel's ru_maxrss would count what this process held when it started the other.
        while (status := os.wait4(process.pid, os.WNOHANG))[0] == 0:
            peak = max(peak, peak_bytes(process.pid))
            time.sleep(0.02)
    _, code, usage = status
    if code:
        raise SystemExit(f"{' '.join(arguments)} failed with exit code {os.waitstatus_to_exitcode(code)}")
    seconds = time.monotonic() - since
    return {"seconds": seconds, "cpu_seconds": usage.ru_utime + usage.ru_stime, "peak_bytes": peak}


def peak_bytes(pid: int) -> int:
    """Return the peak memory of a process so far, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def bench_rows(
    numbers: list[int], formats: list[str], preset: str, num_ranks: int, folder: Path
) -> list[dict[str, Any]]:
    """Measure one plan for each number of rows and format."""
    measured = []
    for kind in formats:
        for number in numbers:
            path, output = folder / f"rows.{kind}", folder / "plan.json"
            write_rows(path, number)
            num_bytes = path.stat().st_size
            plan = ["-m", "streamvid", "plan", str(path), "--preset", preset, "--num-ranks", str(num_ranks), "--json"]
            if preset.startswith("wan") or "opensora" not in preset:
                plan += ["--batch-size", "1"]
            figures = run_measured(plan, output)
            told = json.loads(output.read_text())
            path.unlink()
            assert told["metadata"]["num_rows"] == number
            measured.append(
                {
                    "format": kind, "rows": number, "file_bytes": num_bytes, "bytes_a_row": num_bytes / number,
                    "groups": told["metadata"]["num_groups"], "buckets": len(told["buckets"]),
                    "left_out": sum(kind["num_rows"] for kind in told["metadata"]["left_out"]), **figures,
                }
            )  # fmt: skip
            print_row(measured[-1])
    return measured


def bench_shard_plans(numbers: list[int], formats: list[str], preset: str, folder: Path) -> list[dict[str, Any]]:
    """Measure one dry run of the sharder for each number of rows and format."""
    measured = []
    for kind in formats:
        for number in numbers:
            path, output = folder / f"rows.{kind}", folder / "report.txt"
            write_rows(path, number)
            num_bytes = path.stat().st_size
            words = ["shard", str(path), str(folder / "ds"), "--preset", preset, "--trust-metadata", "--dry-run"]
            figures = run_measured(["-m", "streamvid", "--quiet", *words], output)
            path.unlink()
            assert f"{number}" in output.read_text().replace(",", "")
            measured.append({"format": kind, "rows": number, "bytes_a_row": num_bytes / number, **figures})
            print_row({"groups": 0, "buckets": 0, **measured[-1]})
    return measured


def print_row(row: dict[str, Any]) -> None:
    print(
        f"{row['format']:8} {row['rows']:>11,} rows  {row['bytes_a_row']:6.0f} B/row  {row['seconds']:7.1f} s  "
        f"{row['cpu_seconds']:7.1f} CPU s  {row['cpu_seconds'] / row['rows'] * 1e6:6.2f} us/row  "
        f"peak {row['peak_bytes'] / 1e6:6.0f} MB  {row['groups']:>8,} groups  {row['buckets']} buckets",
        flush=True,
    )


def against(clips: Path, kind: Literal["copy", "native"], folder: Path) -> dict[str, Any]:
    """Compare the estimates for an epoch with measurements, using default costs and then measured decode times."""
    import streamvid
    from streamvid.buckets.config import BucketConfig
    from streamvid.sharder.options import ClipOptions, ShardOptions
    from streamvid.sharder.work_options import WorkOptions

    options = ShardOptions(
        buckets=BucketConfig(resolution=("256px", "480p"), num_frames=(1, 17, 33)),
        clips=ClipOptions(kind),
        work=WorkOptions(workers=2),
    )
    streamvid.shard(clips, folder / "ds", options)
    url = "memory://bench-plan-metadata"
    streamvid.copy_dataset(folder / "ds", url)
    defaults, decode_ms = compare(url, {})
    fitted, _ = compare(url, decode_ms)
    result = {"clips": kind, "defaults": defaults, "fitted": fitted}
    for name, pairs in (("defaults", defaults), ("fitted", fitted)):
        for key, one in pairs.items():
            print(
                f"{kind:7} {name:9} {key:15} estimate {one['estimate']:14,.2f}  measured {one['measured']:14,.2f}  "
                f"error {one['error']:+.1%}"
            )
    return result


def compare(url: str, decode_ms: dict[str, float]) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Return ((estimate, measurement and error for an epoch), CPU milliseconds per sample for each bucket)."""
    import streamvid
    from streamvid.forecast.dataset import forecast_dataset
    from streamvid.forecast.host import HostCosts
    from streamvid.forecast.run import PlannedRun
    from streamvid.plan import PlanOptions, World

    host = HostCosts(decode_ms=decode_ms, num_workers=1, ranks_per_node=1)
    run = PlannedRun(1, 2, None, PlanOptions(tail="uneven", seed=3), 1, "train", host=host, details=True)
    found = forecast_dataset(streamvid.open_dataset(url), run)
    if found.failure is not None:
        raise found.failure
    assert found.details is not None and found.details.estimates is not None
    estimates, by_bucket = found.details.estimates, dict[str, list[float]]()
    work = estimates.work
    with streamvid.VideoLoader(url, batch_size=2, world=World(0, 1), tail="uneven", seed=4, num_workers=0) as loader:
        for _ in loader:  # what is loaded once in a process
            pass
    with streamvid.VideoLoader(url, batch_size=2, world=World(0, 1), tail="uneven", seed=3, num_workers=0) as loader:
        since, cpu = time.monotonic(), time.process_time()
        for batch in loader:
            last = loader.stats().last
            assert last is not None
            by_bucket.setdefault(batch.bucket.id, []).append(last.work.decode_seconds * 1000 / len(batch.sample_keys))
        stats, seconds, cpu = loader.stats(), time.monotonic() - since, time.process_time() - cpu
    assert stats.store is not None
    pairs = {
        "CPU seconds": (work.decode_cpu_seconds, cpu),
        "epoch seconds": (estimates.epoch.seconds, seconds),
        "requests": (work.num_requests, stats.store.num_requests),
        "bytes read": (work.num_bytes, stats.work.num_bytes_fetched),
    }
    compared = {
        name: {"estimate": said, "measured": found, "error": said / found - 1} for name, (said, found) in pairs.items()
    }
    return compared, {bucket: sum(each) / len(each) for bucket, each in by_bucket.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1e6,3e6,1e7")
    parser.add_argument("--formats", default="parquet,csv")
    parser.add_argument("--preset", default="opensora2-256")
    parser.add_argument("--num-ranks", type=int, default=64)
    parser.add_argument("--shard", action="store_true")
    parser.add_argument("--against", type=Path)
    parser.add_argument("--clips", default="copy", choices=["copy", "native"])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="streamvid-bench-") as folder:
        result: Any
        if given.against is not None:
            result = against(given.against, given.clips, Path(folder))
        else:
            numbers, formats = [int(float(number)) for number in given.rows.split(",")], given.formats.split(",")
            if given.shard:
                result = bench_shard_plans(numbers, formats, given.preset, Path(folder))
            else:
                result = bench_rows(numbers, formats, given.preset, given.num_ranks, Path(folder))
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
