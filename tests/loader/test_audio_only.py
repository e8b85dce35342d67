"""Tests of audio file datasets: duration buckets, batches without video, and the guarantees of every dataset."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import streamvid
from streamvid.buckets.bucket import parse_buckets
from streamvid.dataset.upkeep.merge import merge
from streamvid.dataset.versions.open import open_dataset
from streamvid.errors import ConfigError
from streamvid.sharder.append import append
from streamvid.sharder.options import ShardOptions
from streamvid.sharder.report import ShardReport
from streamvid.sharder.sharder import dry_run, shard
from tests.conftest import run_streamvid
from tests.files import tree_of, write_rows
from tests.loader.conftest import open_loader, state_after
from tests.loader.speech import RATE, samples_of, write_wav
from tests.shard_options import shard_options
from tests.video.clips import run_ffmpeg

TICK = RATE // 25
#: Files and their durations in seconds; the last one is too short for every bucket.
FILES = {"0.wav": 1.0, "1.flac": 1.7, "2.mka": 2.5, "3.wav": 3.2, "4.flac": 0.99, "5.wav": 2.2, "6.wav": 0.9}
OPTIONS: dict[str, Any] = {"clips": "audio", "workers": 1, "caption_column": ""}
OUTPUT = {"audio": {"sample_rate": RATE}}


def make_files(folder: Path, files: dict[str, float]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, seconds in files.items():
        write_wav(folder / "made", samples_of(int(name[0]), seconds))
        run_ffmpeg("-i", folder / "made", "-c:a", "pcm_s16le" if name.endswith("wav") else "flac", folder / name)
    (folder / "made").unlink()
    return folder


def options_of(buckets: str = "1s,2s", **options: Any) -> ShardOptions:
    return shard_options(**{**OPTIONS, "buckets": parse_buckets(buckets), **options})


def build(source: Path, dest: Path, **options: Any) -> ShardReport:
    return shard(source, dest, options_of(**options))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_files(tmp_path_factory.mktemp("audio") / "in", FILES)


@pytest.fixture(scope="module")
def dataset(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sealed") / "ds"
    report = build(source, root)
    assert [(one.source, one.kind) for one in report.rejections] == [("6.wav", "too-short")]
    assert report.rejected_by_kind[0].remedy == "add a shorter duration to --buckets to accept shorter audio"
    assert "lasts 0.900 s, but the shortest bucket requires 1 s" in report.rejections[0].reason
    return root


def track(name: str) -> NDArray[np.float32]:
    """Return all samples of a file, followed by silence."""
    found = np.zeros((2, 6 * RATE), np.float32)
    samples = samples_of(int(name[0]), FILES[name]) / 32768
    found[:, : samples.shape[1]] = samples
    return found


def place_of(name: str, found: NDArray[np.float32]) -> int:
    """Return the tick at which these samples start in a file. Fail unless they start at exactly one tick."""
    whole, count = track(name), found.shape[1]
    places = [tick for tick in range(100) if np.array_equal(whole[:, tick * TICK :][:, :count], found)]
    assert len(places) == 1, name
    return places[0]


def delivered(root: Any, **options: Any) -> Iterator[tuple[str, int, int]]:
    """Yield (file, first tick, number of samples) per delivery, after finding its samples in the file."""
    given = {"batch_size": 1, "columns": ["source"], "output": OUTPUT, "tail": "uneven", **options}
    with open_loader(root, **given) as loader:
        for batch in loader:
            assert "video" not in batch and batch.bucket.is_audio
            for index, name in enumerate(batch["source"]):
                found = batch.audio[index].numpy()
                yield name, place_of(name, found), found.shape[1]


def test_each_sample_goes_to_one_of_three_ranks(dataset: Path) -> None:
    worlds = [streamvid.World(rank, 3) for rank in range(3)]
    seen = [[name for name, _, _ in delivered(dataset, world=world)] for world in worlds]
    assert sorted(name for names in seen for name in names) == [name for name in FILES if name != "6.wav"] and all(seen)


def test_stored_files_are_delivered_without_decoding(source: Path, dataset: Path) -> None:
    with open_loader(dataset, columns=["source"], output={"decode": False}, tail="uneven") as loader:
        found = {batch["source"][0]: bytes(batch.clips[0].data) for batch in loader}
    assert found == {name: (source / name).read_bytes() for name in FILES if name != "6.wav"}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_have_the_samples_of_their_files(dataset: Path, num_workers: int) -> None:
    """SAMPLE-2, PLAN-4: each file is delivered once per epoch, bit-exact, in windows of its bucket's duration."""
    seen = list(delivered(dataset, num_epochs=4, num_workers=num_workers))
    counts = {name: sum(one == name for one, _, _ in seen) for name in FILES}
    assert counts == {**dict.fromkeys(FILES, 4), "6.wav": 0}
    lengths = {name: count for name, _, count in seen}
    assert {name for name, count in lengths.items() if count == 2 * RATE} == {"2.mka", "3.wav", "5.wav"}
    assert {name for name, count in lengths.items() if count == RATE} == {"0.wav", "1.flac", "4.flac"}
    assert len({tick for name, tick, _ in seen if name == "3.wav"}) > 1
    assert {tick for name, tick, _ in seen if name in ("0.wav", "4.flac")} == {0}


