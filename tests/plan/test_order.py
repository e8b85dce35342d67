from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from streamvid.plan import PlanOptions, hash_text, uniform
from streamvid.plan.order import EpochOrder
from streamvid.plan.tail import BucketSpan

JITTER = 3


def spans_of(sizes: list[tuple[int, int, int]], tail: Any, epoch: int) -> list[BucketSpan]:
    """One span for each (num_samples, global_batch, position before or after the epoch's start)."""
    spans = [
        BucketSpan.open(f"b{i:02d}", n, batch, tail, epoch, max(0, epoch * n + offset))
        for i, (n, batch, offset) in enumerate(sizes)
    ]
    return [span for span in spans if span.num_steps_left]


def order_by_sorting(spans: list[BucketSpan], options: PlanOptions, epoch: int) -> list[tuple[int, int]]:
    """The specification, one step at a time on Python numbers."""
    keyed = []
    for number, span in enumerate(spans):
        for index in range(span.num_steps_left):
            q = span.position + index * span.global_batch
            jitter = (
                uniform(JITTER, options.seed, epoch, hash_text(span.bucket_id), q) if options.shuffle != "none" else 0.5
            )
            keyed.append((((q - span.start) + span.global_batch * jitter) / span.num_samples, number, index))
    return [(number, index) for _, number, index in sorted(keyed)]


SIZES = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 12), st.integers(-40, 60)), min_size=1, max_size=8)


@given(
    sizes=SIZES,
    tail=st.sampled_from(["carry", "drop", "pad"]),
    shuffle=st.sampled_from(["none", "window"]),
    seed=st.integers(0, 2**63 - 1),
    epoch=st.sampled_from([0, 1, 7, 10**9]),
    data=st.data(),
)
def test_bisecting_finds_what_sorting_gives(
    sizes: list[tuple[int, int, int]], tail: Any, shuffle: Any, seed: int, epoch: int, data: st.DataObject
) -> None:
    """PLAN-1, PLAN-6: any part of the order and any count of steps, without a table of the epoch."""
    options = PlanOptions(seed, shuffle)
    spans = spans_of(sizes, tail, epoch)
    order = EpochOrder(spans, options, epoch)
    expected = order_by_sorting(spans, options, epoch)
    assert order.num_steps == len(expected)
    cuts = data.draw(st.lists(st.integers(0, len(expected)), min_size=2, max_size=8))
    for cut in cuts:
        counts = [sum(number == bucket for bucket, _ in expected[:cut]) for number in range(len(spans))]
        assert order.counts(cut).tolist() == counts
    for start, stop in zip(sorted(cuts), sorted(cuts)[1:], strict=False):
        buckets, indices = order.steps(start, stop)
        assert list(zip(buckets.tolist(), indices.tolist(), strict=True)) == expected[start:stop]


def test_equal_buckets_without_jitter_take_turns() -> None:
    """Ties of the key, of which there are as many as steps, are settled by bucket id."""
    spans = spans_of([(5000, 1, 0)] * 3, "carry", 0)
    order = EpochOrder(spans, PlanOptions(shuffle="none"), 0)
    for start in (0, 1, 7000, 14999):
        buckets, indices = order.steps(start, start + 1)
        assert (buckets.tolist(), indices.tolist()) == ([start % 3], [start // 3])


def test_a_small_bucket_is_spread_over_the_epoch() -> None:
    spans = spans_of([(100_000, 1, 0), (10, 1, 0)], "drop", 0)
    buckets, _ = EpochOrder(spans, PlanOptions(), 0).steps(0, 100_010)
    places = [place for place, bucket in enumerate(buckets.tolist()) if bucket == 1]
    assert [place // 10_001 for place in places] == list(range(10))
