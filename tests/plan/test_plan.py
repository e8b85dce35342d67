from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamvid.errors import ConfigError, PlanError, StateError
from streamvid.plan import PLAN_VERSION, Cursor, EpochPlan, PlanOptions
from tests.plan.golden import golden_plan, step_to_json
from tests.plan.runs import Leg, assert_same_steps, datasets, legs, make_plan, options, samples_of

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "plan_golden.json").read_text())


@given(dataset=datasets(), chosen=options(), leg=legs(), data=st.data())
def test_any_slices_give_the_same_steps(dataset: Any, chosen: PlanOptions, leg: Leg, data: st.DataObject) -> None:
    """PLAN-1: a step does not depend on which other steps are requested with it, or in what order."""
    plan = make_plan(dataset, leg, chosen)
    steps = plan.steps(0, plan.num_steps_left + data.draw(st.integers(0, 5)))
    assert len(steps) == plan.num_steps_left == plan.num_steps
    cuts = sorted(data.draw(st.lists(st.integers(0, len(steps)), max_size=5)))
    bounds = list(zip([0, *cuts], [*cuts, len(steps)], strict=True))
    for start, stop in data.draw(st.permutations(bounds)):
        assert_same_steps(plan.steps(start, stop), steps[start:stop])
    for number in range(min(len(steps), 40)):
        assert_same_steps(plan.steps(number, number + 1), steps[number : number + 1])


@given(dataset=datasets(), chosen=options(), leg=legs(), num_epochs=st.integers(0, 5))
def test_the_number_of_steps_is_known_in_advance(dataset: Any, chosen: PlanOptions, leg: Leg, num_epochs: int) -> None:
    """PLAN-2: the number of steps of consecutive epochs is known in advance."""
    cursor, total = Cursor(), 0
    foretold = make_plan(dataset, leg, chosen).num_steps_through(num_epochs)
    for epoch in range(num_epochs):
        plan = make_plan(dataset, leg, chosen, cursor)
        natural = make_plan(dataset, leg, chosen, Cursor(epoch))
        assert plan.num_steps == plan.num_steps_left == natural.num_steps == natural.num_steps_left
        assert plan.cursor_after(0) == natural.cursor_after(0)
        total += len(plan.steps(0, plan.num_steps))
        cursor = plan.next_epoch()
    assert total == foretold


@given(dataset=datasets(), chosen=options(), leg=legs(), data=st.data())
def test_a_plan_is_a_function_of_its_arguments(
    dataset: Any, chosen: PlanOptions, leg: Leg, data: st.DataObject
) -> None:
    """PLAN-1: neither the order of mappings nor the type of sequence matters, and calls do not change the plan."""
    plan = make_plan(dataset, leg, chosen)
    shuffled = {name: np.array(dataset[name], np.int64) for name in data.draw(st.permutations(list(dataset)))}
    other = make_plan(shuffled, leg, chosen)  # type: ignore[arg-type]
    other.steps(0, 3)
    other.cursor_after(0)
    assert_same_steps(other.steps(0, 50), plan.steps(0, 50))
    assert other.report() == plan.report()


@given(seed=st.integers(0, 2**63 - 1), tail=st.sampled_from(["carry", "drop", "pad"]))
def test_epochs_and_seeds_have_different_orders(seed: int, tail: Any) -> None:
    """PLAN-1: the order is shuffled by (seed, epoch), within and across buckets."""
    dataset = {"a": [20] * 10, "b": [20] * 10}

    def order(options: PlanOptions, epoch: int) -> tuple[list[str], list[int]]:
        plan = EpochPlan(dataset, {"a": 2, "b": 2}, options, 2, Cursor(epoch))
        steps = plan.steps(0, 200)
        return [step.bucket_id for step in steps], [int(i) for step in steps for i in (*step.shards, *step.indices)]

    mine = order(PlanOptions(seed, tail=tail), 0)
    for other in (order(PlanOptions(seed, tail=tail), 1), order(PlanOptions(seed ^ 1, tail=tail), 0)):
        assert mine[0] != other[0]
        assert mine[1] != other[1]


def test_no_shuffle_keeps_the_manifest_order() -> None:
    plan = EpochPlan({"a": [3, 0, 5], "b": [4]}, {"a": 2, "b": 1}, PlanOptions(shuffle="none"))
    steps = plan.steps(0, 8)
    in_a = [(s, i) for step in steps if step.bucket_id == "a" for s, i in zip(step.shards, step.indices, strict=True)]
    assert in_a == sorted(samples_of([3, 0, 5]))
    assert [step.bucket_id for step in steps] == ["a", "b"] * 4


def test_a_bucket_smaller_than_a_step_delivers_every_few_epochs() -> None:
    """PLAN-4: with tail="carry", a bucket of 3 samples that needs 8 per step has its first step in the third epoch."""
    cursor, delivered = Cursor(), []
    for _ in range(8):
        plan = EpochPlan({"a": [3]}, {"a": 4}, PlanOptions(), 2, cursor)
        delivered += [(plan.cursor.epoch, index) for step in plan.steps(0, 9) for index in step.indices.tolist()]
        assert [line.num_carried for line in plan.report()] == [3 * (plan.cursor.epoch + 1) - len(delivered)]
        cursor = plan.next_epoch()
    assert [epoch for epoch, _ in delivered] == [2] * 8 + [5] * 8 + [7] * 8
    assert Counter(index for _, index in delivered) == {0: 8, 1: 8, 2: 8}


