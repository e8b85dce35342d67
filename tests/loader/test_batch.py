"""Tests of Batch: a read-only mapping with attributes, whose memory belongs to the caller."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from fractions import Fraction
from itertools import product
from pathlib import Path

import pytest
import torch
from accelerate.utils import recursively_apply, send_to_device
from hypothesis import given
from hypothesis import strategies as st

import streamvid
from streamvid.buckets.bucket import Bucket
from streamvid.errors import ConfigError
from streamvid.loader.options import OutputOptions


@pytest.fixture
def batch(dataset: Path) -> streamvid.Batch:
    with streamvid.VideoLoader(dataset, batch_size=3, num_workers=0, columns=("score", "place", "year")) as loader:
        return next(iter(loader)).clone()


def test_fields(batch: streamvid.Batch) -> None:
    frames, height, width = batch.bucket.shape
    assert batch.video.shape == (3, 3, frames, height, width) and batch.video.dtype == torch.uint8
    assert batch.video.stride(1) == 1  # channels are last in memory, as decoded
    assert len(batch.sample_keys) == 3 and all(isinstance(key, str) for key in batch.sample_keys)
    assert len(batch.text) == 3 and all(isinstance(text, str) for text in batch.text)
    assert batch.fps.dtype == torch.float32 and batch.fps.tolist() == [24.0] * 3
    assert batch.is_repeat.dtype == torch.bool and not batch.is_repeat.any()
    assert batch.loss_weight == 1.0


def test_notebooks_show_and_complete_the_fields(dataset: Path, batch: streamvid.Batch) -> None:
    assert set(batch) | {"to", "normalized"} <= set(dir(batch))
    assert batch._ipython_key_completions_() == list(batch)
    assert repr(batch).startswith(f"Batch({batch.bucket.id}, 3 samples of {batch.bucket.shape} on cpu; fields: ")
    assert all(f" {name}" in repr(batch) for name in batch)
    with streamvid.VideoLoader(dataset, batch_size=3, num_workers=0) as loader:
        num_steps = len(loader)
        assert repr(loader) == (
            f"VideoLoader({dataset}; buckets: {len(loader.buckets)}, batch size: 3, rank 0 of 1; epoch 0, "
            f"steps left: {num_steps})"
        )
        next(iter(loader))
        assert f"epoch 0, steps left: {num_steps - 1}" in repr(loader)
        counts = loader.dataset.manifest.counts
        assert repr(loader.dataset).startswith(
            f"Dataset({dataset}: {counts.samples} sample(s) in {counts.shards} shard"
        )


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
    with pytest.raises(AttributeError, match="has no 'caption' field; its fields are video, text"):
        _ = batch.caption
    assert "96x64-5f" in repr(batch) or "64x96-9f" in repr(batch)


def made_batch(frames: torch.Tensor, layout: str = "BCTHW", **fields: object) -> streamvid.Batch:
    """Return a batch of `frames` (B, T, H, W, C), built as the loader does."""
    num_samples, num_frames, height, width, _ = frames.shape
    return streamvid.Batch(
        {
            "video": frames.permute(*("BTHWC".index(name) for name in layout)),
            "text": [""] * num_samples,
            "sample_keys": [f"key-{number}" for number in range(num_samples)],
            "bucket": Bucket(num_frames, height, width),
            "layout": layout,
            **fields,
        }
    )


def random_frames(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def neighbours(value: torch.Tensor) -> list[torch.Tensor]:
    ends = (torch.tensor(end, dtype=value.dtype) for end in (-math.inf, math.inf))
    return [value, *(torch.nextafter(value, end) for end in ends)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("span", [(-1, 1), (0, 1), (-0.5, 0.5), (0, 255), (1, -1), (-2.1, 2.6)])
def test_normalized_rounds_each_value_once(dtype: torch.dtype, span: tuple[float, float]) -> None:
    """For all 256 values, no other number of the type is closer to the exact result."""
    values = torch.arange(256, dtype=torch.uint8)
    batch = made_batch(values.reshape(1, 1, 16, 16, 1).expand(1, 1, 16, 16, 3))
    found = batch.normalized(dtype, range=span)[0, 0, 0].flatten()
    low, high = (Fraction(end) for end in span)
    for value, number in zip(values.tolist(), found, strict=True):
        exact = low + (high - low) * value / 255
        # Python computes (high - low) / 255 in float64, whose rounding error is far below the precision of these types.
        nearest, *others = (abs(Fraction(near.item()) - exact) for near in neighbours(number))
        assert all(nearest <= other + Fraction(1, 2**48) for other in others), (value, number)


@pytest.mark.parametrize("shape", [(2, 4, 6, 8, 3), (2, 5, 300, 400, 3), (1, 1, 600, 700, 3), (3, 9, 200, 130, 3)])
@pytest.mark.parametrize("layout", ["BCTHW", "BTCHW", "BTHWC"])
def test_normalized_follows_the_layout(shape: tuple[int, ...], layout: str) -> None:
    """The shapes include clips below and above the size that is processed at once, and frames above it."""
    batch = made_batch(random_frames(*shape), layout)
    normalized = batch.normalized(torch.float32, range=(0, 255))
    assert normalized.is_contiguous() and torch.equal(normalized, batch.video.float())
    assert batch.normalized(torch.bfloat16).dtype == torch.bfloat16


def test_normalized_requires_a_floating_point_type(batch: streamvid.Batch) -> None:
    with pytest.raises(ConfigError, match="not a floating-point type"):
        batch.normalized(torch.uint8)


def test_a_layout_is_one_of_three() -> None:
    assert OutputOptions(layout="BTCHW").layout == "BTCHW"
    for wrong in ("CTHW", "bcthw", None, 3):
        with pytest.raises(ConfigError, match="layout=.*must be 'BCTHW', 'BTCHW' or 'BTHWC'"):
            OutputOptions(layout=wrong)  # type: ignore[arg-type]


WAYS: dict[str, Callable[[streamvid.Batch], streamvid.Batch]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda batch: pickle.loads(pickle.dumps(batch)),
    "clone": lambda batch: batch.clone(),
    "to": lambda batch: batch.to("cpu"),
    "accelerate": lambda batch: send_to_device(batch, "cpu"),
    "accelerate, asynchronous": lambda batch: send_to_device(batch, torch.device("cpu"), non_blocking=True),
    "accelerate, tensor by tensor": lambda batch: recursively_apply(torch.clone, batch),
    "rebuilt, as collators do": lambda batch: type(batch)(dict(batch)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", ["BCTHW", "BTCHW", "BTHWC"])
def test_a_copy_is_the_same_batch(way: str, layout: str) -> None:
    batch = made_batch(random_frames(2, 4, 6, 8, 3), layout, score=torch.tensor([1.0, math.nan]))
    again = WAYS[way](batch)
    assert type(again) is streamvid.Batch and again.keys() == batch.keys()
    assert again.layout == layout and again.bucket == batch.bucket and again.text == batch.text
    assert torch.equal(again.video, batch.video) and again.digest() == batch.digest()
    assert torch.equal(again.score.isnan(), batch.score.isnan())
    with pytest.raises(AttributeError, match="read-only"):
        again.text = []


def test_copies_through_to_are_noticed(dataset: Path) -> None:
    """BATCH-1: copies of a shallow copy and copies by accelerate are noticed, too."""
    noticed: list[torch.device] = []
    fields = dict(made_batch(random_frames(2, 4, 6, 8, 3)))
    batch = streamvid.Batch(fields, noticed.append)
    send_to_device(batch, "meta")
    copy.copy(batch).to("meta")
    batch.to("cpu").to("meta")  # still the same memory
    batch.clone().to("meta")  # separate memory
    assert [device.type for device in noticed] == ["meta", "meta", "cpu", "meta"]


def test_a_digest_does_not_depend_on_the_memory_layout() -> None:
    frames = random_frames(2, 9, 64, 96, 3)
    digests = {made_batch(frames, layout).digest() for layout in ("BCTHW", "BTCHW", "BTHWC")}
    batch = made_batch(frames)
    planar = streamvid.Batch({**batch, "video": batch.video.contiguous()})
    assert planar.video.stride() != batch.video.stride()
    assert digests == {planar.digest()} == {batch.clone().digest()}
    assert made_batch(frames[1:]).digest() == made_batch(frames[1:].clone()).digest()
    assert torch.tensor([batch.digest()], dtype=torch.int64).item() == batch.digest()


def test_a_digest_distinguishes_batches() -> None:
    frames = random_frames(2, 9, 64, 96, 3)
    batch = made_batch(frames)
    others = [
        made_batch(frames.flip(0)),
        made_batch(frames.flip(1)),
        made_batch((frames.int() + 1).to(torch.uint8)),
        made_batch(frames, sample_keys=["key-1", "key-0"]),
        made_batch(frames, bucket=Bucket(9, 96, 64)),
        made_batch(frames[:1]),
        *(made_batch(torch.roll(frames, 1, axis)) for axis in range(1, 5)),
    ]
    assert len({one.digest() for one in [batch, *others]}) == 1 + len(others)


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 6), st.integers(1, 6), st.data())
def test_a_digest_covers_every_value_of_a_small_clip(
    num_samples: int, num_frames: int, height: int, width: int, data: st.DataObject
) -> None:
    frames = random_frames(num_samples, num_frames, height, width, 3)
    place = tuple(data.draw(st.integers(0, size - 1)) for size in frames.shape)
    changed = frames.clone()
    changed[place] ^= 1
    assert made_batch(changed).digest() != made_batch(frames).digest()


def test_a_digest_covers_all_regions_of_a_large_clip() -> None:
    """Values in each frame, each channel and each block of 16 x 16 pixels affect the digest."""
    frames = random_frames(1, 5, 64, 96, 3)
    digest = made_batch(frames).digest()
    for frame, row, column in product(range(5), range(0, 64, 16), range(0, 96, 16)):
        changed = frames.clone()
        changed[0, frame, row : row + 16, column : column + 16] ^= 255
        assert made_batch(changed).digest() != digest
    for channel in range(3):
        changed = frames.clone()
        changed[..., channel] ^= 255
        assert made_batch(changed).digest() != digest


def test_to_moves_every_tensor(batch: streamvid.Batch) -> None:
    moved = batch.to("meta")
    assert {v.device.type for v in moved.values() if isinstance(v, torch.Tensor)} == {"meta"}
    assert moved.text == batch.text


def test_a_column_that_would_hide_a_field_is_refused(dataset: Path) -> None:
    with pytest.raises(ConfigError, match="'text' is the name of a standard batch field"):
        streamvid.VideoLoader(dataset, batch_size=1, columns=("text",))
    with pytest.raises(ConfigError, match="'nope' is not a column of the dataset.*place.*score.*year"):
        streamvid.VideoLoader(dataset, batch_size=1, columns=("nope",))
    with pytest.raises(ConfigError, match="columns=.*must be a list of names"):
        streamvid.VideoLoader(dataset, batch_size=1, columns="score")
