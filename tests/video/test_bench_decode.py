"""tools/bench_decode.py runs and says something."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.video.clips import ClipFolder


def test_the_benchmark_reports_every_method_and_size(clip: ClipFolder) -> None:
    tool = Path(__file__).parents[2] / "tools" / "bench_decode.py"
    command = [sys.executable, str(tool), str(clip("h264_open_gop.mp4")), "--repeats", "1"]
    report = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout)
    assert {(row["size"], row["method"]) for row in report["rows"]} == {
        (size, method)
        for size in ("256px 192x336", "480p 480x848")
        for method in ("whole file", "plain seek", "streamvid")
    }
    assert all(row["cpu_ms"] > 0 for row in report["rows"])
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "1 clips, 1 repeats, 16 frames a sample" in table
