"""Tests of streamvid train: mistakes in a config or a dataset are reported before any work is done."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from streamvid.errors import ConfigError
from tests.cli.conftest import Tiny
from tests.clips import ROOT
from tests.compat.test_diffsynth import config_of
from tests.conftest import run_streamvid

TINY = ROOT / "configs" / "train" / "tiny.yaml"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("data.datset=ds", "did you mean 'dataset'?"),
        ("optimizer.learning_rate=1", "optimizer.learning_rate"),
        ("max_steps=many", 'max_steps is "many"'),
        ("max_steps", "max_steps"),
        ("max_steps=0", "must be an integer of at least 1"),
        ("max_steps=1.5", "max_steps"),
        ("output=s3://bucket/run", "output is s3:/bucket/run"),
        ("output=s3://key:secret@bucket/run", "override='output=s3://bucket/run': must not contain"),
    ],
)
def test_a_bad_key_or_value_is_named(tmp_path: Path, override: str, says: str) -> None:
    arguments = ("--set", "data.dataset=ds", "--set", f"output={tmp_path / 'run'}", "--set", override)
    with pytest.raises(ConfigError) as caught:
        config_of("--config", TINY, *arguments)
    assert says in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def run_train(dataset: Path, output: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    overrides = (f"data.dataset={dataset}", f"output={output}", *overrides)
    arguments = [part for override in overrides for part in ("--set", override)]
    return run_streamvid("train", "--config", TINY, *arguments, check=False)


def test_a_bad_key_is_exit_code_2(tiny: Tiny, tmp_path: Path) -> None:
    done = run_train(tiny.dataset, tmp_path / "run", "data.datset=ds")
    assert done.returncode == 2 and "did you mean 'dataset'?" in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_missing_config_is_exit_code_2(tmp_path: Path) -> None:
    done = run_streamvid("train", "--config", tmp_path / "no.yaml", check=False)
    assert done.returncode == 2 and "no.yaml" in done.stderr
    done = run_streamvid("train", check=False)
    assert done.returncode == 2 and "--config" in done.stderr


def test_a_missing_dataset_is_exit_code_1_and_leaves_no_output(tmp_path: Path) -> None:
    done = run_train(tmp_path / "ds", tmp_path / "run")
    assert done.returncode == 1 and f"error: no dataset at {tmp_path / 'ds'}" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_an_output_that_is_a_file_is_a_one_line_error(tiny: Tiny, tmp_path: Path) -> None:
    """The error comes without a traceback."""
    (tmp_path / "run").write_text("mine")
    done = run_train(tiny.dataset, tmp_path / "run", "max_steps=1")
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith("error: output ")
    assert (
        f"{tmp_path / 'run'} is not a folder; choose another folder" in done.stderr and "Traceback" not in done.stderr
    )
    assert (tmp_path / "run").read_text() == "mine"


def test_restarting_a_complete_run_reports_that(tiny: Tiny, tmp_path: Path) -> None:
    options = ("max_steps=1", "data.batch_size=1", "data.num_workers=0", "eval.steps=null")
    first, second = (run_train(tiny.dataset, tmp_path / "run", *options) for _ in range(2))
    assert first.returncode == 0 and "step 1: loss " in first.stdout, first.stderr
    assert second.returncode == 0 and "already complete at step 1; raise max_steps" in second.stdout, second.stderr
