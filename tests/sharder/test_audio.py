"""Tests of audio in stored clips: it is kept, dropped or required, and the index and reports describe it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamvid
from streamvid.buckets.bucket import parse_buckets
from streamvid.dataset.upkeep.merge import merge
from streamvid.dataset.versions.open import open_dataset
from streamvid.errors import ConfigError, DatasetError
from streamvid.forecast.contents import contents_of
from streamvid.sharder.append import append
from streamvid.sharder.report import ShardReport
from streamvid.sharder.sharder import dry_run, shard
from tests.conftest import run_streamvid
from tests.files import tree_of, write_rows
from tests.shard_options import shard_options
from tests.sharder.conftest import rows_of
from tests.sharder.test_native import clip_of
from tests.sounding import Sound, chirps, heard, shift_of, sounding
from tests.video.clips import run_ffmpeg

FPS, RATE, NUM_FRAMES = 24, 48_000, 48
OPTIONS: dict[str, Any] = {"buckets": parse_buckets("96x64@17"), "workers": 1, "caption_column": ""}
AUDIO = ("codec", "sample_rate", "channels", "start_seconds", "gap_seconds", "silence_share")
SECONDS = NUM_FRAMES / FPS


@dataclass(frozen=True)
class Source:
    folder: Path
    sound: Sound


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    folder, sound = tmp_path_factory.mktemp("sounding"), chirps(SECONDS, RATE)
    files = {
        "whole.mp4": sounding(NUM_FRAMES, sound),
        "late.mp4": sounding(NUM_FRAMES, sound, start_seconds=Fraction(1, 2)),
        "short.mov": sounding(NUM_FRAMES, sound[:1, : RATE // 2], container="mov", codec="aac"),
        "mute.mp4": sounding(NUM_FRAMES, sound[:, :0]),
    }
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return Source(folder, sound)


def build(source: Source, dest: Path, **options: Any) -> ShardReport:
    return shard(source.folder, dest, shard_options(**{**OPTIONS, **options}))


def plan(source: Source, dest: Path, **options: Any) -> ShardReport:
    return dry_run(source.folder, dest, shard_options(**{**OPTIONS, **options}))


def by_name(dest: Path) -> dict[str, dict[str, Any]]:
    return {row["source"]: row for row in rows_of(dest)}


def kinds(report: ShardReport) -> dict[str, str]:
    return {one.source: one.kind for one in report.rejections}


@pytest.fixture(scope="module")
def kept(source: Source, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dataset of copies of the source, with their audio."""
    dest = tmp_path_factory.mktemp("kept") / "ds"
    build(source, dest)
    return dest


def test_the_index_describes_the_audio_of_each_copy(kept: Path) -> None:
    rows = by_name(kept)
    assert {name: row["has_audio"] for name, row in rows.items()} == {
        **dict.fromkeys(("whole.mp4", "late.mp4", "short.mov"), True),
        "mute.mp4": False,
    }
    assert all(rows["mute.mp4"][f"audio_{name}"] is None for name in (*AUDIO, "loudness_lufs", "clipping_share"))
    found = {name: [rows[name][f"audio_{fact}"] for fact in AUDIO[:4]] for name in ("whole.mp4", "late.mp4")}
    assert found == {"whole.mp4": ["flac", RATE, 2, 0.0], "late.mp4": ["flac", RATE, 2, 0.5]}
    assert rows["short.mov"]["audio_codec"] == "aac" and rows["short.mov"]["audio_channels"] == 1
    assert rows["whole.mp4"]["audio_gap_seconds"] == 0 and -60 < rows["whole.mp4"]["audio_loudness_lufs"] < 0


def test_conditions_of_a_loader_select_by_audio(kept: Path) -> None:
    names = {row["key"]: row["source"] for row in rows_of(kept)}
    for where, wanted in {
        "has_audio": {"whole.mp4", "late.mp4", "short.mov"},
        "not has_audio": {"mute.mp4"},
        "has_audio and audio_start_seconds < 0.1 and audio_channels == 2": {"whole.mp4"},
    }.items():
        with streamvid.VideoLoader(kept, batch_size=1, num_workers=0, where=where, tail="uneven") as loader:
            assert {names[key] for batch in loader for key in batch.sample_keys} == wanted, where


