"""Tests of `where` when a dataset is built: rows that do not meet it are rejections, and counts add up."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

import streamvid
from streamvid.dataset.filter.filter import parse_filter
from streamvid.errors import ConfigError, SealedError
from streamvid.sharder.options import ShardOptions
from streamvid.sharder.rejections import REMEDIES, by_kind
from streamvid.sharder.sharder import dry_run, shard
from tests.files import tree_of, write_rows
from tests.shard_options import shard_options
from tests.sharder.conftest import OPTIONS, Built


def options(**changes: Any) -> ShardOptions:
    return shard_options(**{**OPTIONS, **changes})


def sources(dest: Path) -> set[str]:
    return set(streamvid.open_dataset(dest).samples_table().column("source").to_pylist())


def rejections(dest: Path) -> dict[int, tuple[str, str]]:
    rows = streamvid.open_dataset(dest).rejections_table().to_pylist()
    return {row["row"]: (row["kind"], row["reason"]) for row in rows}


@pytest.mark.parametrize(
    "where",
    [
        "score >= 2",
        "score < 3 or row_id == 9",
        "score is None or row_id > 10",
        "contains(text, 'number 1')",
        "not startswith(source, 'more')",
    ],
)
def test_building_selects_the_same_rows_as_loading(built: Built, tmp_path: Path, where: str) -> None:
    """Item 7: the language is the same, and missing values are not true. SHARD-3: each row is in a shard or a
    rejection."""
    report = dry_run(built.source, tmp_path / "dest", options(where=where))
    whole = streamvid.open_dataset(built.dest)
    table = whole.samples_table()
    expected = table.take(parse_filter(where, whole).matching(table)).column("source").to_pylist()
    rejected = {row.source for row in report.rejections}
    assert set(table.column("source").to_pylist()) - rejected == set(expected) and expected
    assert report.num_samples == len(expected)
    assert report.num_samples + report.num_rejected == report.num_records == built.report.num_records


@pytest.mark.parametrize(
    ("where", "test"),
    [
        ("width < height", lambda row: row["clip_width"] < row["clip_height"]),
        ("num_frames >= 12 and score > 1", lambda row: row["window_num_frames"] >= 12 and row["user.score"] > 1),
        ("aspect_ratio > 1.4", lambda row: row["clip_width"] / row["clip_height"] > 1.4),
        ("duration_seconds * fps > 11.5", lambda row: row["duration_seconds"] * row["fps"] > 11.5),
    ],
)
def test_facts_of_the_source_are_found_by_probing(built: Built, tmp_path: Path, where: str, test: Any) -> None:
    rows = streamvid.open_dataset(built.dest).samples_table().to_pylist()
    expected = {row["source"] for row in rows if test(row)}
    report = dry_run(built.source, tmp_path / "dest", options(where=where))
    left = {row["source"] for row in rows} - {row.source for row in report.rejections}
    assert left == expected and 0 < len(expected) < len(rows)
    assert report.num_samples + report.num_rejected == report.num_records
    assert {row.kind for row in report.rejections} >= {"where", "missing-file", "bad-path"}


def test_a_condition_on_metadata_alone_probes_no_row_that_it_rejects(built: Built, tmp_path: Path) -> None:
    probed: dict[str, int] = {}

    def progress(phase: str, done: int, total: int) -> None:
        probed[phase] = total

    report = dry_run(built.source, tmp_path / "dest", options(where="row_id < 3"), progress)
    assert (probed["probe"], report.num_samples) == (3, 3)
    dry_run(built.source, tmp_path / "dest", options(where="row_id < 3 and width > 0"), progress)
    assert probed["probe"] > 3


def test_reasons_name_the_values(built: Built, tmp_path: Path) -> None:
    report = shard(built.source, tmp_path / "dest", options(where="score > 4 and width > 10"))
    assert len(sources(tmp_path / "dest")) == report.num_samples
    kind, reason = rejections(tmp_path / "dest")[0]
    assert kind == "where" and reason == "the row does not meet where='score > 4 and width > 10': score=0.0, width=96"


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("scor > 5", "character 1: 'scor' is not a known column; did you mean 'score'.*num_frames"),
        ("widht > 5", "did you mean 'width'"),
        ("score > 'a'", "cannot be compared"),
        ("score +", "not a valid condition"),
        ("", "must be a condition"),
        (5, "must be text, or None"),
    ],
)
def test_invalid_conditions_are_refused_before_anything_is_built(
    built: Built, tmp_path: Path, where: Any, says: str
) -> None:
    """SAFE-1: no part of the text is run."""
    with pytest.raises(ConfigError, match=says):
        shard(built.source, tmp_path / "dest", options(where=where))
    assert not (tmp_path / "dest").exists() or not any((tmp_path / "dest").iterdir())


def test_facts_of_videos_are_refused_for_rows_of_texts(tmp_path: Path) -> None:
    """The error is a ConfigError, and conditions on the metadata of the texts still work."""
    (tmp_path / "texts.jsonl").write_text('{"caption": "a", "score": 1}\n{"caption": "b", "score": 3}\n')
    for build in (shard, dry_run):
        with pytest.raises(ConfigError, match="'width' describes videos.*use one of text, source, score"):
            build(
                tmp_path / "texts.jsonl", tmp_path / "ds", shard_options(clips="text", where="width > 3 or score > 2")
            )
    report = shard(tmp_path / "texts.jsonl", tmp_path / "ds", shard_options(clips="text", where="score > 2"))
    assert (report.num_samples, report.num_rejected) == (1, 1)


def test_wrong_names_at_load_time_get_a_suggestion(built: Built) -> None:
    dataset = streamvid.open_dataset(built.dest)
    with pytest.raises(ConfigError, match="'scoer' is not a column of the dataset.*did you mean 'score'.*clip_width"):
        parse_filter("scoer > 1", dataset)
    with pytest.raises(ConfigError, match="columns: 'row_idd'.*did you mean 'row_id'"):
        dataset.column("row_idd")


def test_a_different_condition_is_a_different_dataset(built: Built, tmp_path: Path) -> None:
    """SHARD-1: equal options give equal bytes, and other options are detected."""
    first, second = tmp_path / "a", tmp_path / "b"
    for dest in (first, second):
        shard(built.source, dest, options(where="row_id == 7"))
    assert tree_of(first) == tree_of(second)
    assert shard(built.source, first, options(where="row_id == 7")).state == "already sealed"
    with pytest.raises(SealedError, match="where"):
        shard(built.source, first, options(where="row_id == 8"))


def test_rejections_are_counted_by_kind_with_a_remedy(built: Built) -> None:
    """Item 10: the run and the sealed dataset report the same table."""
    kinds = {kind.kind: kind for kind in built.report.rejected_by_kind}
    assert {kind.count for kind in kinds.values()} == {1}
    assert set(kinds) == {"bad-path", "empty-file", "missing-file", "not-media", "too-few-frames"}
    assert "--num-frames" in kinds["too-few-frames"].remedy
    assert kinds["too-few-frames"].examples[0][1] == "bad/short.mp4"
    again = shard(built.source, built.dest, shard_options(**OPTIONS))
    assert again.state == "already sealed" and again.rejected_by_kind == built.report.rejected_by_kind
    assert built.report.to_json()["rejected_by_kind"] == [kind.to_json() for kind in built.report.rejected_by_kind]
    json.dumps(built.report.to_json())


@pytest.mark.parametrize(
    ("changes", "kind", "name"),
    [
        ({"max_clip_bytes": 3000}, "max-clip-bytes", "b/long.MP4"),
        ({"num_frames": (1,), "resolution": ("64px",), "buckets": None}, "no-video-bucket", "b/long.MP4"),
        ({"num_frames": (5,), "resolution": ("64px",), "buckets": None}, "no-image-bucket", "c/still.jpg"),
        ({"num_frames": (1, 5), "resolution": ("1080p",), "buckets": None}, "too-small", "b/long.MP4"),
        ({"policy": {"max_upscale": 0.5}}, "max-upscale", "b/long.MP4"),
    ],
)
def test_each_rejection_has_the_kind_of_its_option(
    built: Built, tmp_path: Path, changes: dict[str, Any], kind: str, name: str
) -> None:
    report = dry_run(built.source, tmp_path / "dest", options(**changes))
    assert {row.kind for row in report.rejections if row.source == name} == {kind}
    assert all(row.kind in REMEDIES for row in report.rejections)


def test_rejections_of_encoding_have_kinds(source: Path, tmp_path: Path) -> None:
    report = shard(source, tmp_path / "dest", options(clips="native", crf=51, min_psnr=33.0, where="row_id < 12"))
    kinds = {kind.kind: kind.count for kind in report.rejected_by_kind}
    assert kinds["min-psnr"] > 0 and kinds["where"] > 0 and report.num_samples > 0
    assert sum(kinds.values()) == report.num_rejected == report.num_records - report.num_samples


def test_reasons_without_a_kind_are_counted_as_others(tmp_path: Path) -> None:
    (found,) = by_kind([("", 3, "a.mp4", "is bad"), ("", 5, "b.mp4", "is bad")])
    assert (found.kind, found.count, found.examples[1]) == ("other", 2, (5, "b.mp4", "is bad"))


def test_a_user_column_takes_precedence_over_a_fact(built: Built, tmp_path: Path) -> None:
    """As when the dataset is loaded, user columns come first."""
    source = tmp_path / "source"
    source.mkdir()
    with (built.source / "metadata.csv").open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["path"].startswith("more/")]
    for row in rows:
        (source / "more").mkdir(exist_ok=True)
        (source / row["path"]).write_bytes((built.source / row["path"]).read_bytes())
    write_rows(
        source / "metadata.csv", [{"path": row["path"], "caption": "c", "width": n} for n, row in enumerate(rows)]
    )
    report = shard(source, tmp_path / "dest", options(where="width < 3"))
    assert report.num_samples == 3
