"""Tests that tools/bench_native.py runs and reports consistent figures."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.clips import ROOT, real_clip
from tests.processes import run_command


def test_the_benchmark_reports_every_profile() -> None:
    command = [sys.executable, str(ROOT / "tools" / "bench_native.py"), "--clips", str(real_clip("bikes"))]
    command += ["--sizes", "96x160", "--max-frames", "32", "--repeats", "2"]
    done = run_command([*command, "--json"])
    report = json.loads(done.stdout)
    (size,) = report["sizes"]
    assert (size["size"], size["num_clips"], report["repeats"], done.stderr) == ("96x160", 1, 2, "")
    assert report["machine"]["pyav"] and report["machine"]["libavcodec"]
    rows = {row["profile"]: row for row in size["rows"]}
    default, small, lossless = rows["h264 crf 18"], rows["h264 crf 23"], rows["ffv1"]
    assert {name.split()[0] for name in rows} == {"h264", "mjpeg", "av1", "ffv1", "(x264", "(windows", "(ffmpeg"}
    assert small["kb_per_16_frames"] < default["kb_per_16_frames"] < lossless["kb_per_16_frames"]
    assert small["psnr_y"] < default["psnr_y"] < lossless["psnr_y"] == 100.0
    assert all(row["decode_ms_low"] <= row["decode_ms"] <= row["decode_ms_high"] for row in rows.values())
    assert all(row["encode_ms_per_frame"] > 0 for row in rows.values())
    assert default["times_default"] == 1
    table = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout
    assert all(name in table for name in rows)
