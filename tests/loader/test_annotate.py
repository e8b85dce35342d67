"""Tests of loaders over annotated datasets: new columns and captions are delivered, and plans and states stay valid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import streamvid
from streamvid.errors import StreamvidError
from tests.files import write_rows
from tests.loader.conftest import SMALL, TALL, build_dataset, open_loader, state_after

pytestmark = pytest.mark.timeout(120)
OPTIONS: dict[str, Any] = {"num_epochs": 2}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Dataset with two buckets and 12 samples, with the columns score, place and year."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return build_dataset(tmp_path / "dataset", {SMALL: [4, 3], TALL: [5]})


def write(path: Path, root: Path, **columns: Any) -> Path:
    """Write a table with one row per sample. The value of each column is a function of the sample's number."""
    keys = streamvid.open_dataset(root).samples_table().column("key").to_pylist()
    rows = [{"key": key, **{name: of(n) for name, of in columns.items()}} for n, key in enumerate(keys)]
    return write_rows(path, rows)


def delivered(root: Path, state: dict[str, Any] | None = None, **options: Any) -> list[tuple[str, str, bytes]]:
    """Return (key, text, pixels) of each sample, in order of delivery."""
    with open_loader(root, state, **OPTIONS | options) as loader:
        return [(batch.sample_keys[0], batch.text[0], batch.video.numpy().tobytes()) for batch in loader]


def test_a_state_saved_before_annotation_resumes_with_the_same_samples(root: Path, tmp_path: Path) -> None:
    """PLAN-5, item 5: positions stay valid.

    Samples, order, windows and pixels do not change, and only the texts are new.
    """
    whole = delivered(root)
    state = state_after(5, root, **OPTIONS)
    file = write(tmp_path / "a.jsonl", root, motion=lambda n: n / 2, caption=lambda n: f"new {n}")
    streamvid.annotate(root, file, caption_column="caption")
    texts = {row["key"]: row["text"] for row in streamvid.open_dataset(root).samples_table().to_pylist()}
    rest = delivered(root, state)
    assert [(key, pixels) for key, _, pixels in rest] == [(key, pixels) for key, _, pixels in whole[5:]]
    assert [text for _, text, _ in rest] == [texts[key] for key, _, _ in rest]
    assert all(text.startswith("new ") for _, text, _ in rest)


def test_new_columns_are_in_batches_and_in_conditions(root: Path, tmp_path: Path) -> None:
    """Items 5 and 7: `columns=` and `where=` accept the new columns.

    Two ranks together deliver all matching samples.
    """
    streamvid.annotate(root, write(tmp_path / "a.jsonl", root, motion=lambda n: n / 2, style=lambda n: f"s{n % 3}"))
    rows = streamvid.open_dataset(root).samples_table().to_pylist()
    expected = {row["key"]: row for row in rows if row["user.motion"] > 2 and row["user.style"] != "s1"}
    options = OPTIONS | {"num_epochs": 1, "where": "motion > 2 and style != 's1'", "columns": ("motion", "style")}
    for num_ranks in (1, 2):
        seen = []
        for rank in range(num_ranks):
            world = streamvid.World(rank, num_ranks)
            with open_loader(root, **options, world=world, tail="pad") as loader:
                for batch in loader:
                    key = batch.sample_keys[0]
                    assert batch.motion.tolist() == [expected[key]["user.motion"]]
                    assert batch.style == [expected[key]["user.style"]]
                    seen.append(key)
        assert set(seen) == set(expected) and (num_ranks > 1 or len(seen) == len(expected))


def test_a_state_with_a_condition_stays_valid_unless_its_columns_change(root: Path, tmp_path: Path) -> None:
    """PLAN-1, PLAN-5: the values determine which samples match. Resuming with changed values raises."""
    where = "year > 2001"
    whole = [key for key, _, _ in delivered(root, where=where)]
    state = state_after(1, root, **OPTIONS, where=where)
    streamvid.annotate(root, write(tmp_path / "a.jsonl", root, motion=lambda n: n))
    assert [key for key, _, _ in delivered(root, state, where=where)] == whole[1:]
    streamvid.annotate(root, write(tmp_path / "b.jsonl", root, year=lambda n: 2001 + n % 3), overwrite=True)
    assert sorted(key for key, _, _ in delivered(root, where=where)) != sorted(whole)
    with pytest.raises(StreamvidError, match="where_columns"):
        delivered(root, state, where=where)


def test_a_running_loader_keeps_its_captions(root: Path, tmp_path: Path) -> None:
    """Annotating does not modify existing files, so a run that has started is not affected."""
    expected = delivered(root)
    with open_loader(root, **OPTIONS) as loader:
        found = []
        for number, batch in enumerate(loader):
            if number == 2:
                file = write(tmp_path / "a.jsonl", root, caption=lambda n: f"new {n}")
                streamvid.annotate(root, file, caption_column="caption")
            found.append((batch.sample_keys[0], batch.text[0], batch.video.numpy().tobytes()))
    assert found == expected


def test_captions_are_drawn_from_annotated_lists(root: Path, tmp_path: Path) -> None:
    """SAMPLE-1: each visit draws one of the sample's captions, and every loader draws the same one."""
    file = write(tmp_path / "a.jsonl", root, captions=lambda n: [f"a{n}", f"b{n}"])
    streamvid.annotate(root, file, caption_column="captions")
    first = delivered(root, num_epochs=6)
    assert {text[0] for _, text, _ in first} == {"a", "b"}
    assert [row[:2] for row in delivered(root, num_epochs=6, num_workers=1)] == [row[:2] for row in first]
