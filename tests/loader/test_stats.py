"""Tests of the loader's statistics on the cost of its batches."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamvid.loader.stats import BatchStats, LoaderStats, StatsMeter

seconds = st.floats(0, 1000)
counts = st.integers(0, 2**40)
costs = st.builds(BatchStats, seconds, seconds, counts, st.integers(0, 9), st.integers(0, 9))
steps = st.tuples(costs, st.integers(1, 64), seconds, seconds, st.integers(0, 100))


def add(meter: StatsMeter, step: tuple[BatchStats, int, float, float, int]) -> None:
    cost, num_samples, wait_seconds, batch_seconds, depth = step
    meter.add(cost, num_samples, wait_seconds=wait_seconds, batch_seconds=batch_seconds, queue_depth=depth)


@given(st.lists(steps, min_size=1, max_size=8), st.lists(steps, min_size=1, max_size=8))
def test_sums_and_intervals_add_up(
    first: list[tuple[BatchStats, int, float, float, int]], second: list[tuple[BatchStats, int, float, float, int]]
) -> None:
    meter = StatsMeter()
    for step in first:
        add(meter, step)
    early = meter.stats()
    for step in second:
        add(meter, step)
    late = meter.stats()
    interval = late.since(early)
    for stats, some in ((early, first), (interval, second), (late, first + second)):
        assert stats.num_steps == len(some) and stats.num_samples == sum(step[1] for step in some)
        assert stats.work.num_bytes_fetched == sum(step[0].num_bytes_fetched for step in some)
        assert stats.work.num_retries == sum(step[0].num_retries for step in some)
        assert stats.work.num_substituted == sum(step[0].num_substituted for step in some)
        for name, expected in (
            ("fetch_seconds", [step[0].fetch_seconds for step in some]),
            ("decode_seconds", [step[0].decode_seconds for step in some]),
            ("wait_seconds", [step[2] for step in some]),
            ("batch_seconds", [step[3] for step in some]),
        ):
            found = getattr(stats if hasattr(stats, name) else stats.work, name)
            assert math.isclose(found, sum(expected), rel_tol=1e-9, abs_tol=1e-6)
        assert math.isclose(stats.mean_queue_depth, sum(step[4] for step in some) / len(some))
        assert stats.queue_depth == some[-1][4] and 0 <= stats.wait_share <= 1
    assert late.last is not None and interval.last == late.last
    cost, num_samples, wait_seconds, batch_seconds, depth = second[-1]
    assert late.last.num_steps == 1 and late.last.num_samples == num_samples and late.last.queue_depth == depth
    assert (late.last.wait_seconds, late.last.batch_seconds) == (wait_seconds, batch_seconds)
    assert late.last.work.decode_seconds == cost.decode_seconds and late.last.last is None


def test_statistics_are_empty_before_the_first_step() -> None:
    stats = StatsMeter().stats()
    assert stats == LoaderStats() and stats.wait_share == 0 and stats.mean_queue_depth == 0


def test_returned_statistics_do_not_change() -> None:
    meter = StatsMeter()
    add(meter, (BatchStats(), 4, 0.5, 0.1, 2))
    before = meter.stats()
    add(meter, (BatchStats(num_bytes_fetched=7), 4, 0.5, 0.1, 2))
    assert before.num_steps == 1 and before.work.num_bytes_fetched == 0
    with pytest.raises(AttributeError):
        before.num_steps = 2  # type: ignore[misc]


@given(steps)
def test_json_holds_every_number(step: tuple[BatchStats, int, float, float, int]) -> None:
    meter = StatsMeter()
    add(meter, step)
    stats = meter.stats()
    record = json.loads(json.dumps(stats.to_json(), allow_nan=False))
    assert record["num_samples"] == stats.num_samples and record["last"]["last"] is None
    assert record.keys() == record["last"].keys() >= {"wait_share", "mean_queue_depth", "queue_depth", "seconds"}
    assert abs(record["wait_seconds"] - stats.wait_seconds) <= 1e-6
    assert json.loads(json.dumps(LoaderStats().to_json()))["last"] is None
