"""Tests of metadata and media as a cached dataset: sharded on first use, reused, and rebuilt when the input changes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streamvid import open_dataset
from streamvid.buckets.document import bucket_config_to_json
from streamvid.buckets.frames import FrameRule
from streamvid.buckets.geometry import dynamic_size
from streamvid.compat.dataset_cache import VARIABLE, cache_folder, cached_dataset, content_key
from streamvid.compat.diffsynth_data import DataFlags, shard_options
from streamvid.errors import ConfigError, StorageError
from streamvid.host.resources import user_cache
from streamvid.sharder.work_options import WorkOptions
from streamvid.storage import StorageOptions
from tests.clips import ROOT
from tests.compat.conftest import make_videos
from tests.files import tree_of
from tests.servers import S3Env, S3Server

CLIPS = {"wide": (96, 64, 12), "tall": (64, 96, 9), "big": (160, 96, 30)}  # width, height, frames
COLUMNS = ("video", "prompt", "control_video", "score")
MAX_PIXELS, NUM_FRAMES = 8000, 9


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three clips, two of them with a control video, and their metadata."""
    return make_videos(tmp_path_factory.mktemp("media") / "videos", CLIPS, ("wide", "tall"), "a {} street")


KEYS = "video,control_video"


@pytest.fixture(scope="module")
def whole(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dataset of these clips, built without interruption."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(tmp_path_factory.mktemp("whole")))
        folder, built = sharded(made, data_file_keys=KEYS)
        assert built and folder.parent == cache_folder()
        before = tree_of(folder)
        assert sharded(made, data_file_keys=KEYS) == (folder, False) and tree_of(folder) == before
    return folder


@pytest.fixture
def videos(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the clips, with their modification times, and a cache for this test only."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    shutil.copytree(made, tmp_path / "videos")
    return tmp_path / "videos"


def options_of(videos: Path, **flags: Any) -> Any:
    flags = {"max_pixels": MAX_PIXELS, "num_frames": NUM_FRAMES, **flags}
    data = DataFlags(str(videos), str(videos / "metadata.csv"), **flags)
    return replace(shard_options(data, COLUMNS, StorageOptions()), work=WorkOptions(workers=1))


def sharded(videos: Path, **flags: Any) -> tuple[Path, bool]:
    """Return the dataset and whether this call built it."""
    folder, report = cached_dataset(str(videos), options_of(videos, **flags), lambda *_: None, lambda _: None)
    return folder, report is not None


def test_sharded_once_by_diffsynths_rules(whole: Path) -> None:
    """Checklist 1 to 3, 10 and 12; SHARD-1: captions, columns and media are stored, and sizes follow DiffSynth's
    rules."""
    dataset = open_dataset(whole)
    found = {(bucket.num_frames, bucket.height, bucket.width) for bucket in dataset.manifest.buckets}
    expected = {
        (min(NUM_FRAMES, FrameRule(4).floor(count)), *dynamic_size(height, width, MAX_PIXELS, 16))
        for width, height, count in CLIPS.values()
    }
    assert found == expected
    rows = dataset.samples_table().to_pylist()
    assert {row["text"] for row in rows} == {f"a {name} street" for name in CLIPS}
    assert sorted(row["user.score"] for row in rows) == [0, 1, 2]
    assert sum(bool(row["media.control_video"]) for row in rows) == 2


def test_changed_input_or_options_give_another_dataset(videos: Path, tmp_path: Path) -> None:
    """The dataset depends on captions, the bytes and presence of files, and flags, but not on the name of the
    folder."""
    known = {content_key(str(videos), options_of(videos))}

    def is_new(**flags: Any) -> bool:
        key = content_key(str(videos), options_of(videos, **flags))
        assert key == content_key(str(videos), options_of(videos, **flags))
        known_before = key in known
        known.add(key)
        return not known_before

    assert is_new(num_frames=5) and is_new(max_pixels=7000) and is_new(max_pixels=None, height=64, width=96)
    assert is_new(data_file_keys=KEYS)
    metadata = videos / "metadata.csv"
    metadata.write_text(metadata.read_text().replace("a wide street", "a wide road"))
    assert is_new()
    clip = videos / "wide.mp4"
    times = clip.stat()
    clip.write_bytes(clip.read_bytes()[::-1])
    os.utime(clip, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    assert is_new()
    control = videos / "tall_edges.mp4"
    os.utime(control, ns=(times.st_atime_ns, times.st_mtime_ns + 2))
    assert not is_new() and is_new(data_file_keys=KEYS)  # files that no flag requests are ignored
    (videos / "big.mp4").unlink()
    assert is_new()
    metadata.write_text(metadata.read_text() + "tall.mp4,again,,7\n")
    assert is_new()

    moved = tmp_path / "moved"
    videos.rename(moved)
    assert content_key(str(moved), options_of(moved)) in known


PROGRAM = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.compat.test_dataset_cache import KEYS, sharded
if __name__ == "__main__":
    folder, built = sharded(Path(sys.argv[2]), data_file_keys=KEYS)
    print(json.dumps([str(folder), built]), flush=True)
"""


def started(videos: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, str(ROOT), str(videos)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


def test_only_one_of_several_processes_shards(videos: Path) -> None:
    """If ranks of a machine start together, one builds the dataset, the others wait, and all get the same one."""
    processes = [started(videos) for _ in range(2)]
    answers = [json.loads(process.communicate(timeout=200)[0]) for process in processes]
    assert len({folder for folder, _ in answers}) == 1
    assert sorted(built for _, built in answers) == [False, True]
    left = sorted(path.suffix for path in cache_folder().iterdir())
    assert left == ["", ".lock"]


def test_a_killed_build_is_resumed(videos: Path, whole: Path) -> None:
    """After kill -9 during a build, the next process resumes it and writes the bytes of an uninterrupted build."""
    process = started(videos)
    part = None
    while part is None and process.poll() is None:
        part = next((path for path in cache_folder().glob("*.part")), None) if cache_folder().is_dir() else None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert part is not None and not part.with_suffix("").exists()
    folder, built = sharded(videos, data_file_keys=KEYS)
    assert built and not part.exists()
    assert whole != folder and whole.name == folder.name
    assert tree_of(whole) == tree_of(folder)


def test_the_location_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "here"))
    assert cache_folder() == tmp_path / "here"
    monkeypatch.delenv(VARIABLE)
    assert cache_folder() == user_cache("train")


def test_a_cache_that_cannot_be_written_names_the_remedy(videos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(videos / "wide.mp4" / "cache"))
    with pytest.raises(StorageError, match=VARIABLE):
        sharded(videos)


@pytest.mark.parametrize(
    ("keys", "columns", "clip", "media"),
    [
        (None, ("video", "prompt"), "video", ()),
        (None, ("image", "prompt"), "image", ()),
        ("video,control_video,reference_image", ("video", "control_video"), "video", ("control_video",)),
        ("edit_image, image", ("image", "edit_image", "prompt"), "image", ("edit_image",)),
        ("clip,mask", ("clip", "mask"), "clip", ("mask",)),
        ("reference_image,vace_video,video", None, "video", ("reference_image", "vace_video")),
    ],
)
def test_the_clip_is_chosen_among_the_keys(
    keys: str | None, columns: tuple[str, ...] | None, clip: str, media: tuple[str, ...]
) -> None:
    """Checklist 3: data_file_keys does not name the clip; as in DiffSynth, keys that the metadata lacks are ignored."""
    assert DataFlags("x", data_file_keys=keys).media(columns) == [clip, *media]


def test_invalid_sizes_are_named_like_the_flags(videos: Path) -> None:
    """DiffSynth accepts 80 frames unchecked, and ignores a height without a width."""
    with pytest.raises(
        ConfigError,
        match="num_frames: a count of 80 frames does not follow the rule 4k\\+1; nearest allowed: 77 and 81",
    ):
        options_of(videos, num_frames=80)
    with pytest.raises(ConfigError, match="--height is 64, but --width is not given"):
        options_of(videos, height=64)
    with pytest.raises(ConfigError, match="but the metadata has none of these columns; available: video, prompt"):
        options_of(videos, data_file_keys="clip,film")
    # As in DiffSynth's scripts, an explicit size takes precedence over max_pixels.
    fixed = options_of(videos, height=64, width=96)
    assert {(bucket.height, bucket.width) for bucket in fixed.table.buckets} == {(64, 96)}
    assert bucket_config_to_json(options_of(videos, num_frames=None, max_pixels=None).config) == {
        "max_pixels": 1048576, "max_frames": 81, "frame_rule": "4k+1",
    }  # fmt: skip


@pytest.mark.slow
def test_media_in_a_bucket_are_the_same_dataset(
    videos: Path, whole: Path, moto_server: S3Server, s3_env: S3Env, tmp_path: Path
) -> None:
    """FETCH-2: media in s3:// give the same bytes, and replacing an object gives another dataset."""
    s3_env(moto_server)
    bucket = moto_server.new_bucket()
    moto_server.upload_folder(videos, bucket, "media/")
    url = f"s3://{bucket}/media"
    data = DataFlags(url, f"{url}/metadata.csv", data_file_keys=KEYS, max_pixels=MAX_PIXELS, num_frames=NUM_FRAMES)
    options = replace(shard_options(data, COLUMNS, StorageOptions()), work=WorkOptions(workers=1))
    folder, report = cached_dataset(url, options, lambda *_: None, lambda _: None)
    assert report is not None and tree_of(folder) == tree_of(whole)
    assert cached_dataset(url, options, lambda *_: None, lambda _: None) == (folder, None)
    moto_server.put(bucket, "media/wide.mp4", (videos / "wide.mp4").read_bytes()[::-1])
    assert content_key(url, options) != folder.name
