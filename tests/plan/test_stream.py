from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamvid.plan import PlanOptions
from streamvid.plan.hashing import hash64, hash_text, permute
from streamvid.plan.stream import BucketStream, ordinals_of
from tests.plan.runs import options, samples_of

SHARDS = st.lists(st.integers(0, 30), min_size=1, max_size=20).filter(any)


@given(shards=SHARDS, chosen=options(), number=st.integers(0, 5))
def test_every_pass_contains_each_sample_once(shards: list[int], chosen: PlanOptions, number: int) -> None:
    """PLAN-4: the positions of a pass contain each of the bucket's samples once."""
    stream = BucketStream("a", np.array(shards), chosen)
    first = number * stream.num_samples
    places = stream.locate(stream.ordinals(np.arange(first, first + stream.num_samples)))
    found = list(zip(*(part.tolist() for part in places), strict=True))
    assert sorted(found) == sorted(samples_of(shards))


def ordinal_by_definition(position: int, shards: list[int], chosen: PlanOptions) -> int:
    """Return the specified ordinal, computed for one position with Python numbers."""
    number, place = divmod(position, sum(shards))
    if chosen.shuffle == "none":
        return place
    key = hash64(1, chosen.seed, number, hash_text("a"))
    turns = sorted(range(len(shards)), key=lambda shard: (hash64(key, shard), shard))
    if chosen.shuffle == "window":
        first, end = 0, 0
        for window, start in enumerate(range(0, len(turns), chosen.window)):
            first, end = end, end + sum(shards[shard] for shard in turns[start : start + chosen.window])
            if place < end:
                seed = hash64(2, chosen.seed, number, hash_text("a"), window)
                moved = permute(np.array([place - first]), np.array([end - first]), np.array([seed], np.uint64))
                place = first + int(moved[0])
                break
    for shard in turns:
        if place < shards[shard]:
            return sum(shards[:shard]) + place
        place -= shards[shard]
    raise AssertionError


@given(
    shards=SHARDS | st.lists(st.integers(0, 1 << 31), min_size=1, max_size=20).filter(any),
    chosen=options(),
    shares=st.lists(st.floats(0, 3, exclude_max=True), max_size=9),
)
def test_positions_match_the_definition(shards: list[int], chosen: PlanOptions, shares: list[float]) -> None:
    """PLAN-1: for small buckets and for those with more than 2**31 samples, whichever passes are requested together."""
    stream = BucketStream("a", np.array(shards), chosen)
    positions = np.array([int(share * sum(shards)) for share in shares], np.int64)
    found = stream.ordinals(positions)
    assert found.tolist() == [ordinal_by_definition(position, shards, chosen) for position in positions.tolist()]
    starts = np.cumsum([0, *shards])
    numbers, indices = stream.locate(found)
    assert (starts[numbers] + indices).tolist() == found.tolist()
    assert (indices < np.array(shards)[numbers]).all()


@given(buckets=st.lists(st.tuples(SHARDS, st.integers(0, 200), st.integers(1, 4)), max_size=6), chosen=options())
def test_streams_requested_together_equal_single_requests(
    buckets: list[tuple[list[int], int, int]], chosen: PlanOptions
) -> None:
    """The positions may have any shape and span several passes."""
    streams = [BucketStream(f"b{i}", np.array(shards), chosen) for i, (shards, _, _) in enumerate(buckets)]
    asked = [np.arange(first, first + 12 * width).reshape(-1, width) for _, first, width in buckets]
    together = ordinals_of(list(zip(streams, asked, strict=True)))
    for stream, positions, found in zip(streams, asked, together, strict=True):
        np.testing.assert_array_equal(found, stream.ordinals(positions))


@given(shards=SHARDS, chosen=options(shuffle="window"))
def test_a_window_holds_few_shards(shards: list[int], chosen: PlanOptions) -> None:
    """PLAN-6: consecutive samples come from at most `window` shards, so few shards are open at a time."""
    stream = BucketStream("a", np.array(shards), chosen)
    numbers, _ = stream.locate(stream.ordinals(np.arange(stream.num_samples)))
    spans = [np.flatnonzero(numbers == shard) for shard in np.unique(numbers)]
    for place in range(stream.num_samples):
        assert sum(span[0] <= place <= span[-1] for span in spans) <= chosen.window


@given(shards=SHARDS, seed=st.integers(0, 2**63 - 1))
def test_shuffling_shards_keeps_the_order_within_each_shard(shards: list[int], seed: int) -> None:
    stream = BucketStream("a", np.array(shards), PlanOptions(seed, "shards"))
    numbers, indices = stream.locate(stream.ordinals(np.arange(stream.num_samples)))
    for shard in np.unique(numbers):
        places = np.flatnonzero(numbers == shard)
        assert places.tolist() == list(range(places[0], places[0] + shards[shard]))
        assert indices[places].tolist() == list(range(shards[shard]))


@pytest.mark.parametrize(("shuffle", "shards"), [("shards", [1] * 200), ("window", [1] * 200), ("window", [200])])
def test_passes_buckets_and_seeds_have_different_orders(shuffle: Any, shards: list[int]) -> None:
    """PLAN-1: this holds for shards, and for samples within a window of one shard."""
    sizes, places = np.array(shards), np.arange(200)
    stream = BucketStream("a", sizes, PlanOptions(0, shuffle))
    others = [BucketStream("b", sizes, PlanOptions(0, shuffle)), BucketStream("a", sizes, PlanOptions(1, shuffle))]
    orders = [stream.ordinals(places + 200 * number) for number in (0, 1, 9)] + [x.ordinals(places) for x in others]
    assert len({tuple(order.tolist()) for order in orders}) == 5
    np.testing.assert_array_equal(stream.ordinals(places), orders[0])


def test_windows_have_different_orders() -> None:
    stream = BucketStream("a", np.array([100, 100]), PlanOptions(window=1))
    order = stream.ordinals(np.arange(200)) % 100
    assert order[:100].tolist() != order[100:].tolist()
