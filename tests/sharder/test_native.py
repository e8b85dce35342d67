"""Tests of `--clips native` with the same source folder as the tests of copies."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

import streamvid
from streamvid.buckets.bucket import parse_buckets
from streamvid.dataset.versions.open import open_dataset
from streamvid.errors import SealedError, SourceError, StorageError
from streamvid.sharder.options import ShardOptions
from streamvid.sharder.planning.assign import sample_key
from streamvid.sharder.sharder import dry_run, shard
from streamvid.video.decode.file import decode_into
from streamvid.video.probe import probe
from tests.clips import encode, frames_of
from tests.files import read_webdataset, tree_of
from tests.shard_options import shard_options
from tests.sharder.conftest import NATIVE, Built, Stop, noted, rows_of, stop_at
from tests.sharder.test_interop import raw_members
from tests.video.clips import mean_square_errors, run_ffmpeg

DEFAULTS = shard_options(**NATIVE)
WIDE = parse_buckets("96x64@9")


def options(**changes: Any) -> ShardOptions:
    return shard_options(**{**NATIVE, **changes})


def reasons_of(dest: Path) -> dict[str, str]:
    return {row["source"]: row["reason"] for row in open_dataset(dest).rejections_table().to_pylist()}


def clip_of(dest: Path, row: dict[str, Any]) -> bytes:
    tar = dest / "shards" / row["bucket_id"] / f"{row['bucket_id']}-{row['shard']:06d}.tar"
    data = tar.read_bytes()[row["clip_offset"] :][: row["clip_bytes"]]
    assert len(data) == row["clip_bytes"]
    return data


def rgb(source: Path | bytes, size: tuple[int, int]) -> np.ndarray[Any, Any]:
    out = np.zeros((probe(source).num_frames, *size, 3), np.uint8)
    decode_into(source, 0, out)
    return out


def nearest(frames: np.ndarray[Any, Any], candidates: np.ndarray[Any, Any]) -> list[int]:
    """Return, for each frame, the index of the most similar candidate."""
    return [int(mean_square_errors(candidates, frame).argmin()) for frame in frames]


@pytest.fixture
def long_source(tmp_path: Path) -> Path:
    """Folder of one clip of 40 frames at 24 frames per second."""
    (tmp_path / "long").mkdir()
    (tmp_path / "long" / "clip.mp4").write_bytes(encode(frames_of("bikes", 96, 64, 40), options={"g": "12"}))
    return tmp_path / "long"


def test_a_clip_is_its_source_at_the_buckets_size(native: Built) -> None:
    """SAMPLE-2 for stored bytes: a plain reader gets all frames of the source at their times."""
    for row in rows_of(native.dest):
        bucket = open_dataset(native.dest).manifest.bucket(row["bucket_id"])
        source, clip = native.source / row["source"], clip_of(native.dest, row)
        before, after = probe(source), probe(clip)
        assert (after.width, after.height) == (row["clip_width"], row["clip_height"]) == (bucket.width, bucket.height)
        assert (after.codec, row["clip_extension"]) == (("mjpeg", "jpg") if before.is_image else ("h264", "mp4"))
        assert after.codec == row["codec"] and len(clip) == row["clip_bytes"]
        times = [[(t - info.timestamps[0]) * info.time_base for t in info.timestamps] for info in (before, after)]
        assert times[0] == times[1]
        assert row["window_start"] == 0
        assert row["window_num_frames"] == row["window_source_frames"] == before.num_frames
        assert (row["source_width"], row["source_height"]) == (before.width, before.height)
        assert row["source_bytes"] == source.stat().st_size
        assert row["fps"] == pytest.approx(after.fps) and row["psnr_y"] > 40
        with av.open(io.BytesIO(clip)) as container:
            assert len(list(container.decode(video=0))) == before.num_frames
        size = (bucket.height, bucket.width)
        assert nearest(rgb(clip, size), rgb(source, size)) == list(range(before.num_frames))


def test_the_loader_delivers_the_sources_frames(native: Built) -> None:
    """SAMPLE-2 end to end: the frames of a batch are consecutive frames of the source."""
    sources = {row["key"]: row["source"] for row in rows_of(native.dest)}
    delivered = []
    for split in ("train", "val"):
        with streamvid.VideoLoader(native.dest, batch_size=1, num_workers=0, split=split, tail="uneven") as loader:
            for batch in loader:
                frames = batch.video[0].permute(1, 2, 3, 0).numpy()
                found = nearest(frames, rgb(native.source / sources[batch.sample_keys[0]], frames.shape[1:3]))
                assert found == list(range(found[0], found[0] + len(frames)))
                delivered.append(batch.sample_keys[0])
    assert sorted(delivered) == sorted(sources)


def test_third_party_readers_get_playable_clips(native: Built) -> None:
    rows = {row["key"]: row for row in rows_of(native.dest)}
    num_read = 0
    for tar in sorted(native.dest.rglob("*.tar")):
        read = read_webdataset(tar)
        for sample in read:
            row, about = rows[sample["__key__"]], json.loads(sample["json"])
            with av.open(io.BytesIO(sample[row["clip_extension"]])) as container:
                frames = list(container.decode(video=0))
            assert len(frames) == about["num_frames"] == row["window_num_frames"]
            assert (frames[0].width, frames[0].height) == (about["width"], about["height"])
            num_read += 1
        offsets = np.frombuffer(Path(f"{tar}.idx").read_bytes(), "<u8")
        starts = [tar.read_bytes()[at : at + 100].split(b".")[0].decode() for at in offsets[:-1].tolist()]
        assert starts == [sample["__key__"] for sample in read]
        assert len({name.partition(".")[2] for name, _ in raw_members(tar.read_bytes())}) == 3
    assert num_read == len(rows)


def test_the_manifest_records_encoding_and_quality(native: Built) -> None:
    manifest = open_dataset(native.dest).manifest
    assert manifest.native is not None
    encoding = manifest.native.encoding
    assert [encoding[name] for name in ("codec", "crf", "gop", "fps")] == ["h264", 18, 16, None]
    assert encoding["versions"]["av"] == av.__version__ and encoding == manifest.build["options"]["encoding"]
    values = sorted(row["psnr_y"] for row in rows_of(native.dest))
    of_all = manifest.native.quality["psnr_y"]
    assert of_all["min"] == of_all["p5"] == values[0]
    assert of_all["median"] == pytest.approx((values[6] + values[7]) / 2, abs=1e-3)
    assert of_all["mean"] == pytest.approx(np.mean(values), abs=1e-3)
    assert set(manifest.native.quality["psnr_y_by_bucket"]) == {bucket.id for bucket in manifest.buckets}


def test_reports_of_the_run_and_of_the_sealed_dataset_agree(native: Built, tmp_path: Path) -> None:
    report = native.report
    assert report.encode_seconds is not None and report.encode_seconds > 0
    assert shard(native.source, native.dest, DEFAULTS) == replace(report, state="already sealed", encode_seconds=None)
    value = json.loads(json.dumps(report.to_json()))
    assert value["source_bytes"] == sum((native.source / row["source"]).stat().st_size for row in rows_of(native.dest))
    assert all(row["min_psnr_y"] <= row["mean_psnr_y"] for row in value["buckets"])
    dry = dry_run(native.source, tmp_path / "out", DEFAULTS)
    assert (dry.num_samples, dry.num_rejected, dry.num_bytes, dry.num_shards) == (14, 5, 0, 0)
    assert dry.rejections == report.rejections and dry.source_bytes == report.source_bytes
    assert list(tmp_path.iterdir()) == []


def test_a_different_encoding_is_a_different_dataset(native: Built) -> None:
    for changes, difference in (
        ({"crf": 23}, "encoding"),
        ({"clips": "copy"}, "clips: .native. stored, .copy. requested"),
    ):
        with pytest.raises(SealedError, match=difference):
            shard(native.source, native.dest, options(**changes))


@pytest.mark.parametrize(
    ("codec", "video", "image"), [("mjpeg", "mjpeg", "mjpeg"), ("ffv1", "ffv1", "png"), ("av1", "av1", "mjpeg")]
)
def test_every_codec_gives_a_dataset_that_loads(
    native: Built, tmp_path: Path, codec: str, video: str, image: str
) -> None:
    """Images stay images, and are stored as PNG if the codec is lossless."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("a/clip_1.5s_a.mp4", "c/still.jpg"):
        shutil.copy(native.source / name, source)
    shard(source, tmp_path / "out", options(codec=codec, val_fraction=0.0))
    rows = {row["source"]: row for row in rows_of(tmp_path / "out")}
    assert {name: row["codec"] for name, row in rows.items()} == {"clip_1.5s_a.mp4": video, "still.jpg": image}
    assert rows["still.jpg"]["clip_extension"] == ("png" if image == "png" else "jpg")
    if codec == "ffv1":
        assert {row["psnr_y"] for row in rows.values()} == {100.0}
    with streamvid.VideoLoader(tmp_path / "out", batch_size=1, num_workers=0, tail="uneven") as loader:
        assert sorted(batch.sample_keys[0] for batch in loader) == sorted(row["key"] for row in rows.values())


