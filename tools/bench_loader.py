"""Throughput and cost of streaming: streamvid and six other loaders on the same clips from one bucket.

    python -m tools.bench_loader [--clips DIR] [--size 336x192] [--repeats 5] [--json]   (from the checkout's root)
    python -m tools.bench_loader --dataset DATASET [--bucket ID] ...

The peers (webdataset, Energon, litdata, mosaic streaming, Hugging Face datasets, and torch's DataLoader over files) run
in a separate environment, which `make peers` creates. If a peer cannot run, the output states the reason.

Without --dataset, the clips (--clips, or the demo corpus) are sharded as native clips in one bucket, several times each
(--copies) to have enough of them. Files are in the page cache. Each run is a separate process. Within a repeat, the
methods run in random order. Results are medians over the repeats, with the lowest and the highest.

- decode off: batches of stored clips. The peers deliver whole clips. streamvid (decode=False) delivers the part that is
  needed for a window of the bucket's frames, and verifies its checksums. "whole" is streamvid on the same tars without
  the packet index: it delivers whole clips, and verifies them as well.
- decode on: batches of decoded windows as uint8. The peers seek and decode with PyAV in their workers. "fast" uses the
  peers' accuracy (swscale's default). With "yuv420p", a device would convert to RGB later; this time is not counted.

samples/s and CPU cover the epochs after the first. CPU per sample includes all processes. Main-process CPU per batch
includes all threads. "first batch" starts when the loader is created, after imports. Memory is the peak of the process
tree. The last lines compare streamvid with the best peer in each repeat, and two workers with one (--pairs).
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import streamvid
from streamvid.buckets.bucket import parse_buckets
from streamvid.buckets.config import BucketConfig
from streamvid.dataset.manifest import manifest_to_json
from streamvid.dataset.sealed_json import MANIFEST
from streamvid.sharder.options import ClipOptions
from streamvid.sharder.source_options import CaptionOptions, SourceOptions
from tools.bench_memory import watching
from tools.peers import client
from tools.peers.loader import METHODS as PEERS
from tools.peers.loader import PAGE_BYTES, cpu_seconds_of_tree

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = {".mp4", ".mkv", ".webm", ".mov", ".avi", ".ts"}
Run = dict[str, float]

#: Ours by name: (decode, arguments of VideoLoader, whether the packet index is left out).
OURS: dict[str, tuple[bool, dict[str, Any], bool]] = {
    "streamvid": (False, {"output": {"decode": False}}, False),
    "streamvid whole": (False, {"output": {"decode": False}}, True),
    "streamvid fast": (True, {"output": {"accuracy": "fast", "pixels": "rgb24"}}, False),
    "streamvid exact": (True, {"output": {"accuracy": "exact", "pixels": "rgb24"}}, False),
    "streamvid yuv420p": (True, {"output": {"pixels": "yuv420p"}}, False),
}


@dataclass(frozen=True)
class Job:
    """The data that all methods stream.

    plain: folder of the same dataset without its packet index.
    root: folder of the copies that tools.peers.convert wrote.
    """

    dataset: Path
    plain: Path
    root: Path
    bucket: str
    shape: tuple[int, int, int]
    num_samples: int
    batch_size: int
    workers: int
    epochs: int
    python: Path


# ---------------------------------------------------------------------------------------------- one run of ours


def run_ours(dataset: str, bucket: str, arguments: dict[str, Any], batch_size: int, workers: int, epochs: int) -> Run:
    """Stream one epoch as a warm-up, and then the timed epochs, as tools/peers/loader.py does for the peers."""
    began, cpu_began = time.perf_counter(), cpu_seconds_of_tree()
    with streamvid.VideoLoader(
        dataset, batch_size={bucket: batch_size, "*": batch_size}, num_epochs=None, num_workers=workers, **arguments
    ) as loader:
        batches = iter(loader)
        first = touch(next(batches))
        first_batch = time.perf_counter() - began
        num_batches = max(1, len(loader))
        warm = first + sum(map(touch, islice(batches, num_batches - 1)))
        cpu, main, wall = cpu_seconds_of_tree(), time.process_time(), time.perf_counter()
        num_samples = sum(map(touch, islice(batches, num_batches * epochs)))
        main_spent, seconds = time.process_time() - main, time.perf_counter() - wall
        spent = cpu_seconds_of_tree() - cpu
    return {
        "first_batch_seconds": first_batch,
        "warm_samples": warm,
        "num_samples": num_samples,
        "num_batches": num_batches * epochs,
        "seconds": seconds,
        "samples_per_second": num_samples / seconds,
        "cpu_seconds_per_sample": spent / num_samples,
        "main_cpu_seconds_per_batch": main_spent / (num_batches * epochs),
        "start_cpu_seconds": cpu - cpu_began,
    }


def touch(batch: streamvid.Batch) -> int:
    """Read some bytes from every page of a batch, and return its number of samples."""
    if "clips" in batch:
        sum(int(clip.data[-1]) for clip in batch.clips)
    else:
        for tensor in islice(batch.tensors(), 1):  # of yuv420p the planes
            int(tensor.reshape(-1)[::PAGE_BYTES].sum()) if tensor.is_contiguous() else _touch_rgb(tensor)
    return len(batch.sample_keys)


def _touch_rgb(video: Any) -> None:
    int(video.permute(0, 2, 3, 4, 1).reshape(-1)[::PAGE_BYTES].sum())  # as it lies in memory: no copy


def apart(method: str, job: Job, workers: int) -> Run:
    """Run streamvid once in a separate process."""
    _, arguments, is_plain = OURS[method]
    request = [str(job.plain if is_plain else job.dataset), job.bucket, arguments, job.batch_size, workers, job.epochs]
    command = [sys.executable, "-m", "tools.bench_loader", "--role"]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process,
        watching(process.pid, client.SAMPLE_SECONDS) as watch,
    ):
        output, _ = process.communicate(json.dumps(request))
    if process.returncode != 0:
        raise SystemExit(f"{method}: the run failed with exit code {process.returncode}")
    found: Run = json.loads(output)
    return {**found, "peak_bytes": watch.peak(lambda memory: memory.total)}


# ---------------------------------------------------------------------------------------------- all of them


def measure(job: Job, decode: bool, repeats: int, peers: Iterable[str]) -> dict[str, list[Run]]:
    """Return the runs of each method, one per repeat. A peer that fails is omitted and named on standard error."""
    _, height, width = job.shape
    request = {"root": str(job.root), "workers": job.workers, "batch_size": job.batch_size, "epochs": job.epochs}
    request |= {"decode": decode, "num_frames": job.shape[0], "height": height, "width": width}

    def peer(name: str) -> Callable[[], Run]:
        return lambda: client.run_loader(job.python, method=name, **request)

    methods: dict[str, Callable[[], Run]] = {
        name: (lambda name=name: apart(name, job, job.workers))  # type: ignore[misc]
        for name, (decodes, _, _) in OURS.items()
        if decodes == decode
    }
    methods |= {name: peer(name) for name in peers}
    runs: dict[str, list[Run]] = {name: [] for name in methods}
    for repeat in range(repeats):
        for name in random.Random(repeat).sample(sorted(runs), len(runs)):
            found = methods[name]()
            if "error" in found:
                print(f"{name} is left out: {found['error']}", file=sys.stderr)
                del runs[name]
            else:
                runs[name].append(found)
    return runs


FIGURES = (
    ("samples/s", "samples_per_second", 1.0),
    ("CPU ms/sample", "cpu_seconds_per_sample", 1e3),
    ("main CPU ms/batch", "main_cpu_seconds_per_batch", 1e3),
    ("first batch s", "first_batch_seconds", 1.0),
    ("MiB", "peak_bytes", 2.0**-20),
)


def summary(runs: dict[str, list[Run]]) -> list[dict[str, Any]]:
    """Return one row per method, with the median, lowest and highest value of each figure."""
    return [
        {"method": name, **{figure: _spread([run[figure] for run in found]) for _, figure, _ in FIGURES}}
        for name, found in runs.items()
        if found
    ]


def against_peers(runs: dict[str, list[Run]], ours: str, figure: str, *, more_is_better: bool) -> list[float]:
    """Return, for each repeat, how much better streamvid is than the repeat's best peer. Values above 1 are better."""
    peers = [found for name, found in runs.items() if not name.startswith("streamvid")]
    ratios = []
    for repeat, run in enumerate(runs[ours]):
        figures = [found[repeat][figure] for found in peers if len(found) > repeat]
        if figures:
            ratios.append(run[figure] / max(figures) if more_is_better else min(figures) / run[figure])
    return ratios


