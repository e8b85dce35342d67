"""CPU cost of a loader's ledger and metrics, and the ledger's bytes per sample.

    python -m tools.bench_monitor [--dataset DATASET] [--repeats 15] [--epochs 2] [--json]   (from the checkout's root)

Each run is one or more epochs of a loader without workers in this process, so that all of its CPU time is counted.
Within a repeat, the methods run in random order. The output lists the median CPU seconds per sample, and the median
over repeats of the ratio to the run without reports, with its 95 % bootstrap interval. Without --dataset, the demo
corpus is sharded as native clips in one bucket. "stored" is the worst case: output.decode=False decodes nothing, and
its runs have ten times as many epochs. Another process requests the metrics once per second, 15 times as often as
usual.

These ratios vary by more than the cost of the reports. Therefore, the reports are also measured alone. "entry" is the
CPU time per sample of LedgerWriter in a loop. "in a loader" is the CPU time per sample that the ledger takes in a
loader's thread between batches, where caches are cold. "request" is the CPU time per request of the metrics endpoint.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import streamvid
from streamvid.ledger.records import LoggedBatch, LoggedSample, Position
from streamvid.ledger.writer import LedgerWriter
from streamvid.loader.delivery.pending import PendingBatch
from streamvid.loader.monitor.monitor import Monitor
from tools.bench_loader import interval, make_dataset

PORT = 19431
KINDS: dict[str, dict[str, Any]] = {"decoded": {}, "stored": {"decode": False}}
STORED_EPOCHS = 10
BATCH_SIZES = (1, 4, 16)
NUM_ENTRIES = 16_384
NUM_REQUESTS = 200
CLIENT = """
import http.client, itertools, sys, time
port, count, pause = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
for _ in range(count) if count else itertools.count():
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", "/metrics")
        connection.getresponse().read()
        connection.close()
    except OSError:
        pass  # the endpoint opens with the first loop
    time.sleep(pause)
"""


@contextmanager
def requesting(count: int, pause: float) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that requests the metrics `count` times. If `count` is 0, it requests them until it is stopped."""
    with subprocess.Popen([sys.executable, "-c", CLIENT, str(PORT), str(count), str(pause)]) as process:
        try:
            yield process
        finally:
            process.terminate()


def methods(folder: Path) -> dict[str, dict[str, Any]]:
    """Map each method to its OutputOptions. Each run has its own folder."""
    metrics = {"metrics_port": PORT, "metrics_folder": folder / "metrics"}
    return {"none": {}, "ledger": {"ledger": folder / "ledger"}, "metrics": metrics}


def run(dataset: Path, output: dict[str, Any], epochs: int) -> tuple[float, int]:
    """Return (CPU seconds, samples) for a loader, without its start and its first batch."""
    with streamvid.VideoLoader(dataset, batch_size=4, num_workers=0, num_epochs=epochs, output=output) as loader:
        batches = iter(loader)
        next(batches)
        before, num_samples = time.process_time(), 0
        for batch in batches:
            num_samples += len(batch.sample_keys)
        return time.process_time() - before, num_samples


def measure(dataset: Path, kind: str, repeats: int, epochs: int, folder: Path) -> dict[str, list[float]]:
    """Return the CPU seconds per sample of each repeat, keyed by method."""
    found: dict[str, list[float]] = {name: [] for name in methods(folder)}
    num_epochs = epochs * (STORED_EPOCHS if kind == "stored" else 1)
    with requesting(0, 1.0):
        for repeat in range(repeats + 1):
            for name in random.Random(repeat).sample(sorted(found), len(found)):
                place = folder / f"{kind}-{name}-{repeat}"
                seconds, num_samples = run(dataset, methods(place)[name] | KINDS[kind], num_epochs)
                if repeat:  # the first one warms up
                    found[name].append(seconds / num_samples)
    return found


def entry_microseconds(folder: Path, batch_size: int, repeats: int) -> float:
    """Return the median CPU time per sample for writing a ledger, with keys like those that the sharder makes."""
    names = [f"clip_{number}-{hashlib.sha256(str(number).encode()).hexdigest()[:16]}" for number in range(NUM_ENTRIES)]
    rows = [LoggedSample(0, name, 0, place % 50, 1, "text") for place, name in enumerate(names)]
    starts = range(0, NUM_ENTRIES, batch_size)
    batches = [LoggedBatch(Position(0, step), tuple(rows[at : at + batch_size])) for step, at in enumerate(starts)]
    found = []
    for _ in range(repeats):
        writer = LedgerWriter(folder, 0, ["dataset"])
        writer.begin({"num_ranks": 1}, {"epoch": 0, "step": 0}, is_again=False)
        before = time.process_time()
        for batch in batches:
            writer.add(batch)
        writer.close()
        found.append((time.process_time() - before) / NUM_ENTRIES)
    return statistics.median(found) * 1e6


