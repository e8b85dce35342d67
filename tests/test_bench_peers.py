"""Tests of the benchmarks' peers: they deliver the right frames, or say why they cannot.

These tests run only peers that the development environment contains; `make peers` reports on its complete environment.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamvid
from streamvid.video.decode.file import decode_into
from tests.clips import encode, frames_of
from tests.processes import run_python
from tests.shard_options import shard_options
from tools.peers.client import DecodePeers, PeerFailure, convert, decode_peers, missing, run_loader
from tools.peers.install import link_ffmpeg

PYTHON = Path(sys.executable)
SOURCE_FRAMES, NUM_CLIPS = 40, 6
SIZE = {"height": 64, "width": 96}


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of clips with B-frames, larger than the requested size."""
    root = tmp_path_factory.mktemp("clips")
    frames = frames_of("bigbuckbunny", 256, 144, SOURCE_FRAMES)
    for number in range(NUM_CLIPS):
        (root / f"{number}.mp4").write_bytes(encode(np.roll(frames, number, axis=0)))
    return root


@pytest.fixture(scope="module")
def peers() -> Iterator[DecodePeers]:
    with decode_peers(PYTHON) as found:
        yield found


@pytest.fixture(scope="module")
def converted(clips: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("converted")
    options = shard_options(resolution=("128px",), num_frames=(5,), shard_size_bytes=40_000)
    streamvid.shard(clips, root / "dataset", options)
    found = convert(root / "dataset", root / "out", python=PYTHON)
    assert found["num_samples"] == NUM_CLIPS
    assert not {"files", "webdataset", "energon"} & set(found["missing"])
    return root / "out"


def request(clips: Path, method: str, **more: object) -> dict[str, Any]:
    window = {"start": 14, "num_frames": 5, "stride": 3}
    return {"method": method, "path": str(clips / "0.mp4"), **window, **SIZE, **more}


@pytest.mark.parametrize("method", ["pyav_seek", "opensora"])
def test_a_decode_peer_delivers_the_same_frames_as_streamvid(
    clips: Path, peers: DecodePeers, tmp_path: Path, method: str
) -> None:
    answer = peers.ask(**request(clips, method, save=str(tmp_path / "pixels.npy")))
    pixels = np.load(tmp_path / "pixels.npy")
    assert answer["sum"] == int(pixels.sum(dtype=np.uint64))
    assert answer["pts_seconds"] == pytest.approx([n / 24 for n in range(14, 29, 3)], abs=1e-3)
    for slot, number in enumerate(range(14, 29, 3)):
        ours = np.empty((1, SIZE["height"], SIZE["width"], 3), np.uint8)
        errors = []
        for shift in (-1, 0, 1):
            decode_into((clips / "0.mp4").read_bytes(), number + shift, ours)
            errors.append(float(np.square(pixels[slot].astype(float) - ours[0]).mean()))
        assert errors[1] == min(errors), f"frame {number}: {errors}"
        # Open-Sora uses torch's resize without antialiasing, so the pixels of the same frame differ more.
        assert errors[1] < (20 if method == "pyav_seek" else 500)


@pytest.mark.parametrize("method", ["decode_only", "decode_only_packets"])
def test_the_limit_decodes_every_window_whatever_came_before(clips: Path, peers: DecodePeers, method: str) -> None:
    for start in (30, 0, 13, 11, 35):
        answer = peers.ask(**request(clips, method, start=start, stride=1))
        assert answer["pts_seconds"] == pytest.approx([n / 24 for n in range(start, start + 5)], abs=1e-3)
        assert answer["checksum"] is None and answer["cpu_seconds"] >= 0


def test_checksums_are_equal_for_equal_requests_only(clips: Path, peers: DecodePeers) -> None:
    first, again = (peers.ask(**request(clips, "pyav_seek"))["checksum"] for _ in range(2))
    assert first == again != peers.ask(**request(clips, "pyav_seek", start=15))["checksum"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"method": "ffmpeg"}, "method is 'ffmpeg'"),
        ({"start": 30}, "no such window"),
        ({"stride": 0}, "no such window"),
        ({"path": "/no/such/file"}, "FileNotFoundError"),
    ],
)
def test_a_failed_request_is_answered_and_the_next_one_is_served(
    clips: Path, peers: DecodePeers, wrong: dict[str, object], said: str
) -> None:
    assert said in peers.ask(**{**request(clips, "pyav_seek"), **wrong})["error"]
    assert "error" not in peers.ask(**request(clips, "pyav_seek"))


