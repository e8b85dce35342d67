"""CPU cost of a loader's ledger and metrics, and the ledger's bytes per sample.

    python -m tools.bench_monitor [--dataset DATASET] [--repeats 15] [--epochs 2] [--json]   (from the checkout's root)

Each run is an epoch or more of a loader without workers in this process, so that all of its CPU time is counted. The
methods take turns within a repeat, in random order. Reported are the medians of CPU seconds per sample, and of each
repeat's ratio to the run without reports, with its 95 % interval (bootstrap). Without --dataset, the demo's corpus is
sharded as native clips of one bucket. "stored" is the worst case: output.decode=False decodes nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import streamvid
from tools.bench_loader import interval, make_dataset

PORT = 19431
KINDS: dict[str, dict[str, Any]] = {"decoded": {}, "stored": {"decode": False}}


def methods(folder: Path) -> dict[str, dict[str, Any]]:
    """Options of OutputOptions by method. Each run has its own folder."""
    metrics = {"metrics_port": PORT, "metrics_folder": folder / "metrics"}
    return {"none": {}, "ledger": {"ledger": folder / "ledger"}, "metrics": metrics}


def run(dataset: Path, output: dict[str, Any], epochs: int) -> tuple[float, int]:
    """(CPU seconds, samples) of a loader; its start and its first batch are not counted.

    Metrics are requested once a second, 15 times as often as usual, and the cost of the client is counted, too.
    """
    with streamvid.VideoLoader(dataset, batch_size=4, num_workers=0, num_epochs=epochs, output=output) as loader:
        batches = iter(loader)
        next(batches)
        before, num_samples, asked = time.process_time(), 0, time.monotonic()
        for batch in batches:
            num_samples += len(batch.sample_keys)
            if "metrics_port" in output and time.monotonic() - asked > 1:
                asked = time.monotonic()
                with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics") as answer:
                    answer.read()
        return time.process_time() - before, num_samples


def measure(dataset: Path, kind: str, repeats: int, epochs: int, folder: Path) -> dict[str, list[float]]:
    """CPU seconds per sample of each repeat, by method."""
    found: dict[str, list[float]] = {name: [] for name in methods(folder)}
    for repeat in range(repeats + 1):
        for name in random.Random(repeat).sample(sorted(found), len(found)):
            place = folder / f"{kind}-{name}-{repeat}"
            seconds, num_samples = run(dataset, methods(place)[name] | KINDS[kind], epochs)
            if repeat:  # the first one warms up
                found[name].append(seconds / num_samples)
    return found


def bytes_per_sample(dataset: Path, folder: Path, epochs: int) -> dict[str, float]:
    """Size of the closed logs of a rank, per delivered sample."""
    run(dataset, {"ledger": folder, "decode": False}, epochs)
    (log,) = folder.glob("session-*/rank-*.ledger")
    num_samples = sum(shard.num_samples for shard in streamvid.open_dataset(dataset).shards) * epochs
    return {"bytes_per_sample": log.stat().st_size / num_samples, "num_samples": num_samples}


def summary(found: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
    """By method: the median in microseconds per sample, and the ratio to no reports with its interval."""
    rows = {}
    for name, values in found.items():
        ratios = [value / base for value, base in zip(values, found["none"], strict=True)]
        ratio = {"ratio": statistics.median(ratios), "interval": interval(ratios)}
        rows[name] = {"microseconds": statistics.median(values) * 1e6, **ratio}
    return rows


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", type=Path, help="a sealed dataset")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--copies", type=int, default=20, help="of each clip of the corpus")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args()


def main() -> None:
    """Parse the command line, measure, print."""
    options = parse()
    corpus = argparse.Namespace(
        clips=None, copies=options.copies, size="336x192", num_frames=16, shard_bytes=16 * 10**6, kind="native",
        max_clip_seconds=10.0,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dataset = options.dataset or make_dataset(folder, corpus)
        report: dict[str, Any] = bytes_per_sample(dataset, folder / "bytes", options.epochs)
        for kind in KINDS:
            report[kind] = summary(measure(dataset, kind, options.repeats, options.epochs, folder))
    if options.json:
        print(json.dumps(report, indent=2))
        return
    print(f"ledger: {report['bytes_per_sample']:.1f} bytes per sample ({report['num_samples']} samples)")
    for kind in KINDS:
        for name, row in report[kind].items():
            low, high = row["interval"]
            print(
                f"{kind:<10}{name:<10}{row['microseconds']:>10.0f} us of CPU per sample, "
                f"{row['ratio'] - 1:+.2%} [{low - 1:+.2%}, {high - 1:+.2%}]"
            )


if __name__ == "__main__":
    main()
