from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamvid.buckets.bucket import Bucket, match_buckets, parse_bucket, parse_buckets
from streamvid.buckets.geometry import aspect_table
from streamvid.errors import ConfigError

EXPLICIT = Bucket(81, 480, 832)
NAMED = Bucket(16, 192, 336, "256px", "16:9")


def test_bucket_properties() -> None:
    assert EXPLICIT.id == "832x480-81f"
    assert EXPLICIT.size_at_frames == "832x480@81"
    assert NAMED.id == "256px-16f-16x9"
    assert Bucket(16, 160, 400, "256px", "2.39:1").id == "256px-16f-2.39x1"
    assert NAMED.shape == (16, 192, 336)
    assert NAMED.num_pixels == 16 * 192 * 336
    assert EXPLICIT.tokens == 21 * 30 * 52
    assert Bucket(1, 256, 256).is_image and not EXPLICIT.is_image


@given(
    num_frames=st.integers(1, 999),
    multiple=st.sampled_from([8, 14, 16, 32]),
    name=st.sampled_from(["256px", "480p", "720p"]),
    draw=st.data(),
)
def test_ids_and_json_round_trip(num_frames: int, multiple: int, name: str, draw: st.DataObject) -> None:
    ratio, (height, width) = draw.draw(st.sampled_from(list(aspect_table(name, multiple).items())))
    named = Bucket(num_frames, height, width, name, ratio)
    explicit = Bucket(num_frames, height, width)

    assert parse_bucket(named.id, multiple) == named
    assert parse_bucket(explicit.id, multiple) == explicit == parse_bucket(explicit.size_at_frames, multiple)
    for bucket in (named, explicit):
        assert Bucket.from_json(json.loads(json.dumps(bucket.to_json()))) == bucket


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_frames": 0}, "num_frames=0"),
        ({"height": -8}, "height=-8"),
        ({"width": 1.5}, "width=1.5"),
        ({"width": True}, "width=True"),
        ({"height": 10**9}, "height=1000000000"),
        ({"resolution": "256px"}, "set both"),
        ({"aspect_ratio": "16:9"}, "set both"),
        ({"resolution": "../x", "aspect_ratio": "16:9"}, "not a valid resolution name"),
        ({"resolution": "256px", "aspect_ratio": "16-9"}, "not a valid ratio"),
        ({"resolution": "256px", "aspect_ratio": "0:9"}, "not a valid ratio"),
        ({"resolution": 7, "aspect_ratio": "1:1"}, "must be a string"),
    ],
)
def test_a_bad_bucket_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Bucket.from_json({"num_frames": 81, "height": 480, "width": 832} | fields)


def test_json_that_is_not_a_bucket_is_refused() -> None:
    with pytest.raises(ConfigError, match="is missing required fields; add height, width"):
        Bucket.from_json({"num_frames": 3})
    with pytest.raises(ConfigError, match="must be an object"):
        Bucket.from_json(["832x480-81f"])  # type: ignore[arg-type]


def test_lists_of_buckets() -> None:
    assert parse_buckets("832x480@81, 480x832@81,256px-16f-16x9") == (EXPLICIT, Bucket(81, 832, 480), NAMED)
    assert parse_buckets("826x476@81", multiple=14)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        (" , ", "is empty"),
        ("832x480", "not a valid bucket name"),
        ("832x480@0", "not a valid bucket name"),
        ("832x480@81,480x832@81,832x480-81f", "contains 832x480-81f more than once"),
        ("830x480@81", "width=830 is not a multiple of 16; nearest allowed: 816 and 832"),
        ("832x481@81", "height=481 is not a multiple of 16; nearest allowed: 480 and 496"),
        ("8x480@81", "nearest allowed: 16"),
        ("256px-16f-7x5", "has no ratio 7:5; available: 2.39:1"),
        ("999999x480@81", "width=999999"),
    ],
)
def test_a_bad_list_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_buckets(text)


def test_matching() -> None:
    buckets = (EXPLICIT, NAMED, Bucket(17, 480, 832))
    assert match_buckets("832x480-81f", buckets) == (EXPLICIT,)
    assert match_buckets("832x480@17", buckets) == (buckets[2],)
    assert match_buckets("832x480*", buckets) == (EXPLICIT, buckets[2])
    assert match_buckets("*@81", buckets) == (EXPLICIT,)
    assert match_buckets("336x192@16", buckets) == (NAMED,)
    assert match_buckets("*", buckets) == buckets
    message = r"no bucket matches '832x480@80'; nearest names \(of 3 in total\): .*832x480-81f"
    with pytest.raises(ConfigError, match=message):
        match_buckets("832x480@80", buckets)
    with pytest.raises(ConfigError, match="the list of buckets is empty"):
        match_buckets("*", ())
