"""Tests that the small model learns from its captions, by running the experiment of tools/check_learning.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Corpus
from tools.check_learning import BOUNDS, EARLY, HeldOut, Plan, encode_split, experiment, make_dataset, missed


@pytest.fixture(scope="module")
def native(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(corpus.root, tmp_path_factory.mktemp("learning") / "dataset")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_model_with_captions_is_better_on_held_out_videos(native: Path) -> None:
    """In a short run of one seed, the loss is lower with a video's own caption than with another's or none, for nearly
    every video and by more than three standard errors, with the same noise."""
    (figures,) = experiment(native, Plan(num_steps=120, num_visits=1, num_draws=4, with_untold=False), [0], "minilm")
    assert figures["own"] < figures["empty"] < figures["shuffled"] < 2.0
    for wrong in ("empty", "shuffled"):
        gain = figures[f"{wrong}_minus_own"]
        assert gain["by_video"] > 3 * gain["error"] > 0, (wrong, figures)
        assert gain["videos_better"] >= 0.8, (wrong, figures)


def test_held_out_videos_are_not_trained_on_and_wrong_captions_are_wrong(native: Path) -> None:
    from streamvid.recipes.small import build

    encoder = build(dim=12, depth=1, heads=2, codec="patch", patch=(1, 16, 16))
    train, val = (encode_split(encoder, native, split, 1) for split in ("train", "val"))
    assert not {sample.video for sample in train} & {sample.video for sample in val}
    held_out = HeldOut.of(val, 3)
    assert len(held_out.samples) == len(held_out.others) == len(set(held_out.seeds)) >= 30
    for sample, other in zip(held_out.samples, held_out.others, strict=True):
        assert sample.text and other.text and sample.text != other.text
    assert 0.2 < float((held_out.times(5.0) > EARLY).float().mean()) < 0.6


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_experiment_meets_its_bounds_for_three_seeds(native: Path) -> None:
    """The results meet the bounds that the docstring of tools/check_learning.py states."""
    found = experiment(native, Plan(), range(3), "minilm")
    assert [missed(figures) for figures in found] == [[], [], []], (BOUNDS, found)
