"""Tests of several datasets in one loader, with conditions on their columns: all guarantees hold for the mix."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import streamvid
from streamvid.buckets.bucket import Bucket
from streamvid.errors import ConfigError, StateError
from streamvid.plan import hash_below, hash_text
from tests.loader.conftest import LONG, SMALL, TALL, build_dataset, in_legs, new_slots

World, DatasetConfig = streamvid.World, streamvid.DatasetConfig


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Datasets of 12 + 11 and 7 + 3 samples. Both contain SMALL, only the first TALL, and only the second LONG."""
    root = tmp_path_factory.mktemp("two")
    first = build_dataset(root / "first", {SMALL: [5, 4, 3], TALL: [6, 5]})
    return first, build_dataset(root / "second", {SMALL: [4, 3], LONG: [3]}, variants=2)


def received(datasets: Any, num_ranks: int = 1, **options: Any) -> list[list[tuple[str, str, str]]]:
    """Return (bucket, key, text) of all samples that each rank receives."""
    told = []
    for rank in range(num_ranks):
        mine = {"batch_size": 1, "num_workers": 0, **options}
        with streamvid.VideoLoader(datasets, world=World(rank, num_ranks), **mine) as loader:
            rows = ((batch.bucket.id, zip(batch.sample_keys, batch.text, strict=True)) for batch in loader)
            told.append([(bucket, key, text) for bucket, samples in rows for key, text in samples])
    return told


def test_repeats_of_several_datasets(two: tuple[Path, Path]) -> None:
    """PLAN-4: over all ranks, each sample is delivered as often as its dataset is repeated.

    A bucket's samples are mixed.
    """
    configs = [
        DatasetConfig(two[0], num_repeats=2),
        DatasetConfig(two[1], num_repeats="1/2", captions={"prefix": "B: "}),
    ]
    epochs = [received(configs, num_ranks=2, num_epochs=2, tail="uneven")]
    rows = [row for rank in epochs[0] for row in rank]
    first = Counter(key for _, key, text in rows if not text.startswith("B: "))
    second = Counter(key for _, key, text in rows if text.startswith("B: "))
    assert len(first) == 23 and set(first.values()) == {4}
    assert set(second.values()) == {1} and len(second) == 10
    small = [text.startswith("B: ") for bucket, _, text in epochs[0][0] if bucket == SMALL.id]
    assert sum(a != b for a, b in itertools.pairwise(small)) > 1


NAMED = Bucket(num_frames=5, height=64, width=96, resolution="240px", aspect_ratio="3:2")
OTHER = Bucket(num_frames=5, height=96, width=128, resolution="240px", aspect_ratio="3:2")


def test_buckets_of_one_shape_stay_apart_within_a_dataset(tmp_path: Path) -> None:
    """PLAN-4: two resolutions may have the same shape (`--multiple 64`).

    Each sample is delivered under its own bucket id.
    """
    one = build_dataset(tmp_path / "one", {NAMED: [3], SMALL: [2, 2]})
    other = build_dataset(tmp_path / "other", {SMALL: [5]}, variants=2)
    (rows,) = received(one, batch_size={NAMED.id: 1, SMALL.id: 2})
    assert Counter(bucket for bucket, _, _ in rows) == {NAMED.id: 3, SMALL.id: 4}
    assert all(key.startswith(bucket) for bucket, key, _ in rows) and len(set(rows)) == 7
    (rows,) = received([DatasetConfig(other), DatasetConfig(one, captions={"prefix": "B: "})])
    assert Counter((bucket, text.startswith("B: ")) for bucket, _, text in rows) == {
        (SMALL.id, False): 5, (SMALL.id, True): 4, (NAMED.id, True): 3,
    }  # fmt: skip


def test_a_bucket_name_with_two_shapes(tmp_path: Path) -> None:
    """PLAN-3: two datasets sharded with different multiples keep their shapes.

    The second bucket is named by its size.
    """
    first = build_dataset(tmp_path / "first", {NAMED: [3]})
    second = build_dataset(tmp_path / "second", {OTHER: [4]})
    shapes = {}
    with streamvid.VideoLoader([first, second], batch_size=1, world=World(0, 1), num_workers=0) as loader:
        for batch in loader:
            assert batch.bucket.shape == (5, *batch.video.shape[-2:])
            shapes[batch.bucket.id] = shapes.get(batch.bucket.id, 0) + 1
    assert shapes == {NAMED.id: 3, "128x96-5f": 4}
    third = build_dataset(tmp_path / "third", {OTHER: [1], Bucket(5, 96, 128): [1]})
    with pytest.raises(ConfigError, match="differs in shape .* list this dataset first"):
        received([first, third])
    assert len(received([third, first])[0]) == 5


