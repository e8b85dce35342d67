"""Tests of curation: scores become columns, are measured once per file, and give the same bytes on any machine."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamvid
from streamvid.errors import ConfigError, SourceError
from streamvid.sharder.options import ShardOptions
from streamvid.sharder.sharder import dry_run, shard
from tests.clips import encode, frames_of
from tests.files import read_webdataset, tree_of, write_rows
from tests.shard_options import shard_options
from tests.sharder.conftest import OPTIONS, Built, Stop, build, noted, stop_at
from tests.sharder.test_kill import run
from tests.sharder.test_tasks import do_task

SCORES = ("motion", "blur")
EXTRA: dict[str, Any] = {"scores": SCORES, "val_fraction": 0.0}
CURATED = {**OPTIONS, **EXTRA}
UNNAMED: dict[str, Any] = {"caption_column": ""}
LOSSLESS: dict[str, Any] = {"codec": "ffv1", "container": "matroska", "numbered": False}


def options(**changes: Any) -> ShardOptions:
    return shard_options(**{**CURATED, **changes})


@pytest.fixture(scope="module")
def curated(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(source, tmp_path_factory.mktemp("curated") / "dataset", CURATED)


def columns(dest: Path, *names: str) -> dict[str, tuple[Any, ...]]:
    """Return the values of user columns by source."""
    rows = streamvid.open_dataset(dest).samples_table().to_pylist()
    return {row["source"]: tuple(row[f"user.{name}"] for name in names) for row in rows}


def make(folder: Path, **clips: bytes) -> Path:
    for name, data in clips.items():
        (folder / f"{name}.mkv").write_bytes(data)
    return folder


def test_scores_of_known_pictures(tmp_path: Path) -> None:
    """Motion is exact for gray levels, whatever the frame rate; blur ranks an image and its blurred versions."""
    levels = np.repeat(np.array([100, 140], np.uint8), 3)  # changes every third frame: at 24 fps, every 1/8 second
    flicker = np.broadcast_to(np.resize(levels, 24)[:, None, None, None], (24, 64, 96, 3))
    sharp = np.repeat(frames_of("bikes", 192, 128, 1), 24, axis=0)
    soft, softer = (sum(np.roll(sharp, place, 1).astype(int) for place in range(size)) // size for size in (2, 4))
    make(
        tmp_path,
        flicker=encode(flicker, **LOSSLESS),
        slow=encode(flicker, fps=12, **LOSSLESS),
        still=encode(sharp, **LOSSLESS),
        soft=encode(soft.astype(np.uint8), **LOSSLESS),
        softer=encode(softer.astype(np.uint8), **LOSSLESS),
        moving=encode(frames_of("bikes", 96, 64, 24), **LOSSLESS),
    )
    shard(tmp_path, tmp_path / "dest", options())
    found = {name.removesuffix(".mkv"): scores for name, scores in columns(tmp_path / "dest", *SCORES).items()}
    motion, blur = ({name: scores[place] for name, scores in found.items()} for place in (0, 1))
    assert motion["flicker"] == pytest.approx(40, abs=1) and motion["slow"] == pytest.approx(20, abs=3)
    assert motion["still"] == motion["soft"] == 0 < 1 < motion["moving"]
    assert blur["flicker"] is None, "flat pictures have no edges"
    assert 0 < blur["still"] < blur["soft"] < blur["softer"] < 1


def test_a_condition_on_scores_selects_rows_when_a_dataset_is_built_and_when_it_is_loaded(
    curated: Built, tmp_path: Path
) -> None:
    """SHARD-3: a row whose score is missing, such as the motion of a still image, does not meet the condition."""
    where, found = "motion > 9.3 and blur < 0.3", columns(curated.dest, *SCORES)
    expected = {name for name, (motion, blur) in found.items() if motion is not None and motion > 9.3 and blur < 0.3}
    report = shard(curated.source, tmp_path / "dest", options(where=where))
    assert columns(tmp_path / "dest", *SCORES) == {name: found[name] for name in expected}
    assert 0 < len(expected) < len(found) and report.num_samples + report.num_rejected == report.num_records
    reasons = {row.source: row.reason for row in report.rejections if row.kind == "where"}
    assert reasons.keys() == found.keys() - expected | {"bad/short.mp4"} and "motion=None" in reasons["c/still.jpg"]
    given: dict[str, Any] = {"batch_size": 1, "where": where, "columns": ("source", *SCORES), "num_workers": 0}
    with streamvid.VideoLoader(curated.dest, **given) as loader:
        loaded = {batch["source"][0]: tuple(float(batch[name][0]) for name in SCORES) for batch in loader}
    assert loaded == {name: pytest.approx(found[name], rel=1e-6) for name in expected}


@pytest.mark.parametrize(
    ("where", "num_decoded"),
    [("row_id < 4 and motion > 9.3", 4), ("row_id < 4 and motion is None", 15)],
)
def test_files_of_rows_that_cannot_meet_a_condition_are_not_decoded(
    curated: Built, tmp_path: Path, where: str, num_decoded: int
) -> None:
    counts: list[int] = []
    report = dry_run(
        curated.source, tmp_path / "dest", options(where=where, scores=("motion",)), noted("curate", counts)
    )
    assert counts[-1] == num_decoded
    reasons = [row.reason for row in report.rejections if row.kind == "where"]
    assert report.num_samples + report.num_rejected == report.num_records and reasons
    assert (
        num_decoded == 15
        or sum("row_id=12" in reason and "motion" not in reason.split(":")[1] for reason in reasons) == 1
    )


def test_a_rerun_measures_nothing_again(curated: Built, tmp_path: Path) -> None:
    """SHARD-1: results are kept after an interruption, and a dry run uses them."""
    dest, counts = tmp_path / "dataset", list[int]()
    with pytest.raises(Stop):
        shard(curated.source, dest, options(), stop_at("curate", 4))
    dry_run(curated.source, dest, options(), noted("curate", counts))
    assert counts[0] == 4 and counts[-1] == 15, "one file that does not decode, and all others"
    with pytest.raises(Stop):
        shard(curated.source, dest, options(), stop_at("build", 0))
    shard(curated.source, dest, options(), noted("curate", again := list[int]()))
    assert again == [15] and tree_of(dest) == curated.tree


def test_a_killed_build_that_tasks_resume_ends_with_the_same_bytes(curated: Built, tmp_path: Path) -> None:
    """SHARD-1, SHARD-2: after kill -9 during measuring, each task measures its share of the remaining files."""
    dest, phases = tmp_path / "dataset", []
    assert run(curated, dest, kill=["curate", 3, 0.0], options=EXTRA).returncode == -signal.SIGKILL
    for number in (0, 1):
        report = do_task(curated, dest, f"{number}/2")
        phases.append(report.remaining and report.remaining.phase)
    assert phases == ["curate", "build"]
    shard(curated.source, dest, options(), noted("curate", counts := list[int]()))
    assert counts == [15] and tree_of(dest) == curated.tree


def test_time_ranges_have_their_own_scores(tmp_path: Path) -> None:
    """Overlapping ranges are decoded in one pass per file and measured like separate files; a damaged file is a
    rejection."""
    still, moving = np.repeat(frames_of("bikes", 96, 64, 1), 24, axis=0), frames_of("bikes", 96, 64, 24)
    data = encode(np.concatenate([still, moving]), **LOSSLESS)
    torn = bytearray(data)
    torn[len(torn) // 2 : len(torn) // 2 + 2000] = bytes(2000)
    make(tmp_path, whole=data, torn=bytes(torn), moving=encode(moving, **LOSSLESS))
    rows = [
        ("whole", 0, 1),
        ("whole", 1, 2),
        ("whole", 0.5, 1.5),
        ("whole", 0, 9),
        ("torn", 0, 2),
        *(2 * [("moving", 0, 1)]),
    ]
    records = [{"path": f"{name}.mkv", "start": start, "end": end} for name, start, end in rows]
    write_rows(tmp_path / "metadata.jsonl", records)
    counts: list[int] = []
    measured = {"scores": ("motion",), "black_bars": True, "shard_size_bytes": 10**6}
    native = options(clips="native", time_columns=("start", "end"), **measured, **UNNAMED)
    report = shard(tmp_path, tmp_path / "dest", native, noted("curate", counts))
    table = streamvid.open_dataset(tmp_path / "dest").samples_table().to_pylist()
    motion = {(row["source"], row["window_start"]): row["user.motion"] for row in table}
    assert counts[-1] == 3, "one unit of work per file"
    assert motion["whole.mkv", 0] == 0 < motion["whole.mkv", 12] < motion["whole.mkv", 24]
    assert motion["whole.mkv", 24] == motion["moving.mkv", 0]
    assert [(row.row, row.kind) for row in report.rejections] == [(3, "time-range"), (4, "damaged")]
    (tar,) = (tmp_path / "dest").rglob("*.tar")
    samples = [json.loads(sample["json"])["columns"] for sample in read_webdataset(tar)]
    names = ["bar_bottom", "bar_left", "bar_right", "bar_top", "motion"]
    assert [sorted(found) for found in samples] == 5 * [names] and all(found["bar_top"] == 0 for found in samples)


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"scores": ("motion", "sharpness")}, ConfigError, "'sharpness' is not a valid score; use motion or blur"),
        ({"scores": ("blur", "blur")}, ConfigError, "contains duplicates"),
        ({"trust_metadata": True}, ConfigError, "scores=.*trust_metadata=True"),
        ({"clips": "text", "buckets": None}, ConfigError, "scores=.*clips.kind='text', which has no files"),
        ({"where": "blurr > 1"}, ConfigError, "did you mean 'blur'"),
        ({"metadata": "taken.jsonl", **UNNAMED}, SourceError, "already has a column named 'blur'"),
    ],
)
def test_invalid_requests_are_refused_before_anything_is_decoded(
    source: Path, tmp_path: Path, changes: dict[str, Any], error: type[Exception], says: str
) -> None:
    if "metadata" in changes:
        changes = {**changes, "metadata": write_rows(tmp_path / "taken.jsonl", [{"path": "a.mp4", "blur": 1}])}
    with pytest.raises(error, match=says):
        dry_run(
            source,
            tmp_path / "dest",
            options(**changes),
            lambda phase, *_: pytest.fail(phase) if phase == "probe" else None,
        )
