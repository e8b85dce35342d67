"""Tests of multi-threaded decoding: a worker may decode one large sample with several threads and equal pixels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import streamvid
from streamvid.buckets.bucket import parse_buckets
from streamvid.dataset.versions.open import open_dataset
from streamvid.sharder.sharder import shard
from tests.clips import encode, frames_of
from tests.conftest import merged
from tests.loader.test_packets import flip, rows_of
from tests.shard_options import shard_options
from tools import make_corpus

pytestmark = pytest.mark.timeout(120)

WIDTH, HEIGHT, NUM_FRAMES = 1280, 720, 48  # the smallest size worth threads, and windows of more than 16 packets
CODECS: dict[str, dict[str, Any]] = {
    "h264.mp4": {},
    "intra.mp4": {"options": {"g": "1", "crf": "30", "preset": "ultrafast"}},
    "hevc.mkv": {
        "codec": "libx265",
        "container": "matroska",
        "options": {"preset": "ultrafast", "x265-params": "log-level=none:keyint=24:bframes=3"},
    },
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("big")
    (folder / "source").mkdir()
    for number, (name, options) in enumerate(CODECS.items()):
        frames = frames_of("bikes", WIDTH, HEIGHT, NUM_FRAMES + 2)[number:][:NUM_FRAMES]
        defaults = {"options": {"g": "24", "bf": "2", "crf": "28", "preset": "ultrafast"}}
        (folder / "source" / name).write_bytes(encode(frames, **defaults | options))
    dest = folder / "dataset"
    shard(folder / "source", dest, shard_options(buckets=parse_buckets("320x176@21"), shard_size_bytes=1000, workers=1))
    return dest


def received(root: Path, **options: Any) -> list[tuple[str, bool, int, bytes]]:
    """Return (key, is_repeat, number of the first frame, pixels) for each sample of two epochs."""
    found, read_number = [], make_corpus.read_number
    settings = {
        "batch_size": 1,
        "limits": {"prefetch_bytes": 0, "max_bad_fraction": 1.0},
        "num_epochs": 2,
        "output": {"layout": "BTHWC"},
    }
    with streamvid.VideoLoader(root, **merged(settings, options)) as loader:
        for batch in loader:
            # Compare planes, because torch's threads compute RGB slowly if other processes use the same cores.
            video = next(batch.tensors())[0].numpy()
            if video.ndim == 2:
                video = video[:, : 176 * 320].reshape(21, 176, 320, 1).repeat(3, axis=-1)
            numbers = [read_number(frame, 0.5) for frame in video]
            assert numbers == list(range(numbers[0], numbers[0] + 21)), numbers
            found.append(
                (batch.sample_keys[0], bool(batch.is_repeat[0]), numbers[0], next(batch.tensors()).numpy().tobytes())
            )
    return found


def test_the_clips_are_large_enough_for_threads(root: Path) -> None:
    for row, index, _ in rows_of(open_dataset(root)):
        assert index is not None and (row["clip_width"], row["clip_height"]) == (WIDTH, HEIGHT)
        assert index.info.coded_width * index.info.coded_height >= 1280 * 720
        assert len(index.window(20, 21).packets) >= 16


@pytest.mark.parametrize("pixels", ["rgb24", "yuv420p"])
def test_pixels_are_the_same_with_many_workers_as_with_one(root: Path, pixels: str) -> None:
    """PLAN-5, SAMPLE-2: with one sample in flight, four workers use four threads, and one worker uses one."""
    expected = received(root, num_workers=1, output={"pixels": pixels})
    assert len(expected) == 6
    assert received(root, num_workers=4, output={"pixels": pixels}) == expected
    assert received(root, num_workers=0, output={"pixels": pixels}) == expected


def test_bad_bytes_are_found_with_threads_too(root: Path, tmp_path: Path) -> None:
    """BAD-1: the substitute and its frames are the same."""
    for file in root.rglob("*"):
        if file.is_file():
            copied = tmp_path / file.relative_to(root)
            copied.parent.mkdir(parents=True, exist_ok=True)
            copied.write_bytes(file.read_bytes())
    row, index, path = rows_of(open_dataset(tmp_path))[0]
    assert index is not None
    middle = index.window(20, 21)
    flip(tmp_path / path, row["clip_offset"] + middle.first_byte + middle.num_bytes // 2)
    expected = received(tmp_path, num_workers=1)
    assert any(is_repeat for _, is_repeat, _, _ in expected)
    assert received(tmp_path, num_workers=4) == expected
