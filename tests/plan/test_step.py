from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamvid.errors import ConfigError
from streamvid.plan import Cursor, EpochPlan, PlanOptions
from streamvid.plan.span import BucketSpan
from streamvid.plan.step import FinalStep
from streamvid.plan.tail import TAIL_RULES
from tests.plan.runs import Leg, datasets, legs, make_plan, options, samples_of


@given(dataset=datasets(), chosen=options(), leg=legs())
def test_steps_are_sorted_by_shard(dataset: Any, chosen: PlanOptions, leg: Leg) -> None:
    """PLAN-3: a step has one bucket, and each run of `shard_locality` samples is sorted by shard and index."""
    for step in make_plan(dataset, leg, chosen).steps(0, 100):
        places = list(zip(step.shards.tolist(), step.indices.tolist(), strict=True))
        for first in range(0, len(places), chosen.shard_locality):
            assert places[first : first + chosen.shard_locality] == sorted(
                places[first : first + chosen.shard_locality]
            )
        assert set(places) <= samples_of(dataset[step.bucket_id])


def test_padding_repeats_samples_as_often_as_a_step_needs() -> None:
    """SAMPLE-1: two samples fill a step of seven; the repeats of each epoch and round have their own visits."""
    seen = set()
    for epoch in range(3):
        plan = EpochPlan({"a": [2]}, {"a": 7}, PlanOptions(tail="pad"), cursor=Cursor(epoch))
        (step,) = plan.steps(0, 5)
        assert Counter(step.indices.tolist()) in (Counter({0: 4, 1: 3}), Counter({0: 3, 1: 4}))
        assert [line.num_repeated for line in plan.report()] == [5]
        assert step.visits[~step.is_repeat].tolist() == [epoch, epoch]
        seen |= set(zip(step.indices.tolist(), step.visits.tolist(), strict=True))
    assert len(seen) == 21


def test_padding_repeats_the_first_samples_of_the_pass() -> None:
    """PLAN-4: with ten samples and steps of eight, the second step has the last two and six of the first eight."""
    first, second = EpochPlan({"a": [10]}, {"a": 8}, PlanOptions(tail="pad")).steps(0, 2)
    assert set(second.indices[second.is_repeat].tolist()) < set(first.indices.tolist())
    assert set(second.indices[~second.is_repeat].tolist()).isdisjoint(first.indices.tolist())


def test_equal_samples_of_a_step_keep_the_order_of_their_positions() -> None:
    """PLAN-1: the sort is stable, even where numpy's default sort would reorder long runs of equal keys."""
    (step,) = EpochPlan({"a": [2]}, {"a": 400}, PlanOptions(tail="pad")).steps(0, 1)
    for index in (0, 1):
        assert step.visits[step.indices == index].tolist() == [0, *(-wrap for wrap in range(1, 200))]


@given(chosen=options(shuffle="window", shard_locality=128))
def test_ranks_read_few_shards(chosen: PlanOptions) -> None:
    """FETCH-1: with shard locality, the parts of all ranks have fewer (rank, shard) pairs than ranks + shards."""
    plan = EpochPlan({"a": [50] * 6}, {"a": 4}, chosen, 16)
    for step in plan.steps(0, 4):
        pairs = {(rank, int(shard)) for rank in range(16) for shard in step.for_rank(rank).shards}
        assert len(pairs) < 16 + len(set(step.shards.tolist()))


@pytest.mark.parametrize("rank", [-1, 2, 4])
def test_ranks_outside_a_step_are_refused(rank: int) -> None:
    (step,) = EpochPlan({"a": [4]}, {"a": 2}, num_ranks=2).steps(0, 1)
    with pytest.raises(ConfigError, match=f"rank={rank}: must be a rank of this step, from 0 to 1"):
        step.for_rank(rank)


def test_a_step_of_several_buckets_has_no_single_name() -> None:
    """PLAN-3: only sync="cost" makes such steps, and each rank's part has a single bucket."""
    options = PlanOptions(sync="cost")
    (step,) = EpochPlan({"a": [1], "b": [1]}, {"a": 1, "b": 1}, options, 2, costs={"a": 10, "b": 10}).steps(0, 1)
    assert sorted(step.for_rank(rank).bucket_id for rank in range(2)) == ["a", "b"]
    with pytest.raises(ConfigError, match="different buckets \\(a, b\\)"):
        _ = step.bucket_id


@given(st.integers(0, 200), st.integers(1, 40), st.integers(0, 3))
def test_a_remainder_is_split_evenly_wherever_it_begins(num_samples: int, num_ranks: int, epoch: int) -> None:
    span = BucketSpan("some", num_samples, 1, num_ranks, TAIL_RULES["uneven"], epoch, 0, num_samples, 0)
    bounds = [FinalStep(span, 0, num_samples).bound(rank) for rank in range(num_ranks + 1)]
    sizes = np.diff(bounds)
    assert bounds[0] == 0 and bounds[-1] == num_samples
    assert set(sizes.tolist()) <= {num_samples // num_ranks, num_samples // num_ranks + 1}


def test_the_remainders_of_many_buckets_are_spread_over_all_ranks() -> None:
    """PLAN-4: regression with 300 tiny buckets on 64 ranks, where rank 0 had 300 batches and most ranks had none."""
    counts = {f"bucket-{number:03d}": [1 + number % 3] for number in range(300)}
    plan = EpochPlan(counts, dict.fromkeys(counts, 1), PlanOptions(tail="uneven"), 64)
    batches = [plan.num_batches_left(rank) for rank in range(64)]
    assert sum(batches) == 600 and min(batches) >= 2 and max(batches) <= 22, batches


@pytest.mark.parametrize(("before", "after"), [(3, 5), (5, 3), (4, 4), (5, 2), (1024, 1000)])
@pytest.mark.parametrize("tail", ["pad", "shrink"])
def test_repeats_that_complete_a_group_have_their_own_visits(tail: Any, before: int, after: int) -> None:
    """PLAN-5: `accumulate` changes between repeats; regression for a repeat delivered twice with the same visit."""
    one: dict[str, Any] = {"counts": {"a": [1]}, "batch_sizes": {"a": 1}, "num_ranks": 2}
    begun = make_one(one, tail, before)
    for done in range(1, min(before, 6)):
        rest = make_one(one, tail, after, begun.cursor_after(done))
        steps = begun.steps(0, done) + rest.steps(0, rest.num_steps_left)
        visits = [visit for step in steps for visit in step.visits.tolist()]
        assert len(set(visits)) == len(visits) and len(steps) % after == 0


def make_one(fixed: dict[str, Any], tail: Any, accumulate: int, cursor: Cursor | None = None) -> EpochPlan:
    chosen = PlanOptions(tail=tail, accumulate=accumulate)
    return EpochPlan(fixed["counts"], fixed["batch_sizes"], chosen, fixed["num_ranks"], cursor=cursor or Cursor())


@pytest.mark.parametrize("num_samples", [1, 3, 7, 8, 50])
def test_a_starved_bucket_reports_the_epoch_of_its_first_step(num_samples: int) -> None:
    """PLAN-4"""
    plan = EpochPlan({"a": [num_samples], "b": [100]}, {"a": 4, "b": 4}, num_ranks=16)
    waits = plan.starved[0].num_epochs_to_step
    assert waits is not None
    for _ in range(waits - 1):
        assert [row.bucket_id for row in plan.starved] == ["a"]
        plan = plan.at(plan.next_epoch())
    assert not plan.starved
