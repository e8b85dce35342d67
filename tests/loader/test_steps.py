"""Tests of the steps that ranks receive: gradient accumulation, weights, cost classes, evaluation and chosen starts."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

import streamvid
from streamvid.errors import ConfigError
from tests.conftest import merged
from tests.loader.conftest import LONG, SMALL, TALL, build_dataset, in_legs, new_keys

World = streamvid.World


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dataset with 13 + 6 + 4 samples.

    SMALL and TALL have different numbers of frames and therefore different costs.
    """
    return build_dataset(tmp_path_factory.mktemp("uneven"), {SMALL: [5, 5, 3], TALL: [4, 2], LONG: [4]})


def steps_of(root: Path, num_ranks: int, **options: Any) -> list[list[tuple[str, int, float, list[str], list[bool]]]]:
    """Return the batches of each rank: (bucket, samples, weight, keys, repeats)."""
    told = []
    for rank in range(num_ranks):
        with streamvid.VideoLoader(root, world=World(rank, num_ranks), num_workers=0, **options) as loader:
            announced = len(loader), loader.num_steps_left
            batches = [
                (b.bucket.id, len(b.sample_keys), b.loss_weight, b.sample_keys, b.is_repeat.tolist()) for b in loader
            ]
            whole = len(batches) // options.get("num_epochs", 1)  # without carried samples, epochs have equal length
            assert announced == (whole, whole)
            told.append(batches)
    return told


def counted_once(ranks: list[list[Any]]) -> Counter[str]:
    """Return how often all ranks of `steps_of` together have each key, without repeats."""
    rows = [(keys, again) for batches in ranks for *_, keys, again in batches]
    return Counter(key for keys, again in rows for key, is_repeat in zip(keys, again, strict=True) if not is_repeat)


@pytest.mark.parametrize("tail", ["carry", "drop", "pad", "shrink"])
@pytest.mark.parametrize("accumulate", [2, 3, 4])
def test_steps_of_an_epoch_are_a_multiple_of_accumulate(uneven: Path, tail: Any, accumulate: int) -> None:
    """PLAN-2, PLAN-4: all ranks agree, for any tail. Pad and shrink add marked repeats and lose no samples."""
    ranks = steps_of(uneven, 2, batch_size=2, tail=tail, accumulate=accumulate)
    assert {len(batches) % accumulate for batches in ranks} == {0}
    assert len({len(batches) for batches in ranks}) == 1 and ranks[0]
    once = counted_once(ranks)
    assert set(once.values()) == {1}
    if tail in ("pad", "shrink"):
        assert len(once) == 23


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("sync", ["bucket", "cost"])
def test_weights_make_every_sample_count_equally(uneven: Path, accumulate: int, sync: Any) -> None:
    """The mean over ranks and batches of weight x mean loss is the mean over the samples of the optimizer step."""
    options: dict[str, Any] = {"batch_size": {"96x64-5f": 3, "64x96-9f": 2, "96x64-17f": 1}, "tail": "shrink"}
    ranks = steps_of(uneven, 2, accumulate=accumulate, sync=sync, **options)
    assert any(weight != 1 for batches in ranks for _, _, weight, *_ in batches) or (accumulate, sync) == (1, "bucket")
    for first in range(0, len(ranks[0]), accumulate):
        group = [batches[step] for batches in ranks for step in range(first, first + accumulate)]
        total = sum(size for _, size, *_ in group)
        for _, size, weight, *_ in group:
            assert weight == pytest.approx(float(Fraction(size * len(group), total)))
    assert {w for _, _, w, *_ in steps_of(uneven, 2, batch_size=2, tail="drop")[0]} == {1.0}