def test_a_peer_that_is_not_installed_is_named_with_the_reason(clips: Path, peers: DecodePeers) -> None:
    absent = missing(PYTHON)
    modules = {"decord": "decord", "litdata": "litdata", "mosaic": "streaming", "torchcodec": "torchcodec"}
    for method, module in modules.items():
        assert (method in absent) == (importlib.util.find_spec(module) is None)
        assert method not in absent or f"No module named '{module}'" in absent[method]
    assert not {"opensora", "files", "webdataset", "energon"} & set(absent)
    if "decord" in absent:
        assert "No module named 'decord'" in peers.ask(**request(clips, "decord"))["error"]


def test_a_dead_decoder_is_a_failure(clips: Path) -> None:
    with decode_peers(PYTHON) as peers:
        peers.process.kill()
        with pytest.raises(PeerFailure, match="ended with -9"):
            peers.ask(**request(clips, "pyav_seek"))


@pytest.mark.parametrize(
    ("method", "decode"), [("files", False), ("files", True), ("webdataset", True), ("energon", False)]
)
def test_a_loader_peer_delivers_every_sample_of_every_epoch(converted: Path, method: str, decode: bool) -> None:
    answer = run_loader(
        PYTHON, method=method, root=str(converted), workers=2, batch_size=1, decode=decode, epochs=2,
        num_frames=5, **SIZE,
    )  # fmt: skip
    assert "error" not in answer, answer
    assert answer["warm_samples"] == NUM_CLIPS
    assert answer["num_samples"] == answer["num_batches"] == 2 * NUM_CLIPS
    assert answer["samples_per_second"] == pytest.approx(answer["num_samples"] / answer["seconds"])
    assert answer["first_batch_seconds"] > 0 and answer["peak_bytes"] > 0
    assert answer["main_cpu_seconds_per_batch"] > 0
    assert answer["cpu_seconds_per_sample"] >= 0


def test_every_format_holds_the_same_clips(converted: Path, clips: Path) -> None:
    sources = sorted(path.read_bytes() for path in clips.iterdir())
    assert sorted(path.read_bytes() for path in (converted / "files").iterdir()) == sources
    facts = json.loads((converted / "convert.json").read_text())
    assert facts["num_bytes"] == sum(map(len, sources))


def test_a_loader_that_fails_says_why(converted: Path, tmp_path: Path) -> None:
    (tmp_path / "convert.json").write_text((converted / "convert.json").read_text())
    answer = run_loader(PYTHON, method="files", root=str(tmp_path), workers=1, batch_size=1, decode=False, epochs=1)
    assert "FileNotFoundError" in answer["error"]


def test_pyavs_ffmpeg_is_linked_under_the_names_that_torchcodec_looks_for(tmp_path: Path) -> None:
    libraries = Path(sys.executable).parent.parent.glob("lib/python3*/site-packages/av.libs")
    link_ffmpeg(next(libraries), tmp_path / "ffmpeg")
    names = [path.name.split(".so.") for path in (tmp_path / "ffmpeg").iterdir()]
    found = {name for name, number in names if number.isdigit()}
    assert {"libavcodec", "libavformat", "libavutil", "libavfilter", "libswscale", "libswresample"} <= found
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path / "ffmpeg")}
    (codec,) = (tmp_path / "ffmpeg").glob("libavcodec.so.??")
    code = f"import ctypes; print(ctypes.CDLL({codec.name!r}).avcodec_version() >> 16)"
    done = run_python(code, env=environment)
    assert int(done.stdout) == int(codec.name.rsplit(".", 1)[1])
