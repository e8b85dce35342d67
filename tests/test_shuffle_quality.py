"""Tests of shuffle quality: how well a shuffle mixes and what it costs in reads, checked by a full count of samples."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamvid.errors import ConfigError, PlanError
from streamvid.plan import EpochPlan, PlanOptions
from tests.plan.runs import options
from tools.shuffle_quality import ShuffleQuality, shuffle_quality

EVERYTHING = 1 << 20

shard_sizes = st.lists(st.integers(0, 12), min_size=1, max_size=8)


def counted(sizes: list[int], batch_size: int, chosen: PlanOptions, num_ranks: int) -> dict[str, float]:
    """Compute the figures of one bucket from their definitions."""
    chosen = replace(chosen, tail="drop", sync="bucket", order="mixed", accumulate=1)
    plan = EpochPlan({"b": sizes}, {"b": batch_size}, chosen, num_ranks)
    stored = list(itertools.chain.from_iterable([(s, i) for i in range(size)] for s, size in enumerate(sizes)))
    place_of = {sample: place for place, sample in enumerate(stored)}
    steps = plan.steps(0, plan.num_steps)
    delivered = [pair for step in steps for pair in zip(step.shards.tolist(), step.indices.tolist(), strict=True)]
    new_place_of = {sample: place for place, sample in enumerate(delivered)}
    n, reach = len(stored), num_ranks * batch_size
    every = list(itertools.permutations(range(n), 2))
    full_move = sum(abs(i - j) for i in range(n) for j in range(n)) / n / n
    successors = {one: other for one, other in itertools.pairwise(stored) if one in new_place_of}
    near = [
        other in new_place_of and abs(new_place_of[one] - new_place_of[other]) <= reach
        for one, other in successors.items()
    ]
    ranks = {round(number * (num_ranks - 1) / 7) for number in range(8)}
    batches = [step.for_rank(rank) for step in steps for rank in ranks]
    samples = [set(zip(batch.shards.tolist(), batch.indices.tolist(), strict=True)) for batch in batches]
    reads = [sum((shard, index - 1) not in batch for shard, index in batch) for batch in samples]
    return {
        "num_samples": len(delivered),
        "move": sum(abs(place - place_of[sample]) for sample, place in new_place_of.items())
        / len(delivered)
        / max(1.0, full_move),
        "neighbors_kept": sum(near) / max(1, len(near)),
        "neighbors_by_chance": sum(abs(i - j) <= reach for i, j in every) / max(1, len(every)),
        "shards_per_batch": sum(len({shard for shard, _ in batch}) for batch in samples) / len(samples),
        "reads_per_batch": sum(reads) / len(reads),
    }


@settings(max_examples=60)
@given(shard_sizes, st.integers(1, 4), options(), st.integers(1, 10))
def test_figures_match_a_full_count(sizes: list[int], batch_size: int, chosen: PlanOptions, num_ranks: int) -> None:
    """For any shuffle and tail, the figures equal a full count; they depend only on the order, which has no tail."""
    if sum(sizes) < num_ranks * batch_size:
        with pytest.raises(PlanError):
            shuffle_quality({"b": sizes}, {"b": batch_size}, chosen, num_ranks)
        return
    found = shuffle_quality({"b": sizes}, {"b": batch_size}, chosen, num_ranks)
    for name, value in counted(sizes, batch_size, chosen, num_ranks).items():
        assert getattr(found, name) == pytest.approx(value), name


def test_one_window_over_all_is_a_full_permutation_and_none_is_no_shuffle() -> None:
    sizes = {"b": [90, 110] * 40}
    full = shuffle_quality(sizes, {"b": 2}, PlanOptions(window=EVERYTHING, shard_locality=1))
    assert full.move == pytest.approx(1, abs=0.03)
    assert full.neighbors_kept == pytest.approx(full.neighbors_by_chance, abs=0.002)
    assert full.shards_per_batch > 1.95
    stored = shuffle_quality(sizes, {"b": 2}, PlanOptions(shuffle="none"))
    assert (stored.move, stored.neighbors_kept, stored.reads_per_batch) == (0, 1, 1)


def test_a_larger_window_mixes_more_and_reads_more_shards() -> None:
    sizes = {"b": [90, 110] * 100, "c": [50] * 60}
    batch_sizes = dict.fromkeys(sizes, 4)
    rows = [shuffle_quality(sizes, batch_sizes, PlanOptions(window=window), 4) for window in (1, 4, 16, 64)]
    for one, other in itertools.pairwise(rows):
        assert one.neighbors_kept > other.neighbors_kept > other.neighbors_by_chance
        assert one.shards_per_batch < other.shards_per_batch
    shards = shuffle_quality(sizes, batch_sizes, PlanOptions(shuffle="shards"), 4)
    assert shards.move == pytest.approx(rows[2].move, rel=0.1)  # only neighboring samples stay together
    assert shards.neighbors_kept > 0.97 and shards.reads_per_batch < 1.1


def test_slices_of_a_large_dataset_represent_all_of_it() -> None:
    sizes = {f"b{number}": [60 + 10 * number, 140] * 150 for number in range(3)}
    batch_sizes = dict.fromkeys(sizes, 4)
    whole = shuffle_quality(sizes, batch_sizes, PlanOptions(), 8)
    part = shuffle_quality(sizes, batch_sizes, PlanOptions(), 8, max_samples=12_000)
    assert part.num_samples == pytest.approx(12_000, rel=0.1) and whole.num_samples > 90_000
    assert part.move == pytest.approx(whole.move, abs=0.1)
    assert part.neighbors_kept == pytest.approx(whole.neighbors_kept, abs=0.02)
    assert part.shards_per_batch == pytest.approx(whole.shards_per_batch, rel=0.05)


def test_a_rank_reads_all_its_shards_within_a_short_epoch() -> None:
    """In an epoch of fewer than 64 steps, the shards of each bucket are counted separately."""
    found = shuffle_quality({"b": [4, 4], "c": [4, 4, 4]}, {"b": 4, "c": 4}, PlanOptions(shuffle="none"))
    assert found == ShuffleQuality(20, 0, 1, found.neighbors_by_chance, 1, 1, 5)


def test_buckets_that_fill_no_step_are_left_out() -> None:
    alone = shuffle_quality({"b": [40, 40]}, {"b": 4})
    assert shuffle_quality({"b": [40, 40], "starved": [3], "empty": []}, {"b": 4, "starved": 4, "empty": 4}) == alone


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_samples=0"):
        shuffle_quality({"b": [4]}, {"b": 1}, max_samples=0)
    with pytest.raises(ConfigError, match="batch_sizes"):
        shuffle_quality({"b": [4]}, {"c": 1})