@pytest.mark.parametrize("codec", ["aac", "opus", "flac"])
def test_native_clips_of_long_videos_have_the_audio_of_their_frames(codec: str, source: Source, tmp_path: Path) -> None:
    """Each clip has its part of the source's audio, and all clips together have all of it."""
    build(source, tmp_path / "ds", clips="native", audio_codec=codec, max_clip_seconds=1)
    dataset = open_dataset(tmp_path / "ds")
    assert dataset.manifest.native is not None and dataset.manifest.native.encoding["audio"] == codec
    heard_of: dict[str, list[int]] = {}
    for row in rows_of(tmp_path / "ds"):
        first = row["window_start"] * RATE // FPS
        wanted = np.zeros((2, round(SECONDS * RATE)))
        offset = RATE // 2 if row["source"] == "late.mp4" else 0
        wanted[:, offset:] = source.sound[:, : wanted.shape[1] - offset] / 32768
        wanted = wanted[:, first : first + RATE * row["window_source_frames"] // FPS]
        if row["source"] in ("mute.mp4", "short.mov"):
            assert row["has_audio"] == (row["source"] == "short.mov" and first == 0)
            continue
        assert row["has_audio"] and row["audio_codec"] == codec
        found = heard(clip_of(tmp_path / "ds", row), tmp_path, RATE)
        assert shift_of(found, wanted) == 0
        assert codec != "flac" or np.array_equal(found[:, : wanted.shape[1]], wanted)
        heard_of.setdefault(row["source"], []).append(row["window_start"])
    assert sorted(heard_of["whole.mp4"]) == [0, 24]


def test_time_ranges_have_the_audio_of_their_range(source: Source, tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"path": "whole.mp4", "start": 0.25, "end": 1.25},
        {"path": "whole.mp4", "start": 1, "end": 2},
    ]
    table = write_rows(tmp_path / "rows.csv", rows)
    options = {"metadata": table, "time_columns": ("start", "end")}
    assert build(source, tmp_path / "ds", **options).num_samples == 2
    for row in rows_of(tmp_path / "ds"):
        first = row["window_start"] * RATE // FPS
        assert (row["has_audio"], row["audio_codec"], row["audio_start_seconds"]) == (True, "flac", 0.0)
        found = heard(clip_of(tmp_path / "ds", row), tmp_path, RATE)
        assert np.array_equal(found, source.sound[:, first : first + RATE] / 32768)
    build(source, tmp_path / "mute", **options, audio="drop")
    assert not any(row["has_audio"] for row in rows_of(tmp_path / "mute"))


@pytest.mark.parametrize("clips", ["copy", "native"])
def test_drop_omits_the_audio(clips: str, source: Source, tmp_path: Path) -> None:
    report = build(source, tmp_path / "ds", clips=clips, audio="drop")
    rows = by_name(tmp_path / "ds")
    assert report.num_samples == 4 and not any(row["has_audio"] for row in rows.values())
    stored, own = clip_of(tmp_path / "ds", rows["whole.mp4"]), (source.folder / "whole.mp4").read_bytes()
    assert stored == own if clips == "copy" else b"Opus" not in stored


@pytest.mark.parametrize("clips", ["copy", "native"])
def test_require_rejects_clips_without_audio(clips: str, source: Source, tmp_path: Path) -> None:
    """SHARD-3: a clip from a part of the video without audio is also rejected, with a reason."""
    report = plan(source, tmp_path / "ds", clips=clips, audio="require")
    assert kinds(report) == {"mute.mp4": "no-audio"}
    (reason,) = (one.reason for one in report.rejections)
    assert "has no audio" in reason and "--audio require" in report.rejected_by_kind[0].remedy
    if clips == "native":
        cut = build(source, tmp_path / "cut", clips=clips, audio="require", max_clip_seconds=1)
        assert [(one.source, one.kind) for one in cut.rejections if one.source == "short.mov"] == [
            ("short.mov", "no-audio")
        ]


