from __future__ import annotations

import json
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from streamvid.config import load_config
from streamvid.errors import ConfigError, StateError, StreamvidError
from streamvid.loader.batch.batch import Batch
from streamvid.modules.config import ModelConfig
from streamvid.trainer import TrainConfig, train
from streamvid.trainer.config import EvalConfig, OptimizerConfig
from tests.processes import run_command
from tests.trainer.configs import combined, train_config
from tests.trainer.modules import build
from tests.trainer.runs import losses_in, metrics_in
from tests.trainer.stand_in import StandInLoader, read_clip_frames

TINY = ModelConfig(factory="tests.trainer.modules:build", args={"dim": 16, "dropout": 0.1})


@pytest.fixture(scope="module")
def frames() -> Tensor:
    return read_clip_frames(60, 32, 32)


def config_of(output: Path, changes: Mapping[str, Any] | None = None) -> TrainConfig:
    usual = {
        "max_steps": 12,
        "model": TINY,
        "eval": EvalConfig(steps=4),
        "checkpoints.steps": 5,
        "logging.steps": 1,
        "optimizer": OptimizerConfig(lr=1e-3, ema_decay=0.9),
    }
    return train_config("in memory", output, combined(usual, changes))


class BreakingLoader(StandInLoader):
    """A loader that calls `act` before it delivers the batch after `num_batches`."""

    def __init__(self, frames: Tensor, num_batches: int, act: Any) -> None:
        super().__init__(frames)
        self.num_batches, self.act = num_batches, act

    def __iter__(self) -> Iterator[Batch]:
        for batch in super().__iter__():
            if len(self.handed_out) == self.num_batches + 1:
                self.act()
            yield batch


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_held_out_loss_falls_on_real_pixels(tmp_path: Path, frames: Tensor, seed: int) -> None:
    model = ModelConfig(factory="tests.trainer.modules:build", args={"dim": 64})
    optimizer = OptimizerConfig(lr=0.005, warmup_steps=10, schedule="cosine")
    lengths = {"seed": seed, "max_steps": 160, "checkpoints.steps": 200}
    config = config_of(tmp_path, {**lengths, "model": model, "optimizer": optimizer})
    # The clip's last frames are used only for evaluation.
    train(config, StandInLoader(frames[:44], 4, seed=seed), StandInLoader(frames[48:], 4, seed=seed))
    held_out = [line["eval_loss"] for line in metrics_in(tmp_path) if "eval_loss" in line]
    assert len(held_out) == 41
    first, last = sum(held_out[:5]) / 5, sum(held_out[-10:]) / 10
    assert last < 0.8 * first


def test_metrics_have_one_line_per_step_with_every_field(tmp_path: Path, frames: Tensor) -> None:
    train(config_of(tmp_path), StandInLoader(frames), StandInLoader(frames, seed=1))
    lines = metrics_in(tmp_path)
    held_out = {"eval_loss", "eval_loss_of_bucket", "eval_late"}
    assert lines[0].keys() == {"step", *held_out}
    assert [line["step"] for line in lines] == list(range(13))
    for line in lines[1:]:
        fields = "step loss late lr grad_norm samples tokens loss_of_bucket seconds step_seconds samples_per_second"
        data = "tokens_per_second data_wait_seconds data_wait_share data_substituted"
        assert line.keys() - held_out == {*fields.split(), *data.split()}
        assert line["samples"] == 2 * line["step"]
        assert 0 <= line["data_wait_seconds"] <= line["seconds"]
        assert list(line["loss_of_bucket"].values()) == [pytest.approx(line["loss"])]
    assert {name for line in lines[1:] for name in line["loss_of_bucket"]} == {"32x32-4f", "16x32-1f"}
    assert [line["step"] for line in lines if "eval_loss" in line] == [0, 4, 8, 12]


def test_lines_are_written_at_the_configured_interval(tmp_path: Path, frames: Tensor) -> None:
    train(config_of(tmp_path, {"logging.steps": 5, "eval": EvalConfig(num_batches=0)}), StandInLoader(frames))
    assert [line["step"] for line in metrics_in(tmp_path)] == [5, 10, 12]


