"""Cost of planning: time to the first step, memory, time per step and time to resume; and the quality of shuffles.

    python tools/bench_plan.py [--scales 1e6/1e4,1e8/1e6,1e9/1e7] [--num-ranks 4096] [--repeats 5] [--json]

A scale is SAMPLES/SHARDS. The sizes of the buckets follow Zipf's law, and a shard holds between half and one and a half
times the mean number of samples. Each measurement is a separate process, so that only the pages of files are warm.
Results are medians over the repeats. Peak memory is VmHWM minus the memory after numpy and streamvid were imported and
the arrays of shard sizes were made. `arrays MiB` is the size of these arrays.

- `first`: seconds from the arrays to the first step of one rank.
- `us/step`: microseconds per step for one rank over 1,024 steps, or fewer in a short epoch, where each step costs more.
- `resume`: seconds to the first step with another number of ranks, from a cursor in the middle of the epoch.
- `state`: size of the cursor as JSON, in bytes.

`index` measures the same from opening a sealed dataset with this many shards on disk, and also times each part.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from itertools import chain, islice, product
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from streamvid.buckets.bucket import Bucket
from streamvid.plan import Cursor, EpochPlan, PlanOptions
from streamvid.plan.cost import default_costs
from streamvid.plan.options import Shuffle, Sync
from streamvid.plan.tail import Tail
from tools.shuffle_quality import shuffle_quality

ROOT = Path(__file__).resolve().parent.parent
NUM_STEPS = 1024
SIDES = ((256, 256), (192, 336), (336, 192), (480, 832), (832, 480), (640, 640), (720, 1280), (1280, 720))
FRAMES = (1, 5, 9, 13, 17, 25, 33, 49, 65, 81, 97, 113, 129)
SHUFFLES = [("none", 1), ("shards", 1), *(("window", window) for window in (1, 4, 16, 64))]


def buckets_of(count: int) -> list[Bucket]:
    """Return this many buckets. Beyond 104 buckets, the number of frames keeps increasing."""
    counts = chain(FRAMES, range(FRAMES[-1] + 4, FRAMES[-1] + 4 * count, 4))
    return [Bucket(frames, *side) for frames, side in islice(product(counts, SIDES), count)]


def shard_sizes(num_samples: int, num_shards: int, buckets: list[Bucket]) -> dict[str, NDArray[np.int64]]:
    """Map each bucket id to the number of samples in each of the bucket's shards.

    The number of shards per bucket follows Zipf's law. Each shard's size is within 50 % of the mean.
    """
    rng = np.random.default_rng(0)
    shares = 1 / np.arange(1, len(buckets) + 1)
    counts = np.maximum(1, np.floor(num_shards * shares / shares.sum()).astype(int))
    mean = num_samples / num_shards
    return {
        bucket.id: rng.integers(max(1, round(mean / 2)), round(mean * 1.5) + 1, size=count)
        for bucket, count in zip(buckets, counts.tolist(), strict=True)
    }


# ------------------------------------------------------------------------------------- in a process of its own


def restart_peak() -> int:
    """Reset the peak that `peak_bytes` reports, and return the current memory of the process."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def peak_bytes() -> int:
    """Return the peak memory of the process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def steps_of_rank(plan: EpochPlan, stop: int, rank: int) -> list[Any]:
    """Return steps [0, stop) for one rank."""
    return list(plan.steps(0, stop, rank))


def measure_plan(job: dict[str, Any]) -> dict[str, Any]:
    """Measure planning for one scale and one set of options, from arrays in memory."""
    buckets = buckets_of(job["num_buckets"])
    sizes = shard_sizes(job["num_samples"], job["num_shards"], buckets)
    num_ranks, batch_sizes = job["num_ranks"], {bucket.id: job["batch_size"] for bucket in buckets}
    options = PlanOptions(tail=job["tail"], shuffle=job["shuffle"], sync=job["sync"])
    costs = default_costs(buckets).costs(batch_sizes)
    rank = num_ranks // 2
    before = restart_peak()
    begin = time.perf_counter()
    plan = EpochPlan(sizes, batch_sizes, options, num_ranks, costs=costs)
    num_steps = plan.num_steps_left
    steps_of_rank(plan, 1, rank)
    first_seconds = time.perf_counter() - begin
    first_peak = peak_bytes() - before
    steps_of_rank(plan, NUM_STEPS, rank)  # now all of the buckets' streams are there
    begin = time.perf_counter()
    count = len(steps_of_rank(plan, NUM_STEPS, rank))
    per_step = (time.perf_counter() - begin) / max(1, count)
    steps_peak = peak_bytes() - before
    cursor = plan.cursor_after(num_steps // 2)
    begin = time.perf_counter()
    elsewhere = EpochPlan(sizes, batch_sizes, options, max(1, num_ranks * 3 // 4), cursor, costs)
    resumed = len(steps_of_rank(elsewhere, 1, 0))
    return {
        "num_steps": num_steps,
        "arrays_mib": sum(array.nbytes for array in sizes.values()) / 2**20,
        "first_seconds": first_seconds,
        "first_peak_mib": first_peak / 2**20,
        "steps_peak_mib": steps_peak / 2**20,
        "steps_timed": count,
        "microseconds_a_step": 1e6 * per_step,
        "resume_seconds": time.perf_counter() - begin if resumed else 0.0,
        "state_bytes": len(json.dumps(Cursor.to_json(cursor))),
    }


def measure_index(job: dict[str, Any]) -> dict[str, Any]:
    """Measure the time and memory from opening a sealed dataset to the first step, part by part."""
    import pyarrow.parquet  # noqa: F401  (imports are not what is measured)
    import torch  # noqa: F401

    import streamvid.loader.loader
    from streamvid.dataset.versions.open import open_dataset
    from streamvid.plan import World

    parts: dict[str, Any] = {}
    before, begin = restart_peak(), time.perf_counter()
    dataset = open_dataset(job["path"])
    parts["open_seconds"] = time.perf_counter() - begin
    begin = time.perf_counter()
    if job["way"] == "table":
        shards = dataset.shards
        sizes = {name: shards.num_samples[rows] for name, rows in sorted(shards.select("train").items())}
        batch_sizes = dict.fromkeys(sizes, job["batch_size"])
        parts["read_seconds"] = time.perf_counter() - begin
        begin = time.perf_counter()
        steps_of_rank(EpochPlan(sizes, batch_sizes, PlanOptions(), job["num_ranks"]), 1, 0)
    elif job["way"] == "shards":
        parts["num_shards"] = len(dataset.shards)
        parts["read_seconds"] = time.perf_counter() - begin
        begin = time.perf_counter()
    else:
        world = World(0, job["num_ranks"])
        streamvid.loader.loader.VideoLoader(dataset, batch_size=job["batch_size"], world=world, num_workers=0).close()
        parts["read_seconds"] = time.perf_counter() - begin
        begin = time.perf_counter()
    parts["plan_seconds"] = time.perf_counter() - begin
    parts["peak_mib"] = (peak_bytes() - before) / 2**20
    return parts


def measure_quality(job: dict[str, Any]) -> dict[str, Any]:
    """Measure the quality of one shuffle."""
    buckets = buckets_of(job["num_buckets"])
    sizes = shard_sizes(job["num_samples"], job["num_shards"], buckets)
    options = PlanOptions(shuffle=job["shuffle"], window=job["window"])
    batch_sizes = {bucket.id: job["batch_size"] for bucket in buckets}
    return asdict(shuffle_quality(sizes, batch_sizes, options, job["num_ranks"]))


MEASURES = {"plan": measure_plan, "index": measure_index, "quality": measure_quality}


# ------------------------------------------------------------------------------------- the dataset on disk


def write_dataset(folder: Path, num_samples: int, num_shards: int, num_buckets: int) -> None:
    """Write a sealed dataset's manifest, shard table and columns. Planning does not read tars or samples files."""
    from streamvid.dataset.index import MAX_SHARDS_PER_FILE, encode_samples, encode_shards, named_by_content
    from streamvid.dataset.manifest import (
        Counts,
        FileInfo,
        Fingerprints,
        Manifest,
        ManifestFiles,
        ShardInfo,
        manifest_to_json,
    )
    from streamvid.dataset.sealed_json import MANIFEST

    buckets = buckets_of(num_buckets)
    sizes = shard_sizes(num_samples, num_shards, buckets)
    shards: list[ShardInfo] = []
    columns = encode_samples([], {})
    samples: list[FileInfo] = [named_by_content("samples", 0, columns)]
    for bucket in buckets:
        for number, count in enumerate(sizes[bucket.id].tolist()):
            digest = hashlib.sha256(f"{bucket.id} {number}".encode()).hexdigest()
            row_group = len(shards) % MAX_SHARDS_PER_FILE
            if row_group == 0 and shards:
                samples.append(FileInfo(f"index/samples-{len(samples):05d}-{digest[:12]}.parquet", 1000, digest))
            size = count * 1_000_000 + number
            where = samples[-1].path
            shards.append(
                ShardInfo(
                    bucket.id, number, 0, "train", count, size, digest, 1000, digest[::-1], 2_000_000, where, row_group
                )
            )
    data = encode_shards(shards)
    file = named_by_content("shards", 0, data)
    num_samples, num_bytes = sum(shard.num_samples for shard in shards), sum(shard.num_bytes for shard in shards)
    counts = Counts(num_samples, num_samples, 0, len(shards), num_bytes)
    files = ManifestFiles((file,), tuple(samples), ())
    manifest = Manifest(tuple(buckets), "copy", counts, files, Fingerprints.of(buckets, shards, samples))
    (folder / "index").mkdir()
    (folder / file.path).write_bytes(data)
    (folder / samples[0].path).write_bytes(columns)
    (folder / MANIFEST).write_bytes(manifest_to_json(manifest))


