"""tools/bench_loader.py runs and reports every method; what it reports is for people to judge."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.clips import ROOT, encode, frames_of


def test_every_method_is_reported(tmp_path: Path) -> None:
    for number, name in enumerate(("bikes", "carphone_pristine", "bigbuckbunny", "bikes")):
        (tmp_path / f"{number}.mp4").write_bytes(encode(frames_of(name, 96, 64, 16 + number)))
    sizes = ("--resolution", "64px", "--num-frames", "5", "--batch-size", "2", "--epochs", "2", "--repeats", "1")
    command = [sys.executable, "-m", "tools.bench_loader", "--clips", str(tmp_path), *sizes, "--workers", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows = {row["method"]: row for row in json.loads(done.stdout)["rows"]}
    assert list(rows) == ["streamvid", "files", "webdataset"]
    assert {row["num_samples"] for row in rows.values()} == {8}
    for row in rows.values():
        figures = ("samples_per_second", "cpu_seconds_per_sample", "first_batch_seconds", "peak_bytes")
        assert all(row[name] > 0 for name in figures), row
    assert rows["streamvid"]["times_slower"] == rows["streamvid"]["times_cpu"] == 1
