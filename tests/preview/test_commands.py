"""Tests of the commands that print or write single samples, distributions, reports and plans."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import streamvid
from tests.conftest import Sharded, run_streamvid
from tests.dataset.frozen import FROZEN
from tests.dataset.samples import BUCKETS, ROW, Part, seal_parts, tar_bytes
from tests.files import tree_of


def test_stats_of_samples_are_their_index_rows(sharded: Sharded) -> None:
    rows = streamvid.open_dataset(sharded.root).samples_table().to_pylist()
    chosen = [rows[20], rows[3]]
    done = run_streamvid("stats", sharded.root, "--samples", *[row["key"] for row in chosen], "--json")
    found = json.loads(done.stdout)["samples"]
    for shown, row in zip(found, chosen, strict=True):
        plain = {name: value.hex() if isinstance(value, bytes) else value for name, value in row.items()}
        assert {name: shown[name] for name in plain} == plain
        assert (sharded.root / shown["shard_path"]).stat().st_size == shown["shard_bytes"]
    text = run_streamvid("stats", sharded.root, "--samples", rows[20]["key"]).stdout
    assert re.search(rf"^key +{rows[20]['key']}$", text, re.MULTILINE)
    done = run_streamvid("stats", sharded.root, "--samples", rows[0]["key"], "nothing", check=False)
    assert done.returncode == 2 and "key 'nothing' is not in" in done.stderr and not done.stdout


def test_stats_print_distributions(sharded: Sharded) -> None:
    text = run_streamvid("stats", sharded.root, "--histograms").stdout
    fps = [r["fps"] for r in streamvid.open_dataset(sharded.root).samples_table().to_pylist()]
    line = next(line for line in text.splitlines() if line.startswith("Frame rate"))
    assert f"{min(fps):.4g}" in line.split() and f"{max(fps):.4g}" in line.split() and "█" in line


def test_extract_writes_no_file_outside_its_folder(tmp_path: Path) -> None:
    """SAFE-1: neither a key nor an extension can lead outside the output folder."""
    rows = [replace(ROW, key="../../evil", clip=replace(ROW.clip, extension="/../../evil"))]
    tar = tar_bytes([("a-0", {"mp4": b"clp", "txt": b"words"})])
    seal_parts(tmp_path / "ds", BUCKETS[:1], [Part(BUCKETS[0], 0, tar, rows)], {})
    before = tree_of(tmp_path)
    done = run_streamvid("extract", tmp_path / "ds", "../../evil", "-o", tmp_path / "a" / "b" / "out", check=False)
    assert done.returncode == 1 and done.stderr.count("error:") == 1
    assert tree_of(tmp_path) == before


def test_extract_explains_wrong_views(sharded: Sharded, tmp_path: Path) -> None:
    key = streamvid.open_dataset(sharded.root).samples_table()["key"][0].as_py()
    done = run_streamvid("extract", sharded.root, key, "-o", tmp_path, "--view", "temporal=unifrm", check=False)
    assert done.returncode == 2 and "temporal" in done.stderr and "uniform" in done.stderr
    assert tree_of(tmp_path) == {}


def test_a_view_that_leaves_a_bucket_empty(tmp_path: Path) -> None:
    """Samples of a view are delivered as without the view, and keys outside the view are refused."""
    root = tmp_path / "ds"
    shutil.copytree(FROZEN / "native", root)
    rows = streamvid.open_dataset(root).samples_table().to_pylist()
    (inside, *_) = (row["key"] for row in rows if row["index"] == 1)
    outside = [row["key"] for row in rows if row["key"] != inside]
    run_streamvid("versions", root, "--view", "one", "--where", f"key == {inside!r}")
    run_streamvid("report", f"{root}#one", "-o", tmp_path / "new" / "folder" / "r.html")
    page = (tmp_path / "new" / "folder" / "r.html").read_text()
    assert inside in page and page.count("data:image/jpeg") == 1 and not any(key in page for key in outside)
    for url, folder in ((f"{root}#one", "view"), (root, "whole")):
        run_streamvid("extract", url, inside, "-o", tmp_path / folder)
    assert tree_of(tmp_path / "view") == tree_of(tmp_path / "whole") != {}
    for key in outside:
        done = run_streamvid("extract", f"{root}#one", key, "-o", tmp_path / "none", check=False)
        assert done.returncode == 2 and f"key {key!r} is not in the view" in done.stderr
    found = run_streamvid("stats", f"{root}#one", "--histograms").stdout
    assert "\n1 samples, " in found and "only samples of the view: key ==" in found


def test_a_plan_is_written_as_html(sharded: Sharded, tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    done = run_streamvid("plan", sharded.root, "--num-ranks", 2, "--batch-size", 1, "--json", "--html", path)
    plan, page = json.loads(done.stdout), path.read_text()
    for bucket in plan["buckets"]:
        row = page.split(f">{bucket['bucket_id']}</th>")[1].split("</tr>")[0]
        assert re.findall(r">([\d,]+)</td>", row)[4] == str(bucket["num_delivered"])
    assert not re.search(r"<script|https?://|src=", page)
