"""What a batch is to its owner: a read-only mapping with attributes, over memory that is his."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import streamvid
from streamvid.errors import ConfigError


@pytest.fixture
def batch(dataset: Path) -> streamvid.Batch:
    with streamvid.VideoLoader(dataset, batch_size=3, num_workers=0, columns=("score", "place", "year")) as loader:
        return next(iter(loader)).clone()


def test_fields(batch: streamvid.Batch) -> None:
    frames, height, width = batch.bucket.shape
    assert batch.video.shape == (3, 3, frames, height, width) and batch.video.dtype == torch.uint8
    assert batch.video.stride(1) == 1  # channels lie last, as they were decoded
    assert len(batch.sample_keys) == 3 and all(isinstance(key, str) for key in batch.sample_keys)
    assert len(batch.text) == 3 and all(isinstance(text, str) for text in batch.text)
    assert batch.fps.dtype == torch.float32 and batch.fps.tolist() == [24.0] * 3
    assert batch.is_repeat.dtype == torch.bool and not batch.is_repeat.any()
    assert batch.loss_weight == 1.0


def test_columns(batch: streamvid.Batch) -> None:
    assert batch.score.shape == (3,) and batch.score.dtype == torch.float64
    numbers = [int(key.rpartition("-")[2]) for key in batch.sample_keys]
    for value, year, place, _number in zip(batch.score, batch.year, batch["place"], numbers, strict=True):
        assert year >= 2000 and place.startswith("p")
        assert math.isnan(value) == ((int(year) - 2000) % 3 == 0)


def test_is_a_read_only_mapping(batch: streamvid.Batch) -> None:
    def take(video: torch.Tensor, text: list[str], **rest: object) -> int:
        return len(text) + len(rest) + video.shape[0]

    assert take(**batch) == 3 + 3 + len(batch) - 2
    assert dict(batch)["text"] is batch.text
    with pytest.raises(AttributeError, match="read-only"):
        batch.text = []
    with pytest.raises(AttributeError, match="has no field 'caption'; it has video, text"):
        _ = batch.caption
    assert "96x64-5f" in repr(batch) or "64x96-9f" in repr(batch)


def test_normalized_maps_the_range_onto_the_asked_one(batch: streamvid.Batch) -> None:
    expected = batch.video.to(torch.float64) / 255 * 2 - 1
    normalized = batch.normalized(torch.float32)
    assert normalized.is_contiguous() and normalized.shape == batch.video.shape
    assert torch.allclose(normalized.double(), expected, atol=1e-6)
    assert torch.allclose(batch.normalized(torch.bfloat16, range=(0, 1)).double(), (expected + 1) / 2, atol=4e-3)
    with pytest.raises(ConfigError, match="no floating point type"):
        batch.normalized(torch.uint8)


def test_to_moves_every_tensor(batch: streamvid.Batch) -> None:
    moved = batch.to("meta")
    assert {v.device.type for v in moved.values() if isinstance(v, torch.Tensor)} == {"meta"}
    assert moved.text == batch.text


def test_a_column_that_would_hide_a_field_is_refused(dataset: Path) -> None:
    with pytest.raises(ConfigError, match="'text' is a field of every batch"):
        streamvid.VideoLoader(dataset, batch_size=1, columns=("text",))
    with pytest.raises(ConfigError, match="'nope' is not in the dataset.*place.*score.*year"):
        streamvid.VideoLoader(dataset, batch_size=1, columns=("nope",))
    with pytest.raises(ConfigError, match="is a string"):
        streamvid.VideoLoader(dataset, batch_size=1, columns="score")
