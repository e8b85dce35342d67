"""Tests for conversions between Arrow arrays and Python objects."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamvid.dataset.arrow import values_of

_INT32 = st.integers(-(2**31), 2**31 - 1)
_TYPES = [
    (pa.int32(), _INT32),
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.uint8(), st.integers(0, 255)),
    (pa.float32(), st.floats(width=32, allow_nan=False)),
    (pa.float64(), st.floats(allow_nan=False)),
    (pa.bool_(), st.booleans()),
    (pa.string(), st.text()),
    (pa.large_string(), st.text()),
    (pa.binary(), st.binary()),
    (pa.binary(3), st.binary(min_size=3, max_size=3)),
    (pa.binary(0), st.just(b"")),
    (pa.list_(pa.int32()), st.lists(_INT32)),
]


@pytest.mark.parametrize(("kind", "values"), _TYPES, ids=[str(kind) for kind, _ in _TYPES])
@given(data=st.data(), has_nulls=st.booleans())
def test_values_of_an_array_are_those_of_to_pylist(kind: Any, values: Any, has_nulls: bool, data: Any) -> None:
    """Whole arrays and slices give equal Python objects of the same types, with and without nulls."""
    items = data.draw(st.lists(st.none() | values if has_nulls else values))
    first = data.draw(st.integers(0, len(items)))
    array = pa.array(items, kind)[first : data.draw(st.integers(first, len(items)))]
    expected = array.to_pylist()
    found = values_of(array)
    assert len(found) == len(expected)
    assert list(found) == expected == [found[number] for number in range(len(expected))]
    assert [type(value) for value in found] == [type(value) for value in expected]