def _spread(values: list[float]) -> list[float]:
    return [statistics.median(values), min(values), max(values)]


def interval(ratios: list[float], draws: int = 2000) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[int(draws * 0.025)], medians[int(draws * 0.975)]


# ---------------------------------------------------------------------------------------------- what they stream


def make_job(folder: Path, options: argparse.Namespace) -> Job:
    """Prepare the dataset, and the peers' copies of one of its buckets. Make the dataset if none is given."""
    dataset = options.dataset.resolve() if options.dataset else make_dataset(folder, options)
    opened = streamvid.open_dataset(dataset)
    counts: dict[str, int] = {}
    for shard in opened.shards:
        counts[shard.bucket_id] = counts.get(shard.bucket_id, 0) + shard.num_samples
    bucket = options.bucket or max(counts, key=lambda name: counts[name])
    if bucket not in counts:
        raise SystemExit(f"--bucket {bucket}: no such bucket; the dataset has {', '.join(counts)}")
    if len(counts) > 1:
        print(f"comparing bucket {bucket} only; the dataset has {len(counts)} buckets", file=sys.stderr)
    converted = client.convert(dataset, folder / "peers", bucket=bucket, python=options.peers)
    for name, why in converted["missing"].items():
        print(f"{name} is left out: {why}", file=sys.stderr)
    plain = folder / "plain"
    plain.mkdir()
    for entry in dataset.iterdir():
        if entry.name != MANIFEST:
            (plain / entry.name).symlink_to(entry)
    files = replace(opened.manifest.files, packets=())
    (plain / MANIFEST).write_bytes(manifest_to_json(replace(opened.manifest, files=files)))
    shape = opened.manifest.bucket(bucket).shape
    return Job(
        dataset, plain, folder / "peers", bucket, shape, counts[bucket], options.batch_size, options.workers,
        options.epochs, options.peers,
    )  # fmt: skip