def test_clips_below_min_psnr_are_rejected_with_their_psnr(native: Built, tmp_path: Path) -> None:
    """SHARD-3: each clip is a sample or a rejection, according to the PSNR-Y in the index of another run."""
    found = {row["source"]: row["psnr_y"] for row in rows_of(native.dest)}
    least = sorted(found.values())[5]
    report = shard(native.source, tmp_path / "out", options(min_psnr=least))
    kept = {row["source"]: row["psnr_y"] for row in rows_of(tmp_path / "out")}
    assert kept == {source: value for source, value in found.items() if value >= least}
    reasons = reasons_of(tmp_path / "out")
    for source in found.keys() - kept.keys():
        assert f"PSNR-Y of {found[source]:.2f} dB, below min_psnr={least:g}" in reasons[source]
    assert report.num_records == report.num_samples + report.num_rejected == 19


def test_time_ranges_become_clips_of_exactly_their_frames(long_source: Path, tmp_path: Path) -> None:
    """SAMPLE-2: in a film with several captions, each clip has the frames of its range; all clips share a split."""
    film = long_source / "clip.mp4"
    times = [(0, 0.5), (0.5, 1.0), (0.98, 1.667), (1.2, 1.9), (0.1, 9), (5, 6)]
    lines = ["video,caption,start_seconds,end_seconds"]
    lines += [f"clip.mp4,caption {number},{start},{end}" for number, (start, end) in enumerate(times)]
    (long_source / "metadata.csv").write_text("\n".join(lines))
    with pytest.raises(SourceError, match=r"seem to contain time ranges.*--time-columns"):
        shard(long_source, tmp_path / "no", options(buckets=WIDE))
    chosen = {"buckets": WIDE, "time_columns": ("start_seconds", "end_seconds"), "val_fraction": 0.5}
    report = shard(long_source, tmp_path / "out", options(**chosen))
    assert (report.num_records, report.num_samples) == (6, 4)
    reasons = [row["reason"] for row in open_dataset(tmp_path / "out").rejections_table().to_pylist()]
    assert all("extends beyond the video, which is 1.667 s long" in reason for reason in reasons) and len(reasons) == 2
    frames = rgb(film, (64, 96))
    rows = sorted(rows_of(tmp_path / "out"), key=lambda row: row["text"])
    assert len({row["split"] for row in rows}) == 1
    assert [row["text"] for row in rows] == [f"caption {number}" for number in range(4)]
    for row, (start, end) in zip(rows, times[:4], strict=True):
        inside = [number for number in range(40) if start <= number / 24 < end]
        assert nearest(rgb(clip_of(tmp_path / "out", row), (64, 96)), frames) == inside
        assert (row["window_start"], row["window_num_frames"]) == (inside[0], len(inside))
    assert shard(long_source, tmp_path / "out", options(**chosen)).state == "already sealed"
    (long_source / "metadata.csv").write_text("\n".join(lines).replace("0.98", "0.9"))
    with pytest.raises(SealedError, match="captions or columns have changed"):
        shard(long_source, tmp_path / "out", options(**chosen))


