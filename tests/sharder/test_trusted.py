"""Tests of metadata that states sizes: planning opens no file, and wrong rows are rejected."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from streamvid import VideoLoader
from streamvid.dataset.upkeep.verify import verify_dataset
from streamvid.dataset.versions.open import open_dataset
from streamvid.errors import ConfigError, SourceError
from streamvid.sharder.report import TASK_ENDED, ShardReport
from streamvid.sharder.sharder import dry_run, shard
from tests.clips import ROOT
from tests.files import Tree, tree_of, write_rows
from tests.loader.sidecars import make_sidecar
from tests.processes import run_command
from tests.shard_options import shard_options
from tests.sharder.conftest import OPTIONS, Built, rows_of
from tests.sharder.test_kill import command, moments

Facts = dict[str, dict[str, Any]]


@pytest.fixture(scope="session")
def facts(built: Built) -> Facts:
    """Metadata that states the facts of each good file of the source."""
    return {
        row["source"]: {
            "path": row["source"],
            "caption": row["text"],
            "num_frames": row["window_num_frames"],
            "height": row["source_height"],
            "width": row["source_width"],
            "fps": row["fps"],
            "duration": row["duration_seconds"],
            "num_bytes": row["source_bytes"],
        }
        for row in rows_of(built.dest)
    }


def build(built: Built, metadata: Path, dest: Path, **changes: Any) -> ShardReport:
    options = {**OPTIONS, "metadata": metadata, "trust_metadata": True, **changes}
    return shard(built.source, dest, shard_options(**options))


def content(dest: Path) -> Tree:
    """Return all files except the manifest, which contains the options of the build."""
    return {name: data for name, data in tree_of(dest).items() if name != "manifest.json"}


@pytest.mark.parametrize("left_out", [(), ("num_bytes",), ("duration",), ("fps", "num_bytes")])
def test_correct_metadata_gives_the_same_dataset_as_probing(
    built: Built, facts: Facts, tmp_path: Path, left_out: tuple[str, ...]
) -> None:
    rows = [{name: value for name, value in row.items() if name not in left_out} for row in facts.values()]
    metadata = write_rows(tmp_path / "m.jsonl", rows)
    probed = build(built, metadata, tmp_path / "probed", trust_metadata=False)
    trusted = build(built, metadata, tmp_path / "trusted")
    assert content(tmp_path / "trusted") == content(tmp_path / "probed")
    assert trusted.num_samples == probed.num_samples == len(facts) and trusted.buckets == probed.buckets
    manifests = [open_dataset(tmp_path / name).manifest for name in ("trusted", "probed")]
    assert manifests[0].fingerprints == manifests[1].fingerprints and manifests[0].build != manifests[1].build


def wrong(facts: Facts) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return the rows with some wrong ones, and the expected reason of each wrong row."""
    rows = {name: dict(row) for name, row in facts.items()}
    rows["b/long.MP4"]["num_frames"] += 3
    rows["more/2.mp4"] |= {"height": 96, "width": 64}
    rows["c/still.jpg"]["width"] = 65  # stored in the same way, and with the right width in the index
    rows["gone.mp4"] = {**rows["more/0.mp4"], "path": "gone.mp4"}
    rows["bad/text.mp4"] = {**rows["more/0.mp4"], "path": "bad/text.mp4"}
    rows["bad/empty.mp4"] = {**rows["more/0.mp4"], "path": "bad/empty.mp4"}
    rows["vélo.webm"]["fps"] = None
    rows["vélo.webm"]["duration"] = None
    reasons = {
        "b/long.MP4": "the metadata states num_frames 23, but the file has 20",
        "more/2.mp4": "the metadata states width 64 and height 96, but the file has 96 and 64",
        "gone.mp4": "cannot be read: No such file or directory",
        "bad/text.mp4": "the file is not a video, image or audio file that FFmpeg can read",
        "bad/empty.mp4": "the file is empty",
        "vélo.webm": "the metadata for the row is incomplete or invalid: fps or duration must be a number above 0",
    }
    return list(rows.values()), reasons


def test_a_wrong_row_is_rejected_and_renames_no_shard(built: Built, facts: Facts, tmp_path: Path) -> None:
    """SHARD-3, and SHARD-1 with tasks: samples of correct rows are where the metadata alone would put them."""
    rows, reasons = wrong(facts)
    metadata = write_rows(tmp_path / "m.jsonl", rows)
    options = shard_options(**OPTIONS, metadata=metadata, trust_metadata=True)
    planned = dry_run(built.source, tmp_path / "none", options)
    report = build(built, metadata, tmp_path / "one")
    found = {rejection.source: rejection.reason for rejection in report.rejections}
    assert found.keys() == reasons.keys()
    for name, reason in reasons.items():
        assert found[name].startswith(reason), found[name]
    assert [rejection.row for rejection in report.rejections] == sorted(r.row for r in report.rejections)
    assert report.num_samples == len(rows) - len(reasons) and verify_dataset(tmp_path / "one", deep=True).is_right
    assert planned.num_shards >= report.num_shards and planned.num_samples == len(rows) - 1
    dest = tmp_path / "tasks"
    for _ in range(2):
        for number in range(3):
            assert build(built, metadata, dest, task=f"{number}/3").state == TASK_ENDED
    assert build(built, metadata, dest) == report and tree_of(dest) == tree_of(tmp_path / "one")


