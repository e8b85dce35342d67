"""Tests of tools/bench_decode.py: it compares the same frames, its report is consistent, and failures are named."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import numpy as np
import pytest

from streamvid.video.decode.file import decode_into
from tests.clips import ROOT, encode, frames_of
from tests.processes import run_command
from tools.bench_decode import lines
from tools.bench_ratios import Cell, Line, check, ratio
from tools.peers.client import decode_ours

SIZE = {"height": 64, "width": 96}
WINDOW = {"start": 13, "num_frames": 5, "stride": 3, **SIZE}


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a clip that has B-frames and a file that is not a video."""
    root = tmp_path_factory.mktemp("clips")
    (root / "good.mp4").write_bytes(encode(frames_of("bigbuckbunny", 256, 144, 40)))
    (root / "rubbish.mp4").write_bytes(b"no video at all" * 50)
    return root


def test_all_our_methods_decode_the_same_window_as_decode_into(clips: Path, tmp_path: Path) -> None:
    source, native, saved = str(clips / "good.mp4"), tmp_path / "native.mp4", tmp_path / "pixels.npy"
    with decode_ours() as ours:
        made = ours.ask(method="encode", path=source, save=str(native), **SIZE)
        assert made["num_frames"] == 40 and made["num_bytes"] == native.stat().st_size and made["psnr_y"] > 35
        assert ours.ask(method="facts", path=source) == {"num_frames": 40, "height": 144, "codec": "h264"}
        for method, path in (
            *((name, source) for name in ("ours_exact", "ours_fast", "seek")),
            *((name, str(native)) for name in ("ours_exact", "ours_fast", "plain")),
        ):
            answer = ours.ask(method=method, path=path, save=str(saved), **WINDOW)
            assert answer["cpu_seconds"] > 0, answer
            found = np.load(saved).reshape(5, 64, 96, 3)
            assert answer["sum"] == int(found.sum(dtype=np.uint64))
            wanted = np.empty_like(found)
            decode_into(path, 13, wanted, stride=3, accuracy="exact" if method == "ours_exact" else "fast")
            error = np.abs(found.astype(int) - wanted).mean()
            assert error == 0 if method.startswith("ours") else error < 4, (method, error)
        assert ours.ask(method="ours_yuv", path=source, **WINDOW)["sum"] > 0
        for path in (source, str(native)):
            assert ours.ask(method="decode_only", path=path, **WINDOW)["sum"] == 0
        assert "the clip has 40" in ours.ask(method="ours_yuv", path=source, **{**WINDOW, "start": 39})["error"]
        assert "error" in ours.ask(method="none", path=source, **WINDOW)


def test_the_benchmark_reports_every_method_and_names_omitted_clips(clips: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.bench_decode", "--clips", str(clips), "--native", str(tmp_path)]
    command += ["--sizes", "64x96", "--num-frames", "5,30", "--strides", "1,2", "--repeats", "2", "--windows", "1"]
    command += ["--peers", sys.executable]  # this environment has PyAV and torch, but not torchcodec or decord
    done = run_command([*command, "--json"], cwd=ROOT)
    assert "left out: " in done.stderr and "rubbish.mp4" in done.stderr
    assert "too few for 30 with stride 2" in done.stderr
    report = json.loads(done.stdout)
    assert {"decord", "torchcodec"} <= set(report["missing_peers"])
    methods = {
        *("pyav_seek", "best_peer", "ours_fast", "ours_exact", "ours_yuv", "decode_only", "native_plain"),
        *("native_fast", "native_exact", "native_yuv", "native_decode_only", "native_yuv_aligned"),
        *("native_fast_aligned", "native_exact_aligned"),
    }
    for cell in report["cells"]:
        is_first = (cell["num_frames"], cell["stride"]) == (5, 1)
        assert set(cell["costs"]) == methods | ({"opensora"} if is_first else set())
        for name, values in cell["costs"].items():
            assert len(values) == 2 and min(values) > 0
            assert cell["cpu_ms"][name] == pytest.approx(1000 * statistics.median(values))
    assert [(cell["num_frames"], cell["stride"]) for cell in report["cells"]] == [(5, 1), (5, 2), (30, 1)]
    assert not report["failures"]
    measured = {line["line"]: line["met"] for line in report["lines"]}
    assert measured["copy, 720p to 480p: 20 x Open-Sora"] is None  # the clip has 144 lines
    assert measured["copy, RGB: 1.2 x the best peer, no cell below 1"] is not None


def cell(clip: str, **costs: list[float]) -> Cell:
    return Cell(clip, 720, "480x848", 16, 1, costs, {})


def test_a_ratio_uses_paired_repeats_of_clips_that_have_both() -> None:
    """A slow repeat affects both sides; each clip has the same weight, whatever its length."""
    cells = [
        cell("a", peer=[4.0, 40.0, 4.0], ours=[2.0, 20.0, 2.0]),
        cell("b", peer=[0.8, 0.8, 8.0], ours=[0.1, 0.1, 0.1]),
        cell("no peer", ours=[1.0, 1.0, 1.0]),
    ]
    found = ratio(cells, "peer", "ours")
    assert found is not None and found.num_cells == 2 and found.worst_cell == "a 480x848 16x1"
    assert (found.mean, found.worst) == (pytest.approx(4), pytest.approx(2))
    assert (found.low, found.high) == (pytest.approx(4), pytest.approx((2 * 80) ** 0.5))
    assert ratio(cells, "none", "ours") is None


def test_a_line_is_met_if_its_mean_and_its_worst_cell_are() -> None:
    cells = [cell("a", peer=[1.5], ours=[1.0]), cell("b", peer=[0.9], ours=[1.0])]
    for least, least_worst, met in ((1.1, None, True), (1.1, 1.0, False), (1.2, None, False), (1.1, 0.9, True)):
        line = Line("line", "peer", "ours", least, lambda cell: True, least_worst)
        assert check(line, cells)["met"] is met
    assert check(Line("line", "peer", "ours", 1, lambda cell: False), cells)["met"] is None


def test_every_line_of_the_promise_exists_once() -> None:
    """The limits are the agreed values."""
    main = [line for line in lines() if not line.text.startswith(" ")]
    assert len({line.text for line in main}) == len(main) == 12
    least = sorted(line.least for line in main if line.least > 1)
    assert least == [1.2, 1.35, 4.5, 20, 30, 40, 90, 1100]
    assert sorted(line.least for line in main if line.least <= 1) == pytest.approx([1 / 1.2, 1 / 1.1, 0.95, 1.0])
