"""Tests that training is reproducible: after kills, with other numbers of ranks, and with smaller batches."""

from __future__ import annotations

import itertools
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from streamvid import World
from streamvid.modules.config import ModelConfig
from streamvid.trainer import train
from streamvid.trainer.config import CheckpointConfig, EvalConfig, OptimizerConfig
from streamvid.trainer.tasks import Task, TaskModule
from tests.loader.conftest import SMALL, TALL, build_dataset, open_loader
from tests.trainer.configs import changed
from tests.trainer.modules import UserTraining
from tests.trainer.runs import config_of, last_step_in, losses_in, metrics_in, run, start, trained

LOGGED = "tests.trainer.modules:build_logged"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_dataset(tmp_path_factory.mktemp("exact") / "ds", {SMALL: [4, 4, 3], TALL: [4, 3]})


def keys_seen(folder: Path) -> list[str]:
    return [key for file in sorted(folder.glob("seen-*")) for key in file.read_text().split()]


@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_a_run_killed_again_and_again_ends_with_the_same_bytes(dataset: Path, tmp_path: Path, kills: int) -> None:
    """PLAN-5: kill -9 hits seeded moments, during steps and saves; dropout, EMA and evaluation are included."""
    optimizer = OptimizerConfig(lr=1e-2, ema_decay=0.9, schedule="cosine", warmup_steps=3)
    changes: dict[str, Any] = {
        "max_steps": 12 * kills,
        "optimizer": optimizer,
        "eval": EvalConfig(steps=6, split="train"),
    }
    changes["checkpoints"] = CheckpointConfig(steps=3, keep=2, keep_weights=1)
    whole = config_of(dataset, tmp_path / "whole", changes)
    run(whole)
    parts = changed(whole, {"output": tmp_path / "parts"})
    draw = random.Random(kills)
    for number in range(kills):
        until = 12 * number + draw.randrange(1, 12)
        process = start(parts)
        while process.is_alive() and last_step_in(parts.output) < until:
            time.sleep(0.001)
        time.sleep(draw.random() * 0.1)
        process.send(signal.SIGKILL)
        assert process.wait() == [-signal.SIGKILL]
    run(parts)
    last = f"step-{parts.max_steps}"
    for name in (f"{last}.safetensors", f"{last}.ema.safetensors"):
        assert (parts.output / name).read_bytes() == (whole.output / name).read_bytes()
    assert losses_in(parts.output) == losses_in(whole.output)
    held_out = [[line["eval_loss"] for line in metrics_in(one.output) if "eval_loss" in line] for one in (whole, parts)]
    assert held_out[0] == held_out[1]
    assert not [path for path in parts.output.rglob("*") if path.name.endswith(".tmp")]


