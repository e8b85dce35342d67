"""Sound of delivered clips: the right samples for the pictures, against a full decode of each file (SAMPLE-2)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamvid
from streamvid.buckets.bucket import parse_buckets
from streamvid.sharder.sharder import shard
from tests.loader.conftest import open_loader
from tests.loader.indexed_sound import add_sound
from tests.loader.sounds import FPS, HEIGHT, RATE, WIDTH, Sound, Track, folder_of, numbers_of, track
from tests.shard_options import shard_options

COUNT = 9
SOUNDS = (
    Sound("pcm.mov", "pcm_s16le"),
    Sound("flac.mkv", "flac"),
    Sound("late.mov", "pcm_s16le", start=0.5),
    Sound("short.mkv", "flac", seconds=0.7),
    Sound("pcm.avi", "pcm_s16le"),
    Sound("silent.mp4", None),
)
OUTPUT = {"audio": {"sample_rate": RATE}}


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("clips"), SOUNDS)


@pytest.fixture(scope="module")
def tracks(clips: Path) -> Mapping[str, Track]:
    return {sound.name: track(clips / sound.name) for sound in SOUNDS}


@pytest.fixture(scope="module")
def dataset(clips: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sealed") / "dataset"
    build(clips, root)
    return root


def build(clips: Path, root: Path, **options: Any) -> None:
    given = {"buckets": parse_buckets(f"{WIDTH}x{HEIGHT}@{COUNT}"), "workers": 1, "caption_column": ""} | options
    shard(clips, root, shard_options(**given))
    add_sound(root)


def check(batch: streamvid.Batch, tracks: Mapping[str, Track]) -> list[tuple[str, int]]:
    """Compare each sample's sound with the full decode at its first picture. Return (file, first picture)."""
    found = []
    for index, source in enumerate(batch["source"]):
        numbers = numbers_of(batch.video[index].numpy())
        name = Path(source).name
        expected, is_there = tracks[name].window(numbers[0], batch.audio.shape[2])
        assert np.array_equal(batch.audio[index].numpy(), expected), (name, numbers[0])
        assert bool(batch.audio_present[index]) is is_there, (name, numbers[0])
        assert abs(float(batch.audio_offset_seconds[index])) <= 0.5 / RATE
        found.append((name, numbers[0]))
    return found


@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_window_has_the_sound_of_its_pictures(
    dataset: Path, tracks: Mapping[str, Track], num_workers: int
) -> None:
    """SAMPLE-2: bit for bit with lossless codecs, in any container, with and without an index of the sound."""
    seen = []
    with open_loader(
        dataset, batch_size=2, num_epochs=8, num_workers=num_workers, columns=["source"], output=OUTPUT, tail="pad"
    ) as loader:
        for batch in loader:
            assert batch.audio.shape == (2, 2, COUNT * RATE // FPS) and batch.audio.dtype.itemsize == 4
            seen += check(batch, tracks)
    assert {name for name, _ in seen} == {sound.name for sound in SOUNDS}
    assert len(set(seen)) > 24
