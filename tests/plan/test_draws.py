"""Tests of draw sets: clips stored in several buckets and delivered from at most one of them per pass."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamvid.errors import ConfigError
from streamvid.plan import Cursor, EpochPlan, PlanOptions, PlanSource
from streamvid.plan.draws import UNIT, DrawnStream, DrawSet

# A clip is (draw set or bucket, number). A bucket's shards are first those of its own clips, then one set after
# another.
Sets = list[tuple[tuple[str, ...], tuple[int, ...], list[int]]]  # (buckets, weights, clips per shard)


def make_source(sets: Sets, plain: dict[str, list[int]], seed: int) -> tuple[PlanSource, dict[str, list[list[object]]]]:
    """Build a plan's source, and return it with the clips of each shard of each bucket."""
    sizes: dict[str, list[int]] = {}
    clips: dict[str, list[list[object]]] = {}
    draws: dict[str, list[DrawSet]] = {}
    for bucket, shards in plain.items():
        for number, size in enumerate(shards):
            sizes.setdefault(bucket, []).append(size)
            clips.setdefault(bucket, []).append([(bucket, number, place) for place in range(size)])
    for name, (buckets, weights, shards) in enumerate(sets):
        for member, bucket in enumerate(buckets):
            first = len(sizes.setdefault(bucket, []))
            sizes[bucket] += shards
            clips.setdefault(bucket, []).extend(
                [(name, number, place) for place in range(size)] for number, size in enumerate(shards)
            )
            own = DrawSet(name + 1000, weights, member, np.arange(first, first + len(shards)))
            draws.setdefault(bucket, []).append(own)
    return PlanSource(sizes, seed, draws=draws), clips


def delivered(source: PlanSource, clips: dict[str, list[list[object]]], plan: EpochPlan) -> list[tuple[str, object]]:
    """Return (bucket, clip) of all samples that the plan's steps deliver to all ranks, in order."""
    found = []
    for step in plan.steps(0, plan.num_steps_left):
        for shard, index in zip(step.shards.tolist(), step.indices.tolist(), strict=True):
            found.append((step.bucket_id, clips[step.bucket_id][shard][index]))
    return found


weights_of = st.lists(st.integers(0, UNIT), min_size=1, max_size=4).filter(lambda w: sum(w) > 0)


@st.composite
def drawn_sets(draw: st.DrawFn) -> Sets:
    sets: Sets = []
    for _ in range(draw(st.integers(1, 3))):
        weights = draw(weights_of)
        total = max(UNIT, sum(weights))
        scaled = tuple(weight * UNIT // total for weight in weights)
        if not sum(scaled):
            scaled = (UNIT, *scaled[1:])
        buckets = tuple(draw(st.permutations("abcde"))[: len(scaled)])
        sets.append((buckets, scaled, draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))))
    return sets


@settings(max_examples=60, deadline=None)
@given(
    sets=drawn_sets(),
    plain=st.dictionaries(st.sampled_from("abc"), st.lists(st.integers(1, 5), min_size=1, max_size=3), max_size=2),
    seed=st.integers(0, 2**40),
    shuffle=st.sampled_from(["none", "shards", "window"]),
    epoch=st.sampled_from([0, 1, 2, 7, 1000, 10**6]),
)
def test_a_pass_has_each_clip_in_at_most_one_bucket(
    sets: Sets, plain: dict[str, list[int]], seed: int, shuffle: str, epoch: int
) -> None:
    """PLAN-4: in an epoch, a clip of a draw set comes at most once, in whichever bucket; other clips come once."""
    source, clips = make_source(sets, plain, seed)
    options = PlanOptions(seed=seed, shuffle=shuffle, window=2, tail="uneven")  # type: ignore[arg-type]
    sizes = dict.fromkeys(source.num_samples, 2)
    plan = EpochPlan([source], sizes, options, 1, Cursor(epoch))
    came = Counter(clip for _, clip in delivered(source, clips, plan))
    assert all(count == 1 for count in came.values())
    own = {clip for bucket in plain for shard in clips[bucket] for clip in shard if clip[0] == bucket}  # type: ignore[index]
    assert own <= came.keys()
    for name, (_, weights, shards) in enumerate(sets):
        num_drawn = sum(clip[0] == name for clip in came)  # type: ignore[index]
        expected = Fraction(sum(weights), UNIT) * sum(shards)
        assert abs(num_drawn - expected) <= len(weights) + 1