def make_dataset(folder: Path, options: argparse.Namespace) -> Path:
    """Shard native clips into one bucket, each source --copies times. All copies share one encoding."""
    clips = options.clips.resolve() if options.clips else folder / "corpus"
    if options.clips is None:
        command = [sys.executable, str(ROOT / "tools" / "make_corpus.py"), str(clips)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    table = folder / "metadata.csv"
    with table.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path"])
        found = sorted(path for path in clips.rglob("*") if path.suffix in SUFFIXES)
        rows.writerows([str(path)] for _ in range(options.copies) for path in found)
    width, height = map(int, options.size.split("x"))
    shard_options = streamvid.ShardOptions(
        source=SourceOptions(metadata=table, captions=CaptionOptions(column=""), whole_files=True),
        buckets=BucketConfig(buckets=parse_buckets(f"{width}x{height}@{options.num_frames}")),
        shard_size_bytes=options.shard_bytes,
        clips=ClipOptions(
            options.kind, max_clip_seconds=options.max_clip_seconds if options.kind == "native" else None
        ),
    )
    report = streamvid.shard(clips, folder / "dataset", shard_options)
    print(report.summary(max_rejections=3), file=sys.stderr)
    return folder / "dataset"


# ---------------------------------------------------------------------------------------------- printing


def print_table(title: str, runs: dict[str, list[Run]]) -> None:
    """Print the results as a table: median (lowest-highest)."""
    print(f"\n{title}")
    print(f"{'':<20}" + "".join(f"{name:>26}" for name, _, _ in FIGURES))
    for row in summary(runs):
        cells = []
        for _, figure, unit in FIGURES:
            median, low, high = (value * unit for value in row[figure])
            cells.append(f"{median:>12.4g} ({low:.4g}-{high:.4g})".rjust(26))
        print(f"{row['method']:<20}" + "".join(cells))


def comparisons(off: dict[str, list[Run]], on: dict[str, list[Run]], pairs: list[float]) -> Iterator[dict[str, Any]]:
    """Return the comparisons with their ratios. Values above 1 are better than the best peer."""
    lines = (
        ("decode off, samples/s", off, "streamvid", "samples_per_second", True),
        ("decode off, samples/s, whole clips", off, "streamvid whole", "samples_per_second", True),
        ("decode off, main-process CPU per batch", off, "streamvid", "main_cpu_seconds_per_batch", False),
        ("decode off, first batch", off, "streamvid", "first_batch_seconds", False),
        ("decode on, CPU per sample, fast", on, "streamvid fast", "cpu_seconds_per_sample", False),
        ("decode on, CPU per sample, exact", on, "streamvid exact", "cpu_seconds_per_sample", False),
        ("decode on, CPU per sample, yuv420p", on, "streamvid yuv420p", "cpu_seconds_per_sample", False),
        ("decode on, first batch", on, "streamvid fast", "first_batch_seconds", False),
    )
    for name, runs, ours, figure, more in lines:
        ratios = against_peers(runs, ours, figure, more_is_better=more) if runs.get(ours) else []
        if ratios:
            yield {"line": name, "ratios": ratios}
    if pairs:
        yield {"line": "two workers against one, samples/s", "ratios": pairs}


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clips", type=Path, help="folder of videos; the demo corpus by default")
    parser.add_argument("--dataset", type=Path, help="sealed dataset to use in place of --clips")
    parser.add_argument("--bucket", help="bucket of the dataset; the largest by default")
    parser.add_argument("--kind", choices=["native", "copy"], default="native")
    parser.add_argument("--size", default="336x192", help="size of the bucket, as WxH")
    parser.add_argument("--num-frames", type=int, default=16)
    parser.add_argument("--max-clip-seconds", type=float, default=10.0)
    parser.add_argument("--copies", type=int, default=20)
    parser.add_argument("--shard-bytes", type=int, default=16 * 10**6)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2, help="number of timed epochs, after one warm-up epoch")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=9, help="number of paired runs with one and two workers")
    parser.add_argument("--modes", default="off,on", help="modes to measure: decode off, on or both")
    parser.add_argument("--methods", default=",".join(PEERS), help="peers to measure")
    parser.add_argument("--peers", type=Path, default=client.PYTHON, help="Python interpreter of the peers")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    if not options.peers.exists():
        parser.error(f"--peers {options.peers} does not exist; run `make peers` to create it")
    return options


