"""Tests of difficult cases in users' modules, settings and signals that a run must tolerate or refuse early."""

from __future__ import annotations

import os
import re
import runpy
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from streamvid.config import load_config
from streamvid.errors import ConfigError, StateError, StreamvidError
from streamvid.modules.config import LoraConfig, ModelConfig
from streamvid.shipped import shipped
from streamvid.trainer import TrainConfig, train
from streamvid.trainer.config import CheckpointConfig, EvalConfig, OptimizerConfig
from streamvid.trainer.encode import encode
from streamvid.trainer.metrics import BucketLoss, RankReport, merge_reports
from streamvid.trainer.preflight.check import check
from streamvid.trainer.preflight.profile import profile
from tests.loader.conftest import SMALL, build_dataset
from tests.trainer.configs import changed
from tests.trainer.modules import UserTraining
from tests.trainer.runs import config_of, losses_in, metrics_in, trained, weights_in

NAN = float("nan")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_dataset(tmp_path_factory.mktemp("hard") / "ds", {SMALL: [4, 3]})


class Telling(UserTraining):
    """A module that returns `tell(module, loss)` as its loss."""

    def __init__(self, tell: Any) -> None:
        super().__init__()
        self.tell, self.steps = tell, 0

    def forward(self, batch: Any) -> Any:
        self.steps += self.training
        return self.tell(self, super().forward(batch)["loss"])


class Tupled(UserTraining):
    def encode(self, batch: Any) -> dict[str, Any]:
        found = super().encode(batch)
        return found | {"words": tuple(found["words"])}