@pytest.mark.parametrize("first_steps", [5, 7, 8])
def test_a_resumed_run_is_equal_to_one_that_never_stopped(tmp_path: Path, frames: Tensor, first_steps: int) -> None:
    """PLAN-5, in the trainer. Epochs have 8 steps, so the stops are before, between and at the ends of epochs."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    once = StandInLoader(frames)
    uninterrupted = train(config_of(whole), once, StandInLoader(frames, seed=1))
    first, second = StandInLoader(frames), StandInLoader(frames)
    train(config_of(parts, {"max_steps": first_steps}), first, StandInLoader(frames, seed=1))
    resumed = train(config_of(parts), second, StandInLoader(frames, seed=1))
    assert losses_in(parts) == losses_in(whole)
    assert (resumed.eval_loss, resumed.num_samples) == (uninterrupted.eval_loss, uninterrupted.num_samples)
    assert first.handed_out + second.handed_out == once.handed_out
    for name in ("step-12.safetensors", "step-12.ema.safetensors"):
        assert (whole / name).read_bytes() == (parts / name).read_bytes()


def test_a_crashed_run_resumes_from_its_checkpoint(tmp_path: Path, frames: Tensor) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(config_of(whole), StandInLoader(frames), StandInLoader(frames, seed=1))

    def crash() -> None:
        raise RuntimeError("the loader broke")

    with pytest.raises(RuntimeError, match="the loader broke"):
        train(config_of(parts), BreakingLoader(frames, 7, crash), StandInLoader(frames, seed=1))
    assert max(losses_in(parts)) == 7
    train(config_of(parts), StandInLoader(frames), StandInLoader(frames, seed=1))
    assert [line["step"] for line in metrics_in(parts)] == list(range(13))
    assert losses_in(parts) == losses_in(whole)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_with_a_checkpoint(tmp_path: Path, frames: Tensor, number: signal.Signals) -> None:
    """STOP-1, in the trainer."""
    before = signal.getsignal(number)
    loader = BreakingLoader(frames, 2, lambda: os.kill(os.getpid(), number))
    result = train(config_of(tmp_path), loader, StandInLoader(frames))
    assert (result.step, result.num_steps, result.stopped_by) == (3, 12, number)
    assert signal.getsignal(number) is before
    second = train(config_of(tmp_path), StandInLoader(frames), StandInLoader(frames))
    assert (second.step, second.stopped_by) == (12, None)
    assert [line["step"] for line in metrics_in(tmp_path)] == list(range(13))


def test_a_complete_run_has_nothing_to_do(tmp_path: Path, frames: Tensor) -> None:
    train(config_of(tmp_path), StandInLoader(frames))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    loader = StandInLoader(frames)
    result = train(config_of(tmp_path), loader)
    assert (result.step, loader.handed_out) == (12, [])
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_epochs_are_counted_in_the_loaders_steps(tmp_path: Path, frames: Tensor) -> None:
    first = train(config_of(tmp_path, {"max_steps": None, "num_epochs": 1}), StandInLoader(frames))
    assert (first.step, first.num_steps) == (8, 8)
    second = train(config_of(tmp_path, {"max_steps": None, "num_epochs": 3}), StandInLoader(frames))
    assert (second.step, second.num_steps) == (24, 24)
    # Half the steps per epoch, as with twice the ranks: only the remaining epochs are counted in the new steps.
    third = train(config_of(tmp_path, {"max_steps": None, "num_epochs": 5}), StandInLoader(frames, steps=4))
    assert third.num_steps == 24 + 2 * 4


def test_only_the_newest_complete_checkpoints_are_kept(tmp_path: Path, frames: Tensor) -> None:
    """SHARD-2, for checkpoints: incomplete files do not remain."""
    (tmp_path / "state" / ".step-6.tmp" / "left").mkdir(parents=True)
    config = config_of(tmp_path, {"checkpoints.steps": 2, "checkpoints.keep": 2, "checkpoints.keep_weights": 2})
    train(config, StandInLoader(frames))
    weights = {f"step-{step}{kind}.safetensors" for step in (10, 12) for kind in (".ema", "")}
    others = {"config.yaml", "metrics.jsonl", "state", "versions.json"}
    assert {path.name for path in tmp_path.iterdir()} == weights | others
    assert sorted(path.name for path in (tmp_path / "state").iterdir()) == ["step-10", "step-12"]
    state = json.loads((tmp_path / "state" / "step-10" / "loader.json").read_text())
    assert state == {"epoch": 1, "position": 2}


def test_only_trained_weights_are_saved_and_they_load_strictly(tmp_path: Path, frames: Tensor) -> None:
    train(config_of(tmp_path, {"max_steps": 3, "checkpoints.remove_prefix": "dit."}), StandInLoader(frames))
    state = load_file(tmp_path / "step-3.safetensors")
    module = build(dim=16)
    assert module.dit.load_state_dict(state, strict=True)
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert not any("vae" in name for name in state)
    saved = tmp_path / "state" / "step-3" / "model.safetensors"
    assert not any("vae" in name for name in load_file(saved)), "frozen weights are not part of a checkpoint"
    assert load_config(TrainConfig, tmp_path / "config.yaml").max_steps == 3
    assert json.loads((tmp_path / "versions.json").read_text())["torch"] == torch.__version__


def test_resume_refuses_to_spoil_a_run(tmp_path: Path, frames: Tensor) -> None:
    train(config_of(tmp_path), StandInLoader(frames))
    with pytest.raises(ConfigError, match="already contains a run, but checkpoints.resume is null"):
        train(config_of(tmp_path, {"checkpoints.resume": None}), StandInLoader(frames))
    with pytest.raises(ConfigError, match="which is not a checkpoint"):
        train(config_of(tmp_path, {"checkpoints.resume": tmp_path / "state"}), StandInLoader(frames))
    with pytest.raises(ConfigError, match=r"contains newer checkpoints \(step-10, step-12\)"):
        train(config_of(tmp_path, {"checkpoints.resume": tmp_path / "state" / "step-5"}), StandInLoader(frames))
    with pytest.raises(StateError, match=r"model\.args\.dim is 48, but 16 in the checkpoint"):
        other = ModelConfig(factory="tests.trainer.modules:build", args={"dim": 48, "dropout": 0.1})
        train(config_of(tmp_path, {"model": other}), StandInLoader(frames))
    with pytest.raises(StateError, match=r"model\.args\.dropout is not set, but 0\.1 in the checkpoint"):
        fewer = ModelConfig(factory="tests.trainer.modules:build", args={"dim": 16})
        train(config_of(tmp_path, {"model": fewer}), StandInLoader(frames))
    with pytest.raises(StateError, match=r"model\.args\.unused is False, but not set in the checkpoint"):
        more = ModelConfig(factory="tests.trainer.modules:build", args={"dim": 16, "dropout": 0.1, "unused": False})
        train(config_of(tmp_path, {"model": more}), StandInLoader(frames))
    (tmp_path / "state" / "step-12" / "loader.json").write_text("torn")
    with pytest.raises(StateError, match=r"cannot read .*loader\.json"):
        train(config_of(tmp_path), StandInLoader(frames))


@pytest.mark.parametrize("damage", [lambda data: data[:-100], lambda data: b"", lambda data: pickle.dumps({"x": 1})])
def test_damaged_random_states_end_a_resume(tmp_path: Path, frames: Tensor, damage: Callable[[bytes], bytes]) -> None:
    """accelerate would only log the damage, and the run would draw other dropout and noise."""
    train(config_of(tmp_path, {"max_steps": 3}), StandInLoader(frames))
    (path,) = (tmp_path / "state" / "step-3").glob("random_states_0.pkl")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(StateError, match="cannot read checkpoint .*step-3: .*remove the folder .*step-3 to resume"):
        train(config_of(tmp_path), StandInLoader(frames))


def test_resume_from_a_checkpoint_of_another_folder(tmp_path: Path, frames: Tensor) -> None:
    whole, branch = tmp_path / "whole", tmp_path / "branch"
    train(config_of(whole), StandInLoader(frames))
    train(config_of(branch, {"checkpoints.resume": whole / "state" / "step-5"}), StandInLoader(frames))
    assert losses_in(branch) == {step: loss for step, loss in losses_in(whole).items() if step > 5}


def test_a_nan_or_infinite_loss_ends_the_run(tmp_path: Path, frames: Tensor) -> None:
    config = config_of(tmp_path, {"optimizer": OptimizerConfig(lr=1e30, grad_clip=None), "checkpoints.steps": 1})
    with pytest.raises(StreamvidError, match=r"loss is (nan|inf) at step [0-9]+; lower optimizer.lr"):
        train(config, StandInLoader(frames))
    assert all(loss == loss for loss in losses_in(tmp_path).values())


def test_two_ranks_stop_together_and_resume(tmp_path: Path) -> None:
    """PLAN-2, STOP-1: in real processes, a signal to one rank ends both after the same step."""
    folder = Path(__file__).parent
    launcher = ["-m", "accelerate.commands.launch", "--config_file"]
    setup = str(folder.parents[1] / "configs" / "accelerate" / "cpu_2ranks.yaml")

    def launch(num_steps: int, stop_at: int) -> list[dict[str, Any]]:
        command = [sys.executable, *launcher, setup, str(folder / "launched.py"), str(tmp_path)]
        run_command([*command, str(num_steps), str(stop_at)])
        return [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]

    first = launch(6, 3)
    assert [rank["ranks"] for rank in first] == [2, 2]
    assert [(rank["step"], rank["stopped_by"]) for rank in first] == [(3, signal.SIGTERM)] * 2
    second = launch(6, -1)
    assert [(rank["step"], rank["stopped_by"], rank["num_samples"]) for rank in second] == [(6, None, 24)] * 2
    assert [len(rank["keys"]) for rank in second] == [3, 3]
    assert [line["step"] for line in metrics_in(tmp_path)] == list(range(7))
    assert second[0]["eval_loss"] == second[1]["eval_loss"]
