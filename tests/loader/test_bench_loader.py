"""Tests that tools/bench_loader.py runs and reports every method. The measured values are not judged."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.clips import encode, frames_of
from tests.processes import run_tool


@pytest.mark.slow
def test_every_method_is_reported(tmp_path: Path) -> None:
    for number, name in enumerate(("bikes", "carphone_pristine", "bigbuckbunny", "bikes")):
        (tmp_path / f"{number}.mp4").write_bytes(encode(frames_of(name, 96, 64, 16 + number)))
    sizes = ("--size", "64x48", "--num-frames", "5", "--copies", "2", "--batch-size", "2", "--epochs", "1")
    runs = ("--repeats", "1", "--pairs", "1", "--workers", "1", "--methods", "files,webdataset")
    peers = ("--peers", sys.executable)  # this environment has both
    found = run_tool("bench_loader", "--clips", tmp_path, *sizes, *runs, *peers)
    ours = {"off": ["streamvid", "streamvid whole"], "on": ["streamvid fast", "streamvid exact", "streamvid yuv420p"]}
    for mode, names in ours.items():
        assert [row["method"] for row in found[mode]] == [*names, "files", "webdataset"]
        for row in found[mode]:
            figures = ("samples_per_second", "cpu_seconds_per_sample", "first_batch_seconds", "peak_bytes")
            assert all(0 < row[name][1] <= row[name][0] <= row[name][2] for name in figures), row
    assert len(found["compared"]) == 9 and found["clips"]["num_samples"] == 8
    assert all(line["interval"][0] <= line["median"] <= line["interval"][1] for line in found["compared"])
