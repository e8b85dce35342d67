"""Tests that training with sharded weights equals training with whole weights on each rank: real processes, on CPUs."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.processes import run_command
from tests.trainer.runs import losses_in, metrics_in

HERE = Path(__file__).parent
SETUPS = HERE.parents[1] / "configs" / "accelerate"
# Runs take seconds on an idle machine, but DeepSpeed compiles its optimizer on first use.
TIMEOUT_SECONDS = 600
pytestmark = pytest.mark.timeout(1800)

Launch = Callable[..., str]


def launched(setup: str, output: Path, num_steps: int, *fields: str, ranks: int = 2, **environment: str) -> str:
    """Train up to a step; return the exit code and the standard error, separated by a line break."""
    done = run_command(
        [
            *(sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(SETUPS / f"{setup}.yaml")),
            *("--num_processes", str(ranks), "--main_process_port", "0", "--mixed_precision", "no"),
            *(str(HERE / "scaled.py"), str(output), str(num_steps), *fields),
        ],
        check=False,
        timeout=TIMEOUT_SECONDS,
        cwd=HERE.parents[1],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )
    return f"{done.returncode}\n{done.stderr}"


def run(setup: str, output: Path, num_steps: int, *fields: str, **options: Any) -> None:
    said = launched(setup, output, num_steps, *fields, **options)
    # Error lines first: they include that of the rank that failed first.
    assert said.startswith("0\n"), "\n".join([line for line in said.splitlines() if "Error" in line] + [said[:6000]])


def deepspeed() -> dict[str, str]:
    """Return the environment for DeepSpeed, or skip the test if DeepSpeed or g++ is missing."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs deepspeed; run `make zero`")
    if shutil.which("g++") is None:
        pytest.skip("needs g++, with which deepspeed compiles its optimizer")
    return {"DS_ACCELERATOR": "cpu"}


def weights(output: Path) -> dict[str, Tensor]:
    return load_file(output / "epoch-0.safetensors")


def assert_same_run(found: Path, expected: Path) -> None:
    """Assert equal metrics and weights, up to the order of float additions."""
    for mine, other in zip(metrics_in(found), metrics_in(expected), strict=True):
        for name in {"step", "loss", "eval_loss", "lr", "grad_norm", "samples", "tokens"} & other.keys():
            assert mine[name] == pytest.approx(other[name], rel=1e-5), (mine["step"], name)
    mine, other = weights(found), weights(expected)
    assert mine.keys() == other.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=2e-6)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with two batches each, by two ranks that both hold all weights."""
    output = tmp_path_factory.mktemp("whole") / "run"
    run("cpu_2ranks", output, 4)
    return output


def test_fsdp_trains_saves_and_resumes_as_ddp_does(tmp_path: Path, whole: Path) -> None:
    """FSDP matches DDP, and the config's number of batches per step overrides the launcher's."""
    run("fsdp", tmp_path / "run", 2)
    run("fsdp", tmp_path / "run", 4, "eval.sample_steps=4", ACCELERATE_GRADIENT_ACCUMULATION_STEPS="3")
    assert_same_run(tmp_path / "run", whole)
    assert (tmp_path / "run" / "samples" / "step-4.mp4").is_file()


def test_samples_that_fail_on_one_rank_of_fsdp_end_the_run_on_all(tmp_path: Path) -> None:
    """All ranks end; otherwise, the other rank would wait for this rank's weights until its timeout."""
    said = launched(
        "fsdp", tmp_path / "run", 2, "model.factory=tests.trainer.modules:fails_on_rank_1", "eval.sample_steps=1"
    )
    assert not said.startswith("0\n")
    assert (
        "StreamvidError: no samples were generated at step 1: RuntimeError: out of memory. With sharded weights" in said
    )


