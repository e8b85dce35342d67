"""Tests of step costs: fits to noisy measurements, and classes of buckets with similar costs."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamvid.buckets.bucket import Bucket
from streamvid.errors import ConfigError
from streamvid.plan.cost import CostTable, cost_classes, default_costs, fit_costs

BUCKETS = tuple(
    Bucket(frames, height, width)
    for frames in (1, 17, 49, 81)
    for height, width in ((192, 336), (256, 256), (480, 832), (720, 1280))
)
TOKENS = {bucket.id: bucket.tokens for bucket in BUCKETS}
IDS = sorted(TOKENS)

models = st.tuples(st.floats(0, 0.2), st.floats(1e-7, 1e-5), st.floats(0, 1e-9))
seeds = st.integers(0, 2**32)
costs_of_buckets = st.dictionaries(st.text(max_size=4), st.integers(1, 10**15) | st.integers(1, 300), max_size=40)


def seconds(model: tuple[float, float, float], bucket_id: str, batch_size: int) -> float:
    constant, per_token, per_pair = model
    tokens = TOKENS[bucket_id]
    return constant + per_token * batch_size * tokens + per_pair * batch_size * tokens**2


def batch_size_of(bucket_id: str, max_tokens: int = 90_000) -> int:
    return max_tokens // TOKENS[bucket_id]


@given(models, seeds)
def test_the_fit_predicts_unmeasured_steps(model: tuple[float, float, float], seed: int) -> None:
    """Measurements have 3 % noise, and the first step of each batch shape takes 20 times as long, as if it compiled."""
    draw = random.Random(seed)
    by_tokens = sorted(IDS, key=TOKENS.__getitem__)
    measured = {by_tokens[0], by_tokens[-1], *draw.sample(IDS, 8)}
    runs = [
        (name, size, seconds(model, name, size) * draw.uniform(0.97, 1.03) * (20 if number == 0 else 1))
        for name in measured
        for size in {1, batch_size_of(name)}
        for number in range(9)
    ]
    table = fit_costs(runs, BUCKETS)
    for name in set(IDS) - measured:
        for size in (1, batch_size_of(name) // 2 + 1, batch_size_of(name)):
            assert table.step_nanoseconds(name, size) / 1e9 == pytest.approx(seconds(model, name, size), rel=0.1)


@given(models)
def test_the_fit_of_exact_measurements_is_exact(model: tuple[float, float, float]) -> None:
    runs = [(name, size, seconds(model, name, size)) for name in IDS for size in (1, 4)]
    table = fit_costs(runs, BUCKETS)
    assert not table.measured  # a single step per batch may have been a first step
    for name in IDS:
        for size in (1, 2, 4, 7):
            assert table.step_nanoseconds(name, size) == pytest.approx(seconds(model, name, size) * 1e9, rel=1e-3)


@given(models, seeds)
def test_the_order_of_measurements_does_not_matter(model: tuple[float, float, float], seed: int) -> None:
    draw = random.Random(seed)
    runs = [
        (name, size, seconds(model, name, size) * draw.uniform(0.5, 3))
        for name in draw.sample(IDS, 5)
        for size in (1, 2)
        for _ in range(draw.randint(1, 5))
    ]
    table = fit_costs(runs, BUCKETS)
    draw.shuffle(runs)
    again = fit_costs(runs, reversed(BUCKETS))
    assert again == table


def test_a_measured_batch_costs_its_median() -> None:
    """One outlier of three is ignored; two measurements might both be first steps, so the model predicts their cost."""
    runs = [(IDS[0], 4, value) for value in (0.5, 90.0, 0.51)] + [(IDS[1], 4, 77.0), (IDS[1], 4, 78.0)]
    table = fit_costs(runs, BUCKETS)
    assert table.measured == {(IDS[0], 4): 510_000_000}
    assert table.step_nanoseconds(IDS[0], 4) == 510_000_000
    assert table.step_nanoseconds(IDS[1], 4) < 10e9


@given(st.integers(0, len(IDS) - 1), st.floats(1e-3, 100))
def test_one_measured_batch_scales_the_default(number: int, value: float) -> None:
    """With one token count, attention cannot be separated from the other costs, so the default determines its share."""
    table, default = fit_costs([(IDS[number], 4, value)] * 3, BUCKETS), default_costs(BUCKETS)
    scale = value * 1e9 / default.step_nanoseconds(IDS[number], 4)
    for name in IDS:
        for size in (1, 3):
            expected = scale * default.step_nanoseconds(name, size)
            assert table.step_nanoseconds(name, size) == pytest.approx(expected, rel=1e-3, abs=1)


@given(st.lists(st.tuples(st.sampled_from(IDS), st.integers(1, 64), st.floats(1e-6, 1e4)), min_size=1, max_size=30))
def test_predictions_never_decrease_with_tokens(runs: list[tuple[str, int, float]]) -> None:
    """Even for nonsensical measurements, no coefficient is negative and every step has a cost."""
    table = fit_costs(runs, BUCKETS)
    plain = CostTable(table.tokens, table.constant, table.per_token, table.per_pair)
    by_tokens = sorted(IDS, key=TOKENS.__getitem__)
    for size in (1, 5, 64):
        rising = [plain.step_nanoseconds(name, size) for name in by_tokens]
        assert rising == sorted(rising) and rising[0] >= 1
    for name in IDS:
        rising = [plain.step_nanoseconds(name, size) for size in (1, 2, 3, 10, 100)]
        assert rising == sorted(rising)


def test_the_default_counts_tokens_and_attention() -> None:
    table = CostTable({"small": 12_288, "none": 1, "large": 24_576})
    assert table.step_nanoseconds("none", 1) == 1000  # 1 µs per token
    assert table.step_nanoseconds("small", 3) == pytest.approx(2 * 3 * 12_288_000, rel=1e-6)
    assert table.step_nanoseconds("large", 3) == pytest.approx(3 * 3 * 24_576_000, rel=1e-6)


@given(models, st.integers(1, 5))
def test_a_table_round_trips_through_json(model: tuple[float, float, float], count: int) -> None:
    runs = [(name, 2, seconds(model, name, 2)) for name in IDS[:5] for _ in range(count)]
    table = fit_costs(runs, BUCKETS)
    again = CostTable.from_json(json.loads(json.dumps(table.to_json())))
    assert again == table
    other = CostTable(table.tokens, table.constant + 1, table.per_token, table.per_pair, table.measured)
    assert other != table


@given(costs_of_buckets, st.floats(0, 2) | st.just(0.1))
def test_classes_partition_and_keep_the_tolerance(costs: dict[str, int], tolerance: float) -> None:
    classes = cost_classes(costs, tolerance)
    assert classes.keys() == costs.keys()
    members: dict[int, list[int]] = {}
    for name, number in classes.items():
        members.setdefault(number, []).append(costs[name])
    assert sorted(members) == list(range(len(members)))
    most = 1 + Fraction(tolerance).limit_denominator(10**6)
    for number, inside in members.items():
        assert max(inside) <= min(inside) * most
        if number:  # the bucket did not fit into the previous class
            assert min(inside) > min(members[number - 1]) * most
            assert min(inside) > max(members[number - 1])
    assert cost_classes(dict(reversed(costs.items())), tolerance) == classes


def test_the_edge_of_a_class_is_exact() -> None:
    assert cost_classes({"a": 10**15, "b": 11 * 10**14, "c": 11 * 10**14 + 1}) == {"a": 0, "b": 0, "c": 1}
    assert cost_classes({"a": 7, "b": 7, "c": 8}, tolerance=0) == {"a": 0, "b": 0, "c": 1}


def test_numpy_numbers_are_accepted() -> None:
    """Step times often come from arrays; the table equals that of plain numbers and is serializable as JSON."""
    runs = [(name, size, 0.25 * size + number) for name in IDS[:4] for size in (1, 4) for number in range(3)]
    table = fit_costs(runs, BUCKETS)
    for integer, real in ((np.int64, np.float64), (np.uint8, np.float32), (np.int32, np.float16)):
        again = fit_costs([(np.str_(name), integer(size), real(value)) for name, size, value in runs], BUCKETS)
        assert again == table and json.dumps(again.to_json()) == json.dumps(table.to_json())
    assert fit_costs([(name, size, Fraction(value)) for name, size, value in runs], BUCKETS) == table
    with pytest.raises(ConfigError, match="seconds must be a number above 0"):
        fit_costs([(IDS[0], 1, np.float32("nan"))], BUCKETS)


ONE = (IDS[0], 1, 1.0)
STEP = r"must be a measured step of the form \(bucket id, batch size, seconds\)"
NO_PAIRS: Any = {"a": 3}
NO_MEASUREMENTS: dict[str, Any] = {
    "at least one step": [],
    r"measurements=\{.*\}: must be a list of measured steps of the form \(bucket id, batch size, seconds\), such as": {
        IDS[0]: 1.0
    },
    r"measurements=5: must be a list of": 5,
    r"measurements=None: must be a list": None,
    r"measurements='abc': must be a list": "abc",
    rf"measurements\[1\]='abc': {STEP}": [ONE, "abc"],
    rf"measurements\[1\]=\('a', 1.0\): {STEP}": [ONE, ("a", 1.0)],
    rf"measurements\[0\]=0.5: {STEP}": [0.5],
    r"bucket \['a'\] is not in": [(["a"], 1, 1.0)],
    "'nowhere' is not in": [("nowhere", 1, 1.0)],
    r"batch size for .*='2'": [(IDS[0], "2", 1.0)],
    r"batch size for .*=2.0": [(IDS[0], 2.0, 1.0)],
    "batch size for .*=0": [(IDS[0], 0, 1.0)],
    r"'1.0'\): seconds must be a number above 0": [(IDS[0], 1, "1.0")],
    r"-1.0\): seconds must be a number above 0": [(IDS[0], 1, -1.0)],
    r"0\): seconds must be a number above 0 and at most": [(IDS[0], 1, 10**400)],
    "seconds must be a number above 0.*": [(IDS[0], 1, 0.0)],
    "nan.*seconds must be a number above 0": [(IDS[0], 1, float("nan"))],
    "inf.*seconds must be a number above 0": [(IDS[0], 1, float("inf"))],
    "at most 1000000": [(IDS[0], 1, 2e6)],
    "True.*seconds must be a number above 0": [(IDS[0], 1, True)],
}
NO_BUCKETS: dict[str, Any] = {
    r"buckets\[0\]='a': must be .*loader\.buckets": ["a"],
    r"buckets=None: must be .*loader\.buckets": None,
    "at least one bucket of a dataset$": [],
}
BAD: dict[str, Callable[[], Any]] = {
    r"measured=\{'a': 3\}: must be .*\(bucket id, batch size\)": lambda: CostTable({"a": 1}, measured=NO_PAIRS),
    r"measured=\[\]: must be a mapping": lambda: CostTable({"a": 1}, measured=[]),  # type: ignore[arg-type]
    r"tokens\['a'\]=0": lambda: CostTable({"a": 0}),
    "per_token=-1": lambda: CostTable({"a": 1}, per_token=-1),
    "at least one of these values must be above 0": lambda: CostTable({"a": 1}, 0, 0, 0),
    r"measured\['a', 1\]=0": lambda: CostTable({"a": 1}, measured={("a", 1): 0}),
    "'b' is not in": lambda: CostTable({"a": 1}).costs({"b": 1}),
    "version=2": lambda: CostTable.from_json({"version": 2}),
    "has type int": lambda: CostTable.from_json(7),  # type: ignore[arg-type]
    "damaged": lambda: CostTable.from_json({"version": 1, "tokens": {"a": 1}}),
    "tolerance=-0.1": lambda: cost_classes({"a": 1}, -0.1),
    r"costs\['a'\]=0": lambda: cost_classes({"a": 0}),
    r"costs\['a'\]=1.5": lambda: cost_classes({"a": 1.5}),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("message", NO_MEASUREMENTS)
def test_invalid_measurements_are_refused(message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fit_costs(NO_MEASUREMENTS[message], BUCKETS)


@pytest.mark.parametrize("message", NO_BUCKETS)
def test_invalid_buckets_are_refused(message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fit_costs([ONE], NO_BUCKETS[message])


@pytest.mark.parametrize("message", BAD)
def test_other_invalid_values_are_refused(message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BAD[message]()