@pytest.mark.parametrize("by", ["samples", "tokens"])
def test_weights_are_shares_of_an_epoch(two: tuple[Path, Path], by: Any) -> None:
    """Shares of samples or tokens are exact up to the rounding of each bucket."""
    configs = [DatasetConfig(two[0], weight=1), DatasetConfig(two[1], weight=3, captions={"prefix": "B: "})]
    options: dict[str, Any] = {"schedule": {"samples_per_epoch": 60, "mix_by": by}, "tail": "uneven"}
    (rows,) = received(configs, **options)
    assert abs(len(rows) - 60) <= 4
    tokens = {bucket.id: bucket.tokens for bucket in (SMALL, TALL, LONG)}
    share = {True: 0, False: 0}
    for bucket, _, text in rows:
        share[text.startswith("B: ")] += tokens[bucket] if by == "tokens" else 1
    assert share[True] / sum(share.values()) == pytest.approx(0.75, abs=0.06)


def test_a_mix_resumes_with_other_ranks(two: tuple[Path, Path]) -> None:
    """PLAN-5: a run that is stopped twice, with 1, 3 and 2 ranks, delivers every sample once."""
    configs = [DatasetConfig(two[0]), DatasetConfig(two[1], captions={"prefix": "B: "})]
    seen = Counter(
        (batch.bucket.id, batch.sample_keys[slot], batch.text[slot].startswith("B: "))
        for _, batch in in_legs(configs, [(1, 1, 7), (3, 1, 4), (2, 1, 10**6)], tail="shrink")
        for slot in new_slots(batch)
    )
    assert len(seen) == 33 and set(seen.values()) == {1}


def test_draws_of_a_dataset_depend_on_its_name(two: tuple[Path, Path]) -> None:
    """SAMPLE-1: adding another dataset changes no window. Listing the same dataset twice draws its windows twice."""

    def windows(configs: Any) -> dict[tuple[str, str], bytes]:
        with streamvid.VideoLoader(configs, batch_size=1, num_workers=0, tail="uneven") as loader:
            return {(b.sample_keys[0], b.text[0][:2]): b.video.numpy().tobytes() for b in loader}

    a = DatasetConfig(two[0], name="a", captions={"prefix": "A:"})
    b = DatasetConfig(two[1], name="b", captions={"prefix": "B:"})
    twice = DatasetConfig(two[0], name="again", captions={"prefix": "C:"})
    both, turned = windows([a, b]), windows([b, a])
    assert both == turned and len(both) == 33
    of_a = windows([a, twice])
    assert {place: of_a[place] for place in both if place[1] == "A:"} == {p: v for p, v in both.items() if p[1] == "A:"}
    assert any(of_a[key, "A:"] != of_a[key, "C:"] for key, prefix in of_a if prefix == "A:")


