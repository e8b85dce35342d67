from __future__ import annotations

import logging
import re
import sys
from pathlib import Path

import pytest

from streamvid.cli.verbs.train import command
from streamvid.config import dump_config
from streamvid.dataset.versions.open import open_dataset
from streamvid.errors import ConfigError, StateError
from streamvid.forecast.ledger import check_ledger
from streamvid.ledger.history import read_history
from streamvid.trainer import TrainConfig, train
from tests.loader.conftest import SMALL, TALL, build_dataset
from tests.processes import on_terminal
from tests.trainer.configs import changed, train_config
from tests.trainer.runs import losses_in


def config_of(dataset: Path, output: Path, num_steps: int) -> TrainConfig:
    data = {"data.batch_size": 2, "data.num_workers": 1, "model.factory": "tests.trainer.modules:build"}
    return train_config(
        dataset, output, {**data, "max_steps": num_steps, "eval.steps": 3, "eval.split": "train", "logging.steps": 1}
    )


def test_a_dataset_trains_and_resumes_to_the_same_losses(
    dataset: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """PLAN-5: with the real loader, a run resumes to the same losses across the end of an epoch."""
    with caplog.at_level(logging.INFO, "streamvid.trainer"):
        whole = train(config_of(dataset, tmp_path / "whole", 8))
        assert whole.eval_loss is not None
    assert "evaluation uses the first 2 batches per rank from the 'train' split" in caplog.text
    ledger = {"data.loader": {"output": {"ledger": str(tmp_path / "ledger")}}}
    train(changed(config_of(dataset, tmp_path / "parts", 3), ledger))
    parts = train(changed(config_of(dataset, tmp_path / "parts", 8), ledger))
    assert losses_in(tmp_path / "parts") == losses_in(tmp_path / "whole")
    assert len(losses_in(tmp_path / "whole")) == 8
    assert whole.eval_loss == parts.eval_loss
    attempts = read_history(tmp_path / "ledger")
    report = check_ledger(attempts, [open_dataset(dataset)], lambda *_: None)
    assert report.is_right and (report.num_batches, len(attempts)) == (8, 2), "evaluations are not in the ledger"


def test_the_command_trains_and_names_mistakes(dataset: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(dump_config(config_of(dataset, tmp_path / "run", 2)))
    assert command.main(["--config", str(file), "--set", "logging.steps=2"], standalone_mode=False) == 0
    assert list(losses_in(tmp_path / "run")) == [2]
    with pytest.raises(ConfigError, match=r"optimizer\.rl is not a field; did you mean 'lr'\?"):
        command.main(["--config", str(file), "--set", "optimizer.rl=1"], standalone_mode=False)


def test_a_run_is_not_resumed_on_a_dataset_that_grew(dataset: Path, tmp_path: Path) -> None:
    train(config_of(dataset, tmp_path / "run", 2))
    other = build_dataset(tmp_path / "other", {SMALL: [4, 4], TALL: [3]})
    with pytest.raises(StateError, match="run/state/step-2 does not match the data of this run; .* another output"):
        train(config_of(other, tmp_path / "run", 4))


def test_a_missing_batch_size_is_named(dataset: Path, tmp_path: Path) -> None:
    config = train_config(str(dataset), tmp_path / "run", {"max_steps": 1})
    with pytest.raises(ConfigError, match="batch_size"):
        train(config)


def test_a_run_without_a_step_is_refused(dataset: Path, tmp_path: Path) -> None:
    """A run is refused if its only epoch would carry all samples over and leave nothing to save."""
    config = changed(config_of(dataset, tmp_path / "run", 1), {"max_steps": None, "data.batch_size": 100})
    with pytest.raises(ConfigError, match=r"num_epochs=1: the run would have no step.*data\.max_tokens_per_batch"):
        train(config)
    assert not (tmp_path / "run").exists()


def test_clips_that_are_trained_on_are_held_out_only_if_asked(
    dataset: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    few = changed(config_of(dataset, tmp_path / "run", 1), {"eval.split": "val"})
    assert train(few).eval_loss is None
    assert (
        "evaluation is disabled, because no dataset has a 'val' split; shard with --val-fraction, or set eval.split"
        in caplog.text
    )
    for wrong in ({"eval.split": "test"}, {"eval.sample_steps": 1}):
        with pytest.raises(ConfigError, match=r"eval.split is '(test|val)', which no dataset has; shard with"):
            train(changed(few, {"output": tmp_path / "other", **wrong}))


def test_a_line_of_the_log_is_short_and_above_the_progress_bar(dataset: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(dump_config(config_of(dataset, tmp_path / "run", 3)))
    shown = on_terminal([sys.executable, "-m", "streamvid", "train", "--config", str(file)])
    lines = [line for line in shown.splitlines() if "streamvid.trainer.run: step" in line]
    assert len(lines) == 4 and not any("━" in line for line in lines)
    assert all("loss_of_bucket" not in line and len(line) <= 160 for line in lines), lines
    assert re.search(r"INFO streamvid.trainer.run: step 1/3, loss [0-9.]{3,6}, lr ", lines[1])
