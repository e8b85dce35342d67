"""Test of tools/bench_shard.py, whose figures must be consistent."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import run_tool


@pytest.mark.slow
def test_every_kind_of_clips_is_measured_with_each_number_of_workers(source: Path) -> None:
    rows = run_tool("bench_shard", "--source", source, "--workers", "1,2", "--repeats", "1")
    assert [(row["clips"], row["workers"]) for row in rows] == [(c, n) for c in ("copy", "native") for n in (1, 2)]
    for row in rows:
        assert row["lowest"] <= row["wall_seconds"] <= row["highest"] and row["cpu_seconds"] > 0
        assert row["workers"] > 1 or row["speedup"] == 1.0