def test_a_shard_that_contains_only_wrong_rows_is_omitted(built: Built, facts: Facts, tmp_path: Path) -> None:
    """Other shards keep their names, which leaves a gap; the dataset and its features are complete nevertheless."""
    names = sorted(name for name in facts if name.startswith("more/"))
    planned = build(built, write_rows(tmp_path / "m.jsonl", [facts[n] for n in names]), tmp_path / "all", **SMALL)
    places = {row["source"]: (row["bucket_id"], row["shard"]) for row in rows_of(tmp_path / "all")}
    assert planned.num_shards == len(names) > 3
    first = min(names, key=lambda name: places[name])
    source = shutil.copytree(built.source, tmp_path / "source")
    shutil.copy(source / "b" / "long.MP4", source / first)
    options = {**OPTIONS, **SMALL, "metadata": tmp_path / "m.jsonl", "trust_metadata": True}
    shard(source, tmp_path / "gap", shard_options(**options))
    assert {row["source"]: (row["bucket_id"], row["shard"]) for row in rows_of(tmp_path / "gap")} == {
        name: place for name, place in places.items() if name != first
    }
    assert verify_dataset(tmp_path / "gap", deep=True).is_right
    keys = sorted(row["key"] for row in rows_of(tmp_path / "gap"))
    features = make_sidecar(tmp_path / "features", tmp_path / "gap")
    for options in ({}, {"features": features}):
        with VideoLoader(tmp_path / "gap", batch_size=1, num_workers=0, **options) as loader:
            assert sorted(key for batch in loader for key in batch.sample_keys) == keys


SMALL: dict[str, Any] = {"shard_size_bytes": 1000, "val_fraction": 0.0}


def test_planning_opens_no_file(facts: Facts, built: Built, tmp_path: Path) -> None:
    """A dry run plans files that do not exist, locally and in a bucket without a server."""
    rows = [{**row, "path": f"s3://none-of-ours/{row['path']}"} for row in facts.values()]
    metadata = write_rows(tmp_path / "m.jsonl", [*rows, {**facts["more/0.mp4"], "path": "nowhere.mp4"}])
    options = {**OPTIONS, "trust_metadata": True, "endpoint_url": "http://127.0.0.1:9"}
    report = dry_run(metadata, tmp_path / "dataset", shard_options(**options))
    assert report.num_samples == len(facts) + 1 and report.num_bytes == sum(
        row["num_bytes"] for row in [*facts.values(), facts["more/0.mp4"]]
    )


def test_only_wrong_rows_keep_the_old_dataset(built: Built, facts: Facts, tmp_path: Path) -> None:
    dest = tmp_path / "dataset"
    shutil.copytree(built.dest, dest)
    rows = [{**row, "num_frames": row["num_frames"] + 1} for row in facts.values()]
    with pytest.raises(SourceError, match="all records were rejected, .*the metadata states num_frames"):
        build(built, write_rows(tmp_path / "m.jsonl", rows), dest, overwrite=True)
    assert open_dataset(dest).manifest == open_dataset(built.dest).manifest


def test_a_run_that_is_killed_repeatedly_ends_with_the_same_bytes(built: Built, facts: Facts, tmp_path: Path) -> None:
    rows, _ = wrong(facts)
    metadata, rng = write_rows(tmp_path / "m.jsonl", rows), random.Random(4)
    report = build(built, metadata, tmp_path / "one")
    options = {"metadata": str(metadata), "trust_metadata": True}
    for kill in rng.sample(moments(report.num_shards, rng), 5):
        done = run_command(command(built, tmp_path / "dataset", kill=kill, options=options), check=False, cwd=ROOT)
        assert done.returncode in (0, -9), done.stderr
    assert build(built, metadata, tmp_path / "dataset").num_samples == report.num_samples
    assert tree_of(tmp_path / "dataset") == tree_of(tmp_path / "one")


def test_unsupported_trusted_metadata_is_refused(built: Built, facts: Facts, tmp_path: Path) -> None:
    for changes in ({"clips": "native", "buckets": OPTIONS["buckets"]}, {"clips": "text"}, {"media": {"control": "c"}}):
        with pytest.raises(ConfigError, match="trust_metadata=True cannot be combined with"):
            shard_options(trust_metadata=True, **changes)
    with pytest.raises(
        SourceError, match=r"the metadata lacks the columns num_frames, height, width, fps .*score, row_id"
    ):
        shard(built.source, tmp_path / "no", shard_options(**OPTIONS, trust_metadata=True))
    assert json.dumps(shard_options(**OPTIONS).to_json()).count("trust") == 0