def test_buckets_of_equal_cost_share_a_step(uneven: Path) -> None:
    """PLAN-3: measured costs decide which buckets share a step.

    Each sample is delivered once, also after a resume with other ranks.
    """
    buckets = [SMALL, TALL, LONG]
    measured = [(bucket.id, 1, seconds) for bucket, seconds in zip(buckets, (1.0, 1.05, 3.0), strict=True)] * 3
    costs = streamvid.fit_costs(measured, buckets)
    options: dict[str, Any] = {"batch_size": 1, "sync": "cost", "schedule": {"costs": costs}}
    ranks = steps_of(uneven, 3, tail="shrink", **options)
    mixed = [{batches[step][0] for batches in ranks} for step in range(len(ranks[0]))]
    assert {SMALL.id, TALL.id} in mixed
    assert all(names == {LONG.id} for names in mixed if LONG.id in names)
    once = counted_once(ranks)
    assert len(once) == 23 and set(once.values()) == {1}
    del options["batch_size"]
    legs = in_legs(uneven, [(3, 1, 4), (2, 1, 10**6)], tail="shrink", **options)
    assert Counter(key for _, batch in legs for key in new_keys(batch)) == once


def test_largest_first_shows_every_bucket_at_once(uneven: Path) -> None:
    """A run that runs out of memory does so in its first steps. A resumed run does not start with them again."""
    with streamvid.VideoLoader(uneven, batch_size=1, num_workers=0, schedule={"order": "largest-first"}) as loader:
        iterator = iter(loader)
        assert [next(iterator).bucket.id for _ in range(3)] == [LONG.id, TALL.id, SMALL.id]
        state, rest = loader.state_dict(), [batch.sample_keys for batch in iterator]
    with streamvid.VideoLoader(uneven, batch_size=1, num_workers=0, schedule={"order": "largest-first"}) as loader:
        loader.load_state_dict(state)
        assert [batch.sample_keys for batch in loader] == rest
        following = [batch.bucket.id for batch in loader]
        assert loader.epoch == 2 and len(following) == 23


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_an_evaluation_pass_has_each_sample_exactly_once(tmp_path: Path, num_ranks: int, batch_size: int) -> None:
    """PLAN-4: split="val" has no repeats over all ranks. The last batches differ in size, and len() counts them."""
    root = build_dataset(tmp_path, {SMALL: [5, 5, 3], TALL: [1]}, split="val")
    ranks = steps_of(root, num_ranks, split="val", batch_size=batch_size)
    keys = [key for batches in ranks for *_, keys, _ in batches for key in keys]
    assert sorted(keys) == sorted([f"{SMALL.id}-{i}" for i in range(13)] + [f"{TALL.id}-0"])
    assert not any(any(again) for batches in ranks for *_, again in batches)
    assert all(size <= batch_size for batches in ranks for _, size, *_ in batches)
    # A second pass differs from the first only in its order, because nothing is carried over.
    again = steps_of(root, num_ranks, split="val", batch_size=batch_size, num_epochs=2)
    assert sorted(k for batches in again for *_, keys, _ in batches for k in keys) == sorted(keys * 2)


def test_a_start_can_be_chosen(uneven: Path) -> None:
    """PLAN-5: the start is an epoch and a step within it, without a state."""
    with streamvid.VideoLoader(uneven, batch_size=1, num_workers=0, tail="drop") as loader:
        loader.set_epoch(2)
        whole = [batch.sample_keys for batch in loader]
        loader.set_epoch(2, step=20)
        assert loader.num_steps_left == 3 and loader.epoch == 2
        assert [batch.sample_keys for batch in loader] == whole[20:]
        loader.set_epoch(2, step=0)
        assert [batch.sample_keys for batch in loader] == whole
        loader.set_epoch(2, step=23)
        assert list(loader) == [] and loader.epoch == 3
        with pytest.raises(ConfigError, match="step=24: must be an integer from 0 to 23"):
            loader.set_epoch(2, step=24)


@pytest.mark.parametrize("epoch", [-1, True, "1", None, 1.0, 1 << 30])
def test_an_invalid_epoch_is_named(uneven: Path, epoch: Any) -> None:
    """The position does not change. True is not an epoch, even if it equals the current one."""
    with streamvid.VideoLoader(uneven, batch_size=1, num_workers=0) as loader:
        loader.set_epoch(1, step=3)
        state = loader.state_dict()
        for step in (None, 0):
            with pytest.raises(ConfigError, match=rf"^epoch={epoch!r}: must be an integer from 0 to 1073741823"):
                loader.set_epoch(epoch, step)
        assert loader.state_dict() == state


