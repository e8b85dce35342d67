"""Share of each training step that is spent waiting for data, with native shards and steps that only sleep.

    python -m tools.bench_trainer [--clips DIR | --dataset DATASET] [--buckets 480x272@33] [--seconds 0.25,0.5,1]
                                  [--batch-size 2] [--steps 40] [--repeats 5] [--json]      (from the checkout's root)

Without --dataset, the clips (--clips, or the demo corpus) are sharded as native clips. Steps run in the real training
loop (`streamvid.trainer.train` with its metrics, but without checkpoints). The module sleeps while a GPU would compute,
so the processor is free, as it is with a GPU. Within a repeat, the step times are in random order, each in a separate
process. The share is `data_wait_share` in metrics.jsonl, without the first five steps, which wait for the workers to
start.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

WARM_UP = 5


class Sleeping(nn.Module):
    """A training step that only sleeps."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.weight = seconds, nn.Parameter(torch.zeros(()))

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        assert batch["video"].dtype == torch.uint8
        time.sleep(self.seconds)
        return self.weight.square() + 1.0


def build(seconds: float) -> Sleeping:
    return Sleeping(seconds)


def measure(dataset: Path, seconds: float, options: argparse.Namespace) -> dict[str, float]:
    """Train once in this process, and return the results."""
    from streamvid.modules.config import ModelConfig
    from streamvid.trainer import TrainConfig, train
    from streamvid.trainer.config import AccelerateConfig, DataConfig, EvalConfig, LoggingConfig

    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(
            output=Path(folder),
            max_steps=options.steps,
            data=DataConfig(dataset=str(dataset), batch_size=options.batch_size, num_workers=options.workers),
            model=ModelConfig(factory="tools.bench_trainer:build", args={"seconds": seconds}),
            eval=EvalConfig(num_batches=0),
            logging=LoggingConfig(steps=1),
            accelerate=AccelerateConfig(cpu=True),
        )
        train(config)
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()][WARM_UP:]
    waited, spent = (sum(line[name] for line in lines) for name in ("data_wait_seconds", "seconds"))
    return {"wait_share": waited / spent, "step_seconds": spent / len(lines), "samples": lines[-1]["samples"]}


def make_dataset(folder: Path, options: argparse.Namespace) -> Path:
    """Shard native clips from the given clips or from the demo corpus."""
    if options.dataset is not None:
        return Path(options.dataset)
    clips = options.clips
    if clips is None:
        clips = folder / "corpus"
        subprocess.run([sys.executable, "tools/make_corpus.py", str(clips)], check=True, stdout=subprocess.DEVNULL)
    command = [
        sys.executable,
        "-m",
        "streamvid",
        "shard",
        str(clips),
        str(folder / "ds"),
        "--clips",
        "native",
        "--json",
    ]
    done = subprocess.run([*command, "--buckets", options.buckets], check=True, stdout=subprocess.PIPE)
    print(f"{json.loads(done.stdout)['num_samples']} native clips of {options.buckets}", file=sys.stderr)
    return folder / "ds"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--clips", type=Path)
    source.add_argument("--dataset")
    parser.add_argument("--buckets", default="480x272@33")
    parser.add_argument("--seconds", default="0.25,0.5,1")
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(measure(Path(options.dataset), options.one, options)))
        return
    steps_of = [float(text) for text in options.seconds.split(",")]
    found: dict[float, list[dict[str, float]]] = {seconds: [] for seconds in steps_of}
    with tempfile.TemporaryDirectory() as folder:
        dataset = make_dataset(Path(folder), options)
        for _ in range(options.repeats):
            for seconds in random.sample(steps_of, len(steps_of)):
                command = [
                    sys.executable,
                    "-m",
                    "tools.bench_trainer",
                    "--dataset",
                    str(dataset),
                    "--one",
                    str(seconds),
                ]
                command += ["--batch-size", str(options.batch_size), "--steps", str(options.steps)]
                command += [] if options.workers is None else ["--workers", str(options.workers)]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
                found[seconds].append(json.loads(done.stdout.splitlines()[-1]))
    table = {str(seconds): summary(runs) for seconds, runs in found.items()}
    if options.json:
        print(json.dumps(table, indent=1))
        return
    print(f"{'step sleeps':>12} {'step takes':>11} {'waits for data: median':>23} {'lowest':>8} {'highest':>8}")
    for name, row in table.items():
        print(f"{name + ' s':>12} {row['step_seconds']:>9.3f} s {row['wait_share']:>22.2%} "
              f"{row['lowest']:>8.2%} {row['highest']:>8.2%}")  # fmt: skip


def summary(runs: list[dict[str, float]]) -> dict[str, float]:
    """Return the medians of the repeats, with the lowest and highest share."""
    shares = [run["wait_share"] for run in runs]
    return {
        "wait_share": statistics.median(shares), "lowest": min(shares), "highest": max(shares),
        "step_seconds": statistics.median(run["step_seconds"] for run in runs),
    }  # fmt: skip


if __name__ == "__main__":
    main()