def test_a_backlog_is_delivered_when_the_batch_shrinks() -> None:
    """PLAN-5: five epochs without a step leave 15 samples, which smaller steps deliver in the sixth epoch."""
    cursor = Cursor()
    for _ in range(5):
        cursor = EpochPlan({"a": [3]}, {"a": 100}, cursor=cursor).next_epoch()
    plan = EpochPlan({"a": [3]}, {"a": 2}, cursor=cursor)
    assert (cursor.epoch, plan.num_steps_left, plan.num_steps) == (5, 9, 9)
    visits = [(int(i), int(v)) for step in plan.steps(0, 9) for i, v in zip(step.indices, step.visits, strict=True)]
    assert sorted(visits) == [(index, visit) for index in range(3) for visit in range(6)]


@pytest.mark.parametrize("tail", ["drop", "pad"])
def test_a_position_before_the_epoch_moves_to_its_start(tail: Any) -> None:
    """PLAN-4: tails that do not carry never deliver another epoch's samples, for example after `set_epoch`."""
    plan = EpochPlan({"a": [6]}, {"a": 2}, PlanOptions(tail=tail), cursor=Cursor(3, {"a": 7}))
    assert [step.visits.tolist() for step in plan.steps(0, 9)] == [[3, 3]] * 3


def test_positions_of_long_runs_stay_exact() -> None:
    """PLAN-4: no rounding errors occur at position 1e12 and beyond, or in a bucket of 1e12 samples."""
    dataset, sizes = {"a": [401] * 30, "b": [607] * 9}, {"a": 2, "b": 3}
    cursor = Cursor(10**9)
    plan = EpochPlan(dataset, sizes, PlanOptions(), 3, cursor)
    assert min(plan.cursor_after(0).positions.values()) > 10**12
    last = plan.next_epoch()
    got = Counter(
        (step.bucket_id, *place)
        for step in plan.steps(0, plan.num_steps_left)
        for place in zip(step.shards.tolist(), step.indices.tolist(), strict=True)
    )
    reports = {line.bucket_id: line for line in plan.report()}
    assert max(got.values()) <= 2
    assert sum(got.values()) == sum(line.num_delivered for line in reports.values())
    assert {name: last.positions[name] + reports[name].num_carried for name in dataset} == {
        name: (cursor.epoch + 1) * sum(dataset[name]) for name in dataset
    }
    huge = EpochPlan({"a": [10**12], "b": [5]}, {"a": 1, "b": 5})
    middle = 5 * 10**11
    assert_same_steps(
        EpochPlan({"a": [10**12], "b": [5]}, {"a": 1, "b": 5}, cursor=huge.cursor_after(middle)).steps(0, 5),
        huge.steps(middle, middle + 5),
    )
    assert huge.next_epoch().positions == {"a": 10**12, "b": 5}


def test_memory_grows_with_shards_not_samples() -> None:
    """PLAN-6: a billion samples need less than twice the memory of 64,000."""

    def peak_bytes(num_samples: int) -> int:
        tracemalloc.start()
        plan = EpochPlan({"a": [num_samples] * 500, "b": [num_samples] * 500}, {"a": 4, "b": 2}, num_ranks=8)
        plan.steps(0, 64)
        middle = plan.num_steps_left // 2
        plan.steps(middle, middle + 64)
        plan.cursor_after(middle)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    few = peak_bytes(64)
    assert peak_bytes(10**6) < 2 * few < 4_000_000


def test_the_state_is_small() -> None:
    """PLAN-6, PLAN-5: the state has one position per bucket."""
    names = [
        f"1024px-{frames}f-{ratio}" for frames in range(101, 121) for ratio in ("16x9", "9x16", "1x1", "2.39x1", "3x4")
    ]
    plan = EpochPlan({name: [10**10] for name in names}, dict.fromkeys(names, 3), cursor=Cursor(100))
    state = json.dumps(plan.cursor_after(1).to_json())
    assert len(names) == 100
    assert min(plan.cursor_after(1).positions.values()) >= 10**12 - 3
    assert len(state) < 4096


def test_the_golden_plan() -> None:
    """PLAN-1: this plan version gives these steps on every machine; a new order needs a new PLAN_VERSION."""
    assert GOLDEN["plan_version"] == PLAN_VERSION
    assert len(GOLDEN["plans"]) >= 12
    for case in GOLDEN["plans"]:
        plan = golden_plan(case)
        assert [step_to_json(step) for step in plan.steps(0, case["stop"])] == case["steps"]
        assert plan.cursor_after(case["stop"]).to_json() == case["cursor_after"]
        assert plan.num_steps_left == case["num_steps_left"]