@pytest.mark.parametrize("number", [signal.SIGUSR1, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_preempted_job_resumes_at_the_same_step(dataset: Path, tmp_path: Path, number: signal.Signals) -> None:
    """A signal like Slurm's leaves a checkpoint of the current step, so every sample is trained on exactly once."""
    model = ModelConfig(factory=LOGGED, args={"log": str(tmp_path), "pause": 0.05})
    config = config_of(dataset, tmp_path / "run", {"max_steps": None, "num_epochs": 1, "model": model})
    process = start(config)
    while process.is_alive() and last_step_in(config.output) < 2:
        time.sleep(0.01)
    process.send(number)
    assert process.wait() == [128 + number], process.stderr()
    run(config)
    assert Counter(keys_seen(tmp_path)).most_common(1)[0][1] == 1
    steps = [line["step"] for line in metrics_in(config.output) if "loss" in line]
    assert steps == list(range(1, steps[-1] + 1))


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_run_resumes_with_other_ranks(dataset: Path, tmp_path: Path, ranks: int) -> None:
    """PLAN-4, PLAN-5: each sample of the epoch comes once, and losses stay similar with the same global batch size."""
    size = {2: 3, 3: 2}[ranks]
    model = ModelConfig(factory=LOGGED, args={"log": str(tmp_path)})
    shrinking = {"data.batch_size": 6, "data.loader": {"tail": "shrink"}}
    changes = {"max_steps": 2, "checkpoints.steps": 1, "model": model, "optimizer.lr": 0.001}
    config = config_of(dataset, tmp_path / "run", shrinking | changes)
    alone = changed(config, {"output": tmp_path / "alone", "max_steps": None, "num_epochs": 1})
    (tmp_path / "of-alone").mkdir()
    logged = ModelConfig(factory=LOGGED, args={"log": str(tmp_path / "of-alone")})
    run(changed(alone, {"model": logged}))
    run(config)
    after = changed(config, {"max_steps": None, "num_epochs": 1, "data.batch_size": size})
    run(after, ranks=ranks)
    seen = Counter(keys_seen(tmp_path))
    assert len(seen) == 18
    # An uneven last step repeats fewer samples than there are ranks (PLAN-4, "shrink").
    assert sum(seen.values()) - len(seen) < 2 * ranks
    ours, theirs = losses_in(config.output), losses_in(alone.output)
    assert ours.keys() == theirs.keys()
    assert all(ours[step] == pytest.approx(theirs[step], rel=0.05) for step in theirs)
    assert all(ours[step] == pytest.approx(theirs[step], rel=1e-6) for step in (1, 2))


def train_by_hand(
    dataset: Path, batch_size: int, ranks: int, accumulate: int, steps: int
) -> tuple[dict[str, Tensor], list[float]]:
    """Run plain gradient descent on the mean loss over the samples of all ranks; return the weights and the losses."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = UserTraining()
    step_of, losses = TaskModule(module, Task()), []
    options: dict[str, Any] = {"accumulate": accumulate, "tail": "shrink", "num_epochs": None}
    worlds = [World(rank, ranks) for rank in range(ranks)]
    loaders = [open_loader(dataset, batch_size=batch_size, world=world, **options) for world in worlds]
    streams = [iter(loader) for loader in loaders]
    parameters = [one for one in module.parameters() if one.requires_grad]
    for _ in range(steps):
        batches = [next(stream).clone() for _ in range(accumulate) for stream in streams]
        loss = torch.cat([step_of(batch)["loss"] for batch in batches]).mean()
        for tensor, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            tensor.data -= 0.05 * gradient
        losses.append(float(loss.detach()))
    for loader in loaders:
        loader.close()
    return {name: one.detach() for name, one in module.named_parameters() if one.requires_grad}, losses


@pytest.mark.parametrize(
    ("ranks", "batch_size", "accumulate"),
    [(1, 4, 1), (1, 2, 2), (1, 3, 3), (2, 3, 2), pytest.param(2, 2, 1, marks=pytest.mark.slow)],
)
def test_a_step_follows_the_mean_loss_of_all_its_samples(
    dataset: Path, tmp_path: Path, ranks: int, batch_size: int, accumulate: int
) -> None:
    """A step uses the mean over all ranks and accumulated batches, with mixed buckets and smaller last batches."""
    weights, losses = train_by_hand(dataset, batch_size, ranks, accumulate, 5)
    plain = OptimizerConfig(factory="torch.optim:SGD", lr=0.05, betas=None, weight_decay=0.0, grad_clip=None)
    model = ModelConfig(factory="tests.trainer.modules:build")
    batches = {"data.batch_size": batch_size, "data.accumulate": accumulate, "data.loader": {"tail": "shrink"}}
    changes = {"max_steps": 5, "checkpoints.steps": 5, "model": model, "optimizer": plain}
    config = config_of(dataset, tmp_path / "run", batches | changes)
    if ranks == 1:
        train(config)
    else:
        run(config, ranks=ranks)
    trained = load_file(config.output / "step-5.safetensors")
    assert list(losses_in(config.output).values()) == pytest.approx(losses, rel=1e-5)
    assert trained.keys() == weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(trained[name], tensor, rtol=1e-4, atol=1e-6)


def test_parameters_without_gradients_are_named_before_the_first_step_of_several_ranks(
    dataset: Path, tmp_path: Path
) -> None:
    unused = ModelConfig(factory="tests.trainer.modules:build", args={"unused": True})
    config = config_of(dataset, tmp_path / "run", {"max_steps": 3, "model": unused})
    failed = start(config, ranks=2)
    assert 0 not in failed.wait()
    told = " ".join(failed.stderr().split())
    assert "spare.weight, spare.bias of the training module got no gradient" in told
    assert "set accelerate.find_unused_parameters=true" in told
    assert not (config.output / "metrics.jsonl").exists()


@pytest.mark.parametrize("stated", [True, None])
def test_unused_parameters_are_allowed_by_the_config_or_by_the_module(
    dataset: Path, tmp_path: Path, stated: bool | None
) -> None:
    args = {"unused": True, "states_unused": stated is None}
    unused = ModelConfig(factory="tests.trainer.modules:build", args=args)
    changes = {"max_steps": 3, "model": unused, "accelerate.find_unused_parameters": stated}
    config = config_of(dataset, tmp_path / "run", changes)
    run(config, ranks=2)
    assert len(losses_in(config.output)) == 3


def test_the_seed_determines_the_run(dataset: Path, tmp_path: Path) -> None:
    found = []
    for name, seed in itertools.product("ab", (0, 1)):
        config = trained(dataset, tmp_path / f"{name}{seed}", {"max_steps": 3, "seed": seed})
        found.append(losses_in(config.output))
    assert found[0] == found[2] and found[1] == found[3] and found[0] != found[1]