def test_the_remainder_of_an_epoch_is_the_same_after_a_resume(dataset: Path) -> None:
    """PLAN-5: a resume with a different number of workers gives the same samples."""

    def rest(state: Any, num_workers: int) -> list[list[Any]]:
        with open_loader(dataset, state, batch_size=1, num_epochs=3, num_workers=num_workers, output=OUTPUT) as loader:
            return [[*batch.sample_keys, batch.digest(), batch.audio.numpy().tobytes()] for batch in loader]

    everything = rest(None, 0)
    state = state_after(4, dataset, batch_size=1, num_epochs=3, output=OUTPUT)
    assert rest(state, 2) == everything[4:]


def test_views_choose_the_window(dataset: Path) -> None:
    assert {tick for _, tick, _ in delivered(dataset, view={"temporal": "head"})} == {0}
    found = {name: tick for name, tick, _ in delivered(dataset, view={"temporal": "middle"})}
    assert (found["0.wav"], found["3.wav"]) == (0, 15)


def test_audio_has_a_default_format_and_presets_have_their_own(dataset: Path) -> None:
    with open_loader(dataset, batch_size=1) as loader:
        assert {batch.audio.shape[1:] for batch in loader} == {(2, 48_000), (2, 96_000)}
    with open_loader(dataset, batch_size=1, output={"audio": {"preset": "ltx-2", "num_channels": 1}}) as loader:
        assert {batch.audio.shape[1:] for batch in loader} == {(1, 16_000), (1, 32_000)}


def test_damaged_files_are_replaced(source: Path, tmp_path: Path) -> None:
    """BAD-1: a file that cannot be decoded never shifts or silences a sample."""
    folder = tmp_path / "in"
    folder.mkdir()
    for name in ("4.flac", "2.mka"):
        (folder / name).write_bytes((source / name).read_bytes())
    run_ffmpeg("-i", source / "1.flac", "-c:a", "alac", folder / "1.m4a")
    data = bytearray((folder / "1.m4a").read_bytes())
    data[-50_000:-2000] = bytes(48_000)
    (folder / "1.m4a").write_bytes(data)
    assert not build(folder, tmp_path / "ds").rejections
    with open_loader(tmp_path / "ds", batch_size=1, columns=["source"], output=OUTPUT, tail="uneven") as loader:
        names = [batch["source"][0] for batch in loader]
    assert sorted(names) == ["2.mka", "4.flac", "4.flac"]
    report = build(folder, tmp_path / "checked", verify="decode")
    assert [(one.source, one.kind) for one in report.rejections] == [("1.m4a", "audio")]


def test_datasets_grow_and_are_joined(source: Path, dataset: Path, tmp_path: Path) -> None:
    more = make_files(tmp_path / "more", {"3.wav": 3.2})
    (more / "3.wav").rename(more / "9.wav")
    build(source, tmp_path / "ds")
    assert append(tmp_path / "ds", more).num_samples == 1
    with pytest.raises(ConfigError, match="buckets"):
        append(tmp_path / "ds", more, {"buckets": {"buckets": ["3s"]}})
    build(more, tmp_path / "other")
    merge(dataset_copy(dataset, tmp_path / "copy"), tmp_path / "other")
    for root in (tmp_path / "ds", tmp_path / "copy"):
        run_streamvid("verify", root, "--deep")
        assert open_dataset(root).manifest.counts.samples == 7
    build(tmp_path / "copy", tmp_path / "again", buckets="0.4s")
    again = open_dataset(tmp_path / "again")
    assert again.manifest.counts.samples == 7
    streamvid.remove(tmp_path / "again", keys=[again.samples(again.shards[0]).column("key")[0].as_py()])
    streamvid.compact(tmp_path / "again")
    compacted = open_dataset(tmp_path / "again")
    for one in compacted.shards:
        rows = compacted.samples(one).to_pylist()
        tables = compacted.packets(one, *(rows[0][f"packets_{name}"] for name in ("offset", "bytes", "sha256")))
        assert all(tables.audio(number) is not None for number in range(len(rows)))


def dataset_copy(root: Path, dest: Path) -> Path:
    for path in root.rglob("*"):
        if path.is_file():
            target = dest / path.relative_to(root)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return dest


def test_a_table_names_the_files(source: Path, tmp_path: Path) -> None:
    rows = [{"audio": name, "caption": f"number {name[0]}"} for name in ("0.wav", "2.mka", "missing.wav")]
    table = write_rows(source.parent / "rows.csv", rows)
    options = {"base_path": source, "caption_column": "caption"}
    for name, workers in (("one", 1), ("two", 2)):
        report = shard(table, tmp_path / name, options_of(**options, workers=workers))
        assert report.num_samples == 2 and [one.kind for one in report.rejections] == ["missing-file"]
    assert tree_of(tmp_path / "one") == tree_of(tmp_path / "two")
    with open_loader(tmp_path / "one", batch_size=1, output=OUTPUT) as loader:
        assert sorted(batch.text[0] for batch in loader) == ["number 0", "number 2"]


