"""Tests of a run's outputs (weights, adapters, samples, metrics), and of the mistakes it refuses before it starts."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file

from streamvid.config import load_config
from streamvid.errors import ConfigError, StateError
from streamvid.modules.config import ActivationCheckpointingConfig, LoraConfig, ModelConfig
from streamvid.trainer import TrainConfig, train
from streamvid.trainer.config import CheckpointConfig, EvalConfig, LoggingConfig, OptimizerConfig
from tests.trainer.configs import changed
from tests.trainer.modules import FailingSamples, build
from tests.trainer.runs import config_of, losses_in, metrics_in, trained, weights_in

ROOT = Path(__file__).parents[2]
OURS = "tests.trainer.modules:build"


def digests(module: torch.nn.Module) -> dict[str, str]:
    return {
        name: hashlib.sha256(one.detach().numpy().tobytes()).hexdigest() for name, one in module.state_dict().items()
    }


def test_only_named_parameters_train_and_the_others_keep_their_bytes(dataset: Path, tmp_path: Path) -> None:
    """Row 21: dotted and indexed names select what trains; frozen parameters keep their bytes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = build()
    module.requires_grad_(False)
    for part in (module.dit.head, module.dit.blocks[1]):
        part.requires_grad_(True)
    before = digests(module)
    train(config_of(dataset, tmp_path / "run", {"max_steps": 4}), module=module)
    moved = {name for name, digest in digests(module).items() if digest != before[name]}
    assert moved == {"dit.head.weight", "dit.head.bias", "dit.blocks.1.0.weight", "dit.blocks.1.0.bias"}
    model = ModelConfig(factory=OURS, trainable=("dit.head", "dit.blocks.1"))
    trained(dataset, tmp_path / "named", {"max_steps": 4, "model": model})
    ours, theirs = (load_file(tmp_path / name / "step-4.safetensors") for name in ("named", "run"))
    assert ours.keys() == theirs.keys() == moved
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_full_training_and_adapters_are_saved_separately(dataset: Path, tmp_path: Path) -> None:
    """Rows 22, 28, 29: the adapters are a folder that peft loads, with rank and alpha; their base stays frozen."""
    adapted = LoraConfig(base_model="dit", target_modules="head,embed", rank=3, alpha=6.0, format="peft")
    model = ModelConfig(factory=OURS, args={"unused": True}, trainable=("spare", "vae.bias"), lora=adapted)
    config = config_of(dataset, tmp_path / "run", {"max_steps": 4, "model": model})
    with pytest.raises(ConfigError, match="encoder"):
        train(config)
    config = changed(config, {"model.trainable": ("spare",), "accelerate.find_unused_parameters": True})
    train(config)
    assert weights_in(config.output) == ["step-4.lora", "step-4.safetensors"]
    path = config.output / "step-4.lora" / "adapter_model.safetensors"
    adapters = load_file(path)
    keys = {f"base_model.model.{layer}.lora_{half}.weight" for layer in ("head", "embed") for half in "AB"}
    assert set(adapters) == keys
    with safe_open(path, "pt") as file:
        told = file.metadata()
    assert (told["rank"], float(told["alpha"]), told["base_model"]) == ("3", 6.0, "dit")
    assert adapters["base_model.model.head.lora_B.weight"].abs().sum() > 0
    theirs = PeftModel.from_pretrained(build().dit, str(path.parent))
    loaded = get_peft_model_state_dict(theirs)
    assert loaded.keys() == keys and all(torch.equal(loaded[name], adapters[name]) for name in keys)
    assert theirs.peft_config["default"].lora_alpha == 6.0
    still = {"max_steps": 1, "optimizer": OptimizerConfig(lr=1e-12, weight_decay=0.0)}
    lora = replace(adapted, checkpoint=path)
    model = ModelConfig(factory=OURS, trainable=(), lora=lora)
    again = trained(dataset, tmp_path / "again", {**still, "model": model})
    kept = load_file(again.output / "step-1" / path.name)
    assert all(torch.allclose(kept[name], adapters[name], atol=1e-9) for name in adapters)


def test_folders_of_adapters_are_replaced_and_removed_like_files(dataset: Path, tmp_path: Path) -> None:
    adapted = LoraConfig(base_model="dit", target_modules="head", rank=2, format="peft")
    changes = {
        "model": ModelConfig(factory=OURS, trainable=(), lora=adapted),
        "checkpoints": CheckpointConfig(steps=1, keep_weights=2),
        "optimizer": OptimizerConfig(ema_decay=0.5),
    }
    config = trained(dataset, tmp_path / "run", {**changes, "max_steps": 3})
    kept = ["step-2", "step-2.ema", "step-3", "step-3.ema"]
    assert weights_in(config.output) == kept
    shutil.rmtree(config.output / "state")  # the run starts over and saves under existing names
    train(config)
    assert weights_in(config.output) == kept
    assert not [path.name for path in config.output.iterdir() if path.name.startswith(".")]


