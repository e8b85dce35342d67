"""Tests of a run's loads per rank, computed from the plan alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamvid.buckets.bucket import Bucket
from streamvid.errors import ConfigError, PlanError
from streamvid.forecast.counts import count_run, failure_of
from streamvid.forecast.host import HostCosts, RankWork, epoch_time
from streamvid.forecast.loads import imbalance, rank_loads
from streamvid.plan import EpochPlan, PlanOptions
from streamvid.plan.cost import default_costs

BUCKETS = {bucket.id: bucket for bucket in (Bucket(5, 64, 96), Bucket(9, 96, 64), Bucket(17, 64, 96))}
TOKENS = {name: bucket.tokens for name, bucket in BUCKETS.items()}


def plan_of(
    counts: dict[str, list[int]], size: int, num_ranks: int, **options: Any
) -> tuple[EpochPlan, dict[str, int]]:
    sizes = dict.fromkeys(counts, size)
    costs = default_costs(BUCKETS.values()).costs(sizes)
    return EpochPlan(counts, sizes, PlanOptions(**options), num_ranks, costs=costs), costs


counts_of_buckets = st.fixed_dictionaries(
    {name: st.lists(st.integers(1, 40), min_size=1, max_size=4) for name in BUCKETS}
)


@settings(max_examples=60)
@given(
    counts=counts_of_buckets,
    size=st.integers(1, 4),
    num_ranks=st.integers(1, 5),
    tail=st.sampled_from(["carry", "drop", "pad", "shrink", "uneven"]),
    sync=st.sampled_from(["bucket", "cost"]),
)
def test_loads_equal_a_count_over_all_steps(
    counts: dict[str, list[int]], size: int, num_ranks: int, tail: str, sync: str
) -> None:
    """PLAN-3 and PLAN-4: each rank's samples, tokens and bytes equal a plain count over every step of the plan."""
    plan, costs = plan_of(counts, size, num_ranks, tail=tail, sync=sync)
    loads = rank_loads(plan, dict.fromkeys(counts, size), TOKENS, costs, lambda _, shards, places: 10 * shards + places)
    steps, summary = plan.steps(0, plan.num_steps_left), loads.summary()
    assert (loads.num_steps, loads.is_sampled) == (len(steps), False)
    for rank in range(num_ranks):
        mine = [step.for_rank(rank) for step in steps]
        assert loads.samples[:, rank].tolist() == [len(step.shards) for step in mine]
        assert loads.tokens[:, rank].tolist() == [len(step.shards) * TOKENS[step.bucket_id] for step in mine]
        own = sum(int((10 * step.shards + step.indices).sum()) for step in mine)
        assert (summary.member_bytes_by_rank or ())[rank] == own
        assert summary.samples_by_rank[rank] == sum(len(step.shards) for step in mine)
    assert sum(summary.samples_by_rank) == sum(row.num_delivered for row in plan.report())
    if sync == "bucket" and tail in ("carry", "drop", "pad"):
        assert imbalance(loads.tokens) == 1.0


def test_a_long_epoch_is_estimated_from_some_of_its_steps() -> None:
    """Slices of the whole epoch are counted; the result is marked as an estimate and is close to the exact values."""
    counts = {name: [50_000] * 4 for name in BUCKETS}
    plan, costs = plan_of(counts, 1, 8, tail="drop", sync="cost")
    loads = rank_loads(plan, dict.fromkeys(counts, 1), TOKENS, costs)
    assert loads.is_sampled and loads.summary().is_estimate and len(loads.tokens) < loads.num_steps == 75_000
    exact = sum(row.num_delivered for row in plan.report())
    assert sum(loads.summary().samples_by_rank) == pytest.approx(exact, rel=0.01)
    tokens = sum(row.num_delivered * TOKENS[row.bucket_id] for row in plan.report())
    assert float(loads.tokens.sum()) * loads.scale == pytest.approx(tokens, rel=0.02)


def test_imbalance_is_the_busiest_rank_over_the_mean() -> None:
    assert imbalance(np.array([[2, 2], [3, 1]])) == pytest.approx((1 + 1.5) / 2)
    assert imbalance(np.array([[0, 0], [4, 0]])) == 2.0
    assert imbalance(np.zeros((0, 4), np.int64)) == 1.0


def test_counts_and_tails_equal_the_plans() -> None:
    """PLAN-4: each tail has the counts that its plan reports, and a run without a step has the plan's error."""
    counts = {name: [7, 4] for name in BUCKETS}
    sizes = dict.fromkeys(counts, 2)
    found = count_run(lambda options: EpochPlan(counts, sizes, options, 3), PlanOptions(tail="pad"), 2)
    assert {tail.tail for tail in found.tails} == {"carry", "drop", "pad", "shrink", "uneven"}
    for tail in found.tails:
        plan = EpochPlan(counts, sizes, PlanOptions(tail=tail.tail), 3)
        epochs = [plan, plan.at(plan.next_epoch())]
        assert tail.num_steps == sum(epoch.num_steps_left for epoch in epochs)
        assert tail.num_delivered == sum(report.num_delivered for epoch in epochs for report in epoch.report())
    assert failure_of(EpochPlan(counts, sizes, PlanOptions(tail="pad"), 3), 2) is None
    assert isinstance(failure_of(EpochPlan(counts, sizes, PlanOptions(tail="drop"), 300), 1), PlanError)


def test_an_epoch_takes_as_long_as_its_longest_part() -> None:
    costs = HostCosts(num_workers=2, ranks_per_node=4, request_ms=10, requests_in_flight=5, link_mb_per_second=100)
    found = epoch_time(RankWork(30.0, 1000, 500e6, None), costs, num_ranks=64)
    assert found.parts == {"decode": 15.0, "link": 20.0, "requests": 2.0, "gpu": None}
    assert (found.seconds, found.bound_by) == (20.0, "link")
    found = epoch_time(RankWork(30.0, 1000, 500e6, 99.0), costs, num_ranks=1)
    assert (found.parts["link"], found.bound_by) == (5.0, "gpu")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_workers", 0), ("request_ms", -1.0), ("link_mb_per_second", 0.0), ("sample_ms", float("inf")),
        ("decode_ms", {"*": -1.0}), ("ranks_per_node", 0),
    ],
)  # fmt: skip
def test_invalid_cost_tables_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        HostCosts(**{field: value})
