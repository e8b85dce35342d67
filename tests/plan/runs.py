"""Datasets, worlds and whole runs with kills, drawn by hypothesis and judged from what the ranks receive."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

from streamvid.plan import BucketReport, Cursor, EpochPlan, PlanOptions, Step

BUCKET_IDS = ("256px-16f-16x9", "256px-1f-1x1", "480x832-81f", "832x480-81f")


@dataclass(frozen=True)
class Leg:
    """A life of the run: its world and batch sizes, and the share of the epoch's rest that it lives through."""

    num_ranks: int
    batch_sizes: dict[str, int]
    share: float


@dataclass
class Received:
    """What all ranks of one epoch received, in order."""

    rows: list[tuple[str, int, int, int, bool]] = field(default_factory=list)  # bucket, shard, index, visit, is_repeat
    last_report: tuple[BucketReport, ...] = ()

    def of(self, bucket_id: str) -> list[tuple[int, int, int, bool]]:
        return [row[1:] for row in self.rows if row[0] == bucket_id]


def datasets() -> st.SearchStrategy[dict[str, list[int]]]:
    """Buckets with few samples (fewer than a step takes, or none) beside others with some hundreds."""
    few = st.lists(st.integers(0, 9), max_size=7)
    many = st.lists(st.integers(10, 60), min_size=3, max_size=12)
    return st.dictionaries(st.sampled_from(BUCKET_IDS), few | many, min_size=1)


def options(**fixed: str) -> st.SearchStrategy[PlanOptions]:
    drawn: dict[str, st.SearchStrategy[Any]] = {
        "seed": st.integers(0, 2**63 - 1),
        "window": st.integers(1, 4),
        "shuffle": st.sampled_from(["none", "shards", "window"]),
        "tail": st.sampled_from(["carry", "drop", "pad"]),
    }
    return st.builds(PlanOptions, **drawn | {name: st.just(value) for name, value in fixed.items()})


def legs() -> st.SearchStrategy[Leg]:
    sizes = st.fixed_dictionaries({name: st.integers(1, 5) for name in BUCKET_IDS})
    return st.builds(Leg, st.integers(1, 4) | st.integers(1, 17), sizes, st.floats(0, 1))


def make_plan(dataset: dict[str, list[int]], leg: Leg, chosen: PlanOptions, cursor: Cursor | None = None) -> EpochPlan:
    return EpochPlan(dataset, {name: leg.batch_sizes[name] for name in dataset}, chosen, leg.num_ranks, cursor)


def receive(step: Step, leg: Leg) -> list[tuple[str, int, int, int, bool]]:
    """What the ranks receive at a step, rank by rank; each a whole batch of the one bucket."""
    rows = []
    size = leg.batch_sizes[step.bucket_id]
    for rank in range(leg.num_ranks):
        part = step.for_rank(rank, size)
        assert part.bucket_id == step.bucket_id
        assert len(part.shards) == len(part.indices) == len(part.visits) == len(part.is_repeat) == size
        rows += zip(
            part.shards.tolist(), part.indices.tolist(), part.visits.tolist(), part.is_repeat.tolist(), strict=True
        )
    assert len(rows) == len(step.shards)
    return [(step.bucket_id, *row) for row in rows]


def run(dataset: dict[str, list[int]], chosen: PlanOptions, epochs: list[list[Leg]]) -> tuple[list[Received], Cursor]:
    """Run epochs; each leg but the last of an epoch is killed after its share, and its state goes through JSON."""
    cursor = Cursor()
    history = []
    for lives in epochs:
        received = Received()
        for leg in lives:
            plan = make_plan(dataset, leg, chosen, cursor)
            is_last = leg is lives[-1]
            taken = plan.num_steps_left if is_last else int(leg.share * plan.num_steps_left)
            steps = plan.steps(0, taken)
            assert len(steps) == taken
            mine = [row for step in steps for row in receive(step, leg)]
            received.rows += mine
            if is_last:
                received.last_report = plan.report()
                assert_report_is_true(plan.report(), mine)
                cursor = plan.next_epoch()
            else:
                cursor = plan.cursor_after(taken)
            cursor = Cursor.from_json(json.loads(json.dumps(cursor.to_json())))
        history.append(received)
    return history, cursor


def assert_report_is_true(report: tuple[BucketReport, ...], rows: list[tuple[str, int, int, int, bool]]) -> None:
    """Announced before the first step, found in what was received after the last."""
    for line in report:
        mine = [row for row in rows if row[0] == line.bucket_id]
        assert line.num_delivered == len(mine) == line.num_steps_left * line.global_batch
        assert line.num_repeated == sum(row[4] for row in mine)


def assert_same_steps(some: list[Step], others: list[Step]) -> None:
    assert [step.bucket_id for step in some] == [step.bucket_id for step in others]
    for one, other in zip(some, others, strict=True):
        for name in ("shards", "indices", "visits", "is_repeat"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def samples_of(shards: list[int]) -> set[tuple[int, int]]:
    return {(shard, index) for shard, count in enumerate(shards) for index in range(count)}