def test_require_applies_to_trusted_metadata(source: Source, tmp_path: Path) -> None:
    facts = {"width": 96, "height": 64, "num_frames": NUM_FRAMES, "fps": FPS}
    table = write_rows(tmp_path / "rows.csv", [{"path": name, **facts} for name in ("whole.mp4", "mute.mp4")])
    options = {"metadata": table, "trust_metadata": True}
    report = build(source, tmp_path / "ds", **options, audio="require")
    assert kinds(report) == {"mute.mp4": "no-audio"} and report.num_samples == 1
    with pytest.raises(ConfigError, match="'has_audio' is known only after a file is probed"):
        build(source, tmp_path / "other", **options, where="has_audio")


def test_where_selects_input_by_audio(source: Source, tmp_path: Path) -> None:
    report = plan(source, tmp_path / "ds", where="has_audio and audio_start_seconds < 0.1")
    assert kinds(report) == {"late.mp4": "where", "mute.mp4": "where"}


def test_datasets_remember_the_option(source: Source, kept: Path, tmp_path: Path) -> None:
    """An append uses the options of its dataset, and datasets with different options are not merged."""
    dest = tmp_path / "ds"
    build(source, dest, audio="require")
    more = tmp_path / "more"
    more.mkdir()
    for name in ("mute.mp4", "whole.mp4"):
        (more / f"new_{name}").write_bytes((source.folder / name).read_bytes())
    report = append(dest, more)
    assert kinds(report) == {"new_mute.mp4": "no-audio"} and report.num_samples == 1
    assert by_name(dest)["new_whole.mp4"]["has_audio"]
    with pytest.raises(ConfigError, match=r"audio: the dataset at .* has .require., but .drop. was given"):
        append(dest, more, {"clips": {"audio": "drop"}})
    with pytest.raises(ConfigError, match=r"audio: the dataset at .* has .keep., but .drop. was given"):
        append(kept, more, {"clips": {"audio": "drop"}})
    assert "build a dataset without --audio require" in report.rejected_by_kind[0].remedy
    with pytest.raises(DatasetError, match="audio is keep in .* but require"):
        merge(kept, dest)


def test_a_compaction_keeps_the_audio_index(source: Source, tmp_path: Path) -> None:
    build(source, tmp_path / "ds", shard_size_bytes=2**30)
    streamvid.remove(tmp_path / "ds", keys=[by_name(tmp_path / "ds")["mute.mp4"]["key"]])
    streamvid.compact(tmp_path / "ds")
    dataset = open_dataset(tmp_path / "ds")
    for one in dataset.shards:
        rows = dataset.samples(one).to_pylist()
        tables = dataset.packets(one, *(rows[0][f"packets_{name}"] for name in ("offset", "bytes", "sha256")))
        assert [tables.audio(number) is not None for number in range(len(rows))] == [True] * len(rows)


def test_bytes_do_not_depend_on_the_number_of_workers(source: Source, tmp_path: Path) -> None:
    """SHARD-1."""
    for name, workers in (("one", 1), ("two", 2)):
        build(source, tmp_path / name, clips="native", workers=workers)
    assert tree_of(tmp_path / "one") == tree_of(tmp_path / "two")


def test_reports_name_files_whose_audio_and_video_disagree(source: Source, tmp_path: Path) -> None:
    report = plan(source, tmp_path / "none")
    assert report.input is not None and report.input.audio is not None
    found = report.input.audio
    assert (found.num_videos, found.num_with_audio, found.unreadable.count) == (4, 3, 0)
    assert found.other_start.examples == ("late.mp4 (+0.500 s)",)
    assert found.other_length.count == 1 and found.other_length.examples[0].startswith("short.mov (0.5")
    assert json.loads(json.dumps(report.to_json()))["input"]["audio"]["num_with_audio"] == 3
    printed = run_streamvid("shard", source.folder, tmp_path / "ds", "--buckets", "96x64@17").stdout
    assert "audio: 3 of 4 videos" in printed and "late.mp4 (+0.500 s)" in printed
    assert "with audio: 3 of 4" in run_streamvid("stats", tmp_path / "ds").stdout
    assert json.loads(run_streamvid("stats", tmp_path / "ds", "--json").stdout)["with_audio"] == 3


