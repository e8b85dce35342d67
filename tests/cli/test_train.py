"""streamvid train: what is wrong with a config or a dataset is said before anything is done. Runs: test_end_to_end.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Tiny
from tests.clips import ROOT
from tests.conftest import run_streamvid

TINY = ROOT / "configs" / "train" / "tiny.yaml"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("datset=ds", "did you mean 'dataset'?"),
        pytest.param("optimizer.learning_rate=1", "optimizer.learning_rate", marks=pytest.mark.slow),
        ("num_steps=many", 'num_steps is "many"'),
        pytest.param("num_steps", "num_steps", marks=pytest.mark.slow),
        pytest.param("num_steps=0", "1 and up", marks=pytest.mark.slow),
    ],
)
def test_a_bad_key_or_value_is_exit_code_2(tiny: Tiny, tmp_path: Path, override: str, says: str) -> None:
    arguments = ("--set", f"dataset={tiny.dataset}", "--set", f"output={tmp_path / 'run'}", "--set", override)
    done = run_streamvid("train", "--config", TINY, *arguments, check=False)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_missing_config_is_exit_code_2(tmp_path: Path) -> None:
    done = run_streamvid("train", "--config", tmp_path / "no.yaml", check=False)
    assert done.returncode == 2 and "no.yaml" in done.stderr
    done = run_streamvid("train", check=False)
    assert done.returncode == 2 and "--config" in done.stderr


def test_a_missing_dataset_is_exit_code_1_and_leaves_no_output(tmp_path: Path) -> None:
    arguments = ("--set", f"dataset={tmp_path / 'ds'}", "--set", f"output={tmp_path / 'run'}")
    done = run_streamvid("train", "--config", TINY, *arguments, check=False)
    assert done.returncode == 1 and f"error: no dataset at {tmp_path / 'ds'}" in done.stderr
    assert "Traceback" not in done.stderr
