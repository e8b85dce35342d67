"""The epoch as arithmetic: no I/O, no torch, no clock."""

from __future__ import annotations

from streamvid.plan.cursor import Cursor
from streamvid.plan.epoch import EpochPlan
from streamvid.plan.hashing import hash64, hash_below, hash_text, uniform
from streamvid.plan.mix import PlanSource
from streamvid.plan.options import PLAN_VERSION, READABLE_PLAN_VERSIONS, PlanOptions
from streamvid.plan.step import Step
from streamvid.plan.tail import BucketReport
from streamvid.plan.world import World

__all__ = [
    "PLAN_VERSION",
    "READABLE_PLAN_VERSIONS",
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
