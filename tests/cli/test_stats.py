"""Tests of streamvid stats in real processes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import streamvid
from tests.cli.conftest import Tiny
from tests.conftest import run_streamvid
from tests.files import tree_of, write_rows


def test_stats_show_buckets_columns_and_rejections(tiny: Tiny) -> None:
    before = tree_of(tiny.dataset)
    text = run_streamvid("stats", tiny.dataset).stdout
    assert re.search(r"^96x64-5f +5 x 64 x 96 +train +1 +1 ", text, re.MULTILINE)
    assert "2 samples in 2 shards" in text and "clips: copy; format 1" in text
    assert "rejected: 1 of 3 input rows" in text
    assert re.search(r"^  row 0  broken\.mp4: .*not a video", text, re.MULTILINE)
    assert tree_of(tiny.dataset) == before


def test_stats_of_many_rejections_are_a_few_lines(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": "x" if not number else ""} for number in range(500)])
    run_streamvid("shard", rows, tmp_path / "ds", "--clips", "text")
    lines = run_streamvid("stats", tmp_path / "ds").stdout.splitlines()
    assert len(lines) < 40 and "rejected: 499 of 500 input rows" in lines
    assert lines[-1] == "  and 479 more; --rejections shows them by kind with remedies, --json lists all"
    assert len(json.loads(run_streamvid("stats", tmp_path / "ds", "--json").stdout)["rejections"]) == 499


def test_stats_as_json_agree_with_the_dataset(tiny: Tiny) -> None:
    done = run_streamvid("stats", tiny.dataset, "--json")
    facts, dataset = json.loads(done.stdout), streamvid.open_dataset(tiny.dataset)
    assert not done.stderr
    assert facts["plan_fingerprint"] == dataset.manifest.fingerprints.plan
    assert facts["content_fingerprint"] == dataset.manifest.fingerprints.content
    assert facts["format_version"] == 1
    assert {bucket["bucket"] for bucket in facts["buckets"]} == {"96x64-5f", "64x96-5f"}
    assert {(b["split"], b["samples"], b["shards"]) for b in facts["buckets"]} == {("train", 1, 1)}
    assert facts["bytes"] == sum(path.stat().st_size for path in tiny.dataset.rglob("*.tar"))
    assert [(row["row"], row["source"]) for row in facts["rejections"]] == [(0, "broken.mp4")]


def test_stats_without_a_dataset_name_the_remedy(tiny: Tiny, tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "missing", tiny.videos, tiny.videos / "wide.mp4"):
        done = run_streamvid("stats", place, check=False)
        assert done.returncode == 1 and not done.stdout
        reason = "it is not a folder" if place.exists() else "the folder does not exist"
        reason = "manifest.json is missing" if place.is_dir() else reason
        assert done.stderr.startswith(f"error: no dataset at {place}: {reason}; pass the DEST of a completed")


def test_stats_of_a_damaged_dataset_are_a_one_line_error(tiny: Tiny, tmp_path: Path) -> None:
    for name, damage in {"manifest.json": b'{"format": "streamvid"', "index/shards": b"PAR1"}.items():
        root = tmp_path / name.replace("/", "-")
        shutil.copytree(tiny.dataset, root)
        (path,) = [path for path in root.rglob("*") if str(path.relative_to(root)).startswith(name)]
        path.write_bytes(damage)
        done = run_streamvid("stats", root, check=False)
        assert done.returncode == 1 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
        assert path.name in done.stderr