def test_each_epoch_is_saved_by_default(dataset: Path, tmp_path: Path) -> None:
    """Row 26: without checkpoints.steps, each epoch leaves a weight file."""
    epochs = {"max_steps": None, "num_epochs": 2, "checkpoints": CheckpointConfig(keep=1)}
    config = config_of(dataset, tmp_path / "run", epochs)
    result = train(config)
    assert weights_in(config.output) == ["epoch-0.safetensors", "epoch-1.safetensors"]
    assert [path.name for path in (config.output / "state").iterdir()] == [f"step-{result.num_steps}"]
    assert len({path.stat().st_mode for path in config.output.iterdir() if path.is_file()}) == 1  # equal permissions
    assert train(config).step == result.num_steps


def test_the_last_step_is_saved_too(dataset: Path, tmp_path: Path) -> None:
    """Row 27: checkpoints.steps counts optimizer steps, not batches, and the last step is always saved."""
    config = trained(dataset, tmp_path / "run", {"max_steps": 5, "checkpoints.steps": 2, "data.accumulate": 2})
    assert weights_in(config.output) == [f"step-{n}.safetensors" for n in (2, 4, 5)]
    assert metrics_in(config.output)[-1]["samples"] == 5 * 2 * 2


def test_samples_are_a_sheet_and_a_movie(dataset: Path, tmp_path: Path) -> None:
    config = trained(
        dataset,
        tmp_path / "run",
        {"max_steps": 2, "eval": EvalConfig(num_batches=1, split="train", sample_steps=2, steps=1)},
    )
    assert sorted(path.name for path in (config.output / "samples").iterdir()) == ["step-2.mp4", "step-2.png"]
    with (
        av.open(str(config.output / "samples" / "step-2.mp4")) as movie,
        av.open(str(config.output / "samples" / "step-2.png")) as sheet,
    ):
        frames = list(movie.decode(video=0))
        picture = next(sheet.decode(video=0))
    assert (len(frames), frames[0].height) in [(5, 64), (9, 96)]
    assert frames[0].width == 2 * (96 if len(frames) == 5 else 64)
    assert (picture.height, picture.width) == (2 * frames[0].height, min(8, len(frames)) * frames[0].width // 2)
    assert abs(int(frames[0].to_ndarray(format="rgb24").mean()) - 128) <= 2


def test_samples_that_fail_neither_end_the_run_nor_lose_its_step(
    dataset: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes = {"max_steps": 2, "checkpoints.steps": 1, "eval": EvalConfig(num_batches=1, split="train", sample_steps=1)}
    failed = config_of(dataset, tmp_path / "failed", changes)
    assert train(failed, module=FailingSamples(RuntimeError("out of memory"))).step == 2
    assert "no samples were generated at step 1: RuntimeError: out of memory; training continues" in caplog.text
    assert weights_in(failed.output) == ["step-1.safetensors", "step-2.safetensors"]
    refused = config_of(dataset, tmp_path / "refused", changes)
    with pytest.raises(ConfigError, match="no such input"):
        train(refused, module=FailingSamples(ConfigError("no such input")))
    assert weights_in(refused.output) == ["step-1.safetensors"]


def test_metrics_go_to_trackers_and_the_profiler_writes_its_traces(dataset: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    figures = LoggingConfig(steps=1, trackers=("tensorboard",), profile_steps=2)
    changes = {"max_steps": 5, "logging": figures, "eval": EvalConfig(steps=2, num_batches=1, split="train")}
    config = trained(dataset, tmp_path / "run", changes)
    events = EventAccumulator(str(config.output / "streamvid")).Reload()
    logged = {one.step: one.value for one in events.Scalars("loss")}
    assert logged == pytest.approx(losses_in(config.output))
    assert {"lr", "grad_norm", "data_wait_share", "samples_per_second", "eval_loss"} <= set(events.Tags()["scalars"])
    assert [path for path in (config.output / "profile").rglob("*") if path.is_file()]


def test_a_task_may_be_a_users_loss(dataset: Path, tmp_path: Path) -> None:
    """Row 25: a task may be a user's loss function; a mistyped task is an error."""
    own = trained(dataset, tmp_path / "own", {"max_steps": 2, "task": "tests.trainer.modules:distil"})
    usual = trained(dataset, tmp_path / "usual", {"max_steps": 2})
    assert losses_in(own.output)[1] != losses_in(usual.output)[1]
    for typo in ("stf", "sft:tarin"):
        with pytest.raises(ConfigError, match=f"task is '{typo}'; allowed: sft, sft:data_process, sft:train, or"):
            trained(dataset, tmp_path / "typo", {"task": typo})
    with pytest.raises(StateError, match="this run: optimizer.ema_decay is set, but null in the checkpoint"):
        train(changed(own, {"max_steps": 3, "optimizer": replace(own.optimizer, ema_decay=0.9)}))


def test_the_example_of_a_task_teaches_a_student(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "examples"))
    lengths = ("max_steps=20", "checkpoints.steps=20", "data.num_workers=0", "eval.num_batches=0")
    places = (f"data.dataset={dataset}", f"output={tmp_path / 'teacher'}")
    teacher = load_config(TrainConfig, ROOT / "configs/train/tiny.yaml", [*places, *lengths])
    train(teacher)
    args = {"teacher": str(teacher.output / "step-20.safetensors")}
    model = ModelConfig(factory="distillation:build", args=args, trainable=("student",))
    changes = {"task": "distillation:distil", "max_steps": 30, "optimizer.lr": 0.005, "model": model}
    config = trained(dataset, tmp_path / "run", changes)
    losses = list(losses_in(config.output).values())
    assert sum(losses[-6:]) < 0.7 * sum(losses[:6])
    assert all(name.startswith("student.") for name in load_file(config.output / "step-30.safetensors"))


def test_a_missing_input_is_named_before_the_first_step(dataset: Path, tmp_path: Path) -> None:
    """Row 17: unknown extra inputs are errors, unless they are marked as optional."""
    with pytest.raises(ConfigError, match=r"extra_inputs contains 'depth', which is neither .*; columns: .*score"):
        trained(dataset, tmp_path / "run", {"data.extra_inputs": ("score", "depth")})
    seen: list[Any] = []

    class Reads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def forward(self, batch: Any) -> torch.Tensor:
            seen.append(batch)
            return self.weight + 1

    changes = {"max_steps": 1, "data.extra_inputs": ("score", "place?", "depth?")}
    train(config_of(dataset, tmp_path / "there", changes), module=Reads())
    assert seen[0].score.shape == (2,) and seen[0].score.dtype == torch.float64
    assert "place" in seen[0] and "depth" not in seen[0]


def test_mistakes_in_the_data_are_reported_before_a_model_is_built(dataset: Path, tmp_path: Path) -> None:
    """Mistakes in the data are reported first, because building a model can take minutes."""
    model = ModelConfig(factory="tests.trainer.modules:none")
    with pytest.raises(ConfigError, match="extra_inputs contains 'depth'"):
        trained(dataset, tmp_path / "run", {"data.extra_inputs": ("depth",), "model": model})
    with pytest.raises(ConfigError, match="none"):
        trained(dataset, tmp_path / "run", {"model": model})


def test_the_summary_of_the_model_is_logged(dataset: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "streamvid.trainer"):
        trained(dataset, tmp_path / "run", {"max_steps": 1})
    table = next(record.getMessage() for record in caplog.records if "trainable" in record.getMessage())
    assert "dit" in table and "vae" in table and "float32" in table
    assert json.loads((tmp_path / "run" / "versions.json").read_text())["accelerate"]


def test_activation_checkpointing_does_not_change_the_weights(dataset: Path, tmp_path: Path) -> None:
    """Rows 33, 34: activation checkpointing gives bit-identical weights, dropout included."""
    weights = []
    ways = {
        "kept": {},
        "again": {"blocks": ("dit.blocks.*",)},
        "offloaded": {"blocks": ("Sequential",), "offload": True},
    }
    for name, way in ways.items():
        checkpointing = ActivationCheckpointingConfig(**way)
        config = trained(dataset, tmp_path / name, {"max_steps": 3, "model.activation_checkpointing": checkpointing})
        weights.append((config.output / "step-3.safetensors").read_bytes())
    assert weights[0] == weights[1] == weights[2]


@pytest.mark.parametrize("name", ["torch.optim:SGD", "torch.optim:Adagrad"])
def test_any_optimizer(dataset: Path, tmp_path: Path, name: str) -> None:
    optimizer = OptimizerConfig(factory=name, lr=0.01, betas=None)
    trained(dataset, tmp_path / "run", {"max_steps": 1, "optimizer": optimizer})
    with pytest.raises(ConfigError, match=r"optimizer.factory 'torch.optim:SGD' rejects .*betas"):
        trained(dataset, tmp_path / "bad", {"optimizer": OptimizerConfig(factory="torch.optim:SGD")})


def test_mistakes_in_loader_and_dataset_are_named(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.loader contains 'colums'; allowed: .*columns"):
        trained(dataset, tmp_path / "run", {"data.loader": {"colums": ["score"]}})
    with pytest.raises(ConfigError, match=r"dataset has no field 'repeats'; .*num_repeats"):
        trained({"url": str(dataset), "repeats": 2}, tmp_path / "run")


def test_buffers_of_trained_models_are_saved_and_resumed(dataset: Path, tmp_path: Path) -> None:
    model = ModelConfig(factory="tests.trainer.modules:build_counting", trainable=("dit",))
    whole = trained(
        dataset,
        tmp_path / "whole",
        {"max_steps": 4, "model": model, "eval": EvalConfig(steps=1, num_batches=1, split="train")},
    )
    parts = changed(whole, {"output": tmp_path / "parts"})
    train(changed(parts, {"max_steps": 2}))
    train(parts)
    one, other = (load_file(run.output / "step-4.safetensors") for run in (whole, parts))
    assert one["dit.0.num_batches_tracked"] == 4 and not any(name.startswith("vae") for name in one)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
