from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamvid.errors import StateError
from streamvid.plan import Cursor


@given(
    epoch=st.integers(0, 2**30), positions=st.dictionaries(st.text(), st.integers(0, 2**53)),
    phase=st.integers(0, 1023), step=st.integers(0, 2**40),
)  # fmt: skip
def test_round_trip(epoch: int, positions: dict[str, int], phase: int, step: int) -> None:
    """PLAN-5: the state round-trips through JSON."""
    cursor = Cursor(epoch, positions, phase, step)
    assert Cursor.from_json(json.loads(json.dumps(cursor.to_json()))) == cursor
    assert list(cursor.positions) == sorted(positions)


@pytest.mark.parametrize(
    "state",
    [
        None,
        {},
        {"epoch": 0},
        {"epoch": -1, "positions": {}},
        {"epoch": True, "positions": {}},
        {"epoch": 0, "positions": {"a": -1}},
        {"epoch": 0, "positions": {"a": 1.0}},
        {"epoch": 0, "positions": {"a": 2**60}},
        {"epoch": 0, "positions": {3: 1}},
        {"epoch": 0, "positions": [1]},
        {"epoch": 0, "positions": {}, "steps": 1},
        {"epoch": 0, "positions": {}, "step": -1},
    ],
)
def test_invalid_states_are_refused(state: Any) -> None:
    with pytest.raises(StateError, match=r"cursor|positions"):
        Cursor.from_json(state)
