"""The loader's state as JSON: one position per bucket, and the identity of its plan."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from streamvid.errors import StateError
from streamvid.plan import PLAN_VERSION, Cursor, PlanOptions
from streamvid.plan.versions.continued import AnyPlan

_log = logging.getLogger(__name__)

STATE_VERSION = 1
_CURSOR = ("epoch", "positions", "phase", "step", "carried")
_VERSIONS = ("versions", "carried_versions")
_MAX_NAMED = 1000


@dataclass(frozen=True, slots=True)
class StateVersions:
    """Dataset versions in use at a position. A state lists these versions, but can also be loaded with other versions.

    current: version of each dataset.
    carried: version of each dataset from which samples are still carried over; empty if no samples are carried over.
    """

    current: tuple[int, ...]
    carried: tuple[int, ...] = ()

    @staticmethod
    def of(state: Mapping[str, Any]) -> StateVersions:
        """Return the versions in a state. Raises StateError if the versions are not valid."""
        _check_state(state)
        found = []
        for name in _VERSIONS:
            numbers = state.get(name, [])
            if not isinstance(numbers, list) or not all(type(number) is int and number >= 1 for number in numbers):
                raise StateError(
                    f"{name}={numbers!r} in the loader state: must be a list of version numbers; the state is damaged. "
                    "Use an older state, or start without a state"
                )
            found.append(tuple(numbers))
        return StateVersions(*found)

    def to_json(self) -> dict[str, list[int]]:
        """Return the versions as fields of a state."""
        carried = {"carried_versions": list(self.carried)} if self.carried else {}
        return {"versions": list(self.current), **carried}


def make_state(
    plan: AnyPlan, num_steps_done: int, belongs_to: Mapping[str, Any], versions: StateVersions
) -> dict[str, Any]:
    """Return, as JSON, the loader state after `num_steps_done` steps of a plan. It is equal on all ranks.

    versions: the current versions, and the versions of carried samples. Versions of carried samples are omitted once
        all these samples have been delivered.

    The state's `progress` is the share of the epoch that is done, from 0 to 1. `load_state_dict(state, force=True)` can
    resume at this share.
    """
    cursor = plan.cursor_after(num_steps_done)
    progress = 1.0 if num_steps_done >= plan.num_steps_left else _progress(plan, cursor)
    head = {"version": STATE_VERSION, "plan_version": PLAN_VERSION}
    named = versions if cursor.carried else StateVersions(versions.current)
    state = {**head, **belongs_to, **named.to_json(), **cursor.to_json(), "progress": progress}
    if len(cursor.positions) > _MAX_NAMED:
        state["positions"] = _packed(cursor.positions)
    return {**state, "checksum": _checksum(state)}


def _packed(positions: Mapping[str, int]) -> str:
    """Return the positions, in the order of their bucket ids, as base64-encoded big-endian integers of equal width.

    For 10,000 buckets, the result takes 40 kB; a JSON object of ids and numbers would take 200 kB. The result is not
    compressed: ranks would need the same version of a compression library, and decompression would need a size limit.
    """
    width = max(1, -(-max(positions.values()).bit_length() // 8))
    return base64.b64encode(b"".join(value.to_bytes(width, "big") for value in positions.values())).decode()


def _unpacked(text: str, bucket_ids: Iterable[str], force: bool) -> dict[str, int]:
    names = sorted(bucket_ids)
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError:
        data = b""
    width, rest = divmod(len(data), max(1, len(names)))
    if (rest or not width) and force:
        return {}  # a forced load of other buckets does not use positions
    if rest or not width:
        raise StateError(
            f"positions={text[:20]!r}… in the loader state do not match the {len(names)} buckets of this loader, or "
            "are damaged; create the loader with the dataset and filter that it had when the state was saved, use an "
            "older state, start without a state, or use the state as an approximate position with "
            "load_state_dict(state, force=True)"
        )
    return {name: int.from_bytes(data[place * width :][:width], "big") for place, name in enumerate(names)}


def _checksum(state: Mapping[str, Any]) -> str:
    """Return the checksum of a state that does not contain a checksum yet."""
    text = json.dumps(state, sort_keys=True, separators=(",", ":"), default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _progress(plan: AnyPlan, cursor: Cursor) -> float:
    done = total = 0
    for bucket_id, position in cursor.positions.items():
        start, end = plan.start_of(bucket_id), plan.end_of(bucket_id)
        done += min(max(position, start), end) - start
        total += end - start
    return round(done / total, 6) if total else 1.0


def read_state(
    state: Mapping[str, Any], bucket_ids: Iterable[str], force: bool
) -> tuple[Cursor, float, Mapping[str, Any]]:
    """Return (cursor, progress, plan identity) from a state. Raises StateError if the state is not valid.

    bucket_ids: ids of the loader's buckets; needed because a state with many buckets does not contain the ids.
    """
    _check_state(state)
    named = ("version", "plan_version", "checksum", *_VERSIONS)
    value = {name: state[name] for name in state if name not in named}
    place = {name: value.pop(name) for name in _CURSOR if name in value}
    if isinstance(place.get("positions"), str):
        place["positions"] = _unpacked(place["positions"], bucket_ids, force)
    cursor = Cursor.from_json(place)
    progress = value.pop("progress", None)
    if isinstance(progress, bool) or not isinstance(progress, int | float) or not 0 <= progress <= 1:
        raise StateError(
            f"progress={progress!r} in the loader state: must be a number from 0 to 1; the state is damaged. Use an "
            "older state, or start without a state"
        )
    checksum = _checksum({name: state[name] for name in state if name != "checksum"})
    if state.get("checksum") != checksum:
        raise StateError(
            f"checksum={state.get('checksum')!r} in the loader state does not match the checksum {checksum!r} of its "
            "values; the state was damaged or edited after state_dict() returned it. Use an older state, or start "
            "without a state"
        )
    return cursor, progress, value


def _check_state(state: Mapping[str, Any]) -> None:
    """Raise StateError if this version of the library cannot read a state."""
    if not isinstance(state, Mapping):
        raise StateError(f"state={state!r}: must be the mapping that state_dict() returned")
    for name, readable in (("version", STATE_VERSION), ("plan_version", PLAN_VERSION)):
        if name not in state:
            raise StateError(f"the loader state has no {name!r}; pass the mapping that state_dict() returned")
        if state[name] != readable:
            raise StateError(
                f"{name}={state[name]!r} in the loader state: must be {readable} for this version of streamvid; "
                "resume with the streamvid version that saved the state, or start without the state"
            )


def belongs(found: Mapping[str, Any], expected: Mapping[str, Any], force: bool) -> bool:
    """Return whether a state belongs to this loader. If not, raise StateError or, with `force`, log a warning."""
    differing = "; ".join(differences(found, expected))
    if differing and not force:
        raise StateError(
            f"the state does not belong to this loader: {differing}. The positions in the state are not valid here; "
            "create the loader with the arguments that it had when the state was saved, start without the state, or "
            "use the state as an approximate position with load_state_dict(state, force=True)"
        )
    if differing:
        _log.warning("the state does not belong to this loader and is used as an approximate position: %s", differing)
    return not differing


def differences(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Return the differences between a state's identity and the expected identity, each with both values."""
    datasets = found.get("datasets")
    is_valid = isinstance(datasets, list) and all(isinstance(one, Mapping) for one in datasets)
    theirs = _name_by_name({**found, "datasets": datasets if is_valid else []})
    return [
        f"{name} is {theirs.get(name)!r} in the state and {value!r} here"
        for name, value in _name_by_name(expected).items()
        if theirs.get(name) != value
    ]


def _name_by_name(belongs_to: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the identity in a state as one flat mapping."""
    several = belongs_to["datasets"]
    of_datasets = {f"{name} of dataset {n}": value for n, one in enumerate(several) for name, value in one.items()}
    others = {name: value for name, value in belongs_to.items() if name != "datasets"}
    return {"number of datasets": len(several), **of_datasets, **others}


def plan_identity(
    belongs_to: Mapping[str, Any], cursor: Cursor, options: PlanOptions, parts: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the values that determine a plan, except the rank, as a mapping that processes can compare.

    Causes come before their effects, so that a comparison names the causes first. Values are JSON-serializable.
    """
    return {
        "plan_version": PLAN_VERSION,
        **_name_by_name(belongs_to),
        **{name: value for name, value in asdict(options).items() if name not in belongs_to},
        "epoch": cursor.epoch,
        **parts,
        "position": cursor.to_json(),
    }
