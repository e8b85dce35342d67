"""What a plan depends on besides the dataset, the batch sizes and the world."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from streamvid.errors import ConfigError

PLAN_VERSION = 1
"""Grows whenever the same inputs would give another order; a state of another version is refused."""

Tail: TypeAlias = Literal["carry", "drop", "pad"]
Shuffle: TypeAlias = Literal["none", "shards", "window"]
Sync: TypeAlias = Literal["bucket"]


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Options of a plan.

    seed: 0 to 2**63 - 1.
    shuffle: "none" keeps the manifest's order within a bucket and interleaves buckets evenly; "shards" permutes
        shards; "window" also permutes samples within each run of `window` consecutive permuted shards.
    tail: what becomes of the samples of an epoch that do not fill a step: "carry" opens the next epoch with them,
        "drop" leaves them out, "pad" fills the step with repeats of the bucket.
    sync: "bucket": all ranks have the same bucket at a step.
    """

    seed: int = 0
    shuffle: Shuffle = "window"
    window: int = 16
    tail: Tail = "carry"
    sync: Sync = "bucket"

    def __post_init__(self) -> None:
        _validate_integer("seed", self.seed, 0, (1 << 63) - 1)
        _validate_integer("window", self.window, 1, 1 << 20)
        for name, kind in (("shuffle", Shuffle), ("tail", Tail), ("sync", Sync)):
            value, allowed = getattr(self, name), get_args(kind)
            if value not in allowed:
                raise ConfigError(f"{name}={value!r}: allowed are {', '.join(map(repr, allowed))}")

    def order_key(self) -> dict[str, Any]:
        """What the meaning of a position depends on, as plain JSON; a state belongs to plans with an equal key."""
        return {"plan_version": PLAN_VERSION, "seed": self.seed, "shuffle": self.shuffle, "window": self.window}


def _validate_integer(name: str, value: object, lowest: int, highest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
        raise ConfigError(f"{name}={value!r}: allowed are the integers {lowest} to {highest}")