# ------------------------------------------------------------------------------------- in the process that asks


def measured(what: str, job: dict[str, Any]) -> dict[str, Any]:
    """Run a measurement in a new process. Return the job with its results, or with the last line of the error."""
    command = [sys.executable, str(Path(__file__).resolve()), "--measure", what, json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        return {**job, "error": (done.stderr.strip().splitlines() or ["no output"])[-1]}
    return {**job, **json.loads(done.stdout)}


def medians(repeats: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return one row per job with the median of each figure over the repeats, or with the error if a repeat failed."""
    rows = []
    for runs in zip(*repeats, strict=True):
        failed = [run for run in runs if "error" in run]
        figures = {name for name, value in runs[0].items() if isinstance(value, float)}
        row = {n: statistics.median(run[n] for run in runs) if n in figures else v for n, v in runs[0].items()}
        rows.append(failed[0] if failed else row)
    return rows


def jobs(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return jobs for all scales with the default options.

    For one scale, also return jobs with every other tail, sync and shuffle, and with 100 buckets.
    """
    scales = [tuple(round(float(part)) for part in scale.split("/")) for scale in options.scales.split(",")]
    plain = {
        "num_ranks": options.num_ranks,
        "batch_size": options.batch_size,
        "num_buckets": options.num_buckets,
        "tail": "carry",
        "shuffle": "window",
        "sync": "bucket",
    }
    rows = [{"num_samples": samples, "num_shards": shards, **plain} for samples, shards in scales]
    first = rows[options.vary_at]
    rows += [{**first, "tail": tail} for tail in get_args(Tail) if tail != "carry"]
    rows += [{**first, "sync": sync} for sync in get_args(Sync) if sync != "bucket"]
    rows += [{**first, "shuffle": shuffle} for shuffle in get_args(Shuffle) if shuffle != "window"]
    return [*rows, {**first, "num_buckets": 100}]


def main() -> None:
    """Parse the command line, measure, and print the results."""
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(MEASURES[sys.argv[2]](json.loads(sys.argv[3]))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--scales", default="1e6/1e4,1e8/1e6,1e9/1e7", help="scales as SAMPLES/SHARDS, separated by commas"
    )
    parser.add_argument("--vary-at", type=int, default=0, help="index of the scale with varied options")
    parser.add_argument("--num-ranks", type=int, default=4096)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--num-buckets", type=int, default=60)
    parser.add_argument("--index-shards", type=int, default=1_000_000, help="number of shards on disk; 0 for none")
    parser.add_argument("--quality-scale", default="2e6/2e4", help="SAMPLES/SHARDS for the shuffles; 0 to omit them")
    parser.add_argument("--quality-ranks", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5, help="number of repeats of all measurements")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    plans = jobs(options)
    result = {"plan": medians([[measured("plan", job) for job in plans] for _ in range(options.repeats)])}
    result["index"] = measure_indexes(options) if options.index_shards else []
    result["quality"] = measure_qualities(options) if options.quality_scale != "0" else []
    print(json.dumps(result, indent=2) if options.json else report(result))


def measure_indexes(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure three ways to make a plan from a dataset on disk."""
    with tempfile.TemporaryDirectory() as folder:
        write_dataset(Path(folder), options.index_shards * 100, options.index_shards, options.num_buckets)
        job = {"path": folder, "num_ranks": options.num_ranks, "batch_size": options.batch_size}
        ways = [{**job, "way": way} for way in ("table", "shards", "loader")]
        return medians([[measured("index", one) for one in ways] for _ in range(options.repeats)])


def measure_qualities(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the quality of every shuffle at one scale."""
    samples, shards = (round(float(part)) for part in options.quality_scale.split("/"))
    job = {
        "num_samples": samples,
        "num_shards": shards,
        "num_buckets": options.num_buckets,
        "num_ranks": options.quality_ranks,
        "batch_size": options.batch_size,
    }
    return [measured("quality", {**job, "shuffle": shuffle, "window": window}) for shuffle, window in SHUFFLES]


COLUMNS = {
    "plan": {
        "num_samples": "samples", "num_shards": "shards", "num_buckets": "buckets", "tail": "tail",
        "shuffle": "shuffle", "sync": "sync", "arrays_mib": "arrays MiB", "first_seconds": "first s",
        "first_peak_mib": "first MiB", "steps_peak_mib": "1024 steps MiB", "steps_timed": "steps timed",
        "microseconds_a_step": "us/step",
        "resume_seconds": "resume s", "state_bytes": "state B",
    },
    "index": {
        "way": "index by", "open_seconds": "open s", "read_seconds": "read s", "plan_seconds": "plan s",
        "peak_mib": "peak MiB",
    },
    "quality": {
        "shuffle": "shuffle", "window": "window", "move": "moves", "neighbors_kept": "neighbors kept",
        "neighbors_by_chance": "chance", "shards_per_batch": "shards per batch", "reads_per_batch": "reads per batch",
        "shards_per_window": "shards in 64 steps",
    },
}  # fmt: skip


def report(result: dict[str, list[dict[str, Any]]]) -> str:
    """Format the results as tables."""
    lines = []
    for what, rows in result.items():
        if not rows:
            continue
        lines.append(" | ".join(COLUMNS[what].values()))
        for row in rows:
            cells = [row[name] for name in COLUMNS[what] if name in row] + [
                row[name] for name in row if name == "error"
            ]
            lines.append(" | ".join(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells))
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
