"""tools/bench_plan.py runs and reports everything it measures; what it reports is for people to judge."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import get_args

import pytest

from streamvid.plan.options import Shuffle, Sync, Tail
from tests.clips import ROOT


@pytest.mark.slow
def test_every_measurement_is_reported() -> None:
    sizes = (
        "--scales",
        "2e3/40",
        "--num-ranks",
        "3",
        "--num-buckets",
        "2",
        "--batch-size",
        "2",
        "--index-shards",
        "50",
        "--repeats",
        "2",
    )
    quality = ("--quality-scale", "2e3/40", "--quality-ranks", "2")
    command = [sys.executable, "tools/bench_plan.py", *sizes, *quality, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert not [row for rows in result.values() for row in rows if "error" in row]
    plans = result["plan"]
    for name, kind in (("tail", Tail), ("shuffle", Shuffle), ("sync", Sync)):
        assert {row[name] for row in plans} == set(get_args(kind))
    assert all(row["first_seconds"] > 0 and row["microseconds_a_step"] > 0 and row["num_steps"] for row in plans)
    assert [row["way"] for row in result["index"]] == ["table", "shards", "loader"]
    assert all(row["peak_mib"] > 0 and row["read_seconds"] > 0 for row in result["index"])
    assert [(row["shuffle"], row["window"]) for row in result["quality"]][:3] == [
        ("none", 1), ("shards", 1), ("window", 1),
    ]  # fmt: skip
