"""Tests of the plan's promises over datasets, mixes, worlds, options and kills, judged by what the ranks receive."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamvid.plan import Cursor, EpochPlan, PlanOptions
from tests.plan.runs import (
    Case,
    Leg,
    Received,
    assert_passes_are_whole,
    assert_same_samples,
    assert_same_steps,
    cases,
    legs,
    plan_of,
    run,
)  # fmt: skip

LIVES = st.lists(st.lists(legs(), min_size=1, max_size=4), min_size=1, max_size=4)
SLOW = settings(max_examples=6000, suppress_health_check=list(HealthCheck))


@settings(max_examples=150)
@given(case=cases(), epochs=LIVES)
def test_samples_are_delivered_as_often_as_the_tail_defines(case: Case, epochs: list[list[Leg]]) -> None:
    """PLAN-2, PLAN-3, PLAN-4, PLAN-5: over epochs, kills, and changes of ranks and batch size."""
    check_a_run(case, epochs)


@pytest.mark.slow
@SLOW
@given(case=cases(), epochs=LIVES)
def test_samples_are_delivered_as_often_as_the_tail_defines_in_many_cases(case: Case, epochs: list[list[Leg]]) -> None:
    """PLAN-2, PLAN-3, PLAN-4, PLAN-5."""
    check_a_run(case, epochs)


def check_a_run(case: Case, epochs: list[list[Leg]]) -> None:
    history, cursor = run(case, epochs)
    every = [row for received in history for row in received.rows]
    assert len({row.delivery for row in every}) == len(every)
    accumulate = case.options.accumulate
    for epoch, received in enumerate(history):
        if len(epochs[epoch]) == 1:
            assert received.num_steps % accumulate == 0
        for name in case.bucket_ids:
            check_an_epoch(case, epoch, name, received)
    if case.options.tail == "carry":
        check_what_is_carried(case, history, cursor)
    elif case.options.tail != "drop":
        for source in range(len(case.datasets)):
            for name in case.bucket_ids:
                rows = [row for row in every if (row.source, row.bucket_id) == (source, name) and not row.is_repeat]
                total = case.boundary(source, name, len(history))
                assert_passes_are_whole(rows, case.counts(source, name), total)


def check_an_epoch(case: Case, epoch: int, name: str, received: Received) -> None:
    tail, rows = case.options.tail, received.of(name)
    once = Counter(row.source for row in rows if not row.is_repeat)
    in_epoch = {source: case.in_epoch(source, name, epoch) for source in range(len(case.datasets))}
    repeats = [row for row in rows if row.is_repeat]
    (line,) = (line for line in received.last_report if line.bucket_id == name)
    if tail == "drop":
        assert not repeats
        assert sum(once.values()) + line.num_dropped == sum(in_epoch.values())
        assert all(once[source] <= count for source, count in in_epoch.items())
    elif tail != "carry":
        assert once == Counter({source: count for source, count in in_epoch.items() if count})
        assert line.num_dropped == line.num_carried == 0
        there = {row.sample for row in rows if not row.is_repeat}
        assert {row.sample for row in repeats} <= there
        assert not (tail == "uneven" and repeats)
        assert all(row.visit < 0 for row in repeats)
        if tail == "shrink" and case.options.accumulate == 1:
            assert received.last_leg is not None
            assert line.num_repeated < max(1, received.last_leg.num_ranks)


def check_what_is_carried(case: Case, history: list[Received], cursor: Cursor) -> None:
    """Check that no sample is lost or repeated: undelivered samples are the ones that the report counts as carried."""
    for name in case.bucket_ids:
        rows = [row for received in history for row in received.of(name)]
        assert not any(row.is_repeat for row in rows)
        total = sum(case.boundary(source, name, len(history)) for source in range(len(case.datasets)))
        (line,) = (line for line in history[-1].last_report if line.bucket_id == name)
        assert cursor.positions[name] == len(rows) == total - line.num_carried
        assert line.num_dropped == line.num_repeated == 0
        for source in range(len(case.datasets)):
            mine = [row for row in rows if row.source == source]
            if len(case.datasets) == 1:
                assert_passes_are_whole(mine, case.counts(source, name), len(rows))
            assert len(mine) <= case.boundary(source, name, len(history))


@settings(max_examples=75)
@given(case=cases(), leg=legs(), epoch=st.integers(0, 3), data=st.data())
def test_the_remainder_is_bit_identical(case: Case, leg: Leg, epoch: int, data: st.DataObject) -> None:
    """PLAN-5: the steps after a state equal those of an uninterrupted run."""
    check_the_rest(case, leg, epoch, data)


@pytest.mark.slow
@SLOW
@given(case=cases(), leg=legs(), epoch=st.integers(0, 3), data=st.data())
def test_the_remainder_is_bit_identical_in_many_cases(case: Case, leg: Leg, epoch: int, data: st.DataObject) -> None:
    """PLAN-5."""
    check_the_rest(case, leg, epoch, data)


def check_the_rest(case: Case, leg: Leg, epoch: int, data: Any) -> None:
    start = Cursor()
    for _ in range(epoch):
        start = plan_of(case, leg, start).next_epoch()
    plan = plan_of(case, leg, start)
    steps = plan.steps(0, plan.num_steps_left)
    assert plan.num_steps == plan.num_steps_left == len(steps)
    done = data.draw(st.integers(0, plan.num_steps_left), label="done")

    rest = plan_of(case, leg, plan.cursor_after(done))

    assert rest.num_steps_left == plan.num_steps_left - done
    assert_same_steps(rest.steps(0, rest.num_steps_left), steps[done:])
    assert rest.next_epoch() == plan.next_epoch()
    assert rest.num_steps == plan.num_steps
    if case.options.sync == "bucket" and case.options.tail not in ("shrink", "uneven"):
        factor = data.draw(st.sampled_from([n for n in range(1, 18) if leg.num_ranks % n == 0]), label="factor")
        other = Leg(leg.num_ranks // factor, {name: size * factor for name, size in leg.batch_sizes.items()}, 0.0)
        rest = plan_of(case, other, plan.cursor_after(done))
        assert_same_samples(rest.steps(0, rest.num_steps_left), steps[done:])


@settings(max_examples=150)
@given(case=cases(), leg=legs(), data=st.data())
def test_a_rank_computes_its_part_alone(case: Case, leg: Leg, data: st.DataObject) -> None:
    """PLAN-1: a rank's steps are its part of all ranks' steps, for any requested slices."""
    plan = plan_of(case, leg)
    steps = plan.steps(0, plan.num_steps_left)
    rank = data.draw(st.integers(0, leg.num_ranks - 1))
    start = data.draw(st.integers(0, len(steps)))
    stop = data.draw(st.integers(start, len(steps)))
    assert_same_steps(plan.steps(start, stop, rank), [step.for_rank(rank) for step in steps[start:stop]])
    num_batches = sum(bool(len(step.for_rank(rank).shards)) for step in steps)
    assert plan.num_batches_left(rank) == num_batches
    left = sum(bool(len(step.for_rank(rank).shards)) for step in steps[start:])
    assert plan.num_batches_left(rank, start) == left
    if case.options.tail != "uneven":
        assert num_batches == len(steps)


@settings(max_examples=150)
@given(case=cases(), leg=legs(), num_epochs=st.integers(0, 5))
def test_the_number_of_steps_of_several_epochs_is_known_in_advance(case: Case, leg: Leg, num_epochs: int) -> None:
    """PLAN-2: the number of steps of consecutive epochs is known in advance."""
    cursor, total = Cursor(), 0
    for _ in range(num_epochs):
        plan = plan_of(case, leg, cursor)
        total += plan.num_steps_left
        cursor = plan.next_epoch()
    assert plan_of(case, leg).num_steps_through(num_epochs) == total


@pytest.mark.parametrize("tail", ["shrink", "uneven"])
def test_the_last_batches_of_a_class_make_one_or_two_steps(tail: Any) -> None:
    """PLAN-2: two buckets of a class have 50 batches for 3 ranks; the last two come from one bucket or from both."""
    sizes, costs = {"a": [10] * 3, "b": [10] * 4}, {"a": 1, "b": 1}
    plan = EpochPlan(sizes, {"a": 3, "b": 1}, PlanOptions(tail=tail, sync="cost"), 3, costs=costs)
    counts = [plan.at(Cursor(epoch)).num_steps_left for epoch in range(12)]
    assert set(counts) == {17, 18}
    assert [plan.num_steps_through(epoch) for epoch in range(13)] == [sum(counts[:epoch]) for epoch in range(13)]


@settings(max_examples=150)
@given(case=cases(), leg=legs())
def test_ranks_of_a_step_have_about_the_same_cost(case: Case, leg: Leg) -> None:
    """PLAN-3: with sync="cost", costs within a step differ by at most 10 %; with sync="bucket", a step has one
    bucket.
    """
    plan: EpochPlan = plan_of(case, leg)
    for step in plan.steps(0, plan.num_steps_left):
        costs = [case.costs[name] for name in step.bucket_ids]
        assert max(costs) <= min(costs) * 1.1
        if case.options.sync == "bucket":
            assert len(set(step.bucket_ids)) == 1


@settings(max_examples=150)
@given(case=cases(), leg=legs())
def test_largest_first_begins_with_one_step_per_bucket(case: Case, leg: Leg) -> None:
    """Only epoch 0 begins this way, costliest bucket first, so that a run that needs too much memory fails at once."""
    plan = plan_of(case, leg)
    steps = plan.steps(0, plan.num_steps_left)
    if case.options.order == "largest-first" and case.options.sync == "bucket" and case.options.accumulate == 1:
        firsts = list(dict.fromkeys(step.bucket_id for step in steps[: plan.num_steps_left]))
        warm = firsts[: len({step.bucket_id for step in steps})]
        mixed = [name for name in warm if any(r.bucket_id == name and r.num_steps for r in plan.report())]
        full = [
            name
            for name in mixed
            if any(len(s.shards) == leg.num_ranks * leg.batch_sizes[name] for s in steps if s.bucket_id == name)
        ]
        order = [name for name in firsts if name in full]
        assert order[: len(full)] == sorted(
            full, key=lambda name: (case.costs[name], name), reverse=True
        ) or case.options.tail in ("shrink", "uneven")
