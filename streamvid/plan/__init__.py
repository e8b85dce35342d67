"""Computation of the steps of an epoch, without I/O, torch or a clock.

This package may import errors, config, buckets and the draw sets of dataset. README.md gives the reading order.
"""

from __future__ import annotations

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
