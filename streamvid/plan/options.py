"""Plan options. The dataset, batch sizes, costs and number of ranks also affect the order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from streamvid.config import check_options, option
from streamvid.errors import ConfigError
from streamvid.plan.tail import EQUAL_TAILS, TAIL_RULES, Tail, TailRule

PLAN_VERSION = 1
"""Version of the order, increased whenever the same inputs would give a different order."""

Shuffle: TypeAlias = Literal["none", "shards", "window"]
Sync: TypeAlias = Literal["bucket", "cost"]
Order: TypeAlias = Literal["mixed", "largest-first"]


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Options for a plan.

    shuffle: "none" keeps the manifest's order within a bucket and interleaves buckets evenly. "shards" permutes
        shards. "window" also permutes samples within each run of `window` consecutive permuted shards.
    tail: policy for an epoch's samples that do not fill a step. "carry" starts the next epoch with them. "drop" omits
        them. "pad" fills the step with repeated samples. "shrink" delivers them in one last step per bucket with
        equal, smaller batches (and fewer than num_ranks repeats). "uneven" delivers them in one last step per bucket
        with unequal batches and no repeats; ranks with no samples left have no batch in that step.
    sync: "bucket" gives all ranks the same bucket at each step; "cost" gives them buckets of similar predicted cost.
    order: order of the steps, "mixed" or "largest-first". The latter begins epoch 0 with the first step of each bucket
        (with sync="cost", of each class of buckets), costliest first.
    accumulate: number of steps per optimizer step. The number of steps in an epoch is a multiple of this value.
    shard_locality: number of consecutive samples of a step to sort together by shard, within each dataset,
        before they are assigned to ranks. 1 disables sorting.
    """

    seed: int = option(0, help="Seed for the sample order.", minimum=0, maximum=(1 << 63) - 1)
    shuffle: Shuffle = option(
        "window", help="What to shuffle: nothing, only the shards, or also the samples within windows of shards."
    )
    window: int = option(16, help="Number of shards per shuffle window.", minimum=1, maximum=1 << 20)
    tail: Tail = option(
        "carry",
        help="Policy for samples that do not fill a step.",
        shown_default="carry for split train, otherwise uneven",
    )
    sync: Sync = option(
        "bucket", help="Bucket choice at each step: the same bucket for all ranks, or buckets of similar cost."
    )
    order: Order = option("mixed", help="Order of steps in epoch 0.")
    accumulate: int = option(1, help="Number of loader steps per optimizer step.", minimum=1, maximum=1 << 10)
    shard_locality: int = option(
        64,
        help="Number of consecutive samples of a step to sort together by shard.",
        minimum=1,
        maximum=1 << 30,
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.accumulate > 1 and not self.tail_rule.is_equal:
            *first, last = map(repr, EQUAL_TAILS)
            raise ConfigError(
                f"accumulate={self.accumulate} cannot be combined with tail={self.tail!r}, because some ranks then "
                f"have no batch in some steps; use tail={', '.join(first)} or {last}, or accumulate=1"
            )

    @property
    def tail_rule(self) -> TailRule:
        """Properties of the tail policy."""
        return TAIL_RULES[self.tail]

    def order_key(self) -> dict[str, int | str]:
        """Return the options that determine the order. A saved state is valid only if they do not change."""
        return {"seed": self.seed, "shuffle": self.shuffle, "window": self.window}
