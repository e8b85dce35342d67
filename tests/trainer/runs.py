"""Training runs as users start them: in separate processes, on a dataset on disk."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from streamvid.cli import main
from streamvid.config import dump_config
from streamvid.modules.config import ModelConfig
from streamvid.trainer.config import EvalConfig, OptimizerConfig, TrainConfig
from tests.trainer.configs import combined, train_config


def config_of(dataset: Path | dict[str, Any], output: Path, changes: Mapping[str, Any] | None = None) -> TrainConfig:
    """Return the configuration of a run of the tests' module that takes seconds."""
    few = {
        "max_steps": 8,
        "data.batch_size": 2,
        "data.num_workers": 0,
        "model": ModelConfig(factory="tests.trainer.modules:build", args={"dropout": 0.1}),
        "optimizer": OptimizerConfig(lr=1e-2),
        "eval": EvalConfig(num_batches=0),
        "checkpoints.steps": 100,
        "logging.steps": 1,
    }
    return train_config(dataset, output, combined(few, changes))


def trained(dataset: Path | dict[str, Any], output: Path, changes: Mapping[str, Any] | None = None) -> TrainConfig:
    """Train such a run to its end in this process; return its configuration."""
    from streamvid.trainer import train

    config = config_of(dataset, output, changes)
    train(config)
    return config


def weights_in(output: Path) -> list[str]:
    """Return the names of a run's weight files and of its peft adapter folders."""
    folders = [path.parent for path in output.glob("*/adapter_model.safetensors")]
    return sorted(path.name for path in [*output.glob("*.safetensors"), *folders])


@dataclass
class Ranks:
    """The processes of a run, one per rank."""

    processes: list[BaseProcess]
    told: list[Path]

    def is_alive(self) -> bool:
        return any(process.is_alive() for process in self.processes)

    def send(self, number: signal.Signals) -> None:
        for process in self.processes:
            assert process.pid is not None and process.is_alive(), "the process ended before the signal"
            os.kill(process.pid, number)

    def wait(self, seconds: float = 240) -> list[int | None]:
        """Wait for all processes and return their exit codes."""
        for process in self.processes:
            process.join(seconds)
            if process.is_alive():
                process.kill()
                process.join()
        return [process.exitcode for process in self.processes]

    def stderr(self) -> str:
        return "".join(path.read_text() for path in self.told)


def start(config: TrainConfig, ranks: int = 1, preload: Sequence[str] = ()) -> Ranks:
    """Start training in separate processes, with rank and port in the environment as a launcher sets them.

    The processes are forked from one that has already imported the libraries, because the imports take longer than a
    test's run.
    """
    context = multiprocessing.get_context("forkserver")
    usual = ["streamvid.trainer.trainer", "streamvid.cli.verbs.train", "tests.trainer.modules"]
    context.set_forkserver_preload([*usual, *preload])
    config.output.parent.mkdir(parents=True, exist_ok=True)
    number = len(list(config.output.parent.glob("*.stderr")))
    told = [config.output.with_suffix(f".{number + rank}.stderr") for rank in range(ranks)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes: list[BaseProcess] = []
    for rank in range(ranks):
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
        environment |= {name: str(rank) for name in ("RANK", "LOCAL_RANK")}
        environment |= {name: str(ranks) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
        process = context.Process(
            target=_train, args=(dump_config(config), environment if ranks > 1 else {}, told[rank])
        )
        process.start()
        processes.append(process)
    return Ranks(processes, told)


def _train(config: str, environment: dict[str, str], told: Path) -> None:
    import torch

    os.environ.update(environment)
    with told.open("w") as file:
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    written = told.with_suffix(".yaml")
    written.write_text(config)
    sys.argv = ["streamvid", "train", "--config", str(written)]
    main()


def run(config: TrainConfig, ranks: int = 1, preload: Sequence[str] = ()) -> None:
    """Train to the end, and fail if a process fails."""
    made = start(config, ranks, preload)
    assert made.wait() == [0] * ranks, made.stderr()[-3000:]


def metrics_in(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def losses_in(output: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in metrics_in(output) if "loss" in line}


def last_step_in(output: Path) -> int:
    """Return the last step in the metrics of a running training, whose last line may be incomplete."""
    file = output / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("\n")), default=0)
