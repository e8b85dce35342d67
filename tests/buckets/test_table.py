from __future__ import annotations

import json
from fractions import Fraction
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamvid.buckets.bucket import Bucket, parse_buckets
from streamvid.buckets.config import BucketConfig
from streamvid.buckets.geometry import aspect_table, resolution_pixels
from streamvid.buckets.ratios import Ratios
from streamvid.buckets.table import BucketTable
from streamvid.errors import ConfigError, NoBucketError

OPENSORA = json.loads((Path(__file__).parents[1] / "data" / "opensora_assign.json").read_text())
SIZES = st.integers(16, 4096)
FRAMES = st.integers(1, 400)


def table_of(resolutions: list[str], num_frames: list[int], multiple: int = 16) -> BucketTable:
    return BucketConfig(resolution=tuple(resolutions), num_frames=tuple(num_frames), ratios=Ratios(multiple)).table


def assign_or_none(table: BucketTable, *clip: int, is_image: bool = False) -> Bucket | None:
    try:
        return table.assign(*clip, is_image=is_image)
    except NoBucketError:
        return None


def test_assignment_equals_opensora() -> None:
    """Compares with results of Open-Sora's own code; its 768px and 1024px buckets accept only images."""
    table = BucketTable(
        bucket
        for resolution in OPENSORA["image_resolutions"]
        for bucket in table_of(
            [resolution], OPENSORA["num_frames"] if resolution in OPENSORA["resolutions"] else [1]
        ).buckets
    )
    differing = []
    for num_frames, height, width, expected in OPENSORA["cases"]:
        bucket = assign_or_none(table, num_frames, height, width)
        got = bucket and [bucket.resolution, *bucket.shape, bucket.aspect_ratio]
        if got != expected:
            differing.append((num_frames, height, width, expected, got))
    assert len(OPENSORA["cases"]) > 200
    assert differing == []


def opensora_order(
    resolutions: list[str], frame_counts: list[int], clip: tuple[int, int, int]
) -> tuple[str, int, int, int] | None:
    """Return Open-Sora's choice with probability 1: resolution by area, then frames, then nominal ratio."""
    num_frames, height, width = clip
    for resolution in sorted(resolutions, key=resolution_pixels, reverse=True):
        if Fraction(height * width) < Fraction(8, 10) * resolution_pixels(resolution):
            continue
        for frames in sorted(frame_counts, reverse=True):
            if 1 < frames <= num_frames:
                table = aspect_table(resolution)
                nearest = min(table, key=lambda name: abs(Fraction(height, width) - h_over_w(name)))
                return (resolution, frames, *table[nearest])
    return None


def h_over_w(name: str) -> Fraction:
    width, height = name.split(":")
    return Fraction(height) / Fraction(width)


@given(num_frames=FRAMES, height=SIZES, width=SIZES)
def test_full_grids_follow_opensora_order(num_frames: int, height: int, width: int) -> None:
    resolutions, frame_counts = ["256px", "480p", "720p"], [17, 33, 65, 129]
    table = table_of(resolutions, frame_counts)
    bucket = assign_or_none(table, num_frames, height, width)
    got = bucket and (bucket.resolution, *bucket.shape)
    assert got == opensora_order(resolutions, frame_counts, (num_frames, height, width))


@cache
def tables() -> tuple[BucketTable, BucketTable]:
    """Return a table and its copy after a JSON round trip."""
    table = table_of(["144p", "480p"], [1, 17, 81], multiple=32)
    rows = json.loads(json.dumps([bucket.to_json() for bucket in table.candidates]))
    return table, BucketTable(map(Bucket.from_json, rows))


@given(num_frames=FRAMES, height=SIZES, width=SIZES, is_image=st.booleans())
def test_the_assigned_bucket_fits(num_frames: int, height: int, width: int, is_image: bool) -> None:
    """Assignment is total and deterministic: a fitting bucket or a reason, also after a JSON round trip."""
    table, again = tables()
    bucket = assign_or_none(table, num_frames, height, width, is_image=is_image)
    assert assign_or_none(again, num_frames, height, width, is_image=is_image) == bucket
    if bucket is None:
        assert height * width * 5 < 4 * resolution_pixels("144p") or (num_frames < 17 and not is_image)
        return
    assert bucket in table.buckets
    assert bucket.is_image == is_image
    assert is_image or bucket.num_frames <= num_frames
    assert bucket.resolution is not None
    assert height * width * 5 >= 4 * resolution_pixels(bucket.resolution)


