"""The loader's state as JSON: one position a bucket, and what it must belong to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from streamvid.errors import StateError
from streamvid.plan import PLAN_VERSION, READABLE_PLAN_VERSIONS, Cursor, PlanOptions

STATE_VERSION = 2
_CURSOR = ("epoch", "positions", "phase")


def make_state(cursor: Cursor, belongs_to: Mapping[str, Any]) -> dict[str, Any]:
    """`cursor` and what it holds for, JSON-able; the same on every rank after the same step."""
    return {"version": STATE_VERSION, "plan_version": PLAN_VERSION, **belongs_to, **cursor.to_json()}


def read_state(state: Mapping[str, Any]) -> tuple[Cursor, dict[str, Any]]:
    """(cursor, what it belongs to) of a state of this version or an older one. StateError for anything else."""
    if not isinstance(state, Mapping):
        raise StateError(f"state={state!r}: expected the mapping that state_dict() gave")
    version = state.get("version")
    if version not in (1, STATE_VERSION):
        raise StateError(
            f"version={version!r} of the loader state; this streamvid reads versions 1 and {STATE_VERSION}"
        )
    if state.get("plan_version") not in READABLE_PLAN_VERSIONS:
        readable = ", ".join(map(str, READABLE_PLAN_VERSIONS))
        raise StateError(
            f"plan_version={state.get('plan_version')!r} in the state: its positions mean other samples here; "
            f"{readable} can be read"
        )
    value = {name: state[name] for name in state if name not in ("version", "plan_version")}
    if version == 1:  # of one dataset, without conditions
        fingerprint = value.pop("plan_fingerprint", None)
        value["datasets"] = [{"plan_fingerprint": fingerprint, "where": None, "num_repeats": "1"}]
    cursor = Cursor.from_json({name: value.pop(name) for name in _CURSOR if name in value})
    return cursor, value


def differences(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """What differs between what a state belongs to and what it should, each said with both values."""
    differing = []
    theirs, ours = found.get("datasets"), expected["datasets"]
    if isinstance(theirs, list) and len(theirs) == len(ours) and all(isinstance(one, Mapping) for one in theirs):
        for number, (one, other) in enumerate(zip(theirs, ours, strict=True)):
            where = f" of dataset {number}" if len(ours) > 1 else ""
            differing += [
                f"{name}{where} is {one.get(name)!r} in the state and {value!r} here"
                for name, value in other.items()
                if one.get(name) != value
            ]
    else:
        count = len(theirs) if isinstance(theirs, list) else 0
        differing.append(f"the state is of {count} dataset(s) and there are {len(ours)} here")
    return differing + [
        f"{name} is {found.get(name)!r} in the state and {value!r} here"
        for name, value in expected.items()
        if name != "datasets" and found.get(name) != value
    ]


def plan_identity(
    belongs_to: Mapping[str, Any], cursor: Cursor, options: PlanOptions, parts: Mapping[str, Any]
) -> dict[str, str | int]:
    """All that a plan depends on but the rank, name by name, in values short enough to be shown: what ranks compare."""
    return {
        **{name: _short(value) for name, value in belongs_to.items()},
        **{name: _short(value) for name, value in parts.items()},
        "sync": options.sync,
        "order": options.order,
        "accumulate": options.accumulate,
        "epoch": cursor.epoch,
        "position": _short(cursor.to_json()),
        "plan_version": PLAN_VERSION,
    }


def _short(value: Any) -> str | int:
    if isinstance(value, str | int):
        return value
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