def main() -> None:
    """Parse the command line, measure, and print the results."""
    if sys.argv[1:] == ["--role"]:
        import torch

        torch.set_num_threads(1)
        # What is imported when it is first used: imports are not counted, of no method.
        import pyarrow.compute
        import pyarrow.parquet  # noqa: F401

        import streamvid.dataset.packets
        import streamvid.loader.workers.reader

        streamvid.VideoLoader.__name__  # noqa: B018  # imported at its first use
        print(json.dumps(run_ours(*json.loads(sys.stdin.readline()))))
        return
    options = parse()
    wanted, absent = options.methods.split(","), client.missing(options.peers)
    for name in wanted:
        if name in absent:
            print(f"{name} is left out: {absent[name]}", file=sys.stderr)
    peers = [name for name in wanted if name not in absent]
    modes = options.modes.split(",")
    with tempfile.TemporaryDirectory() as folder:
        job = make_job(Path(folder), options)
        off = measure(job, False, options.repeats, peers) if "off" in modes else {}
        on = measure(job, True, options.repeats, peers) if "on" in modes else {}
        pairs = []
        for number in range(options.pairs):
            order = (1, 2) if number % 2 else (2, 1)
            rates = {workers: apart("streamvid fast", job, workers)["samples_per_second"] for workers in order}
            pairs.append(rates[2] / rates[1])
    compared = [
        {**line, "median": statistics.median(line["ratios"]), "interval": interval(line["ratios"])}
        for line in comparisons(off, on, pairs)
    ]
    if options.json:
        about: dict[str, Any] = {
            "machine": platform.platform(),
            "python": platform.python_version(),
            "av": version("av"),
        }
        about |= {"clips": {"num_samples": job.num_samples, "shape": job.shape, "bucket": job.bucket}}
        about |= {"peers": client.versions(options.peers), "missing": absent}
        print(json.dumps({**about, "off": summary(off), "on": summary(on), "compared": compared}, indent=2))
        return
    print(f"{job.num_samples} clips of {job.bucket}, batches of {job.batch_size}, {job.workers} workers")
    for title, runs in (("decode off", off), ("decode on", on)):
        if runs:
            print_table(title, runs)
    print("\ntimes better than the best peer of each repeat: median [95 % of the median] (lowest-highest)")
    for line in compared:
        low, high = line["interval"]
        lowest, highest = min(line["ratios"]), max(line["ratios"])
        print(f"  {line['line']:<40}{line['median']:>7.2f} [{low:.2f}, {high:.2f}] ({lowest:.2f}-{highest:.2f})")


if __name__ == "__main__":
    main()