@given(data=st.data(), num_frames=st.integers(17, 200), scale=st.integers(1, 3))
def test_a_clip_with_a_buckets_shape_is_assigned_to_it(data: st.DataObject, num_frames: int, scale: int) -> None:
    table = BucketTable(parse_buckets("832x480@81,480x832@81,624x624@81,832x480@17,480x832@17,624x624@17"))
    own = data.draw(st.sampled_from(table.buckets))
    bucket = table.assign(num_frames, own.height * scale, own.width * scale)
    assert bucket == Bucket(81 if num_frames >= 81 else 17, own.height, own.width)


@given(num_frames=st.integers(1, 100), height=SIZES, width=SIZES)
def test_the_order_of_explicit_buckets_does_not_matter(num_frames: int, height: int, width: int) -> None:
    buckets = parse_buckets("832x480@81,480x832@81,624x624@33,416x240@17,240x416@49")
    assert assign_or_none(BucketTable(buckets), num_frames, height, width) == assign_or_none(
        BucketTable(buckets[::-1]), num_frames, height, width
    )


def test_the_ratio_decides_between_sizes_of_equal_area() -> None:
    table = BucketTable(parse_buckets("832x480@81,480x832@81,624x624@81"))
    assert table.assign(100, 1080, 1920).id == "832x480-81f"
    assert table.assign(100, 1920, 1080).id == "480x832-81f"
    assert table.assign(100, 1000, 1000).id == "624x624-81f"


def test_a_nearer_ratio_without_a_short_enough_bucket_is_skipped() -> None:
    table = BucketTable(parse_buckets("832x480@81,624x624@17"))
    assert table.assign(20, 1080, 1920).id == "624x624-17f"


def test_a_shorter_clip_falls_through_to_the_next_class() -> None:
    table = BucketTable(parse_buckets("1280x720@81,416x240@17"))
    assert table.assign(20, 1080, 1920).id == "416x240-17f"
    assert table.assign(81, 1080, 1920).id == "1280x720-81f"


def test_among_equal_ratios_the_most_frames_win() -> None:
    """The frame count decides even if there are fewer pixels: 73 small frames have fewer pixels than 65 large ones."""
    table = BucketTable([Bucket(65, 720, 1280), Bucket(73, 648, 1152)])
    assert table.assign(100, 1080, 1920).num_frames == 73
    assert table.assign(72, 1080, 1920).num_frames == 65


def test_a_source_with_exactly_four_fifths_of_the_area_is_accepted() -> None:
    table = BucketTable([Bucket(17, 320, 400)])
    assert table.assign(17, 320, 320).id == "400x320-17f"
    with pytest.raises(NoBucketError, match=r"less than 0\.8"):
        table.assign(17, 320, 319)


def test_ratios_with_the_same_size_share_a_bucket() -> None:
    """At multiple 32, 144p has 128x288 for both 2.39:1 and 16:9: one bucket, chosen for clips near either ratio."""
    table = table_of(["144p"], [17], multiple=32)
    shapes = [bucket.shape for bucket in table.buckets]
    assert len(shapes) == len(set(shapes)) < len(table.candidates)
    wide, cinema = table.assign(17, 1080, 1920), table.assign(17, 1000, 2390)
    assert wide == cinema
    assert (wide.id, wide.shape) == ("144p-17f-2.39x1", (17, 128, 288))


@pytest.mark.parametrize(
    ("buckets", "clip", "is_image", "reason"),
    [
        ("832x480@17,832x480@81", (7, 480, 832), False, "has 7 frames, but the shortest bucket has 17"),
        ("832x480@17", (1, 480, 832), False, "has 1 frame, but the shortest bucket has 17"),
        ("832x480@17", (17, 144, 176), False, "176x144 has less than 0.8 of .* video bucket, 399360 pixels .832x480."),
        ("832x480@17", (1, 480, 832), True, "is an image, but no bucket has 1 frame; add frame count 1"),
        ("832x480@1", (50, 480, 832), False, "is a video, but all buckets have 1 frame"),
        ("832x480@17,416x240@49", (20, 240, 416), False, "has 20 frames at 416x240: .* has 49 frames"),
    ],
)
def test_reasons(buckets: str, clip: tuple[int, int, int], is_image: bool, reason: str) -> None:
    with pytest.raises(NoBucketError, match=reason):
        BucketTable(parse_buckets(buckets)).assign(*clip, is_image=is_image)


def test_bad_tables_and_clips_are_refused() -> None:
    with pytest.raises(ConfigError, match="buckets is empty"):
        BucketTable([])
    with pytest.raises(ConfigError, match="832x480-81f more than once"):
        BucketTable([Bucket(81, 480, 832), Bucket(81, 480, 832)])
    with pytest.raises(ConfigError, match="width=0"):
        BucketTable([Bucket(81, 480, 832)]).assign(81, 480, 0)
