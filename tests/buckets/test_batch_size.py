from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamvid.buckets.batch_size import batch_sizes
from streamvid.buckets.bucket import Bucket, parse_buckets
from streamvid.buckets.config import BucketConfig
from streamvid.errors import ConfigError

BUCKETS = parse_buckets("832x480@81,480x832@81,256px-16f-16x9")


def test_one_number_for_all() -> None:
    assert batch_sizes(BUCKETS, 4) == {"832x480-81f": 4, "480x832-81f": 4, "256px-16f-16x9": 4}


def test_an_exact_name_beats_a_glob() -> None:
    sizes = batch_sizes(BUCKETS, {"*": 2, "832x480@81": 1, "256px-16f-16x9": 24})
    assert sizes == {"832x480-81f": 1, "480x832-81f": 2, "256px-16f-16x9": 24}


@given(max_tokens=st.integers(1, 200_000))
def test_derived_from_tokens(max_tokens: int) -> None:
    buckets = BucketConfig(resolution=("256px",), num_frames=(1, 33, 129)).table.buckets
    largest = max(bucket.tokens for bucket in buckets)
    if max_tokens < largest:
        with pytest.raises(ConfigError, match=r"one sample of bucket 256px-\d+f-\S+ has \d+ tokens; raise"):
            batch_sizes(buckets, None, max_tokens)
        return
    sizes = batch_sizes(buckets, None, max_tokens)
    for bucket in buckets:
        assert sizes[bucket.id] * bucket.tokens <= max_tokens < (sizes[bucket.id] + 1) * bucket.tokens


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, None), "set exactly one"),
        ((4, 1000), "set exactly one"),
        ((0, None), "batch_size=0"),
        ((True, None), "batch_size=True"),
        ((None, -1), "max_tokens_per_batch=-1"),
        (({"*": 0}, None), r"batch_size\['\*'\]=0"),
        (({"832*": 1}, None), "no entry for bucket 480x832-81f; add an entry, or"),
        (({"*": 1, "480x832-80f": 2}, None), "no bucket matches '480x832-80f'; nearest"),
        (({"*": 3, "*-81f": 1, "8*": 2}, None), "both match bucket 832x480-81f; add an entry for '832x480-81f'"),
        (({"*": 1, BUCKETS[0]: 2}, None), "batch_size has the key Bucket.*; each key must be text: a bucket id"),
    ],
)
def test_unclear_sizes_are_refused(arguments: tuple[Any, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        batch_sizes(BUCKETS, *arguments)


def test_a_glob_may_match_nothing_and_a_name_may_not() -> None:
    """One config can serve datasets that lack some sizes; a misspelled glob leaves a bucket without an entry."""
    buckets = parse_buckets("832x480@81")
    assert batch_sizes(buckets, {"832x*": 2, "1280x*": 1}) == {"832x480-81f": 2}
    with pytest.raises(ConfigError, match="no entry for bucket 832x480-81f"):
        batch_sizes(buckets, {"823x*": 2})
    with pytest.raises(ConfigError, match="1280x720"):
        batch_sizes(buckets, {"*": 2, "1280x720-81f": 1})


def test_a_lone_star_is_the_default_for_all_other_buckets() -> None:
    buckets = parse_buckets("832x480@1,832x480@81,256px-1f-16x9")
    expected = {"832x480-1f": 32, "832x480-81f": 4, "256px-1f-16x9": 32}
    for sizes in ({"*-1f*": 32, "*": 4}, {"*": 4, "*-1f*": 32}):
        assert batch_sizes(buckets, sizes) == expected
    assert batch_sizes(buckets, {"*": 4, "*-1f*": 32, "832x480@1": 8}) == expected | {"832x480-1f": 8}


def test_overlapping_globs_that_agree_or_are_overridden_are_accepted() -> None:
    assert batch_sizes(BUCKETS[:1], {"*-81f": 2, "8*": 2}) == {"832x480-81f": 2}
    assert batch_sizes(BUCKETS[:1], {"*-81f": 1, "8*": 2, "832x480-81f": 3}) == {"832x480-81f": 3}
    assert batch_sizes((Bucket(1, 64, 64),), {"64x64-1f": 5, "64x64@1": 6}) == {"64x64-1f": 5}
