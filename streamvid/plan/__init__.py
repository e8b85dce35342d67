"""Epoch planning: which samples each step delivers, computed without I/O, torch or a clock.

This package may import `errors`, `config`, `buckets` and the draw sets from `dataset`. README.md gives the reading
order. Names are imported when they are first used, so that options and `streamvid plan --help` do not import numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamvid.plan.epoch import EpochPlan
    from streamvid.plan.hashing import hash64, hash_below, hash_text, uniform
    from streamvid.plan.mix import PlanSource
    from streamvid.plan.options import PLAN_VERSION, PlanOptions
    from streamvid.plan.position import Cursor, World
    from streamvid.plan.span import BucketReport
    from streamvid.plan.step import Step

__all__ = [
    "PLAN_VERSION",
    "BucketReport",
    "Cursor",
    "EpochPlan",
    "PlanOptions",
    "PlanSource",
    "Step",
    "World",
    "hash64",
    "hash_below",
    "hash_text",
    "uniform",
]
_MODULES = ("options", "position", "hashing", "step", "span", "mix", "epoch")


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in (importlib.import_module(f"streamvid.plan.{home}") for home in _MODULES):
            if name in vars(module):
                return vars(module)[name]
    raise AttributeError(f"module 'streamvid.plan' has no attribute {name!r}")
