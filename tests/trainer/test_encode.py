"""Split training's first stage: what it writes is right, the same however it is run, and refused once it is stale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import streamvid
from streamvid.dataset.reader import open_dataset
from tests.loader.conftest import SMALL, TALL, build_dataset


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    # Two threads wait for each other at every small operation, which on a busy machine takes a hundred times as long.
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two buckets, five shards, 23 samples."""
    return build_dataset(tmp_path_factory.mktemp("base"), {SMALL: [5, 4, 3], TALL: [6, 5]})


def test_one_shard_s_loader_shows_what_the_whole_dataset_s_does(dataset: Path) -> None:
    """SAMPLE-1: pixels and captions of a visit are the same whether a loader has one shard or all of them."""
    opened, whole = open_dataset(dataset), {}
    options: dict[str, Any] = {"batch_size": 2, "num_workers": 0, "spatial": "random_crop", "seed": 3, "tail": "uneven"}
    with streamvid.VideoLoader(opened, num_epochs=2, **options) as loader:
        for batch in loader:
            for i, key in enumerate(batch.sample_keys):
                whole[key, loader.epoch] = (batch.video[i].clone(), batch.text[i])
    for shard in opened.shards:
        with streamvid.VideoLoader(opened.only(shard), num_epochs=2, shuffle="none", **options) as loader:
            for batch in loader:
                for i, key in enumerate(batch.sample_keys):
                    video, text = whole.pop((key, loader.epoch))
                    assert torch.equal(video, batch.video[i]) and text == batch.text[i]
    assert not whole