def test_max_growth_limits_every_clip(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A strongly compressed source grows at the default crf, with a warning; the limit applies to each window."""
    source = tmp_path / "source"
    source.mkdir()
    data = encode(frames_of("bikes", 96, 64, 40), options={"crf": "40"})
    (source / "clip.mp4").write_bytes(data)
    size = len(data)
    cut = {"buckets": WIDE, "max_clip_seconds": 0.6, "val_fraction": 0.0}
    free = shard(source, tmp_path / "free", options(**cut))
    assert free.source_bytes == size and sum(row["clip_bytes"] for row in rows_of(tmp_path / "free")) > 2 * size
    (warning,) = (record for record in caplog.records if "as large as their sources" in record.message)
    assert warning.levelname == "WARNING"
    shard(source, tmp_path / "bound", options(max_growth=2, **cut))
    before, after = rows_of(tmp_path / "free"), rows_of(tmp_path / "bound")
    assert len(before) == len(after) == 3
    for old, new in zip(before, after, strict=True):
        assert new["key"] == old["key"] and new["psnr_y"] < old["psnr_y"]
        assert new["clip_bytes"] <= 2 * size * new["window_num_frames"] / 40 < old["clip_bytes"]
    with pytest.raises(
        SourceError, match="at the highest crf, the clip is .* bytes long, but at most 13 are allowed .max_growth=0.01."
    ):
        shard(source, tmp_path / "none", options(max_growth=0.01, **cut))


def test_long_sources_become_windows_that_share_a_record(long_source: Path, tmp_path: Path) -> None:
    """SHARD-3: every frame of the source is in exactly one window, and all windows are in the same split."""
    report = shard(long_source, tmp_path / "out", options(buckets=WIDE, max_clip_seconds=0.6, val_fraction=0.5))
    rows = sorted(rows_of(tmp_path / "out"), key=lambda row: row["window_start"])
    assert [(row["window_start"], row["window_num_frames"]) for row in rows] == [(0, 13), (13, 13), (26, 14)]
    assert [row["key"] for row in rows] == [
        sample_key("clip.mp4", row["window_start"], row["window_num_frames"], "96x64-9f") for row in rows
    ]
    assert len({row["record_key"] for row in rows}) == len({row["split"] for row in rows}) == 1
    source = rgb(long_source / "clip.mp4", (64, 96))
    shown = [nearest(rgb(clip_of(tmp_path / "out", row), (64, 96)), source) for row in rows]
    assert [number for numbers in shown for number in numbers] == list(range(40))
    assert (report.num_records, report.num_windows, report.num_samples) == (1, 3, 3)
    assert report.source_bytes == (long_source / "clip.mp4").stat().st_size
    again = shard(long_source, tmp_path / "out", options(buckets=WIDE, max_clip_seconds=0.6, val_fraction=0.5))
    assert again == replace(report, state="already sealed", encode_seconds=None)


def test_a_window_that_is_too_short_for_a_bucket_is_made_longer(long_source: Path, tmp_path: Path) -> None:
    report = shard(long_source, tmp_path / "out", options(buckets=WIDE, max_clip_seconds=0.3, val_fraction=0.0))
    assert [row["window_num_frames"] for row in rows_of(tmp_path / "out")] == [10] * 4
    assert report.num_rejected == 0


def test_fps_resamples_before_buckets_are_chosen(long_source: Path, tmp_path: Path) -> None:
    """SAMPLE-2: at half the rate, every other frame is kept; a clip that becomes too short is rejected."""
    (long_source / "short.mp4").write_bytes(encode(frames_of("bikes", 96, 64, 14)))
    buckets = parse_buckets("96x64@9,96x64@33")
    shard(long_source, tmp_path / "out", options(buckets=buckets, fps=12, val_fraction=0.0))
    (row,) = rows_of(tmp_path / "out")
    assert (row["bucket_id"], row["fps"]) == ("96x64-9f", 12.0)
    assert (row["window_num_frames"], row["window_source_frames"]) == (20, 40)
    clip = rgb(clip_of(tmp_path / "out", row), (64, 96))
    assert nearest(clip, rgb(long_source / "clip.mp4", (64, 96))) == list(range(0, 40, 2))
    assert reasons_of(tmp_path / "out") == {
        "short.mp4": "the clip has 7 frames, but the shortest bucket has 9 (at fps=12; the source has 14 frames)"
    }
    with streamvid.VideoLoader(tmp_path / "out", batch_size=1, num_workers=0) as loader:
        assert [batch.video.shape[2] for batch in loader] == [9]


def test_fps_and_windows_together(long_source: Path, tmp_path: Path) -> None:
    changes = {"buckets": WIDE, "fps": Fraction(30000, 1001), "max_clip_seconds": 0.7, "val_fraction": 0.0}
    report = shard(long_source, tmp_path / "out", options(**changes))
    rows = sorted(rows_of(tmp_path / "out"), key=lambda row: row["window_start"])
    assert sum(row["window_source_frames"] for row in rows) == 40 and report.num_rejected == 0
    assert all(row["duration_seconds"] <= 0.75 and row["fps"] == pytest.approx(30000 / 1001) for row in rows)
    source = rgb(long_source / "clip.mp4", (64, 96))
    for row in rows:
        shown = nearest(rgb(clip_of(tmp_path / "out", row), (64, 96)), source)
        assert set(shown) == set(range(row["window_start"], row["window_start"] + row["window_source_frames"]))


@pytest.mark.parametrize("clips", ["copy", "native"])
def test_hdr_is_refused_or_allowed(tmp_path: Path, clips: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "plain.mp4").write_bytes(encode(frames_of("bikes", 96, 64, 10)))
    tags = "-c:v libx264 -pix_fmt yuv420p10le -x264-params transfer=smpte2084:colorprim=bt2020:colormatrix=bt2020nc"
    run_ffmpeg("-i", source / "plain.mp4", *tags.split(), source / "hdr.mp4")
    changes = {"clips": clips, "buckets": WIDE, "val_fraction": 0.0}
    refused = dry_run(source, tmp_path / "refused", options(**changes))
    assert refused.num_samples == 1
    assert [(row.source, "HDR" in row.reason) for row in refused.rejections] == [("hdr.mp4", True)]
    shard(source, tmp_path / "allowed", options(**changes, hdr="allow"))
    assert sorted(row["source"] for row in rows_of(tmp_path / "allowed")) == ["hdr.mp4", "plain.mp4"]
    with streamvid.VideoLoader(tmp_path / "allowed", batch_size=2, num_workers=0) as loader:
        assert [batch.video.shape[0] for batch in loader] == [2]


def test_frames_that_do_not_decode_are_found_on_request(tmp_path: Path) -> None:
    """SHARD-3: native builds always find them, copies only with verify="decode"; otherwise the clip is stored
    unchanged."""
    source = tmp_path / "source"
    source.mkdir()
    data = bytearray(encode(frames_of("bikes", 96, 64, 20)))
    (source / "good.mp4").write_bytes(data)
    middle = data.index(b"mdat") + (len(data) - data.index(b"mdat")) // 2
    data[middle : middle + 300] = bytes(300)
    (source / "bad.mp4").write_bytes(data)
    probed = {
        verify: dry_run(source, tmp_path / "out", options(clips="copy", verify=verify, buckets=WIDE)).rejections
        for verify in (None, "decode")
    }
    assert probed[None] == ()
    shard(source, tmp_path / "out", options(buckets=WIDE, val_fraction=0.0))
    encoded = reasons_of(tmp_path / "out")
    for reasons in (encoded, {row.source: row.reason for row in probed["decode"]}):
        assert list(reasons) == ["bad.mp4"] and "decode" in reasons["bad.mp4"]
    for clips, verify in (("copy", "probe"), ("native", "decode")):  # the default for each kind of clips
        assert options(clips=clips, verify=verify).to_json() == options(clips=clips).to_json()


def test_an_unfinished_run_encodes_nothing_twice(native: Built, tmp_path: Path) -> None:
    """SHARD-1: encoded clips are kept across plans, and the staging directory is removed at the end."""
    dest = tmp_path / "out"
    with pytest.raises(Stop):
        shard(native.source, dest, DEFAULTS, stop_at("encode", 6))
    with pytest.raises(Stop):
        shard(native.source, dest, options(seed=8), stop_at("encode", 9))
    first: list[int] = []
    shard(native.source, dest, DEFAULTS, noted("encode", first))
    assert first[0] == 9
    assert tree_of(dest) == native.tree


def test_another_encoding_starts_anew(native: Built, tmp_path: Path) -> None:
    """SHARD-1: clips left by a run with another crf are not used."""
    dest = tmp_path / "out"
    with pytest.raises(Stop):
        shard(native.source, dest, options(crf=40), stop_at("build", 2))
    first: list[int] = []
    shard(native.source, dest, DEFAULTS, noted("encode", first))
    assert first[0] == 0
    assert tree_of(dest) == native.tree


def test_staged_clips_go_with_their_shard_and_are_encoded_again_if_it_is_lost(native: Built, tmp_path: Path) -> None:
    """SHARD-1: the disk holds each clip once, and a finished shard that is lost is encoded again."""
    dest, waiting = tmp_path / "out", []

    def watch(phase: str, done: int, total: int) -> None:
        if phase == "build":
            waiting.append(len(list((dest / ".staging" / "clips").iterdir())))
        if (phase, done) == ("seal", 1):
            raise Stop

    with pytest.raises(Stop):
        shard(native.source, dest, DEFAULTS, watch)
    assert waiting[0] == 14 and waiting[-1] == 0 and waiting == sorted(waiting, reverse=True)
    lost = sorted(dest.rglob("*.tar"))[:2]
    for path in lost:
        path.unlink()
    shard(native.source, dest, DEFAULTS)
    assert tree_of(dest) == native.tree


def test_a_staged_clip_that_is_damaged_is_never_stored(native: Built, tmp_path: Path) -> None:
    dest = tmp_path / "out"

    def damage(phase: str, done: int, total: int) -> None:
        if (phase, done) == ("build", 0):
            path = sorted((dest / ".staging" / "clips").iterdir())[0]
            path.write_bytes(bytes(path.stat().st_size))

    with pytest.raises(StorageError, match="was damaged and .*; run the same command again"):
        shard(native.source, dest, DEFAULTS, damage)
    shard(native.source, dest, DEFAULTS)
    assert tree_of(dest) == native.tree


def test_a_file_in_two_rows_is_encoded_once(long_source: Path, tmp_path: Path) -> None:
    (long_source / "meta.csv").write_text("path,caption\nclip.mp4,one\nclip.mp4,two\n")
    totals = set()
    chosen = options(buckets=WIDE, shard_size_bytes=1000, whole_files=True)
    add = lambda phase, done, total: totals.add(total) if phase == "encode" else None  # noqa: E731
    report = shard(long_source / "meta.csv", tmp_path / "out", chosen, add)
    assert totals == {1} and (report.num_samples, report.num_shards) == (2, 2)
    rows = rows_of(tmp_path / "out")
    assert {row["text"] for row in rows} == {"one", "two"} and len({row["clip_sha256"] for row in rows}) == 1


def test_a_clip_that_takes_too_long_is_rejected_by_name(long_source: Path, tmp_path: Path) -> None:
    """SHARD-3: encoding has a time limit per clip. With a longer limit only that clip is tried again."""
    run = options(buckets=WIDE, encode_timeout_seconds=0.0001)
    with pytest.raises(SourceError, match=r"all records were rejected.*longer than encode_timeout_seconds=0.0001"):
        shard(long_source, tmp_path / "out", run)
    with pytest.raises(Stop):
        shard(long_source, tmp_path / "out", options(buckets=WIDE), stop_at("build", 0))
    first: list[int] = []
    shard(long_source, tmp_path / "out", options(buckets=WIDE, encode_timeout_seconds=100), noted("encode", first))
    assert first == [1] and len(rows_of(tmp_path / "out")) == 1
