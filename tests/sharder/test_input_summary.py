"""Tests of the input summary, which is printed once, before any clip is stored."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from streamvid.buckets.bucket import parse_buckets
from streamvid.buckets.frames import FrameRate
from streamvid.sharder.options import ShardOptions
from streamvid.sharder.sharder import dry_run, shard
from streamvid.sharder.source.summary import InputSummary
from tests.clips import encode, frames_of
from tests.files import write_rows
from tests.shard_options import shard_options

BUCKETS = parse_buckets("96x64@5,64x64@1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Metadata that names five of six media files and a missing one; slow, fast, short and equal clips; an image."""
    root = tmp_path_factory.mktemp("folder")
    (root / "more").mkdir()
    frames = frames_of("bikes", 96, 64, 20)
    still = encode(
        frames_of("bigbuckbunny", 64, 64, 1), codec="mjpeg", container="image2pipe", options={"strict": "-1"}
    )
    slow = encode(frames[:12], fps=8)
    files = {
        "slow.mp4": slow,
        "equal.mp4": slow,
        "fast.mp4": encode(frames, fps=24),
        "still.jpg": still,
        "short.mp4": encode(frames[:2], fps=16),
        "more/unnamed.mp4": encode(frames[3:12], fps=16),
        "more/clip.json": b"{}",
    }
    for name, data in files.items():
        (root / name).write_bytes(data)
    named = ("slow.mp4", "equal.mp4", "fast.mp4", "still.jpg", "./short.mp4", "missing.mp4")
    rows = [{"file": name, "prompt": "x" if name != "fast.mp4" else "", "score": 1, "text": "y"} for name in named]
    write_rows(root / "metadata.csv", rows)
    write_rows(root / "captions.jsonl", [{"file": "slow.mp4"}])
    write_rows(root / "slow.json", [{}])  # describes only slow.mp4
    return root


def options(**changes: Any) -> ShardOptions:
    given = {"video_column": "file", "caption_column": "prompt", "buckets": BUCKETS, "fps": 16, "workers": 1}
    return shard_options(**given | changes)


def test_the_input_is_summarized_before_anything_is_stored(folder: Path, tmp_path: Path) -> None:
    summaries: list[InputSummary] = []

    def listen(summary: InputSummary) -> None:
        summaries.append(summary)
        assert not (tmp_path / "ds" / "shards").exists()

    report = shard(folder, tmp_path / "ds", options(), None, listen)
    assert summaries == [report.input]
    assert dry_run(folder, tmp_path / "dry", options(), None, summaries.append).input == summaries[0] == summaries[1]
    value = json.loads(json.dumps(report.to_json()))["input"]
    (source,) = value.pop("sources")
    assert source == {
        "url": str(folder),
        "layout": "metadata",
        "num_rows": 6,
        "metadata": ["metadata.csv"],
        "unread_metadata": {"count": 1, "examples": ["captions.jsonl"]},
        "columns": {"video": ["file"], "caption": ["prompt"], "kept": ["score", "text"]},
        "num_usable": 5,
        "num_captions": 4,
        "unnamed_files": {"count": 1, "examples": ["more/unnamed.mp4"]},
    }
    none: dict[str, Any] = {"count": 0, "examples": []}
    audio = value.pop("audio")
    assert audio.pop("num_videos") >= 3
    assert audio == {"num_with_audio": 0, "unreadable": none, "other_start": none, "other_length": none}
    assert value == {
        "shared_files": {"count": 0, "examples": []},
        "duplicates": {"count": 1, "examples": ["equal.mp4 = slow.mp4"]},
        "fps": [8.0, 24.0],
        "read_fps": 16.0,
        "repeated": {"count": 2, "examples": ["slow.mp4 (8 fps)", "equal.mp4 (8 fps)"]},
        "num_dropped": 1,
        "num_without_bucket": 1,
        "near_duplicates": None,
    }
    again = shard(folder, tmp_path / "ds", options(), None, summaries.append)
    assert again.state == "already sealed" and again.input == InputSummary(summaries[0].sources) == summaries[-1]


