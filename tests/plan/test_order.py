from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streamvid.plan import EpochPlan, PlanOptions, hash_text, uniform
from streamvid.plan.order import EpochOrder, Track

JITTER = 3
Size = tuple[int, int, int, bool]


def tracks_of(sizes: list[Size], epoch: int) -> list[Track]:
    """Build a track per (samples, stride, offset from the epoch's start, has a first key)."""
    tracks = []
    for i, (length, stride, offset, has_first) in enumerate(sizes):
        position = max(0, epoch * length + offset)
        num_steps = max(0, (epoch + 1) * length - position) // stride
        first_key = -float(1 << 31) * (i + 1) if has_first and position == epoch * length else None
        name, offset = hash_text(f"b{i:02d}"), position - epoch * length
        tracks.append(Track(name, num_steps, offset, stride, float(length), position, stride, first_key))
    return [track for track in tracks if track.num_steps]


def order_of(tracks: list[Track], options: PlanOptions, epoch: int) -> EpochOrder:
    return EpochOrder(tracks, JITTER, options.seed, epoch, options.shuffle != "none")


def order_by_sorting(tracks: list[Track], options: PlanOptions, epoch: int) -> list[tuple[int, int]]:
    """Return the specified order, computed one step at a time with Python numbers."""
    keyed = []
    for number, track in enumerate(tracks):
        for index in range(track.num_steps):
            where = track.first_id + index * track.id_stride
            jitter = uniform(JITTER, options.seed, epoch, track.hash, where) if options.shuffle != "none" else 0.5
            key = (track.offset + index * track.stride + track.stride * jitter) / track.length
            if index == 0 and track.first_key is not None:
                key = track.first_key
            keyed.append((key, number, index))
    return [(number, index) for _, number, index in sorted(keyed)]


SIZES = st.lists(
    st.tuples(st.integers(1, 300), st.integers(1, 12), st.integers(-40, 60) | st.just(0), st.booleans()),
    min_size=1,
    max_size=8,
)


@given(
    sizes=SIZES,
    shuffle=st.sampled_from(["none", "window"]),
    seed=st.integers(0, 2**63 - 1),
    epoch=st.sampled_from([0, 1, 7, 10**9]),
    data=st.data(),
)
def test_any_part_of_the_order_equals_sorting(
    sizes: list[Size], shuffle: Any, seed: int, epoch: int, data: st.DataObject
) -> None:
    """PLAN-1, PLAN-6: any part of the order and any step count are computed without a table of the epoch."""
    options = PlanOptions(seed, shuffle)
    spans = tracks_of(sizes, epoch)
    order = order_of(spans, options, epoch)
    expected = order_by_sorting(spans, options, epoch)
    assert order.num_steps == len(expected)
    cuts = data.draw(st.lists(st.integers(0, len(expected)), min_size=2, max_size=8))
    for cut in cuts:
        counts = [sum(number == bucket for bucket, _ in expected[:cut]) for number in range(len(spans))]
        assert order.counts(cut).tolist() == counts
    for start, stop in zip(sorted(cuts), sorted(cuts)[1:], strict=False):
        buckets, indices = order.steps(start, stop)
        assert list(zip(buckets.tolist(), indices.tolist(), strict=True)) == expected[start:stop]
    # All ranges in one call, including empty ones.
    starts, stops = np.array(sorted(cuts)[:-1]), np.array(sorted(cuts)[1:])
    buckets, indices = order.stretches(starts, stops)
    assert list(zip(buckets.tolist(), indices.tolist(), strict=True)) == expected[min(cuts) : max(cuts)]
    assert order.counts_at(np.array(cuts)).tolist() == [order.counts(cut).tolist() for cut in cuts]


def test_equal_buckets_without_jitter_take_turns() -> None:
    """All steps have equal keys; the bucket ID breaks the ties."""
    order = order_of(tracks_of([(5000, 1, 0, False)] * 3, 0), PlanOptions(shuffle="none"), 0)
    for start in (0, 1, 7000, 14999):
        buckets, indices = order.steps(start, start + 1)
        assert (buckets.tolist(), indices.tolist()) == ([start % 3], [start // 3])


def test_a_small_bucket_is_spread_over_the_epoch() -> None:
    tracks = tracks_of([(100_000, 1, 0, False), (10, 1, 0, False)], 0)
    buckets, _ = order_of(tracks, PlanOptions(), 0).steps(0, 100_010)
    places = [place for place, bucket in enumerate(buckets.tolist()) if bucket == 1]
    assert [place // 10_001 for place in places] == list(range(10))


def test_memory_does_not_grow_with_the_square_of_the_number_of_buckets() -> None:
    """Regression: ten thousand buckets took 2.7 GB per rank per epoch."""
    counts = {f"bucket-{number:05d}": [1 + number % 60, 20] for number in range(10_000)}
    tracemalloc.start()
    try:
        plan = EpochPlan(counts, dict.fromkeys(counts, 2), num_ranks=4)
        assert len(plan.steps(0, 256, rank=0)) == 256
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 50 * 2**20, peak
