from __future__ import annotations

import logging
from pathlib import Path

import pytest

from streamvid.cli.verbs.train import command
from streamvid.config import dump_config
from streamvid.errors import ConfigError, StateError
from streamvid.trainer import TrainConfig, train
from tests.loader.conftest import SMALL, TALL, build_dataset
from tests.trainer.configs import train_config
from tests.trainer.runs import losses_in


def config_of(dataset: Path, output: Path, num_steps: int) -> TrainConfig:
    data = {"data.batch_size": 2, "data.num_workers": 1, "model.factory": "tests.trainer.modules:build"}
    return train_config(dataset, output, {**data, "max_steps": num_steps, "eval.steps": 3, "logging.steps": 1})


def test_a_dataset_trains_and_resumes_to_the_same_losses(
    dataset: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """PLAN-5: over the end of an epoch, with the real loader."""
    with caplog.at_level(logging.INFO, "streamvid.trainer"):
        whole = train(config_of(dataset, tmp_path / "whole", 8))
    assert "evaluation: the first 2 batches per rank of split 'train'" in caplog.text
    train(config_of(dataset, tmp_path / "parts", 3))
    parts = train(config_of(dataset, tmp_path / "parts", 8))
    assert losses_in(tmp_path / "parts") == losses_in(tmp_path / "whole")
    assert len(losses_in(tmp_path / "whole")) == 8
    assert whole.eval_loss == parts.eval_loss


def test_the_command_trains_and_names_mistakes(dataset: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(dump_config(config_of(dataset, tmp_path / "run", 2)))
    assert command.main(["--config", str(file), "--set", "logging.steps=2"], standalone_mode=False) == 0
    assert list(losses_in(tmp_path / "run")) == [2]
    with pytest.raises(ConfigError, match=r"optimizer\.rl is not a field; did you mean 'lr'\?"):
        command.main(["--config", str(file), "--set", "optimizer.rl=1"], standalone_mode=False)


def test_a_dataset_that_grew_is_not_resumed_as_if_it_had_not(dataset: Path, tmp_path: Path) -> None:
    train(config_of(dataset, tmp_path / "run", 2))
    other = build_dataset(tmp_path / "other", {SMALL: [4, 4], TALL: [3]})
    with pytest.raises(StateError, match="does not belong to this loader"):
        train(config_of(other, tmp_path / "run", 4))


def test_a_missing_batch_size_is_named(dataset: Path, tmp_path: Path) -> None:
    config = train_config(str(dataset), tmp_path / "run", {"max_steps": 1})
    with pytest.raises(ConfigError, match="batch_size"):
        train(config)
