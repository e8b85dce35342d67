"""Tests of `where=`: an epoch delivers each sample that matches a condition exactly once, and no other sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import streamvid
from streamvid.errors import ConfigError, StreamvidError
from tests.loader.conftest import SMALL, TALL, build_dataset, open_loader, state_after

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def keys(dataset: Path, state: Any = None, **options: Any) -> list[str]:
    with open_loader(dataset, state, **options) as loader:
        return [key for batch in loader for key in batch.sample_keys]


def admitted(dataset: Path, test: Any) -> list[str]:
    rows = streamvid.open_dataset(dataset).samples_table().to_pylist()
    return sorted(row["key"] for row in rows if test(row))


@pytest.mark.parametrize(
    ("where", "test"),
    [
        ("year >= 2002", lambda row: row["user.year"] >= 2002),
        (
            "score < 3 and place != 'p1'",
            lambda row: row["user.score"] is not None and row["user.score"] < 3 and row["user.place"] != "p1",
        ),
        (
            "score is None or clip_height > clip_width",
            lambda row: row["user.score"] is None or row["clip_height"] > row["clip_width"],
        ),
        ("place in ('p4',)", lambda row: row["user.place"] == "p4"),
    ],
)
def test_each_sample_that_meets_the_condition_is_delivered_once(dataset: Path, where: str, test: Any) -> None:
    """PLAN-4, PLAN-6: shards have no, some or only matching samples. Ranks, workers and the cache change nothing."""
    expected = admitted(dataset, test)
    assert expected
    for _ in range(2):
        assert sorted(keys(dataset, where=where)) == expected
    shared = [keys(dataset, where=where, tail="pad", world=streamvid.World(rank, 2)) for rank in range(2)]
    assert {key for some in shared for key in some} == set(expected) and len(shared[0]) == len(shared[1])
    assert keys(dataset, where=where, num_workers=1) == keys(dataset, where=where)


def test_captions_and_columns_belong_to_the_sample(dataset: Path) -> None:
    rows = {row["key"]: row for row in streamvid.open_dataset(dataset).samples_table().to_pylist()}
    with open_loader(dataset, where="year > 2001", columns=("year", "place")) as loader:
        for batch in loader:
            row = rows[batch.sample_keys[0]]
            assert (batch.text[0], batch.place[0]) == (row["text"] or "", row["user.place"])
            assert batch.year.tolist() == [row["user.year"]] and row["user.year"] > 2001


def test_a_state_belongs_to_its_condition(dataset: Path) -> None:
    """PLAN-1, PLAN-5: equivalent spellings of a condition are interchangeable. Another condition is another plan."""
    state = state_after(2, dataset, where="year>2001 and score is not None")
    whole = keys(dataset, where="year > 2001 and score is not None")
    assert keys(dataset, state, where="(year > 2001) and (score is not None)") == whole[2:]
    for other in ("year > 2000 and score is not None", None):
        with pytest.raises(StreamvidError):
            keys(dataset, state, where=other)


def test_a_bad_sample_is_replaced_by_one_that_meets_the_condition(tmp_path: Path) -> None:
    """BAD-1: samples that the filter excludes are never used as substitutes."""
    root = build_dataset(tmp_path / "dataset", {SMALL: [5, 3], TALL: [2]}, damage={"96x64-5f-2": b"no clip"})
    received = keys(root, where="year >= 2002", shuffle="none")
    assert len(received) == 4 and received.count("96x64-5f-3") == 2
    assert set(received) == {"96x64-5f-3", "96x64-5f-4", "96x64-5f-7"}


@pytest.mark.parametrize(
    ("where", "error", "says"),
    [
        ("yaer > 2001", ConfigError, "character 1: 'yaer' is not a column of the dataset.*year"),
        ("year > '2001'", ConfigError, "cannot be compared"),
        ("__import__('os')", ConfigError, "the only allowed calls are"),
        ("year > 3000", StreamvidError, "where|filter"),
    ],
)
def test_invalid_conditions_are_refused(dataset: Path, where: str, error: type[Exception], says: str) -> None:
    """SAFE-1: the error is raised when the loader is created, before anything is started."""
    with pytest.raises(error, match=says):
        streamvid.VideoLoader(dataset, batch_size=1, num_workers=0, where=where)


def test_counts_are_kept_for_the_next_loader(dataset: Path, own_cache: Path) -> None:
    """PLAN-6: an equivalent condition reuses the cached counts."""
    keys(dataset, where="year > 2001")
    (entry,) = own_cache.rglob("*.counts")
    before = entry.stat().st_mtime_ns
    keys(dataset, where="year   > 2001", seed=7)
    assert list(own_cache.rglob("*.counts")) == [entry] and entry.stat().st_mtime_ns == before


def test_batch_sizes_of_all_buckets_fit_a_filter_that_leaves_one_out(dataset: Path) -> None:
    sizes = dict.fromkeys((bucket.id for bucket in streamvid.open_dataset(dataset).manifest.buckets), 1)
    assert len(sizes) == 2 and keys(dataset, batch_size=sizes, where="clip_height < 150")
    with pytest.raises(ConfigError, match="'72x96-9f'"):
        keys(dataset, batch_size={**sizes, "72x96-9f": 1}, where="clip_height < 150")
