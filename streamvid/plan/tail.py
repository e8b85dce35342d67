"""Tail policies, for samples of a bucket that are too few to fill a step on all ranks.

To add a policy that these properties can express, add a name to `Tail` and a line to `TAIL_RULES`. All other files
depend on the properties and not on the name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

Tail: TypeAlias = Literal["carry", "drop", "pad", "shrink", "uneven"]


@dataclass(frozen=True, slots=True)
class TailRule:
    """Properties of a tail policy.

    carries: True if the next epoch starts with the remainder.
    pads: True if repeats fill the bucket's last step.
    has_final_step: True if the remainder is delivered in one more step per bucket, with smaller batches.
    repeats: True if repeats, marked as such, make batches equal in size on all ranks and complete the last group of
        `accumulate` steps.
    """

    carries: bool = False
    pads: bool = False
    has_final_step: bool = False
    repeats: bool = False

    @property
    def delivers_all(self) -> bool:
        """True if every epoch delivers all of its samples."""
        return self.pads or self.has_final_step

    @property
    def is_equal(self) -> bool:
        """True if every rank has a batch of the same size in every step."""
        return self.repeats or not self.has_final_step


TAIL_RULES: dict[Tail, TailRule] = {
    "carry": TailRule(carries=True),
    "drop": TailRule(),
    "pad": TailRule(pads=True, repeats=True),
    "shrink": TailRule(has_final_step=True, repeats=True),
    "uneven": TailRule(has_final_step=True),
}
assert set(TAIL_RULES) == set(get_args(Tail))
EQUAL_TAILS = tuple(tail for tail, rule in TAIL_RULES.items() if rule.is_equal)
