"""Tests of how benchmark figures are interpreted: pure functions on synthetic figures."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamvid.bench.verdict import (
    MARGIN,
    BucketRun,
    LoaderRun,
    Need,
    StoreRun,
    decoder_seconds,
    judge,
    need_of,
    usage_of,
    warnings_of,
    workers_for,
)
from streamvid.loader.verdict import Setting, limit_of

SETTING = Setting(num_cores=8, clips="copy", pixels="rgb24", accuracy="exact")
FAST = StoreRun(num_samples=10_000, num_bytes=10**9, num_stored_bytes=2 * 10**9, seconds=1.0)
SIZES = {"small": 4, "big": 2}


def run_of(
    num_workers: int = 4, rate: float = 100.0, busy: float = 1.0, reading: float = 0.1, main: float = 0.1, **other: Any
) -> LoaderRun:
    """Build a ten-second run with equal decoding time in two buckets, one nine times as costly per sample."""
    num_samples, decode = int(rate * 10), busy * max(1, num_workers) * 10
    cheap = num_samples * 9 // 10
    values = {
        "num_workers": num_workers,
        "num_fetch_threads": 4,
        "first_batch_seconds": 0.5,
        "seconds": 10.0,
        "room": 1000.0,
        "num_steps": num_samples // 4,
        "num_bytes": num_samples * 1000,
        "num_substituted": 0,
        "fetch_seconds": reading * 4 * 10,
        "buckets": (
            BucketRun(bucket_id="small", num_samples=cheap, decode_seconds=decode / 2),
            BucketRun(bucket_id="big", num_samples=num_samples - cheap, decode_seconds=decode / 2),
        ),
        "worker_cpu_seconds": decode * 0.99 if num_workers else None,
        "main_cpu_seconds": main * 10 if num_workers else None,
    }
    return LoaderRun(**values | other)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("run", "store", "limit"),
    [
        (run_of(4), FAST, "decoders"),
        (run_of(8), FAST, "cores"),
        (run_of(16), FAST, "cores"),
        (run_of(0), FAST, "decoders"),  # one decoding thread, eight cores
        (run_of(4, busy=0.3, reading=0.95), FAST, "store"),
        (run_of(4, rate=9_000, busy=0.3), FAST, "store"),
        (run_of(4, busy=0.3, main=0.9), FAST, "main"),
        (run_of(4, busy=0.3, room=7.0), FAST, "ring"),
        (run_of(4, busy=0.3, room=8.0), FAST, "decoders"),  # handing over small samples takes a worker's time
        (run_of(8, busy=0.3), FAST, "cores"),
        (run_of(8, busy=0.8, worker_cpu_seconds=70.0), FAST, "cores"),
        (run_of(4, busy=0.9, reading=0.95, main=0.95), FAST, "decoders"),
    ],
)
def test_the_busiest_part_is_the_limit(run: LoaderRun, store: StoreRun, limit: str) -> None:
    assert limit_of(usage_of(run, store, 8), num_cores=8) == limit
    verdict = judge([run], [store, store], SETTING)
    assert verdict.limit == limit and verdict.advice
    assert f"{run.samples_per_second:.1f} samples/s" in verdict.reasons[0]


def test_among_similar_runs_the_one_with_more_workers_is_judged() -> None:
    """If eight workers are no faster than one, more workers do not help."""
    pair = [run_of(1, rate=100), run_of(8, rate=99)]
    assert judge(pair, [FAST, FAST], SETTING).limit == "cores"
    worse = judge([run_of(1, rate=200), run_of(8, rate=99)], [FAST, FAST], SETTING)
    assert worse.limit == "cores" and "8 workers delivered only 99.0 samples/s" in worse.reasons
    assert not any("more workers" in one for one in worse.advice)


def test_a_cold_store_slower_than_the_loader_is_reported_but_is_not_the_limit() -> None:
    cold = replace(FAST, num_samples=50)
    verdict = judge([run_of(4, rate=100)], [cold, FAST], SETTING)
    assert verdict.limit == "decoders" and any(
        "slowest pass over the store delivered 50.0 samples/s" in one for one in verdict.reasons
    )
    assert not any("slowest" in one for one in judge([run_of(4, rate=100)], [FAST, FAST], SETTING).reasons)


def test_cores_used_by_other_processes_are_reported() -> None:
    verdict = judge([run_of(4, worker_cpu_seconds=10.0)], [FAST, FAST], SETTING)
    assert any("a core for only 25% of their working time" in one for one in verdict.reasons)


def test_advice_omits_settings_already_in_use() -> None:
    before = judge([run_of(8)], [FAST, FAST], SETTING).advice
    after = judge([run_of(8)], [FAST, FAST], replace(SETTING, clips="native", pixels="yuv420p", accuracy=None)).advice
    assert any("--clips native" in one for one in before) and any("yuv420p" in one for one in before)
    assert after == ("more cores: decoding scales with them",)


@given(st.floats(1e-4, 1e4), st.floats(1e-3, 1e3), st.floats(0, 2))
def test_the_number_of_workers_is_the_smallest_sufficient_one(busy: float, step: float, margin: float) -> None:
    number = workers_for(busy, step, margin)
    wanted = (1 + margin) * busy / step
    assert number >= 1 and number >= wanted - 1e-6 * wanted - 1e-9
    assert number == 1 or number - 1 < wanted + 1e-6


def need(**values: Any) -> Need:
    asked = {
        "runs": [run_of(8, rate=100)],
        "passes": [FAST, FAST],
        "steps": {"small": 225.0, "big": 50.0},
        "batch_sizes": SIZES,
        "step_seconds": 1.0,
        "num_local_ranks": 1,
        "num_cores": 8,
    }
    asked |= values
    return need_of(asked.pop("runs"), asked.pop("passes"), **asked)


def test_a_need_is_the_mean_over_steps_and_names_the_heaviest() -> None:
    run = run_of(8, rate=100)
    costs = decoder_seconds(run, "cores")
    assert math.isclose(costs["small"], 40 / 900) and math.isclose(costs["big"], 40 / 100)
    found = need()
    mean = (225 * 4 * costs["small"] + 50 * 2 * costs["big"]) / 275
    assert found.num_workers == math.ceil((1 + MARGIN) * mean)
    assert (found.heaviest_bucket, found.heaviest_workers) == ("big", math.ceil((1 + MARGIN) * 2 * costs["big"]))
    assert math.isclose(found.samples_per_second, (225 * 4 + 50 * 2) / 275)
    assert found.obstacles == () and found.unmeasured == ()


def test_waiting_decoders_are_not_counted_as_slow() -> None:
    """Decoders that wait for clips could do more; if they are the limit, time between samples counts as work."""
    run = run_of(8, rate=100, busy=0.5)
    assert math.isclose(decoder_seconds(run, "store")["small"], 20 / 900)
    assert math.isclose(decoder_seconds(run, "cores")["small"], 40 / 900)


def test_a_pass_too_short_to_measure_is_not_an_obstacle() -> None:
    """For a small dataset, the pass mostly opens files."""
    short = replace(FAST, num_samples=1, seconds=0.4)
    assert not need(passes=[short, FAST]).obstacles and need(passes=[replace(short, seconds=0.6), FAST]).obstacles
    assert "too short" in warnings_of([run_of()], [short, FAST], SIZES)[0]


def test_a_bucket_without_a_sample_is_named_and_left_out() -> None:
    found = need(steps={"small": 1.0, "big": 1.0, "rare": 3.0}, batch_sizes={**SIZES, "rare": 1})
    assert found.unmeasured == ("rare",) and found.num_workers == need(steps={"small": 1.0, "big": 1.0}).num_workers


@given(st.floats(1e-3, 100), st.integers(1, 64), st.integers(1, 128), st.floats(1, 1e5), st.floats(0.01, 1))
def test_a_step_time_is_reachable_exactly_if_it_is_not_below_the_fastest(
    step: float, num_ranks: int, num_cores: int, store_rate: float, main: float
) -> None:
    store = replace(FAST, num_samples=round(store_rate))
    asked = {"runs": [run_of(1, main=main)], "passes": [store, store], "step_seconds": step, "num_cores": num_cores}
    found, twice = (need(**asked, num_local_ranks=ranks) for ranks in (num_ranks, 2 * num_ranks))
    assert bool(found.obstacles) == (found.fastest_step_seconds > step)
    assert math.isclose(twice.num_cores, 2 * found.num_cores) and twice.num_workers == found.num_workers
    assert twice.fastest_step_seconds >= found.fastest_step_seconds


def test_obstacles_are_cores_store_and_main_process() -> None:
    assert (
        "num_local_ranks=64" in need(num_local_ranks=64).obstacles[0]
        and "only 8 are available" in need(num_local_ranks=64).obstacles[0]
    )
    (store,) = need(passes=[replace(FAST, num_samples=3), FAST]).obstacles
    assert store.startswith("the store delivers 3.0 samples/s")
    assert any("main process" in one for one in need(runs=[run_of(8, main=1.0)], step_seconds=0.01).obstacles)


def test_a_need_uses_the_run_that_filled_the_cores() -> None:
    """With more workers than cores, workers wait for each other, and that time would count as work."""
    runs = [run_of(1, rate=20), run_of(8, rate=100), run_of(64, rate=100)]
    assert need(runs=runs) == need(runs=[runs[1]])
    assert need(runs=[runs[2]]).num_workers > need(runs=runs).num_workers  # the only run is used anyway


def test_warnings_name_few_batches_bad_samples_and_missing_buckets() -> None:
    assert warnings_of([run_of()], [FAST, FAST], SIZES) == ()
    rough, bad = run_of(2, num_steps=3, num_substituted=2), replace(FAST, num_bad=5)
    text = "\n".join(warnings_of([run_of(), rough], [bad, FAST], [*SIZES, "rare"]))
    assert "5 of 10000 samples" in text and "2 bad samples" in text and "rare" in text and "with num_workers=2" in text
