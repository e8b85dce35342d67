from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamvid.buckets.geometry import aspect_table, resolution_pixels
from streamvid.errors import ConfigError

OPENSORA = json.loads((Path(__file__).parents[1] / "data" / "opensora_aspect.json").read_text())


@pytest.mark.parametrize("multiple", [16, 32])
@pytest.mark.parametrize("name", sorted(OPENSORA["multiple_of_16"]))
def test_tables_equal_opensora(name: str, multiple: int) -> None:
    golden = OPENSORA[f"multiple_of_{multiple}"][name]
    expected = {ratio: (size["h"], size["w"]) for ratio, size in golden["ratios_w_to_h"].items()}

    table = aspect_table(name, multiple)

    assert resolution_pixels(name) == golden["pixels"]
    assert list(table.items()) == list(expected.items())


@given(
    side=st.integers(64, 2160),
    suffix=st.sampled_from(["px", "p"]),
    multiple=st.sampled_from([2, 8, 14, 16, 28, 32, 64, 100]),
)
def test_every_size_keeps_the_multiple_and_is_close_to_the_area(side: int, suffix: str, multiple: int) -> None:
    name = f"{side}{suffix}"
    pixels = resolution_pixels(name)
    if pixels < multiple * multiple:
        with pytest.raises(ConfigError, match="fewer than multiple=.* squared"):
            aspect_table(name, multiple)
        return
    table = aspect_table(name, multiple)
    for height, width in table.values():
        assert height % multiple == 0 == width % multiple
        # Rounding two sides down to the multiple costs at most one row and one column of blocks.
        assert abs(height * width - pixels) <= multiple * (height + width + multiple)


@given(side=st.integers(64, 2160), multiple=st.sampled_from([2, 8, 14, 16, 28, 32, 64]))
def test_every_table_is_symmetric(side: int, multiple: int) -> None:
    table = aspect_table(f"{side}px", multiple)
    for ratio, (height, width) in table.items():
        if ratio == "1:1":  # the size with the nearest area is not always a square
            continue
        assert table[":".join(reversed(ratio.split(":")))] == (width, height)


@pytest.mark.parametrize("name", ["", "256", "px", "0px", "-1p", "256PX", "256px ", "99999px", "../256px", "٢٥٦px"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="resolution="):
        resolution_pixels(name)


@pytest.mark.parametrize("multiple", [0, -16, 2048])
def test_other_multiples_are_refused(multiple: int) -> None:
    with pytest.raises(ConfigError, match="multiple="):
        aspect_table("256px", multiple)