def metrics_of(
    dataset: Path, output: Path, tell: Any, changes: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Train a module with this loss and return the lines of its metrics."""
    train(config_of(dataset, output, {"max_steps": 2, **(changes or {})}), module=Telling(tell))
    return metrics_in(output)


def test_metrics_of_a_module_may_be_floats_or_nan(dataset: Path, tmp_path: Path) -> None:
    """A metric may be a float or NaN, such as a mean over no values; neither ends the run."""
    lines = metrics_of(
        dataset, tmp_path / "run", lambda _, loss: {"loss": loss, "half": 0.5, "none": torch.tensor(NAN)}
    )
    assert [(line["half"], line["none"]) for line in lines if "loss" in line] == [(0.5, None)] * 2


def test_a_metric_of_a_module_does_not_replace_a_built_in_one(dataset: Path, tmp_path: Path) -> None:
    lines = metrics_of(dataset, tmp_path / "run", lambda _, loss: {"loss": loss, "step": loss.mean()})
    assert [line["step"] for line in lines if "loss" in line] == [1, 2]


def test_a_metric_that_some_ranks_lack_is_the_mean_over_the_others() -> None:
    spent = {"seconds": 1.0, "data_wait_seconds": 0.0, "data_wait_share": 0.0}
    batches = [BucketLoss("a", 1.0, 1, 1)]
    merged = merge_reports([RankReport(1.0, figures, batches, spent, 1, 1) for figures in ({}, {"x": 2.0}, {"x": 4.0})])
    assert merged["x"] == 3.0


@pytest.mark.parametrize(
    "tell",
    [
        lambda _, loss: None,
        lambda _, loss: "low",
        lambda _, loss: (loss, {}),
        lambda _, loss: loss[:, None].expand(-1, 7),
        lambda _, loss: loss[:, None].expand(-1, len(loss)),
        lambda _, loss: torch.cat([loss, loss]),
    ],
)
def test_invalid_losses_are_refused(dataset: Path, tmp_path: Path, tell: Any) -> None:
    with pytest.raises(ConfigError, match="the loss from Telling is not valid"):
        metrics_of(dataset, tmp_path / "run", tell)


def test_invalid_weights_never_replace_a_checkpoint(dataset: Path, tmp_path: Path) -> None:
    """Invalid weights are never saved, even if they appear between two log lines: the last valid checkpoint stays."""

    def tell(module: Telling, loss: Tensor) -> Tensor:
        return loss * (NAN if module.steps >= 3 else 1.0)

    with pytest.raises(StreamvidError, match=r"lower optimizer\.lr"):
        changes = {"max_steps": 8, "checkpoints": CheckpointConfig(steps=1, keep=1), "logging.steps": 8}
        metrics_of(dataset, tmp_path / "run", tell, changes)
    assert [path.name for path in (tmp_path / "run" / "state").iterdir()] == ["step-2"]
    saved = [load_file(path) for path in (tmp_path / "run").glob("*.safetensors")]
    assert len(saved) == 2
    assert all(tensor.isfinite().all() for one in saved for tensor in one.values())


def test_noise_of_an_evaluation_is_the_same_each_time(dataset: Path, tmp_path: Path) -> None:
    """This also holds for a module that draws noise from the global generator instead of the samples' seeds."""
    changes = {
        "eval": EvalConfig(steps=1, num_batches=2, split="train"),
        "optimizer": OptimizerConfig(lr=1e-30, weight_decay=0.0),
    }
    lines = metrics_of(dataset, tmp_path / "run", lambda _, loss: loss + torch.randn(len(loss)), changes)
    assert len({line["eval_loss"] for line in lines}) == 1


def test_held_out_clips_are_not_repeated_to_fill_a_batch(dataset: Path, tmp_path: Path) -> None:
    sizes: list[int] = []

    class Sizing(UserTraining):
        def validate(self, batch: Any) -> Any:
            sizes.append(len(batch.sample_keys))
            return super().forward(batch)

    evaluation = EvalConfig(steps=1, num_batches=3, split="train")
    train(
        config_of(
            dataset,
            tmp_path / "run",
            {"max_steps": 1, "data.batch_size": 3, "eval": evaluation},
        ),
        module=Sizing(),
    )
    assert sizes == [3, 3, 1] * 2


def interrupting() -> UserTraining:
    os.kill(os.getpid(), signal.SIGINT)
    return UserTraining()


def terminating() -> UserTraining:
    os.kill(os.getpid(), signal.SIGTERM)
    return UserTraining()


def test_a_signal_before_the_first_step_ends_the_run_without_a_checkpoint(dataset: Path, tmp_path: Path) -> None:
    """STOP-1: signals work before the first step, because a large model takes minutes to load."""
    model = ModelConfig(factory="tests.trainer.test_hard:interrupting")
    with pytest.raises(KeyboardInterrupt):
        trained(dataset, tmp_path / "run", {"model": model})
    assert not (tmp_path / "run").exists()
    model = ModelConfig(factory="tests.trainer.test_hard:terminating")
    evaluation = EvalConfig(steps=1, num_batches=1, split="train")
    done = train(config_of(dataset, tmp_path / "run", {"model": model, "eval": evaluation}))
    assert (done.step, done.stopped_by, done.eval_loss) == (0, signal.SIGTERM, None)
    assert not (tmp_path / "run" / "state").exists()


def test_an_output_that_cannot_be_written_is_refused_before_a_model_is_built(dataset: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    model = ModelConfig(factory="tests.trainer.modules:none")
    for output, said in (
        (tmp_path / "file", "file is not a folder; choose another folder"),
        (tmp_path / "file" / "run", "file is not a folder; choose another folder"),
        (dataset, "it contains a dataset or features; choose another folder"),
    ):
        config = config_of(dataset, output, {"model": model})
        for command in (train, check, profile):
            with pytest.raises(ConfigError, match=said):
                command(config)


def test_the_newest_weights_are_kept(dataset: Path, tmp_path: Path) -> None:
    """Weights of an epoch replace older weights of a step, although the number of the epoch is lower."""
    output = tmp_path / "run"
    trained(dataset, output, {"max_steps": 2, "checkpoints.keep_weights": 1})
    epochs = {"max_steps": None, "num_epochs": 2, "checkpoints": CheckpointConfig(keep_weights=1)}
    trained(dataset, output, epochs)
    assert weights_in(output) == ["epoch-1.safetensors"]


def test_a_resumed_optimizer_follows_the_config(dataset: Path, tmp_path: Path) -> None:
    """A resumed run uses the optimizer settings of its config, so the saved config describes the weights."""
    ours = tmp_path / "run"
    trained(dataset, ours, {"max_steps": 1, "optimizer": OptimizerConfig(weight_decay=0.0)})
    changed = OptimizerConfig(weight_decay=0.5, betas=(0.5, 0.6), args={"eps": 1e-6})
    trained(dataset, ours, {"max_steps": 2, "optimizer": changed})
    group = torch.load(ours / "state" / "step-2" / "optimizer.bin")["param_groups"][0]
    assert (group["weight_decay"], tuple(group["betas"]), group["eps"]) == (0.5, (0.5, 0.6), 1e-6)
    with pytest.raises(StateError, match=r"optimizer\.factory is torch\.optim:SGD, but"):
        trained(dataset, ours, {"optimizer": OptimizerConfig(factory="torch.optim:SGD", betas=None)})


def test_leftovers_of_a_killed_save_are_removed(dataset: Path, tmp_path: Path) -> None:
    left = tmp_path / "run" / "state" / ".step-7.tmp"
    left.mkdir(parents=True)
    trained(dataset, tmp_path / "run", {"max_steps": 1})
    assert [path.name for path in left.parent.iterdir()] == ["step-1"]


def test_a_list_of_tensors_may_be_a_tuple(dataset: Path, tmp_path: Path) -> None:
    """`encode` may return a tuple of tensors in place of a list, as for features."""
    torch.manual_seed(0)
    train(config_of(dataset, tmp_path / "tuple", {"max_steps": 2}), module=Tupled())
    torch.manual_seed(0)
    train(config_of(dataset, tmp_path / "list", {"max_steps": 2}), module=UserTraining())
    assert losses_in(tmp_path / "tuple") == losses_in(tmp_path / "list")


def test_files_of_adapters_are_the_same_bytes_each_time(dataset: Path, tmp_path: Path) -> None:
    """Files are reproducible although safetensors writes the entries of their header in any order."""
    adapters = LoraConfig(base_model="dit", rank=2)
    for number in range(4):
        trained(dataset, tmp_path / str(number), {"max_steps": 1, "model.lora": adapters})
    assert len({(tmp_path / str(number) / "step-1.safetensors").read_bytes() for number in range(4)}) == 1
    with safe_open(tmp_path / "0" / "step-1.safetensors", "pt") as file:
        assert file.metadata()["rank"] == "2"
    assert all(tensor.isfinite().all() for tensor in load_file(tmp_path / "0" / "step-1.safetensors").values())


def test_a_new_projects_encoders_are_the_same_in_each_task() -> None:
    """Otherwise, `sft:data_process` would store other features than those that `sft` trains on."""
    build = runpy.run_path(str(shipped("configs/project/training.py")))["build"]
    tables = []
    for task in ("sft", "sft:data_process"):
        torch.manual_seed(0)
        tables.append(build(task).text_encoder.table.weight)
    assert torch.equal(*tables)


def test_the_commented_options_of_a_new_project_exist(dataset: Path, tmp_path: Path) -> None:
    """Every option in the template that a user may uncomment is valid."""
    file, section, overrides = shipped("configs/project/config.yaml"), "", []
    for line in file.read_text().splitlines():
        section = line.partition(":")[0] if line[:1].isalpha() else section
        if found := re.fullmatch(r"  # (\w+): (.+?)(  .*)?", line):
            overrides.append(f"{section}.{found[1]}={found[2]}")
    assert {line.partition("=")[0] for line in overrides} >= {"data.loader", "data.dataset", "model.lora"}
    data = load_config(TrainConfig, file, overrides).data
    assert isinstance(data.dataset, dict)
    source = {**data.dataset, "url": str(dataset)}
    assert train(config_of(source, tmp_path / "run", {"max_steps": 1, "data.loader": data.loader})).step == 1


def test_evaluation_can_be_switched_off_and_samples_stay(dataset: Path, tmp_path: Path) -> None:
    quiet = EvalConfig(steps=None, sample_steps=2, num_batches=1, split="train")
    config = trained(dataset, tmp_path / "run", {"max_steps": 2, "eval": quiet})
    assert not any("eval_loss" in line for line in metrics_in(config.output))
    assert (config.output / "samples" / "step-2.png").exists()


def test_unknown_and_reserved_names_are_reported(dataset: Path, tmp_path: Path) -> None:
    class Typo(UserTraining):
        encoders = ("vea",)

    class Taken(UserTraining):
        def encode(self, batch: Any) -> dict[str, Any]:
            return {"text": torch.zeros(len(batch.text), 1)}

    names = vars(sys.modules[__name__])
    names["Typo"], names["Taken"] = Typo, Taken
    for name, message in (
        ("Typo", r"Typo.encoders contains 'vea', but Typo has no child 'vea'; allowed: dit, vae"),
        ("Taken", "encode returned 'text'"),
    ):
        model = ModelConfig(factory=f"{__name__}:{name}")
        with pytest.raises(ConfigError, match=message):
            trained(dataset, tmp_path / name, {"model": model})
    with pytest.raises(ConfigError, match="trackers contains 'clearml', which is unknown or not installed"):
        trained(dataset, tmp_path / "tracker", {"logging.trackers": ("clearml",)})


class Precise(UserTraining):
    """A module that asserts the dtypes in a step."""

    def encode(self, batch: Any) -> dict[str, Any]:
        assert not torch.is_autocast_enabled("cpu")
        return super().encode(batch)

    def forward(self, batch: Any) -> Any:
        assert batch.latents.dtype == torch.float32
        wanted = torch.bfloat16 if torch.is_autocast_enabled("cpu") else torch.float32
        assert self.dit.text(batch.words).dtype == wanted
        return super().forward(batch) | {"is_half": torch.tensor(float(wanted == torch.bfloat16))}


def test_encoders_compute_in_their_own_dtype_and_runs_of_one_process_differ(dataset: Path, tmp_path: Path) -> None:
    for precision in ("bf16", "no", "bf16"):
        model = ModelConfig(factory=f"{__name__}:Precise")
        output = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        changes = {"max_steps": 1, "model": model, "accelerate.mixed_precision": precision}
        config = trained(dataset, output, changes)
        assert metrics_in(config.output)[-1]["is_half"] == (precision == "bf16")


class Seeded(UserTraining):
    """A module that builds its encoder for every task, with weights that depend on a class attribute."""

    number = 0

    def __init__(self) -> None:
        super().__init__()
        torch.nn.init.constant_(self.vae.weight, 0.01 + self.number)


def test_a_sidecar_of_other_weights_is_refused_where_training_builds_the_encoders(
    dataset: Path, tmp_path: Path
) -> None:
    model = ModelConfig(factory=f"{__name__}:Seeded")
    config = config_of(
        dataset, tmp_path / "run", {"max_steps": 1, "model": model, "data.features.url": str(tmp_path / "latents")}
    )
    encode(changed(config, {"task": "sft:data_process"}))
    fresh = changed(config, {"task": "sft:train"})
    train(fresh)
    Seeded.number = 1
    try:
        with pytest.raises(
            ConfigError, match=r"latents are stale: encoders_sha256.vae is .* in the features, but .* here"
        ):
            train(changed(fresh, {"output": tmp_path / "other"}))
    finally:
        Seeded.number = 0
