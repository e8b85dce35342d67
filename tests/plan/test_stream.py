from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamvid.plan import PlanOptions
from streamvid.plan.stream import BucketStream
from tests.plan.runs import options, samples_of

SHARDS = st.lists(st.integers(0, 30), min_size=1, max_size=20).filter(any)


@given(shards=SHARDS, chosen=options(), number=st.integers(0, 5))
def test_every_pass_is_all_samples(shards: list[int], chosen: PlanOptions, number: int) -> None:
    """PLAN-4: the positions of one pass are the bucket's samples, each once."""
    stream = BucketStream("a", np.array(shards), chosen)
    first = number * stream.num_samples
    places = stream.locate(stream.ordinals(np.arange(first, first + stream.num_samples)))
    found = list(zip(*(part.tolist() for part in places), strict=True))
    assert sorted(found) == sorted(samples_of(shards))


@given(shards=SHARDS, chosen=options(shuffle="window"))
def test_a_window_holds_few_shards(shards: list[int], chosen: PlanOptions) -> None:
    """PLAN-6: consecutive samples come from `window` shards at a time, so that few need be open."""
    stream = BucketStream("a", np.array(shards), chosen)
    numbers, _ = stream.locate(stream.ordinals(np.arange(stream.num_samples)))
    spans = [np.flatnonzero(numbers == shard) for shard in np.unique(numbers)]
    for place in range(stream.num_samples):
        assert sum(span[0] <= place <= span[-1] for span in spans) <= chosen.window


@given(shards=SHARDS, seed=st.integers(0, 2**63 - 1))
def test_shuffling_shards_keeps_the_order_within(shards: list[int], seed: int) -> None:
    stream = BucketStream("a", np.array(shards), PlanOptions(seed, "shards"))
    numbers, indices = stream.locate(stream.ordinals(np.arange(stream.num_samples)))
    for shard in np.unique(numbers):
        places = np.flatnonzero(numbers == shard)
        assert places.tolist() == list(range(places[0], places[0] + shards[shard]))
        assert indices[places].tolist() == list(range(shards[shard]))


@pytest.mark.parametrize(("shuffle", "shards"), [("shards", [1] * 200), ("window", [1] * 200), ("window", [200])])
def test_passes_buckets_and_seeds_have_orders_of_their_own(shuffle: Any, shards: list[int]) -> None:
    """PLAN-1: of shards, and of samples within a window of one shard."""
    sizes, places = np.array(shards), np.arange(200)
    stream = BucketStream("a", sizes, PlanOptions(0, shuffle))
    others = [BucketStream("b", sizes, PlanOptions(0, shuffle)), BucketStream("a", sizes, PlanOptions(1, shuffle))]
    orders = [stream.ordinals(places + 200 * number) for number in (0, 1, 9)] + [x.ordinals(places) for x in others]
    assert len({tuple(order.tolist()) for order in orders}) == 5
    np.testing.assert_array_equal(stream.ordinals(places), orders[0])


def test_windows_have_orders_of_their_own() -> None:
    stream = BucketStream("a", np.array([100, 100]), PlanOptions(window=1))
    order = stream.ordinals(np.arange(200)) % 100
    assert order[:100].tolist() != order[100:].tolist()
