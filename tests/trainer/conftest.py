"""Fixtures shared by the trainer's tests: a single thread, and a small dataset."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.loader.conftest import SMALL, TALL, build_dataset


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    # Two threads synchronize at every small operation, which takes a hundred times as long on a busy machine.
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two buckets of 7 and 3 samples, in three shards."""
    return build_dataset(tmp_path_factory.mktemp("dataset") / "ds", {SMALL: [4, 3], TALL: [3]})
