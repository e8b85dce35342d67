"""Test that tools/bench_plan.py runs and reports all of its measurements; judging them is left to people."""

from __future__ import annotations

from typing import get_args

import pytest

from streamvid.plan.options import Shuffle, Sync, Tail
from tests.processes import run_tool


@pytest.mark.slow
def test_every_measurement_is_reported() -> None:
    sizes = "--scales 2e3/40 --num-ranks 3 --num-buckets 2 --batch-size 2 --index-shards 50 --repeats 2"
    quality = "--quality-scale 2e3/40 --quality-ranks 2"
    result = run_tool("bench_plan", *sizes.split(), *quality.split())
    assert not [row for rows in result.values() for row in rows if "error" in row]
    plans = result["plan"]
    for name, kind in (("tail", Tail), ("shuffle", Shuffle), ("sync", Sync)):
        assert {row[name] for row in plans} == set(get_args(kind))
    assert all(row["first_seconds"] > 0 and row["microseconds_a_step"] > 0 and row["num_steps"] for row in plans)
    assert [row["way"] for row in result["index"]] == ["table", "shards", "loader"]
    assert all(row["peak_mib"] > 0 and row["read_seconds"] > 0 for row in result["index"])
    first = result["quality"][:3]
    assert [(row["shuffle"], row["window"]) for row in first] == [("none", 1), ("shards", 1), ("window", 1)]