def test_command_line_tools_accept_audio_datasets(source: Path, tmp_path: Path) -> None:
    run_streamvid("shard", source, tmp_path / "ds", "--clips", "audio", "--buckets", "1s,2s", "--workers", 1)
    assert "audio-1000ms" in run_streamvid("stats", tmp_path / "ds").stdout
    planned = run_streamvid("plan", tmp_path / "ds", "--batch-size", "audio-*=1").stdout
    assert "audio-2000ms" in planned and "yuv420p" not in planned
    run_streamvid("report", tmp_path / "ds", "-o", tmp_path / "report.html")
    dataset = open_dataset(tmp_path / "ds")
    row = dataset.samples(dataset.shards[0]).to_pylist()[0]
    run_streamvid("extract", tmp_path / "ds", row["key"], "-o", tmp_path / "files")
    (stored,) = (tmp_path / "files").rglob("clip.*")
    assert stored.read_bytes() == (source / row["source"]).read_bytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buckets": "96x64@17"}, "96x64-17f cannot be combined with clips.kind='audio'.*such as '2s,5s,10s'"),
        ({"clips": "copy"}, "audio-1000ms, audio-2000ms contain audio without pictures; set clips.kind='audio'"),
        ({"fps": 25}, "fps=25.* cannot be combined with clips.kind='audio'"),
        ({"audio": "require"}, "cannot be combined with clips.kind='audio', whose samples are audio"),
        ({"media": {"control": "c"}}, "source.media=.* whose files have no pictures"),
        ({"codec": "h264"}, "cannot be combined with clips.kind='audio', which encodes nothing"),
        ({"buckets": "0.01s"}, "must be a multiple of 40 ms"),
        ({"buckets": "99999s"}, "bucket '99999s': the duration .* from 40 ms to"),
        ({"buckets": "2sec"}, "for audio files, a duration such as '2s'"),
        ({"hdr": "allow"}, "hdr='allow' cannot be combined with clips.kind='audio'"),
    ],
)
def test_video_options_are_refused(source: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(source, tmp_path / "ds", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"view": {"spatial": "random_crop"}}, "contains audio files, which have no pictures"),
        (
            {"view": {"temporal": "uniform"}},
            "temporal='uniform' changes the speed .*only at their original speed; use [^=]*=",
        ),
        (
            {"view": {"temporal": "uniform"}, "output": {"audio": {"sample_rate": RATE, "stretch": True}}},
            "original speed",
        ),
        ({"view": {"temporal": "uniform"}, "output": {"decode": False}}, "original speed"),
        ({"view": {"max_interval": 2}, "output": {"audio": {"sample_rate": RATE, "stretch": True}}}, "max_interval=2"),
        ({"output": {"audio": {"sample_rate": RATE, "fps": 50}}}, "output.audio.fps=50: must be 25, .*; leave"),
        (
            {"output": {"audio": {"sample_rate": 16_000, "rule": "64000k"}}},
            "rule='64000k': bucket audio-1000ms lasts 1 s, which is 16000 .* allows is 64000; .*use 'exact' or a rule with",
        ),
        ({"media": ["control"]}, "the dataset has no conditioning inputs"),
        ({"output": {"pixels": "yuv420p"}}, "output.pixels='yuv420p' cannot be combined with audio datasets"),
        ({"output": {"layout": "BTCHW"}}, "output.layout='BTCHW' cannot be combined with audio datasets"),
    ],
)
def test_loader_options_that_require_video_are_refused(dataset: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_loader(dataset, **options)


def test_files_with_video_are_rejected(tmp_path: Path) -> None:
    run_ffmpeg("-f", "lavfi", "-i", "testsrc=s=64x64:d=1", "-f", "lavfi", "-i", "sine=d=1", tmp_path / "a.mkv")
    (tmp_path / "a.mkv").rename(tmp_path / "a.mka")
    report = dry_run(tmp_path, tmp_path / "ds", options_of())
    assert [one.kind for one in report.rejections] == ["not-media"]
    assert "with --clips audio, an audio file" in report.rejected_by_kind[0].remedy
    assert "extract its audio (ffmpeg -i IN -vn" in report.rejections[0].reason


@pytest.mark.slow
@settings(max_examples=12)
@given(first=st.integers(0, 20), num_epochs=st.integers(1, 5), seed=st.integers(0, 9), num_workers=st.integers(0, 1))
def test_every_resume_point_and_window_is_exact(
    first: int, num_epochs: int, seed: int, num_workers: int, dataset: Path
) -> None:
    options: dict[str, Any] = {"num_epochs": num_epochs, "seed": seed, "columns": ["source"], "output": OUTPUT}
    first = min(first, 6 * num_epochs - 1)
    state = state_after(first, dataset, batch_size=1, **options) if first else None
    with open_loader(dataset, state, batch_size=1, num_workers=num_workers, **options) as loader:
        found = [(batch["source"][0], batch.audio[0].numpy()) for batch in loader]
    assert len(found) == 6 * num_epochs - first
    for name, samples in found:
        place_of(name, samples)
