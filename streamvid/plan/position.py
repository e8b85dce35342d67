"""Rank of a process, and position of a run in its plan."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from streamvid.config import require_integer
from streamvid.errors import StateError

MAX_NUM_RANKS = 1 << 24
MAX_EPOCH = 1 << 30
MAX_POSITION = 1 << 53


@dataclass(frozen=True, slots=True)
class World:
    """Data-parallel rank. Processes that share a batch (sequence, tensor or context parallelism) share a rank."""

    rank: int = 0
    num_ranks: int = 1

    def __post_init__(self) -> None:
        require_integer("num_ranks", self.num_ranks, 1, MAX_NUM_RANKS)
        require_integer("rank", self.rank, 0, self.num_ranks - 1)


@dataclass(frozen=True, slots=True)
class Cursor:
    """Position of a run, the same on all ranks: an epoch, and a position in the endless stream of each bucket.

    positions: bucket id → number of samples delivered since the stream began, over all passes. A bucket without an
        entry is at the start of the epoch's own samples.
    phase: number of steps done in an incomplete group of `accumulate` steps.
    step: number of steps done in the epoch, including steps before a resume.
    carried: bucket id → position of the first sample that is still carried over from the datasets' previous versions;
        see `versions/`. Empty unless a version changed at the start of this epoch.
    Raises StateError for values that no plan produces.
    """

    epoch: int = 0
    positions: Mapping[str, int] = field(default_factory=dict)
    phase: int = 0
    step: int = 0
    carried: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_integer("cursor.epoch", self.epoch, 0, MAX_EPOCH, StateError)
        require_integer("cursor.phase", self.phase, 0, MAX_EPOCH, StateError)
        require_integer("cursor.step", self.step, 0, MAX_POSITION, StateError)
        for field_name in ("positions", "carried"):
            places = getattr(self, field_name)
            if not isinstance(places, Mapping) or not all(isinstance(name, str) for name in places):
                raise StateError(
                    f"cursor.{field_name}={reprlib.repr(places)}: must be a mapping from bucket ids to integers"
                )
            for name, position in places.items():
                require_integer(f"cursor.{field_name}[{name!r}]", position, 0, MAX_POSITION, StateError)
            object.__setattr__(self, field_name, dict(sorted(places.items())))

    def to_json(self) -> dict[str, Any]:
        """Return the cursor as JSON values; `from_json` reads them. 100 buckets take less than 4 KB of JSON."""
        value = {"epoch": self.epoch, "positions": dict(self.positions), "step": self.step}
        rare = {"phase": self.phase, "carried": dict(self.carried)}
        return value | {name: one for name, one in rare.items() if one}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Cursor:
        """Create a cursor from the result of `to_json`. Raises StateError if the value is invalid."""
        if not isinstance(state, Mapping) or set(state) - {"phase", "carried"} != {"epoch", "positions", "step"}:
            raise StateError(
                f"cursor={reprlib.repr(state)}: must have the keys epoch, positions and step, may also have phase "
                "and carried, and must have no other keys; use the result of Cursor.to_json"
            )
        return cls(state["epoch"], state["positions"], state.get("phase", 0), state["step"], state.get("carried", {}))
