"""Training runs as their users start them: processes of their own, on a dataset on the disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from streamvid.config import dump_config
from streamvid.models.config import ModelConfig
from streamvid.trainer.config import EvalConfig, OptimizerConfig, TrainConfig

ROOT = Path(__file__).parents[2]
TWO_RANKS = ROOT / "configs" / "accelerate" / "cpu_2ranks.yaml"


def config_of(dataset: Path, output: Path, **changes: Any) -> TrainConfig:
    """A run of the tests' module that takes seconds."""
    fields: dict[str, Any] = {
        "dataset": str(dataset),
        "output": output,
        "max_steps": 8,
        "batch_size": 2,
        "num_workers": 0,
        "model": ModelConfig(factory="tests.trainer.modules:build", args={"dropout": 0.1}),
        "optimizer": OptimizerConfig(lr=1e-2),
        "eval": EvalConfig(num_batches=0),
        "save_steps": 100,
        "log_steps": 1,
        "cpu": True,
    }
    return TrainConfig(**(fields | changes))


def command(config: TrainConfig, file: Path, ranks: int = 1) -> list[str]:
    """The command that trains so; the config is written to `file`."""
    file.write_text(dump_config(config))
    launcher = ["-m", "accelerate.commands.launch", "--config_file", str(TWO_RANKS), "--num_processes", str(ranks)]
    return [sys.executable, *(launcher if ranks > 1 else []), "-m", "streamvid.trainer", "--config", str(file)]


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def run(config: TrainConfig, file: Path, ranks: int = 1) -> None:
    """Train to the end."""
    done = subprocess.run(
        command(config, file, ranks), cwd=ROOT, env=environment(), capture_output=True, text=True, check=False,
        timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def metrics_in(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def losses_in(output: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in metrics_in(output) if "loss" in line}
