"""Tests of Transform: the crop box and the equivalent filter."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamvid.errors import ConfigError
from streamvid.video.frame_format import FrameFormat
from streamvid.video.transform import Crop, Transform


def source_of(
    coded_width: int = 1920,
    coded_height: int = 1080,
    aspect: tuple[int, int] = (1, 1),
    rotation: int = 0,
    flip: bool = False,
    color_space: str = "bt709",
    color_range: str = "limited",
) -> FrameFormat:
    return FrameFormat(coded_width, coded_height, aspect, rotation, flip, "yuv420p", color_space, color_range, False)


_SIDES = st.integers(1, 8192)
_ASPECTS = st.tuples(st.integers(1, 32), st.integers(1, 32)).filter(lambda pair: 1 / 16 <= pair[0] / pair[1] <= 16)


@given(_SIDES, _SIDES, _ASPECTS, st.sampled_from([0, 90, 180, 270]), st.booleans(), _SIDES, _SIDES)
def test_the_box_is_in_the_frame_and_has_the_shape_of_the_target(
    coded_width: int, coded_height: int, aspect: tuple[int, int], rotation: int, flip: bool, height: int, width: int
) -> None:
    """SAMPLE-2: the box is maximal, centered, even, and exact to a pixel, for any size, pixel shape and rotation."""
    source = source_of(coded_width, coded_height, aspect, rotation, flip)
    transform = Transform.cover(source, height, width)
    assert 0 <= transform.crop_left <= coded_width - transform.crop_width
    assert 0 <= transform.crop_top <= coded_height - transform.crop_height
    assert transform.crop_left % 2 == transform.crop_top % 2 == 0
    assert transform.crop_width in (coded_width, transform.crop_width // 2 * 2)
    assert transform.crop_height in (coded_height, transform.crop_height // 2 * 2)
    assert coded_width in (transform.crop_width, coded_width) or coded_height == transform.crop_height
    # Centered: the margins of both sides differ by at most the rounding to even.
    assert abs(coded_width - transform.crop_width - 2 * transform.crop_left) <= 3
    assert abs(coded_height - transform.crop_height - 2 * transform.crop_top) <= 3
    # The rotated picture has the requested size.
    turned = rotation in (90, 270)
    assert (transform.scale_width, transform.scale_height) == ((height, width) if turned else (width, height))
    # One side is complete; the other follows from the shape to within a pixel (or is the minimum of 2).
    shape = transform.scale_width * aspect[1] / (transform.scale_height * aspect[0])
    ideal_width, ideal_height = min(coded_width, coded_height * shape), min(coded_height, coded_width / shape)
    assert abs(transform.crop_width - ideal_width) <= 1 + 1e-9 or transform.crop_width == min(2, coded_width)
    assert abs(transform.crop_height - ideal_height) <= 1 + 1e-9 or transform.crop_height == min(2, coded_height)


def test_a_frame_with_the_right_shape_is_not_cropped() -> None:
    for width, height in [(1920, 1080), (853, 480), (161, 91), (1, 1)]:
        assert Transform.cover(source_of(width, height), height, width).crop_filters == []


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (
            source_of(),
            (192, 336),
            "crop=1890:1080:14:0:exact=1,scale=336:192:flags=area+accurate_rnd+full_chroma_int:in_chroma_loc=left:in_color_matrix=bt709:in_range=limited,"
            "format=rgb24,setsar=1",
        ),
        (
            source_of(rotation=90, color_space="bt601", color_range="full"),
            (480, 480),
            "crop=1080:1080:420:0:exact=1,scale=480:480:flags=area+accurate_rnd+full_chroma_int:in_chroma_loc=left:in_color_matrix=bt601:in_range=full,"
            "format=rgb24,transpose=clock,setsar=1",
        ),
        (
            source_of(640, 480, flip=True, rotation=270, color_space="rgb"),
            (320, 240),
            "scale=320:240:flags=area+accurate_rnd+full_chroma_int:in_chroma_loc=left,format=rgb24,hflip,transpose=cclock,setsar=1",
        ),
        (
            source_of(720, 576, (16, 15), rotation=180),
            (576, 576),
            "crop=540:576:90:0:exact=1,scale=576:576:flags=area+accurate_rnd+full_chroma_int:in_chroma_loc=left:in_color_matrix=bt709:in_range=limited,"
            "format=rgb24,hflip,vflip,setsar=1",
        ),
    ],
)
def test_the_equivalent_filter(source: FrameFormat, target: tuple[int, int], expected: str) -> None:
    assert Transform.cover(source, *target).ffmpeg_filter == expected


def test_invalid_transforms_are_refused() -> None:
    with pytest.raises(ConfigError, match="the target is 0x4"):
        Transform.cover(source_of(), 4, 0)
    with pytest.raises(ConfigError, match="rotation is 45"):
        Transform.cover(source_of(rotation=45), 4, 4)
    with pytest.raises(ConfigError, match="must be inside the frame"):
        Transform(8, 8, 4, 0, 6, 8, 4, 4, 0, False, "bt709", "limited")


crops = st.builds(Crop, st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 32) - 1), st.integers(1, 1 << 16))
sides = st.integers(2, 2000)


@given(st.builds(source_of, sides, sides, rotation=st.sampled_from([0, 90])), sides, sides, crops)
def test_a_random_crop_is_in_the_frame_and_keeps_the_shape(
    source: FrameFormat, height: int, width: int, crop: Crop
) -> None:
    """PLAN: the box is even, in the frame and no larger than the largest box, and its shape is exact to two pixels."""
    largest, drawn = Transform.cover(source, height, width), Transform.cover(source, height, width, crop)
    assert 0 <= drawn.crop_left <= source.coded_width - drawn.crop_width
    assert 0 <= drawn.crop_top <= source.coded_height - drawn.crop_height
    assert drawn.crop_left % 2 == drawn.crop_top % 2 == 0
    share = Fraction(crop.scale, 1 << 16)
    for side, full in ((drawn.crop_width, largest.crop_width), (drawn.crop_height, largest.crop_height)):
        assert side <= full
        assert abs(side - full * share) <= 2
    assert (drawn.scale_width, drawn.scale_height) == (largest.scale_width, largest.scale_height)


def test_every_even_position_is_reached() -> None:
    """SAMPLE-1: the first and last positions are as frequent as those between them."""
    source = source_of(100, 64)
    places = [Transform.cover(source, 64, 64, Crop(share << 20, 0)).crop_left for share in range(1 << 12)]
    counts = {place: places.count(place) for place in set(places)}
    assert set(counts) == set(range(0, 37, 2))
    assert max(counts.values()) - min(counts.values()) <= 1


@pytest.mark.parametrize("fields", [(-1, 0), (0, 1 << 32), (0, 0, 0), (0, 0, (1 << 16) + 1)])
def test_invalid_crops_are_refused(fields: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="invalid crop"):
        Crop(*fields)
