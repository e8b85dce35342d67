"""Where a run stands in its plan: the whole state of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from streamvid.errors import StateError

MAX_EPOCH = 1 << 30
MAX_POSITION = 1 << 53


@dataclass(frozen=True, slots=True)
class Cursor:
    """An epoch and a position in the endless stream of each bucket; nothing in it depends on the number of ranks.

    positions: bucket id → samples delivered since the stream began, over all passes; a bucket that is not in it
    stands at the natural start of the epoch. phase: steps done of a group of `accumulate` that is not complete. step:
    steps done of the epoch, over all lives of the run; 0 where a state of plan version 1 does not say. StateError for
    values that no plan gives.
    """

    epoch: int = 0
    positions: Mapping[str, int] = field(default_factory=dict)
    phase: int = 0
    step: int = 0

    def __post_init__(self) -> None:
        _validate("epoch", self.epoch, MAX_EPOCH)
        _validate("phase", self.phase, MAX_EPOCH)
        _validate("step", self.step, MAX_POSITION)
        if not isinstance(self.positions, Mapping) or not all(isinstance(name, str) for name in self.positions):
            raise StateError(f"positions={self.positions!r}: expected a mapping from bucket ids to integers")
        for name, position in self.positions.items():
            _validate(f"positions[{name!r}]", position, MAX_POSITION)
        object.__setattr__(self, "positions", dict(sorted(self.positions.items())))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON that `from_json` reads back; under 4 KB for 100 buckets."""
        value = {"epoch": self.epoch, "positions": dict(self.positions), "step": self.step}
        return value | {"phase": self.phase} if self.phase else value

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Cursor:
        """Cursor of what `to_json` gave; StateError for anything else."""
        if not isinstance(state, Mapping) or set(state) - {"step", "phase"} != {"epoch", "positions"}:
            raise StateError(f"cursor={state!r}: expected an object of epoch, positions and perhaps step and phase")
        return cls(state["epoch"], state["positions"], state.get("phase", 0), state.get("step", 0))


def _validate(name: str, value: object, highest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= highest:
        raise StateError(f"{name}={value!r} in the cursor: expected an integer from 0 to {highest}")
