"""Tests that tools/bench_monitor.py runs and reports every method. The measured values are not judged."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import run_tool


@pytest.mark.slow
def test_every_method_is_reported(dataset: Path) -> None:
    found = run_tool("bench_monitor", "--dataset", dataset, "--repeats", "1", "--epochs", "1")
    assert 0 < found["bytes_per_sample"] < 100 and found["num_samples"] == 23
    assert set(found["entry_microseconds"]) == {"1", "4", "16"} and found["request_milliseconds"] > 0
    for kind in ("decoded", "stored"):
        assert found[kind].keys() == {"none", "ledger", "metrics"}
        assert all(row["microseconds"] > 0 < row["ratio"] for row in found[kind].values())
