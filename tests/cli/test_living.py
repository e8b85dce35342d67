"""Tests of the verbs that change a dataset: their output, and what they refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Call
from tests.dataset.living import clip_of, expected, files_with, seal_living, seen


@pytest.fixture
def root(tmp_path: Path) -> Path:
    seal_living(tmp_path / "dataset", range(8))
    return tmp_path / "dataset"


def test_a_takedown_from_request_to_record(root: Path, tmp_path: Path, call: Call) -> None:
    (tmp_path / "keys.txt").write_text("c3\nc9\n")
    shown = call("remove", root, "--keys", tmp_path / "keys.txt", "--dry-run")
    assert "would be removed in version 2: 1 samples, 7 remain" in shown.stdout
    assert "1 of the keys match no sample: c9" in shown.stdout
    done = call("remove", root, "--keys", tmp_path / "keys.txt", "--reason", "request 7", "--json")
    record = json.loads(done.stdout)
    assert (record["state"], record["reason"], record["version"]) == ("removed", "request 7", 2)
    assert [(clip["key"], clip["source"]) for clip in record["removed"]] == [("c3", "folder-1/3.mp4")]
    assert record["stored_in"] and "streamvid compact" in record["next_steps"][0]
    assert "1 tar(s) still contain removed samples" in call("verify", root, "--deep").stdout
    assert "deleted tars that contained removed samples: 1" in call("compact", root).stdout
    assert "still contain" not in call("verify", root, "--deep").stdout
    old = call("verify", f"{root}@1", "--deep").stdout
    assert "1 samples are stored elsewhere now, 1 were removed" in old and "OK: " in old
    assert files_with(root, clip_of("c3")) == []


def test_versions_tags_and_views(root: Path, call: Call) -> None:
    call("versions", root, "--tag", "v1")
    call("versions", root, "--view", "hq", "--where", "score > 5")
    shown = call("versions", root).stdout
    assert "view hq: score > 5" in shown and "v1=1" in shown
    versions = json.loads(call("versions", root, "--json").stdout)
    assert [(one["number"], one["verb"], one["tags"]) for one in versions["versions"]] == [
        (3, "view", []),
        (2, "tag", []),
        (1, "shard", ["v1"]),
    ]
    assert json.loads(call("stats", f"{root}#hq", "--json").stdout)["samples"] == 2
    assert json.loads(call("stats", f"{root}@v1", "--json").stdout)["version"] == 1
    assert "--move" in call("versions", root, "--tag", "v1").stderr
    call("versions", root, "--tag", "v1", "--move")
    assert json.loads(call("stats", f"{root}@v1", "--json").stdout)["version"] == 3
    call("versions", root, "--untag", "v1")
    assert "view hq" not in call("versions", root, "--drop-view", "hq").stdout
    for words in (
        ("--view", "a"),
        ("--where", "score > 1"),
        ("--tag", "a", "--untag", "b"),
        ("--tag", "1"),
        ("--move",),
    ):
        refused = call("versions", root, *words)
        assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert call("annotate", f"{root}@1", "x.csv").returncode == 2


def test_a_merge_and_a_compaction(root: Path, tmp_path: Path, call: Call) -> None:
    seal_living(tmp_path / "other", [7, 8])
    assert "1 source files have samples" in call("merge", root, tmp_path / "other").stderr
    assert "1 samples added" in call("merge", root, tmp_path / "other", "--on-duplicate", "first").stdout
    assert "already merged" in call("merge", root, tmp_path / "other").stdout
    assert "would be compacted" in call("compact", root, "--dry-run").stdout
    shown = call("compact", root, "--expire", "0d", "--shard-size", "1MB").stdout
    assert "shards rewritten" in shown and "expired versions: 1, 2" in shown
    assert seen(root) == expected([f"c{clip}" for clip in range(9)])
    assert "nothing to do" in call("compact", root).stdout
    for words in (("--cache-only",), ("--expire", "soon"), ("--shard-size", "big")):
        assert call("compact", root, *words).returncode == 2


def test_verify_refuses_missing_versions_and_views(root: Path, call: Call) -> None:
    call("versions", root, "--view", "hq", "--where", "score > 5")
    call("compact", root, "--expire", "0d")
    assert call("verify", f"{root}#hq").returncode == 0
    for suffix, said in (
        ("#nope", "has no view named 'nope'"),
        ("@44", "has no version '44'"),
        ("@1", "no version 1 of"),
    ):
        for verb in ("verify", "stats"):
            refused = call(verb, f"{root}{suffix}")
            assert refused.returncode in (1, 2) and refused.stderr.startswith("error: ") and said in refused.stderr
            assert not refused.stdout, verb


@pytest.mark.parametrize("make", [lambda root: root / "none", lambda root: f"{root}@9"])
def test_a_missing_dataset_is_named(root: Path, call: Call, make: Callable[[Path], object]) -> None:
    for verb in ("versions", "compact"):
        refused = call(verb, make(root))
        assert refused.returncode in (1, 2) and "Traceback" not in refused.stderr and str(root) in refused.stderr