def test_unused_costs_are_refused(uneven: Path) -> None:
    """An argument without effect is an error that gives the remedy."""
    costs = streamvid.fit_costs([(SMALL.id, 1, 1.0), (TALL.id, 1, 1.0), (LONG.id, 1, 2.0)] * 3, [SMALL, TALL, LONG])
    options: dict[str, Any] = {"batch_size": 1, "num_workers": 0}
    with pytest.raises(
        ConfigError,
        match="schedule.costs has no .*sync='bucket' and schedule.order='mixed'.*sync='cost' or schedule.order='l",
    ):
        streamvid.VideoLoader(uneven, schedule={"costs": costs}, **options)
    with pytest.raises(ConfigError, match="schedule.costs=.*: must be the result of streamvid.fit_costs"):
        streamvid.VideoLoader(uneven, schedule={"costs": {"x": 1}}, sync="cost", **options)  # type: ignore[arg-type]
    for asked in ({"sync": "cost"}, {"schedule": {"order": "largest-first"}}):
        with streamvid.VideoLoader(uneven, **merged({"schedule": {"costs": costs}, **options}, asked)) as loader:
            assert len(loader) > 0


def test_a_wrong_caption_column_is_named(uneven: Path) -> None:
    for options, says in (
        (
            {"captions": {"column": "caption"}},
            "^captions.column: 'caption' is not a column of the dataset at .*uneven.*; available: .*text",
        ),
        ({}, "^columns: 'caption' is not a column of"),
    ):
        config = streamvid.DatasetConfig(uneven, **options)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=says):
            streamvid.VideoLoader(config, batch_size=1, columns=() if options else ("caption",))


def test_a_state_within_a_group_resumes_with_its_remainder(uneven: Path) -> None:
    """PLAN-5: over the whole epoch, the number of steps remains a multiple of `accumulate`."""
    options: dict[str, Any] = {"batch_size": 2, "num_workers": 0, "accumulate": 4}
    with streamvid.VideoLoader(uneven, **options) as loader:
        iterator = iter(loader)
        keys = [next(iterator).sample_keys for _ in range(2)]
        state = json.loads(json.dumps(loader.state_dict()))
        rest = [batch.sample_keys for batch in iterator]
        assert (len(keys) + len(rest)) % 4 == 0
    with streamvid.VideoLoader(uneven, **options) as loader:
        loader.load_state_dict(state)
        assert loader.num_steps_left == len(rest)
        assert [batch.sample_keys for batch in loader] == rest


def test_buckets_and_epochs_without_a_step_are_named_with_remedies(uneven: Path, caplog: Any) -> None:
    """PLAN-4: some buckets, or all of them, have no step in an epoch."""
    with streamvid.VideoLoader(uneven, batch_size=5, num_workers=0, num_epochs=None):
        assert (
            "1 of 3 buckets have no step in this epoch" in caplog.text
            and "96x64-17f (4 of 5, first step in epoch 1)" in caplog.text
        )
    caplog.clear()
    with streamvid.VideoLoader(uneven, batch_size=20, num_workers=0, num_epochs=None):
        assert "epoch 0 has no step" in caplog.text and "lower batch_size or accumulate" in caplog.text
    assert "set sync='cost'" in caplog.text
    caplog.clear()
    with streamvid.VideoLoader(uneven, batch_size=20, num_workers=0, num_epochs=None, sync="cost"):
        assert "have no step in this epoch" in caplog.text and "set sync='cost'" not in caplog.text


def test_the_state_of_a_loader_is_small(tmp_path: Path) -> None:
    """PLAN-5: the state takes less than 4 KB of JSON for 100 buckets."""
    sides = range(32, 352, 32)
    layout = {streamvid.Bucket(1, height, width): [1] for height in sides for width in sides}
    assert len(layout) == 100
    root = build_dataset(tmp_path, layout, clip_frames=1)
    with streamvid.VideoLoader(root, batch_size=1, num_workers=0, num_epochs=None) as loader:
        loader.set_epoch(10**6)
        assert len(json.dumps(loader.state_dict())) < 4096
