"""Tests of shard() and dry_run() from the caller's point of view."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streamvid.buckets.bucket import parse_buckets
from streamvid.dataset.versions.open import open_dataset
from streamvid.errors import ConfigError, DatasetError, SealedError, SourceError, StorageError
from streamvid.sharder.options import ShardOptions
from streamvid.sharder.sharder import abandon, dry_run, shard
from tests.files import tree_of, write_rows
from tests.shard_options import shard_options
from tests.sharder.conftest import BUCKETS, OPTIONS, Built, Stop, noted, rows_of, stop_at

DEFAULTS = shard_options(**OPTIONS)


def options(**changes: Any) -> ShardOptions:
    return shard_options(**{**OPTIONS, **changes})


@pytest.fixture
def own(built: Built, tmp_path: Path) -> Path:
    """Copy of the source that a test may change."""
    return Path(shutil.copytree(built.source, tmp_path / "own"))


def test_every_row_is_in_a_shard_or_in_the_rejections(either: Built) -> None:
    """SHARD-3."""
    dataset, report = open_dataset(either.dest), either.report
    assert dataset.manifest.clips == report.clips == either.options.get("clips", "copy")
    sources = [row["source"] for row in dataset.samples_table().to_pylist()]
    rejected = dataset.rejections_table().to_pylist()
    assert len(sources) + len(rejected) == report.num_records == dataset.manifest.counts.records == 19
    assert len(sources) == report.num_samples == dataset.manifest.counts.samples == 14
    assert [row["row"] for row in rejected] == [14, 15, 16, 17, 18]
    reasons = {row["source"]: row["reason"] for row in rejected}
    assert "not a video" in reasons["bad/text.mp4"]
    assert reasons["bad/empty.mp4"] == "the file is empty"
    assert reasons["bad/short.mp4"] == "the clip has 3 frames, but the shortest bucket has 9"
    assert "No such file" in reasons["not/there.mp4"]
    assert "points outside the source folder" in reasons["../outside.mp4"]


def test_report_adds_up_and_is_json(built: Built) -> None:
    value = json.loads(json.dumps(built.report.to_json()))
    assert value["state"] == "built"
    assert sum(row["num_samples"] for row in value["buckets"]) == value["num_samples"] == 14
    assert sum(row["num_shards"] for row in value["buckets"]) == value["num_shards"]
    assert sum(row["num_bytes"] for row in value["buckets"]) == value["num_bytes"]
    assert len(value["rejections"]) == value["num_rejected"] == 5
    assert "and 3 more rejections" in built.report.summary(max_rejections=2)


def test_the_index_matches_the_input(built: Built) -> None:
    rows = {row["source"]: row for row in rows_of(built.dest)}
    clip = rows["a/clip_1.5s_a.mp4"]
    assert clip["text"] == 'number 0, with "quotes"\nand\ta new line é'
    assert (clip["user.score"], clip["user.row_id"]) == (0.0, 0)
    assert (clip["clip_width"], clip["clip_height"], clip["window_num_frames"], clip["fps"]) == (96, 64, 10, 24.0)
    assert {source: row["clip_extension"] for source, row in rows.items() if not source.startswith("more/")} == {
        **dict.fromkeys(("a/clip_1.5s_a.mp4", "a/clip_1.5s_b.mp4", "b/clip_1.5s_a.mp4", "b/long.MP4"), "mp4"),
        "b/long two.mov": "mp4",
        "vélo.webm": "webm",
        "c/deep/tall.mkv": "mkv",
        "c/still.jpg": "jpg",
    }
    for row in rows.values():
        assert row["clip_bytes"] == (built.source / row["source"]).stat().st_size


def test_equal_stems_get_different_keys(built: Built) -> None:
    keys = [row["key"] for row in rows_of(built.dest)]
    assert len(set(keys)) == len(keys) == 14
    assert sum(key.startswith("clip_1_5s_a-") for key in keys) == 2


def test_a_split_never_divides_a_source(own: Path, tmp_path: Path) -> None:
    rows = [{"path": f"more/{number}.mp4", "caption": str(copy)} for number in range(6) for copy in range(3)]
    write_rows(own / "metadata.csv", rows)
    report = shard(own, tmp_path / "out", options(val_fraction=0.5, whole_files=True))
    table = rows_of(tmp_path / "out")
    splits = {(row["source"], row["split"]) for row in table}
    assert report.num_samples == len({row["key"] for row in table}) == 18
    assert len(splits) == 6 and {split for _, split in splits} == {"train", "val"}
    assert len({row["record_key"] for row in table}) == 6


def test_bytes_depend_only_on_the_input(either: Built, tmp_path: Path) -> None:
    """SHARD-1: bytes do not depend on workers, umask, location or file times, and contain no clock, host or temporary
    path."""
    own = shutil.copytree(either.source, tmp_path / "own")
    for path in own.rglob("*.mp4"):
        os.utime(path, (1, 1))
    before = os.umask(0o077)
    try:
        shard(own / "metadata.csv", tmp_path / "out", shard_options(**either.options | {"workers": 3}))
    finally:
        os.umask(before)
    assert tree_of(tmp_path / "out") == either.tree
    assert not any(str(tmp_path.parent).encode() in data for data in either.tree.values())


def test_a_repeated_run_changes_and_probes_nothing(built: Built) -> None:
    phases = []
    report = shard(built.source, built.dest, DEFAULTS, lambda phase, *_: phases.append(phase))
    assert report == replace(built.report, state="already sealed")
    assert set(phases) == {"records"}
    assert tree_of(built.dest) == built.tree


def test_a_staging_folder_left_by_a_kill_after_sealing_is_removed(built: Built, tmp_path: Path) -> None:
    dest = shutil.copytree(built.dest, tmp_path / "out")
    (dest / ".staging" / "plan").mkdir(parents=True)
    (dest / ".staging" / "plan" / "files.json").write_text('["manifest.json"]')
    assert shard(built.source, dest, DEFAULTS).state == "already sealed"
    assert tree_of(dest) == built.tree and not (dest / ".staging").exists()


@pytest.mark.parametrize("name", ["ab" * 16, "overwritten", "x"])
def test_a_planted_list_of_files_removes_nothing(built: Built, tmp_path: Path, name: str) -> None:
    """SAFE-1: this protects foreign files, and a sealed dataset for which --abandon finds unfinished work."""
    for dest in (tmp_path / "new", shutil.copytree(built.dest, tmp_path / "sealed")):
        plan = dest / ".staging" / name
        plan.mkdir(parents=True)
        names = ["keep.txt", "index/keep", "shards/a/b-000000.tar", "manifest.json", *built.tree]
        (plan / "files.json").write_text(json.dumps(names))
        for kept in names[:3]:
            (dest / kept).parent.mkdir(parents=True, exist_ok=True)
            (dest / kept).write_text("mine")
    abandon(tmp_path / "sealed", DEFAULTS)
    shard(built.source, tmp_path / "new", DEFAULTS)
    assert tree_of(tmp_path / "sealed") == tree_of(tmp_path / "new") == built.tree | dict.fromkeys(names[:3], b"mine")


def append_row(own: Path) -> None:
    with (own / "metadata.csv").open("a", newline="") as file:
        file.write("a/clip_1.5s_a.mp4,again,1.0,50\r\n")


def edit_caption(own: Path) -> None:
    path = own / "metadata.csv"
    path.write_bytes(path.read_bytes().replace(b"number 3,", b"number three,"))


@pytest.mark.parametrize(
    ("change", "changes", "difference"),
    [
        (None, {"seed": 6}, "seed: 5 stored, 6 requested"),
        (None, {"buckets": BUCKETS[:1]}, "buckets: 4: 96x64-9f 96x64@9"),
        (append_row, {}, "input: the dataset was built from 19 rows, but the input now has 20 rows"),
        (edit_caption, {}, "input: the number of rows is still 19, but files, sizes, captions or columns have changed"),
    ],
)
def test_another_dataset_is_never_replaced_without_overwrite(
    built: Built, own: Path, change: Callable[[Path], None] | None, changes: dict[str, Any], difference: str
) -> None:
    if change:
        change(own)
    with pytest.raises(SealedError, match=difference):
        shard(own, built.dest, options(whole_files=True, **changes))
    assert tree_of(built.dest) == built.tree


def test_overwrite_removes_the_old_dataset_and_nothing_else(built: Built, tmp_path: Path) -> None:
    dest = shutil.copytree(built.dest, tmp_path / "out")
    (dest / "shards" / "notes.txt").write_text("mine")
    shard(built.source, dest, options(buckets=BUCKETS[:1], overwrite=True))
    shard(built.source, tmp_path / "fresh", options(buckets=BUCKETS[:1]))
    tree = tree_of(dest)
    assert tree.pop("shards/notes.txt") == b"mine"
    assert tree == tree_of(tmp_path / "fresh")


def test_overwrite_without_valid_input_keeps_the_old_dataset(built: Built, tmp_path: Path) -> None:
    dest = shutil.copytree(built.dest, tmp_path / "out")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "x.mp4").write_bytes(b"text")
    with pytest.raises(SourceError, match=r"all records were rejected.*row 0 x.mp4"):
        shard(tmp_path / "bad", dest, options(overwrite=True))
    assert open_dataset(dest).samples_table().num_rows == 14


def test_dry_run_writes_nothing_and_returns_the_expected_report(built: Built, tmp_path: Path) -> None:
    report = dry_run(built.source, tmp_path / "out", DEFAULTS)
    assert report == replace(built.report, state="dry run")
    assert list(tmp_path.iterdir()) == []


def test_appending_renames_no_sample(built: Built, own: Path, tmp_path: Path) -> None:
    append_row(own)
    shard(own, tmp_path / "out", options(whole_files=True))
    rows = rows_of(tmp_path / "out")
    places = {row["key"]: (row["record_key"], row["split"]) for row in rows}
    old = {row["key"]: (row["record_key"], row["split"]) for row in rows_of(built.dest)}
    assert old.items() <= places.items()
    assert len(places) == len(old) + 1


def test_an_unfinished_run_with_other_options_leaves_no_trace(built: Built, tmp_path: Path) -> None:
    """SHARD-1: all files of the abandoned plan are removed, including its index; its probe results are used."""
    dest = tmp_path / "out"
    with pytest.raises(Stop):
        shard(built.source, dest, options(buckets=BUCKETS[:1], seed=9), stop_at("seal", 4))
    assert (dest / "index").exists()
    probed: list[int] = []
    shard(built.source, dest, DEFAULTS, noted("probe", probed))
    assert probed == [16]
    assert tree_of(dest) == built.tree


def test_a_file_that_changes_after_probing_is_never_stored_silently(either: Built, tmp_path: Path) -> None:
    own, out, chosen = (
        shutil.copytree(either.source, tmp_path / "own"),
        tmp_path / "out",
        shard_options(**either.options),
    )
    victim = own / "more" / "3.mp4"

    def change(phase: str, done: int, total: int) -> None:
        if (phase, done) == ("encode" if "clips" in either.options else "build", 0):
            victim.write_bytes(victim.read_bytes() + b"\0")

    with pytest.raises(SourceError, match=r"more/3.mp4 changed after it was probed; run the same command again"):
        shard(own, out, chosen, change)
    assert not (out / "manifest.json").exists()
    shard(own, out, chosen)
    assert {row["source"]: row["source_bytes"] for row in rows_of(out)}["more/3.mp4"] == victim.stat().st_size


def test_a_caption_edited_between_runs_rebuilds_its_shard(own: Path, tmp_path: Path) -> None:
    """SHARD-1: a shard finished with another caption does not count as finished."""
    with pytest.raises(Stop):
        shard(own, tmp_path / "out", DEFAULTS, stop_at("seal", 0))
    edit_caption(own)
    shard(own, tmp_path / "out", DEFAULTS)
    shard(own, tmp_path / "fresh", DEFAULTS)
    assert tree_of(tmp_path / "out") == tree_of(tmp_path / "fresh")


@pytest.mark.slow
def test_a_damaged_staging_folder_costs_only_work(built: Built, tmp_path: Path) -> None:
    dest = tmp_path / "out"
    with pytest.raises(Stop):
        shard(built.source, dest, DEFAULTS, stop_at("seal", 1))
    journal = dest / ".staging" / "probes.jsonl"
    journal.write_bytes(journal.read_bytes()[:-7])
    markers = sorted(dest.glob(".staging/*/*-0*.json"))
    markers[0].write_bytes(b"{")
    markers[1].unlink()
    next(dest.glob("shards/*/*-000001.tar")).write_bytes(b"short")
    shard(built.source, dest, DEFAULTS)
    assert tree_of(dest) == built.tree


def test_a_file_that_takes_too_long_is_rejected_by_name(own: Path, tmp_path: Path) -> None:
    """SHARD-3: probing has a time limit per file, and ending a worker at the limit loses no record."""
    report = dry_run(own / "b", tmp_path / "out", options(probe_timeout_seconds=0.0001))
    assert (report.num_samples, report.num_rejected) == (0, 3)
    assert {row.reason for row in report.rejections} == {"probing took longer than probe_timeout_seconds=0.0001"}


def test_destinations_that_are_refused(built: Built, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "holiday.jpg").write_text("")
    with pytest.raises(DatasetError, match="is a file"):
        shard(built.source, tmp_path / "file", DEFAULTS)
    with pytest.raises(DatasetError, match="not empty, but does not contain a dataset"):
        shard(built.source, tmp_path / "full", DEFAULTS)
    with pytest.raises(SourceError, match="neither a folder nor a file"):
        shard(tmp_path / "nowhere", tmp_path / "out", DEFAULTS)
    with pytest.raises(SourceError, match="is a single media file; pass its folder"):
        shard(tmp_path / "full" / "holiday.jpg", tmp_path / "out", DEFAULTS)
    with pytest.raises(SourceError, match=r"contains no file with a video or image extension.*mp4, "):
        (tmp_path / "empty").mkdir()
        shard(tmp_path / "empty", tmp_path / "out", DEFAULTS)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"resolution": ("256px",)}, "buckets and resolution cannot be combined"),
        ({"val_fraction": 1.0}, "val_fraction=1.0"),
        ({"val_fraction": float("nan")}, "val_fraction=nan"),
        ({"shard_size_bytes": 10}, "shard_size_bytes=10"),
        ({"workers": 0}, "workers=0"),
        ({"seed": -1}, "seed=-1"),
        ({"probe_timeout_seconds": 0}, "probe_timeout_seconds=0"),
        ({"clips": "raw"}, "kind='raw': must be 'copy', 'native', 'text' or 'audio'"),
        ({"clips": "copy", "codec": "h264"}, "codec='h264' cannot be combined with clips.kind='copy'"),
        ({"clips": "copy", "crf": 20}, "crf=20 cannot be combined"),
        ({"clips": "copy", "gop": 8}, "gop=8 cannot be combined"),
        ({"clips": "copy", "min_psnr": 30}, "min_psnr=30 cannot be combined"),
        ({"clips": "native", "verify": "probe"}, "verify='probe' cannot be combined with clips.kind='native'"),
        ({"clips": "native", "verify": "hash"}, "verify='hash': must be 'decode' or 'probe'"),
        ({"clips": "native", "hdr": "tonemap"}, "hdr='tonemap': must be 'refuse' or 'allow'"),
        ({"clips": "native", "codec": "vp9"}, "codec is 'vp9'; it must be one of h264"),
        ({"clips": "native", "crf": 99}, "crf is 99"),
        ({"clips": "native", "gop": -1}, "gop=-1: must be an integer of at least 1"),
        ({"clips": "native", "fps": 0}, "fps=0: must"),
        ({"clips": "native", "fps": "many"}, "fps='many': must be a number, or None"),
        ({"clips": "native", "max_clip_seconds": 0}, "max_clip_seconds=0"),
        ({"clips": "native", "min_psnr": 101}, "min_psnr=101"),
        (
            {"time_columns": ("start", "end"), "media": {"a": "b"}},
            "media=.* with source.time_columns and clips.kind='copy'",
        ),
        ({"max_clip_seconds": 8, "media": {"a": "b"}}, "media=.* with clips.max_clip_seconds and clips.kind='copy'"),
        ({"max_clip_seconds": 8, "trust_metadata": True}, "trust_metadata=True cannot be combined"),
        ({"clips": "native", "time_columns": ("start", "start")}, "must be two different columns"),
        (
            {"clips": "native", "time_columns": ("a",), "whole_files": True},
            "cannot be combined with source.whole_files",
        ),
        ({"clips": "copy", "max_growth": 1}, "max_growth=1 cannot be combined"),
        ({"clips": "native", "max_growth": 0}, "max_growth=0"),
        ({"clips": "native", "codec": "ffv1", "max_growth": 1}, "max_growth=1: ffv1 is lossless"),
        ({"clips": "native", "encode_timeout_seconds": 0}, "encode_timeout_seconds=0"),
        ({"clips": "native", "buckets": parse_buckets("8x16@9", multiple=8)}, "sides of native clips must be even"),
    ],
)
def test_invalid_options_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options(**changes)


def test_a_destination_that_cannot_be_created_is_one_clear_error(own: Path) -> None:
    with pytest.raises(StorageError, match="cannot write to /proc/nope/x: No such file.*choose a destination"):
        shard(own, "/proc/nope/x", options())