def loader_microseconds(dataset: Path, folder: Path, batch_size: int) -> float:
    """Return the CPU time per sample that a loader's own thread spends on its ledger."""
    hand_over, spent, num_samples = Monitor.hand_over, 0, 0

    def timed(self: Monitor, pending: PendingBatch, planned_keys: Mapping[int, str]) -> None:
        nonlocal spent, num_samples
        before = time.thread_time_ns()
        hand_over(self, pending, planned_keys)
        spent, num_samples = spent + time.thread_time_ns() - before, num_samples + len(pending.deliveries)

    output = {"ledger": folder, "decode": False}
    with mock.patch.object(Monitor, "hand_over", timed):
        options: dict[str, Any] = {"num_workers": 0, "num_epochs": STORED_EPOCHS, "output": output}
        with streamvid.VideoLoader(dataset, batch_size=batch_size, **options) as loader:
            for _ in loader:
                pass
    return spent / num_samples / 1e3


def request_milliseconds(dataset: Path) -> float:
    """Return this process's CPU time per metrics request, while its loader does nothing else."""
    output = {"metrics_port": PORT, "decode": False}
    with streamvid.VideoLoader(dataset, batch_size=4, num_workers=0, output=output) as loader:
        batches = iter(loader)
        next(batches)
        time.sleep(1)  # reading ahead ends
        before = time.process_time()
        with requesting(NUM_REQUESTS, 0.0) as process:
            process.wait()
        return (time.process_time() - before) / NUM_REQUESTS * 1e3


def bytes_per_sample(dataset: Path, folder: Path, epochs: int) -> dict[str, float]:
    """Return the size of a rank's closed logs in bytes per delivered sample."""
    run(dataset, {"ledger": folder, "decode": False}, epochs)
    (log,) = folder.glob("session-*/rank-*.ledger")
    num_samples = sum(shard.num_samples for shard in streamvid.open_dataset(dataset).shards) * epochs
    return {"bytes_per_sample": log.stat().st_size / num_samples, "num_samples": num_samples}


def summary(found: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
    """Map each method to its median in microseconds per sample, and to the ratio to no reports with its interval."""
    rows = {}
    for name, values in found.items():
        ratios = [value / base for value, base in zip(values, found["none"], strict=True)]
        ratio = {"ratio": statistics.median(ratios), "interval": interval(ratios)}
        rows[name] = {"microseconds": statistics.median(values) * 1e6, **ratio}
    return rows


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", type=Path, help="sealed dataset; by default, the demo corpus is sharded")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--copies", type=int, default=20, help="number of copies of each clip in the corpus")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args()


def main() -> None:
    """Parse the command line, measure, and print the results."""
    options = parse()
    corpus = argparse.Namespace(
        clips=None, copies=options.copies, size="336x192", num_frames=16, shard_bytes=16 * 10**6, kind="native",
        max_clip_seconds=10.0,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dataset = options.dataset or make_dataset(folder, corpus)
        report: dict[str, Any] = bytes_per_sample(dataset, folder / "bytes", options.epochs)
        report["entry_microseconds"] = {
            str(size): entry_microseconds(folder / f"entry-{size}", size, options.repeats) for size in BATCH_SIZES
        }
        report["loader_microseconds"] = {
            str(size): loader_microseconds(dataset, folder / f"loader-{size}", size) for size in BATCH_SIZES
        }
        report["request_milliseconds"] = request_milliseconds(dataset)
        for kind in KINDS:
            report[kind] = summary(measure(dataset, kind, options.repeats, options.epochs, folder))
    if options.json:
        print(json.dumps(report, indent=2))
        return
    print(f"ledger: {report['bytes_per_sample']:.1f} bytes per sample ({report['num_samples']} samples)")
    for size, microseconds in report["entry_microseconds"].items():
        inside = report["loader_microseconds"][size]
        print(f"entry, batch size {size:<4}{microseconds:>6.1f} us of CPU per sample, in a loader {inside:.1f} us")
    print(f"request {report['request_milliseconds']:.2f} ms of CPU")
    for kind in KINDS:
        for name, row in report[kind].items():
            low, high = row["interval"]
            print(
                f"{kind:<10}{name:<10}{row['microseconds']:>10.0f} us of CPU per sample, "
                f"{row['ratio'] - 1:+.2%} [{low - 1:+.2%}, {high - 1:+.2%}]"
            )


if __name__ == "__main__":
    main()