def test_where_leaves_out_samples_that_do_not_match(two: tuple[Path, Path], monkeypatch: Any, tmp_path: Path) -> None:
    """PLAN-6: conditions use user and index columns, for all datasets or for one. Sample counts are after filtering."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for where in ("score > 1", "score > 1 and year < 2004", f"bucket_id == '{SMALL.id}'"):
        (rows,) = received(two[0], where=where, columns=("score", "year"), tail="uneven")
        table = streamvid.open_dataset(two[0]).samples_table().to_pylist()
        admits = {
            "score > 1": lambda r: r["user.score"] is not None and r["user.score"] > 1,
            "score > 1 and year < 2004": lambda r: (
                r["user.score"] is not None and r["user.score"] > 1 and r["user.year"] < 2004
            ),
            f"bucket_id == '{SMALL.id}'": lambda r: r["bucket_id"] == SMALL.id,
        }[where]
        assert sorted(key for _, key, _ in rows) == sorted(row["key"] for row in table if admits(row))
    configs = [DatasetConfig(two[0], where="year == 2000"), two[1]]
    (rows,) = received(configs, where="window_num_frames > 3", tail="uneven")
    assert len(rows) == 5 + 10  # the first sample of each shard


def test_images_and_videos_in_stated_proportions(two: tuple[Path, Path]) -> None:
    """One dataset is listed twice with different conditions, and every epoch has three short clips per long clip."""
    long = DatasetConfig(two[1], where="bucket_id == '96x64-17f'", weight=0.25, name="long")
    short = DatasetConfig(two[1], where="bucket_id != '96x64-17f'", weight=0.75, name="short")
    (rows,) = received([long, short], schedule={"samples_per_epoch": 40}, tail="uneven")
    assert Counter(bucket for bucket, _, _ in rows) == {LONG.id: 10, SMALL.id: 30}


def test_captions_of_each_dataset(two: tuple[Path, Path]) -> None:
    """SAMPLE-1: captions come from another column, with a prefix, and dropout is drawn per visit, for any workers."""
    config = DatasetConfig(two[0], captions={"column": "place", "prefix": "at ", "dropout": 0.5})
    runs = [received(config, num_epochs=4, num_workers=workers) for workers in (0, 2)]
    assert runs[0] == runs[1]
    texts = Counter(text for _, _, text in runs[0][0])
    assert set(texts) <= {"", *(f"at p{i}" for i in range(6))}
    assert 92 * 0.3 < texts[""] < 92 * 0.7
    by_key: dict[str, set[bool]] = {}
    for _, key, text in runs[0][0]:
        by_key.setdefault(key, set()).add(not text)
    assert any(len(outcomes) == 2 for outcomes in by_key.values())


def test_a_state_of_another_mix_is_refused_by_name_or_forced(two: tuple[Path, Path], caplog: Any) -> None:
    """PLAN-5: the error names a different filter, number of repeats, dataset or number of datasets.

    With `force`, the run resumes at an approximate position.
    """

    def make(*configs: Any, **options: Any) -> streamvid.VideoLoader:
        return streamvid.VideoLoader(list(configs), batch_size=1, num_workers=0, **options)

    with make(two[0]) as loader:
        iterator = iter(loader)
        for _ in range(9):
            next(iterator)
        state = json.loads(json.dumps(loader.state_dict()))
    for others, options, named in (
        ([DatasetConfig(two[0], where="score > 1")], {}, "where of dataset 0 is None in the state and .*score.* here"),
        ([DatasetConfig(two[0], num_repeats=2)], {}, "num_repeats of dataset 0 is '1' in the state and '2' here"),
        ([two[1]], {}, "samples_fingerprint of dataset 0 is"),
        ([two[0], two[1]], {}, "number of datasets is 1 in the state and 2 here"),
        ([two[0]], {"seed": 3}, "seed is 0 in the state and 3 here"),
        ([two[0]], {"tail": "drop"}, "tail is 'carry' in the state and 'drop' here"),
    ):
        with make(*others, **options) as loader:
            with pytest.raises(StateError, match=named):
                loader.load_state_dict(state)
            caplog.clear()
            loader.load_state_dict(state, force=True)
            assert "approximate position" in caplog.text
            left = loader.num_steps_left
            assert 0 < left < len(loader) and len(list(map(id, loader))) == left
            assert loader.epoch == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda a, b: [], "at least one"),
        (lambda a, b: [7], "dataset.0.=7: must be a path"),
        (lambda a, b: [DatasetConfig(a, num_repeats=0)], "num_repeats=0: must be a number above 0"),
        (lambda a, b: [DatasetConfig(a, num_repeats="x")], "num_repeats='x'"),
        (lambda a, b: [DatasetConfig(a, weight=-1)], "weight=-1"),
        (lambda a, b: [DatasetConfig(a, weight=1, num_repeats=2)], "cannot be combined with weight=1"),
        (lambda a, b: [DatasetConfig(a, weight=1), b], "weight is set for 1 of 2 datasets"),
        (lambda a, b: [DatasetConfig(a, name="x"), DatasetConfig(b, name="x")], "are not unique"),
        (lambda a, b: [DatasetConfig(a, captions={"dropout": 2})], "captions.dropout=2: must be a number from 0 to 1"),
        (lambda a, b: [DatasetConfig(a, captions={"column": "nope"})], "'nope' is not a column of the dataset"),
        (lambda a, b: [DatasetConfig(a, where="score > 10000")], "matches none of the 23 samples"),
        (lambda a, b: [DatasetConfig(a, where="nope > 1")], "nope"),
    ],
)
def test_invalid_mixes_are_refused(two: tuple[Path, Path], make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        streamvid.VideoLoader(make(*two), batch_size=1)
    with pytest.raises(ConfigError, match="schedule.samples_per_epoch=5 requires weights"):
        streamvid.VideoLoader(two[0], batch_size=1, schedule={"samples_per_epoch": 5})


def test_a_single_dataset_uses_the_loaders_seed(two: tuple[Path, Path]) -> None:
    """SAMPLE-1: a single dataset draws the same windows as before mixes were introduced."""
    with streamvid.VideoLoader(two[0], batch_size=1, num_workers=0, seed=5) as loader:
        batch = next(iter(loader))
    start = hash_below(24 - batch.bucket.num_frames + 1, 5, 1, hash_text(batch.sample_keys[0]), 0)
    assert 0 <= start <= 24 - batch.bucket.num_frames
