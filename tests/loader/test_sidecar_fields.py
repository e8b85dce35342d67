"""Tests of batch fields for training steps: the seeds of samples, and fields that the caller adds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import streamvid
from streamvid import World
from streamvid.errors import ConfigError
from streamvid.loader.view.view import RandomChoices


def seeds_of(dataset: Path, world: World, **options: object) -> dict[tuple[int, str], int]:
    """Return the seed of each (epoch, key) over two epochs."""
    found = {}
    with streamvid.VideoLoader(dataset, world=world, num_workers=0, num_epochs=None, **options) as loader:  # type: ignore[arg-type]
        for batch in loader:
            assert len(batch.sample_seeds) == len(batch.sample_keys)
            assert all(type(seed) is int and 0 <= seed < 1 << 63 for seed in batch.sample_seeds)
            if loader.epoch == 2:
                break
            found |= {(loader.epoch, k): s for k, s in zip(batch.sample_keys, batch.sample_seeds, strict=True)}
    return found


def test_seeds_depend_only_on_seed_key_and_visit(dataset: Path) -> None:
    """SAMPLE-1: seeds do not depend on ranks, batch size or decoding, and differ between visits and loader seeds."""
    options = {"tail": "uneven", "shuffle": "window"}
    alone = seeds_of(dataset, World(0, 1), batch_size=2, **options)
    assert len(set(alone.values())) == len(alone) == 2 * 23
    two = [seeds_of(dataset, World(rank, 2), batch_size=3, output={"decode": False}, **options) for rank in range(2)]
    assert two[0] | two[1] == alone
    other = seeds_of(dataset, World(0, 1), batch_size=2, seed=1, **options)
    assert other.keys() == alone.keys() and not set(other.values()) & set(alone.values())


def test_seeds_do_not_change() -> None:
    """SAMPLE-1: other versions of the library give the same seeds, so that a resumed run uses the same noise."""
    assert RandomChoices.of(0, "a", 0).sample_seed() == 6195026668461239124
    assert RandomChoices.of(7, "clip-9", -3).sample_seed() == 4739910669824933658


def test_a_batch_with_more_fields(dataset: Path) -> None:
    """BATCH-1: both batches share memory, which belongs to the caller as long as one of them exists."""
    with streamvid.VideoLoader(dataset, batch_size=3, num_workers=0) as loader:
        batch = next(iter(loader))
        more = batch.with_fields({"latents": torch.ones(3, 2), "text": ["", "", ""]})
        assert more.video.data_ptr() == batch.video.data_ptr() and "latents" not in batch and batch.text != more.text
        assert more.sample_seeds == batch.sample_seeds and more.to("meta").latents.device.type == "meta"
        assert torch.equal(more.clone().latents, torch.ones(3, 2))


def test_no_column_can_have_the_name_of_the_seeds(dataset: Path) -> None:
    with pytest.raises(ConfigError, match="sample_seeds.* is the name of a standard batch field"):
        streamvid.VideoLoader(dataset, batch_size=1, columns=("sample_seeds",))
