"""The loader's state as JSON: one position a bucket, and what it must belong to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamvid.errors import StateError
from streamvid.plan.cursor import Cursor

STATE_VERSION = 1


def make_state(cursor: Cursor, belongs_to: Mapping[str, Any]) -> dict[str, Any]:
    """`cursor` and what it holds for, JSON-able; the same on every rank after the same step."""
    return {"version": STATE_VERSION, **belongs_to, **cursor.to_json()}


def read_state(state: Mapping[str, Any], belongs_to: Mapping[str, Any]) -> Cursor:
    """The cursor in `state`. Raises StateError naming what differs where it belongs to another dataset or order."""
    if not isinstance(state, Mapping):
        raise StateError(f"state={state!r}: expected the mapping that state_dict() gave")
    version = state.get("version")
    if version != STATE_VERSION:
        raise StateError(f"version={version!r} of the loader state; this streamvid reads version {STATE_VERSION}")
    different = [
        f"{name} is {state.get(name)!r} in the state and {expected!r} here"
        for name, expected in belongs_to.items()
        if state.get(name) != expected
    ]
    if different:
        raise StateError(
            f"the loader state does not belong here: {'; '.join(different)}. Its positions mean other samples; "
            "open the loader as it was when the state was saved, or start without the state"
        )
    return Cursor.from_json({name: state.get(name) for name in ("epoch", "positions")})