@pytest.mark.parametrize("tail", ["carry", "drop"])
def test_a_plan_without_steps_is_an_error_with_remedies(tail: Any) -> None:
    """PLAN-4"""
    plan = EpochPlan({"a": [3], "b": [0]}, {"a": 2, "b": 1}, PlanOptions(tail=tail), 4)
    with pytest.raises(PlanError) as error:
        plan.check()
    message = str(error.value)
    assert "a has 3 of the 8 samples that a step needs (num_ranks=4 times batch_size=2)" in message
    assert "b has 0 of the 4 samples" in message
    assert "smaller batch_size, fewer ranks, tail='pad'" in message
    assert ("at least 3 epochs" in message) == (tail == "carry")
    assert [line.bucket_id for line in plan.starved] == ["a", "b"]
    assert plan.steps(0, 10) == []
    assert plan.next_epoch().positions == plan.cursor_after(0).positions | ({"a": 3} if tail == "drop" else {})


def test_enough_epochs_or_padding_make_a_step() -> None:
    few = {"a": [3]}
    EpochPlan(few, {"a": 8}).check(num_epochs=3)
    EpochPlan(few, {"a": 8}).check(num_epochs=None)
    EpochPlan(few, {"a": 8}, PlanOptions(tail="pad")).check()
    with pytest.raises(PlanError, match="at least 3 epochs"):
        EpochPlan(few, {"a": 8}).check(num_epochs=2)
    with pytest.raises(PlanError, match="no bucket"):
        EpochPlan(few, {"a": 8}, PlanOptions(tail="drop")).check(num_epochs=None)
    for empty in ({}, {"a": []}, {"a": [0, 0]}):
        for tail in ("carry", "drop", "pad"):
            plan = EpochPlan(empty, dict.fromkeys(empty, 1), PlanOptions(tail=tail))  # type: ignore[arg-type]
            assert plan.num_steps == plan.num_steps_left == 0
            plan.next_epoch()
            with pytest.raises(PlanError, match="no samples to deliver"):
                plan.check(num_epochs=None)


def test_the_end_of_an_epoch_is_not_an_error() -> None:
    plan = EpochPlan({"a": [8]}, {"a": 4})
    ended = EpochPlan({"a": [8]}, {"a": 4}, cursor=plan.cursor_after(2))
    ended.check()
    assert (ended.num_steps, ended.num_steps_left, ended.steps(0, 9), ended.starved) == (2, 0, [], ())


@given(dataset=datasets(), chosen=options(), leg=legs(), epoch=st.integers(0, 4), data=st.data())
def test_any_position_is_accepted(dataset: Any, chosen: PlanOptions, leg: Leg, epoch: int, data: st.DataObject) -> None:
    """A cursor beyond the epoch's end or before its start gives a plan with a correct report."""
    positions = {name: data.draw(st.integers(0, 200)) for name in dataset}
    plan = make_plan(dataset, leg, chosen, Cursor(epoch, positions))
    received = Counter(step.bucket_id for step in plan.steps(0, plan.num_steps_left))
    after = plan.cursor_after(plan.num_steps_left)
    for line in plan.report():
        assert received[line.bucket_id] == line.num_steps
        assert (
            positions[line.bucket_id] <= after.positions[line.bucket_id] <= plan.next_epoch().positions[line.bucket_id]
        )


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (({"a": [1]}, {}), ConfigError, r"no entry for these buckets in the dataset: a"),
        (({"a": [1]}, {"a": 1, "b": 1}), ConfigError, r"buckets that the dataset lacks: b"),
        (({"a": [1]}, {"a": 0}), ConfigError, r"batch_sizes\['a'\]=0"),
        (({"a": [1.5]}, {"a": 1}), ConfigError, "must contain one integer per shard"),
        (({"a": [[1]]}, {"a": 1}), ConfigError, "must contain one integer per shard"),
        (({"a": [-1]}, {"a": 1}), ConfigError, "at least 0"),
        (({"a": [2**62, 2**62]}, {"a": 1}), ConfigError, "at least 0"),
        (({"a": [1]}, {"a": 1}, None, 0), ConfigError, "num_ranks=0"),
        (({"a": [1]}, {"a": 2**20}, None, 2**20), ConfigError, r"num_ranks \* batch_size"),
        (
            ({"a": [1]}, {"a": 1}, None, 1, Cursor(0, {"b": 3})),
            StateError,
            r"positions in buckets that the dataset lacks: b; .* start without a state",
        ),
        (({"a": [2**30]}, {"a": 1}, None, 1, Cursor(2**30)), StateError, "earlier epoch"),
    ],
)
def test_invalid_arguments_are_refused(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        EpochPlan(*arguments)


def test_steps_out_of_range_are_refused() -> None:
    plan = EpochPlan({"a": [8]}, {"a": 4})
    for start, stop in ((-1, 2), (0, -1)):
        with pytest.raises(ConfigError, match="must be an integer"):
            plan.steps(start, stop)
    with pytest.raises(ConfigError, match="num_steps_done=3"):
        plan.cursor_after(3)
    with pytest.raises(ConfigError, match="num_epochs=-1"):
        plan.num_steps_through(-1)
