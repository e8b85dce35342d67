"""Tests of every preset, from a folder of clips to a batch, with one command each."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from streamvid import VideoLoader, World
from streamvid.buckets.presets import load_preset, preset_names
from streamvid.cli.main import cli
from tests.clips import encode, frames_of

NUM_FRAMES, FPS = 136, 24
QUICK = ("wan2.1-480p", "opensora2-256", "ltx")
ALL = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in preset_names()]


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A landscape and a portrait clip of 720p and 5.7 s, each frame numbered."""
    root = tmp_path_factory.mktemp("videos")
    for name, width, height in (("landscape", 1280, 720), ("portrait", 720, 1280)):
        frames = np.broadcast_to(frames_of("bikes", width, height, 1)[0], (NUM_FRAMES, height, width, 3))
        clip = encode(frames, fps=FPS, options={"g": "12", "crf": "30", "preset": "ultrafast"})
        (root / f"{name}.mp4").write_bytes(clip)
        (root / f"{name}.txt").write_text(f"a {name}")
    return root


def shard(videos: Path, dest: Path, preset: str, *arguments: str) -> dict[str, object]:
    command = ["shard", str(videos), str(dest), "--preset", preset, "--workers", "1", "--json", *arguments]
    result = CliRunner().invoke(cli, command, catch_exceptions=False, standalone_mode=False)
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def check(root: Path, preset: str) -> None:
    """Assert that each clip is delivered in the preset's longest bucket that it fills, at the model's frame rate."""
    config = load_preset(preset)
    assert config.model is not None
    # Number of frames in 5.67 s at the model's rate; presets that cap the rate at 24 keep every frame.
    there = config.frame_rate.num_frames(NUM_FRAMES, FPS, NUM_FRAMES / FPS)
    longest = max(bucket.num_frames for bucket in config.table.buckets if bucket.num_frames <= there)
    seen: dict[str, tuple[int, ...]] = {}
    with VideoLoader(root, batch_size=1, world=World(0, 1), num_workers=0, preset=preset, tail="pad") as loader:
        for batch in loader:
            seen[batch.text[0]] = tuple(batch.video.shape)
            assert batch.fps[0] == pytest.approx(float(config.frame_rate.fps or 0), rel=0.01)
            config.model.check(batch.bucket)
    assert set(seen) == {"a landscape", "a portrait"}
    for text, (_, _, num_frames, height, width) in seen.items():
        assert num_frames == longest
        assert (width > height) == (text == "a landscape" or preset == "cogvideox")


@pytest.mark.parametrize("preset", ALL)
def test_a_folder_becomes_a_dataset_for_the_model_in_one_command(videos: Path, tmp_path: Path, preset: str) -> None:
    """Rows 15 and 24: every preset works with --clips copy, checked on batches."""
    report = shard(videos, tmp_path / "ds", preset)
    assert (report["num_samples"], report["num_rejected"]) == (2, 0)
    check(tmp_path / "ds", preset)


def test_one_preset_of_480p_as_native_clips(videos: Path, tmp_path: Path) -> None:
    shard(videos, tmp_path / "ds", "wan2.1-480p", "--clips", "native", "--codec", "mjpeg")
    check(tmp_path / "ds", "wan2.1-480p")
    # The same shards also serve the other model with these buckets.
    check(tmp_path / "ds", "wan2.2-a14b-480p")
