"""Tests of streamvid annotate, and of stats on its results, in real processes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import streamvid
from tests.cli.conftest import OPTIONS, Tiny
from tests.conftest import run_streamvid


@pytest.fixture
def dataset(tiny: Tiny, tmp_path: Path) -> Path:
    shutil.copytree(tiny.dataset, tmp_path / "dataset")
    return tmp_path / "dataset"


def test_columns_and_captions_are_added_and_shown(dataset: Path, tmp_path: Path) -> None:
    """Item 5: one command adds the values and reports them, repeating it changes nothing, and an error is one line."""
    file = tmp_path / "more.csv"
    file.write_text("source,motion,caption\nwide.mp4,0.5,a wide road\ntall.mp4,,\nnone.mp4,1,gone\n")
    arguments = ("annotate", dataset, file)
    done = run_streamvid(*arguments)
    assert "2 of 2 samples match one of the 3 rows; added: captions, motion" in done.stdout
    assert "1 rows match no sample: none.mp4" in done.stdout and f"next: streamvid stats {dataset}" in done.stdout
    again = json.loads(run_streamvid(*arguments, "--json").stdout)
    assert (again["state"], again["num_annotated"], again["unmatched"]) == ("already annotated", 2, ["none.mp4"])
    rows = {row["source"]: row for row in streamvid.open_dataset(dataset).samples_table().to_pylist()}
    found = {name: (row["text"], row["user.motion"]) for name, row in rows.items()}
    assert found == {"wide.mp4": ("a wide road", 0.5), "tall.mp4": ("a tall street", None)}
    stats = run_streamvid("stats", dataset).stdout
    assert "columns: motion" in stats and "added by annotate: text, motion (" in stats
    facts = json.loads(run_streamvid("stats", dataset, "--json").stdout)
    assert facts["annotations"][0]["columns"] == ["text", "motion"]
    assert run_streamvid("verify", dataset, "--deep").returncode == 0
    wrong = run_streamvid("annotate", dataset, file, "--columns", "moton", check=False)
    assert wrong.returncode == 2 and "did you mean 'motion'" in wrong.stderr and wrong.stderr.count("\n") == 1


def test_rejections_by_kind_are_the_same_in_the_report_and_in_stats(tiny: Tiny, tmp_path: Path) -> None:
    """Item 10: each kind, including `--where`, has a count, examples and the option that would accept the files."""
    dest = tmp_path / "dataset"
    shard = ("shard", tiny.videos, dest, *OPTIONS, "--where", "height < 90")
    report = json.loads(run_streamvid(*shard, "--json").stdout)
    kinds = {kind["kind"]: kind for kind in report["rejected_by_kind"]}
    assert {name: kind["count"] for name, kind in kinds.items()} == {"not-media": 1, "where": 1}
    assert kinds["where"]["examples"][0]["source"] == "tall.mp4" and "--where" in kinds["where"]["remedy"]
    shown = json.loads(run_streamvid("stats", dest, "--rejections", "--json").stdout)
    assert shown["rejected_by_kind"] == report["rejected_by_kind"] and shown["rejections"] == 2
    for text in (run_streamvid("stats", dest, "--rejections").stdout, run_streamvid(*shard).stdout):
        assert "remedy" in text and "relax the --where condition" in text
    assert "  where: row" in run_streamvid("stats", dest, "--rejections").stdout
