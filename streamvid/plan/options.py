"""What a plan depends on besides the dataset, the batch sizes and the world."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from streamvid.errors import ConfigError

PLAN_VERSION = 2
"""Grows whenever the same inputs would give another order."""

READABLE_PLAN_VERSIONS = (1, 2)
"""Versions whose positions mean the same samples as today's: their states go on, with steps in today's order."""

MAX_ACCUMULATE = 1024

Tail: TypeAlias = Literal["carry", "drop", "pad", "shrink", "uneven"]
Shuffle: TypeAlias = Literal["none", "shards", "window"]
Sync: TypeAlias = Literal["bucket", "cost"]
Order: TypeAlias = Literal["mixed", "largest-first"]


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Options of a plan.

    seed: 0 to 2**63 - 1.
    shuffle: "none" keeps the manifest's order within a bucket and interleaves buckets evenly; "shards" permutes
        shards; "window" also permutes samples within each run of `window` consecutive permuted shards.
    tail: what becomes of the samples of an epoch that do not fill a step: "carry" opens the next epoch with them,
        "drop" leaves them out, "pad" fills the step with repeats of the bucket, "shrink" takes them in one last step
        a bucket of equal, smaller batches (fewer than num_ranks repeats), "uneven" in one of unequal batches without
        any repeat: ranks for which nothing is left have no batch in that step.
    sync: "bucket": all ranks have the same bucket at a step; "cost": buckets of about the same predicted cost.
    order: "mixed"; "largest-first" begins epoch 0 with the first step of each bucket, or with sync="cost" of each
        class of buckets, the costliest first.
    accumulate: the number of steps of an epoch is a multiple of it.
    shard_locality: number of consecutive samples of a step that are sorted by shard, within each dataset, before they
        are assigned to ranks. 1 does not sort.
    """

    seed: int = 0
    shuffle: Shuffle = "window"
    window: int = 16
    tail: Tail = "carry"
    sync: Sync = "bucket"
    order: Order = "mixed"
    accumulate: int = 1
    shard_locality: int = 64

    def __post_init__(self) -> None:
        _validate_integer("seed", self.seed, 0, (1 << 63) - 1)
        _validate_integer("window", self.window, 1, 1 << 20)
        _validate_integer("accumulate", self.accumulate, 1, MAX_ACCUMULATE)
        _validate_integer("shard_locality", self.shard_locality, 1, 1 << 30)
        for name, kind in (("shuffle", Shuffle), ("tail", Tail), ("sync", Sync), ("order", Order)):
            value, allowed = getattr(self, name), get_args(kind)
            if value not in allowed:
                raise ConfigError(f"{name}={value!r}: allowed are {', '.join(map(repr, allowed))}")
        if self.tail == "uneven" and self.accumulate > 1:
            raise ConfigError(
                f"accumulate={self.accumulate} with tail='uneven': steps that some ranks have no batch in cannot be "
                "accumulated; use tail='carry', 'drop', 'pad' or 'shrink', or accumulate=1"
            )

    def order_key(self) -> dict[str, Any]:
        """What the meaning of a position depends on, as plain JSON; a state belongs to plans with an equal key."""
        return {"seed": self.seed, "shuffle": self.shuffle, "window": self.window}


def _validate_integer(name: str, value: object, lowest: int, highest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
        raise ConfigError(f"{name}={value!r}: allowed are the integers {lowest} to {highest}")