def test_other_sources_are_summarized(folder: Path, tmp_path: Path) -> None:
    """The sources are a file listed twice, metadata as the source, two sources, and files without metadata."""
    rows = write_rows(tmp_path / "rows.jsonl", [{"video": str(folder / "fast.mp4"), "cap": "x"}] * 2)
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "a.mp4").write_bytes(encode(frames_of("bikes", 96, 64, 20)[7:14], fps=24))
    (tmp_path / "plain" / "meta_v2.csv").write_text("video,caption\na.mp4,x\n")
    chosen = shard_options(buckets=BUCKETS, workers=1, whole_files=True)
    found = dry_run([rows, tmp_path / "plain"], tmp_path / "ds", chosen).input
    assert found is not None and found.shared_files is not None and found.duplicates is not None
    listed, plain = found.sources
    assert (listed.layout, listed.metadata) == ("metadata", ("rows.jsonl",))
    assert listed.columns == {"video": ("video",), "caption": ("cap",)}
    assert listed.unnamed_files is not None and listed.unnamed_files.count == 4, "all other files in its folder"
    assert (plain.layout, plain.num_rows, plain.num_captions, plain.unnamed_files) == ("folder", 1, 0, None)
    assert plain.unread_metadata.examples == ("meta_v2.csv",)
    assert found.shared_files.examples == ("rows 0 and 1: " + str(folder / "fast.mp4"),)
    assert (found.duplicates.count, found.read_fps, found.num_dropped) == (0, None, 0)
    assert (
        dry_run(tmp_path / "plain", tmp_path / "ds", options(video_column=None, caption_column=None)).num_samples == 1
    )


def test_sealed_datasets_are_a_source_without_invented_columns(folder: Path, tmp_path: Path) -> None:
    shard(folder, tmp_path / "ds", options())
    found = dry_run(tmp_path / "ds", tmp_path / "more", shard_options(buckets=BUCKETS, workers=1)).input
    assert found is not None
    (source,) = found.sources
    assert source.layout == "dataset" and source.columns == {"kept": ("score", "text")}
    assert source.unnamed_files is None
    assert found.duplicates is not None and found.duplicates.count == 1, "recognized by checksum"


def test_min_fps_rejects_videos_whose_frames_would_be_repeated(folder: Path, tmp_path: Path) -> None:
    """Images are not rejected, and neither is 23.976 if 24 is requested."""
    report = dry_run(folder, tmp_path / "ds", options(min_fps=16))
    assert report.input is not None and report.input.repeated is not None
    rejected = [rejection.source for rejection in report.rejections if rejection.kind == "min-fps"]
    assert len(rejected) == 2 and report.input.repeated.count == 0 and set(rejected) == {"slow.mp4", "equal.mp4"}
    (kind,) = (kind for kind in report.rejected_by_kind if kind.kind == "min-fps")
    assert "--min-fps" in kind.remedy and "has 8 frames per second; at least min_fps=16" in kind.examples[0][2]
    near = dry_run(folder, tmp_path / "ds", options(fps=None, min_fps=24.2))
    assert "fast.mp4" not in [rejection.source for rejection in near.rejections]


@pytest.mark.parametrize(
    ("rule", "slow", "fast"), [("resample", 15.8, 16.2), ("fix_frame_rate", 15.8, 16.2), ("cap", 0.0, 16.2)]
)
def test_a_rate_within_one_percent_is_equal(rule: Any, slow: float, fast: float) -> None:
    rate = FrameRate(rule, Fraction(16))
    assert rate.repeats_below == pytest.approx(slow, abs=0.05) and rate.drops_above == pytest.approx(fast, abs=0.05)
    assert not FrameRate().repeats_below