@pytest.mark.slow
def test_fsdp_keeps_no_moving_average_and_is_refused_without_accelerators(tmp_path: Path) -> None:
    said = launched("fsdp", tmp_path / "run", 1, "optimizer.ema_decay=0.9", ranks=1)
    assert "ConfigError: optimizer.ema_decay=0.9 cannot be combined with sharded weights" in said
    said = launched("fsdp", tmp_path / "run", 1, ranks=1, LEAVE_FSDP="1")
    assert "ConfigError: the launcher requests FSDP, but accelerate selected" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("setup", ["zero2", "zero3", "zero3_cpu_offload"])
def test_zero_trains_saves_and_resumes_as_ddp_does(tmp_path: Path, whole: Path, setup: str) -> None:
    """ZeRO matches DDP, although DeepSpeed recomputes the blocks under ZeRO, and torch under DDP."""
    run(setup, tmp_path / "run", 2, **deepspeed())
    run(setup, tmp_path / "run", 4, **deepspeed())
    assert_same_run(tmp_path / "run", whole)
    if setup == "zero2":  # its state stores weights by name, without the frozen ones
        state = tmp_path / "run" / "state" / "step-4" / "pytorch_model" / "mp_rank_00_model_states.pt"
        kept = torch.load(state, weights_only=False)["module"]  # our own file, so unpickling is safe
        assert {name.removeprefix("model.") for name in kept} == weights(tmp_path / "run").keys()


@pytest.mark.slow
@pytest.mark.parametrize("setup", ["zero2", "zero3"])
def test_zero_uses_the_learning_rate_of_the_current_step(tmp_path: Path, setup: str) -> None:
    """DeepSpeed steps during backward, so with one batch per step the learning rate must be set before it."""
    run("cpu_2ranks", tmp_path / "whole", 4, "data.accumulate=1", "checkpoints.steps=100")
    run(setup, tmp_path / "run", 4, "data.accumulate=1", "checkpoints.steps=100", **deepspeed())
    assert losses_in(tmp_path / "run") == pytest.approx(losses_in(tmp_path / "whole"), rel=1e-5)


@pytest.mark.slow
def test_bf16_is_autocast_under_zero_as_under_ddp(tmp_path: Path) -> None:
    for setup, environment in {"cpu_2ranks": {}, "zero3": deepspeed()}.items():
        run(setup, tmp_path / setup, 4, "accelerate.mixed_precision=bf16", **environment)
    assert losses_in(tmp_path / "zero3") == pytest.approx(losses_in(tmp_path / "cpu_2ranks"), rel=1e-3)
    assert {tensor.dtype for tensor in weights(tmp_path / "zero3").values()} == {torch.float32}


@pytest.mark.slow
def test_zero_3_keeps_no_moving_average_and_its_json_may_not_contradict_the_config(tmp_path: Path) -> None:
    said = launched("zero3", tmp_path / "run", 1, "optimizer.ema_decay=0.9", **deepspeed())
    assert "ConfigError: optimizer.ema_decay=0.9 cannot be combined with sharded weights" in said
    told = json.loads((SETUPS / "ds_zero3.json").read_text()) | {"gradient_accumulation_steps": 3}
    (tmp_path / "ds.json").write_text(json.dumps(told))
    environment = deepspeed() | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(tmp_path / "ds.json")}
    setup = (SETUPS / "zero3.yaml").read_text().replace("configs/accelerate/ds_zero3.json", str(tmp_path / "ds.json"))
    (tmp_path / "zero3.yaml").write_text(setup)
    said = launched(str(tmp_path / "zero3"), tmp_path / "run", 1, **environment)
    assert "gradient_accumulation_steps in DeepSpeed's JSON is 3, but data.accumulate is 2" in said


@pytest.mark.slow
def test_a_zero_state_is_not_resumed_with_fewer_ranks(tmp_path: Path) -> None:
    run("zero3", tmp_path / "run", 2, **deepspeed())
    said = launched("zero3", tmp_path / "run", 4, ranks=1, **deepspeed())
    assert not said.startswith("0\n")
    assert "StateError: cannot read checkpoint" in said