@pytest.mark.parametrize("num_clips", [1, 2, 7, 64])
@pytest.mark.parametrize("weights", [(800_000, 200_000), (100_000, 330_000, 70_000), (500_000,)])
def test_every_clip_is_in_each_bucket_with_its_probability(num_clips: int, weights: tuple[int, ...]) -> None:
    """Over many passes, each clip's share of passes in a bucket is close to its probability.

    Draws without replacement stay far within the binomial bounds at alpha = 1e-6.
    """
    shards = [num_clips] if num_clips < 7 else [num_clips // 3, num_clips - num_clips // 3]
    buckets = tuple("abc"[: len(weights)])
    source, clips = make_source([(buckets, weights, shards)], {}, seed=11)
    num_passes = 1000
    counts: Counter[tuple[str, object]] = Counter()
    for bucket in buckets:
        stream = source.stream(bucket, np.asarray(source.num_samples[bucket]), PlanOptions(seed=11))
        places = np.arange(stream.begin(Fraction(num_passes)))
        found, times = np.unique(stream.locate(stream.ordinals(places)), axis=1, return_counts=True)
        for shard, index, count in zip(*found.tolist(), times.tolist(), strict=True):
            counts[bucket, clips[bucket][shard][index]] += count
    for member, bucket in enumerate(buckets):
        p = weights[member] / UNIT
        bound = 4.9 * math.sqrt(p * (1 - p) / num_passes) + 2 / num_passes
        for clip in {clip for shard in clips[bucket] for clip in shard}:
            assert abs(counts[bucket, clip] / num_passes - p) < bound, (bucket, clip)


def test_draws_differ_between_passes_and_are_reproducible() -> None:
    """Draws depend only on the seed and the pass, and differ from epoch to epoch."""
    source, clips = make_source([(("a", "b"), (500_000, 500_000), [20, 20])], {}, seed=5)
    sizes = {"a": 4, "b": 4}

    def of(epoch: int, seed: int = 5) -> set[object]:
        one = PlanSource(source.num_samples, seed, draws=source.draws)
        plan = EpochPlan([one], sizes, PlanOptions(seed=5, tail="uneven"), 2, Cursor(epoch))
        return {clip for bucket, clip in delivered(one, clips, plan) if bucket == "a"}

    assert of(0) != of(1) and of(0) == of(0) and of(0) != of(0, seed=6)
    assert all(len(of(epoch)) == 20 for epoch in range(5))


@settings(max_examples=60, deadline=None)
@given(
    sets=drawn_sets(),
    seed=st.integers(0, 2**40),
    ranks=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    tail=st.sampled_from(["carry", "drop", "shrink"]),
    data=st.data(),
)
def test_a_run_that_resumes_with_other_ranks_delivers_the_remaining_samples(
    sets: Sets, seed: int, ranks: list[int], tail: str, data: st.DataObject
) -> None:
    """PLAN-5: the state is one position per bucket, from which any number of ranks can continue."""
    source, clips = make_source(sets, {"a": [3]}, seed)
    options = PlanOptions(seed=seed, window=2, tail=tail)  # type: ignore[arg-type]
    sizes = dict.fromkeys(source.num_samples, 1)
    cursor, came = Cursor(), []
    while cursor.epoch < 2:
        plan = EpochPlan([source], sizes, options, data.draw(st.sampled_from(ranks)), cursor)
        done = data.draw(st.integers(0, plan.num_steps_left))
        steps = plan.steps(0, done)
        came += [
            (step.bucket_id, clips[step.bucket_id][shard][index], visit)  # type: ignore[index]
            for step in steps
            for shard, index, visit in zip(
                step.shards.tolist(), step.indices.tolist(), step.visits.tolist(), strict=True
            )
            if visit >= 0
        ]
        cursor = plan.next_epoch() if done == plan.num_steps_left else plan.cursor_after(done)
    assert len(set(came)) == len(came)
    by_clip = Counter((clip, visit) for _, clip, visit in came)
    assert all(count == 1 for count in by_clip.values())


def test_a_drawn_stream_has_each_sample_once_per_pass() -> None:
    """In each pass, positions map one-to-one to samples, whatever is drawn."""
    source, _ = make_source([(("a", "b"), (300_000, 300_000), [4, 9, 1])], {"a": [5, 2]}, seed=3)
    stream = source.stream("a", np.asarray(source.num_samples["a"]), PlanOptions(seed=3, window=2))
    assert isinstance(stream, DrawnStream)
    for number in (0, 1, 17, 12345):
        start, end = stream.begin(Fraction(number)), stream.begin(Fraction(number + 1))
        positions = np.arange(start, end)
        assert set(stream.passes_of(positions).tolist()) <= {number}
        ordinals = stream.ordinals(positions)
        assert len(set(ordinals.tolist())) == len(ordinals)
        assert set(range(7)) <= set(ordinals.tolist())


def test_invalid_draw_sets_are_refused() -> None:
    for weights, member in (((0, 0), 0), ((600_000, 500_000), 0), ((-1, 5), 0), ((5,), 1)):
        with pytest.raises(ConfigError, match="draw set with weights"):
            DrawSet(1, weights, member, np.arange(2))