@pytest.mark.parametrize("values", [["yes", "no", "no", "no"], [True, False, False, False]])
def test_a_user_column_does_not_change_the_number_of_clips_with_audio(
    values: list[Any], source: Source, tmp_path: Path
) -> None:
    names = ("mute.mp4", "whole.mp4", "late.mp4", "short.mov")
    rows = [{"path": name, "has_audio": value} for name, value in zip(names, values, strict=True)]
    table = write_rows(tmp_path / "rows.jsonl", rows)
    shard(table, tmp_path / "ds", shard_options(**OPTIONS, base_path=source.folder))
    assert contents_of(open_dataset(tmp_path / "ds")).with_audio == 3
    run_streamvid("versions", tmp_path / "ds", "--view", "yes", "--where", "has_audio is not None")
    assert contents_of(open_dataset(f"{tmp_path / 'ds'}#yes")).with_audio == 3


def test_damaged_audio_is_reported_and_can_be_dropped(source: Source, tmp_path: Path) -> None:
    data = bytearray((source.folder / "short.mov").read_bytes())
    import av

    with av.open(str(source.folder / "short.mov")) as container:
        packets = [(one.pos, one.size) for one in container.demux(audio=0) if one.size]
    for place, size in packets[3:]:
        data[place : place + size] = b"\xff" * size
    damaged = Source(tmp_path / "in", source.sound)
    damaged.folder.mkdir()
    (damaged.folder / "damaged.mov").write_bytes(data)
    (damaged.folder / "whole.mp4").write_bytes((source.folder / "whole.mp4").read_bytes())
    for report in (
        build(damaged, tmp_path / "native", clips="native"),
        plan(damaged, tmp_path / "none", verify="decode"),
        plan(damaged, tmp_path / "none", audio="require"),
    ):
        assert kinds(report) == {"damaged.mov": "audio"} and "--audio drop" in report.rejected_by_kind[0].remedy
    assert build(damaged, tmp_path / "mute", clips="native", audio="drop").num_samples == 2
    assert plan(damaged, tmp_path / "none", verify="decode", audio="drop").num_samples == 2
    for _ in ("built", "already sealed"):
        report = build(damaged, tmp_path / "copies")
        assert (report.damaged_audio.count, report.damaged_audio.examples) == (1, ("damaged.mov",))
        assert "audio that cannot be decoded: 1 (damaged.mov)" in report.summary()
    row = by_name(tmp_path / "copies")["damaged.mov"]
    assert row["has_audio"] and row["audio_loudness_lufs"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"audio_codec": "opus"}, "encodes nothing; set clips.kind='native'"),
        ({"clips": "native", "audio_codec": "mp3"}, "opus"),
        ({"clips": "native", "audio_codec": "aac", "audio": "drop"}, "which stores no audio"),
        ({"clips": "text", "audio": "require", "buckets": None}, "which has no files"),
    ],
)
def test_incompatible_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shard_options(**{**OPTIONS, **options})


def test_audio_only_files_are_rejected_with_a_remedy(source: Source, tmp_path: Path) -> None:
    for name, codec in {"a.wav": "pcm_s16le", "b.flac": "flac", "c.mp3": "libmp3lame", "d.m4a": "aac"}.items():
        run_ffmpeg("-i", source.folder / "whole.mp4", "-vn", "-c:a", codec, tmp_path / name)
    table = write_rows(
        tmp_path / "rows.csv", [{"path": name, "caption": "sound"} for name in ("a.wav", "b.flac", "c.mp3", "d.m4a")]
    )
    report = dry_run(tmp_path, tmp_path / "ds", shard_options(**{**OPTIONS, "metadata": table}))
    assert [one.kind for one in report.rejections] == ["not-media"] * 4
    assert all("only audio" in one.reason and "ffmpeg -i AUDIO -i VIDEO" in one.reason for one in report.rejections)
    assert all("--media audio:NAME=COLUMN" in one.reason for one in report.rejections)
