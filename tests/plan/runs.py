"""Hypothesis strategies for datasets, worlds and runs with kills, and checks of what the ranks receive."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, NamedTuple, get_args

import numpy as np
from hypothesis import strategies as st

from streamvid.plan import BucketReport, Cursor, EpochPlan, PlanOptions, PlanSource, Step
from streamvid.plan.tail import TAIL_RULES, Tail

BUCKET_IDS = ("256px-16f-16x9", "256px-1f-1x1", "480x832-81f", "832x480-81f")
Dataset = dict[str, list[int]]


class Row(NamedTuple):
    """Sample that a rank received."""

    bucket_id: str
    source: int
    shard: int
    index: int
    visit: int
    is_repeat: bool

    @property
    def sample(self) -> tuple[str, int, int, int]:
        return self[:4]

    @property
    def delivery(self) -> tuple[str, int, int, int, int]:
        return self[:5]


@dataclass(frozen=True)
class Case:
    """Everything that defines a run except its legs; `repeats` has one value per dataset."""

    datasets: tuple[Dataset, ...]
    repeats: tuple[Fraction, ...]
    options: PlanOptions
    costs: dict[str, int]

    @property
    def bucket_ids(self) -> list[str]:
        return sorted({name for dataset in self.datasets for name in dataset})

    def counts(self, source: int, bucket_id: str) -> list[int]:
        return self.datasets[source].get(bucket_id, [])

    def boundary(self, source: int, bucket_id: str, epoch: int) -> int:
        """Return how many samples of a dataset's bucket the epochs before `epoch` take, as repeats define it."""
        whole = self.repeats[source] * sum(self.counts(source, bucket_id)) * epoch
        return (2 * whole.numerator + whole.denominator) // (2 * whole.denominator)

    def in_epoch(self, source: int, bucket_id: str, epoch: int) -> int:
        return self.boundary(source, bucket_id, epoch + 1) - self.boundary(source, bucket_id, epoch)


@dataclass(frozen=True)
class Leg:
    """Part of a run between two kills: world, batch sizes, and the share of the remaining steps that it completes."""

    num_ranks: int
    batch_sizes: dict[str, int]
    share: float


@dataclass
class Received:
    """Samples that all ranks received in one epoch, in order."""

    rows: list[Row] = field(default_factory=list)
    num_steps: int = 0
    last_report: tuple[BucketReport, ...] = ()
    last_leg: Leg | None = None
    num_fillers: int = 0  # samples of steps that complete a group of `accumulate`

    def of(self, bucket_id: str) -> list[Row]:
        return [row for row in self.rows if row.bucket_id == bucket_id]


def datasets() -> st.SearchStrategy[Dataset]:
    """Draw buckets with few samples (fewer than a step takes, or none) and others with some hundreds."""
    few = st.lists(st.integers(0, 9), max_size=7)
    many = st.lists(st.integers(10, 60), min_size=3, max_size=12)
    return st.dictionaries(st.sampled_from(BUCKET_IDS), few | many, min_size=1)


def options(**fixed: Any) -> st.SearchStrategy[PlanOptions]:
    drawn: dict[str, st.SearchStrategy[Any]] = {
        "seed": st.integers(0, 2**63 - 1),
        "window": st.integers(1, 4),
        "shuffle": st.sampled_from(["none", "shards", "window"]),
        "tail": st.sampled_from(["carry", "drop", "pad"]),
        "shard_locality": st.sampled_from([1, 2, 7, 128]),
    }
    return st.builds(PlanOptions, **drawn | {name: st.just(value) for name, value in fixed.items()})


def legs() -> st.SearchStrategy[Leg]:
    sizes = st.fixed_dictionaries({name: st.integers(1, 5) for name in BUCKET_IDS})
    return st.builds(Leg, st.integers(1, 4) | st.integers(1, 17), sizes, st.floats(0, 1))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw one dataset, or several with repeats, and all options."""
    sets = draw(st.lists(datasets(), min_size=1, max_size=3))
    simple = st.sampled_from([Fraction(1), Fraction(2), Fraction(1, 2)])
    repeats = draw(st.lists(simple | st.fractions(Fraction(1, 9), 3, max_denominator=9), min_size=3, max_size=3))
    tail = draw(st.sampled_from(get_args(Tail)))
    chosen = replace(
        draw(options(tail="carry")),
        tail=tail,
        sync=draw(st.sampled_from(["bucket", "cost"])),
        order=draw(st.sampled_from(["mixed", "largest-first"])),
        accumulate=draw(st.sampled_from([1, 1, 2, 3, 4])) if TAIL_RULES[tail].is_equal else 1,
    )
    costs = draw(st.fixed_dictionaries({name: st.sampled_from([100, 105, 108, 300]) for name in BUCKET_IDS}))
    return Case(tuple(sets), tuple(repeats[: len(sets)]), chosen, costs)


def make_plan(dataset: Dataset, leg: Leg, chosen: PlanOptions, cursor: Cursor | None = None) -> EpochPlan:
    return EpochPlan(dataset, {name: leg.batch_sizes[name] for name in dataset}, chosen, leg.num_ranks, cursor)


def plan_of(case: Case, leg: Leg, cursor: Cursor | None = None) -> EpochPlan:
    seeds = [case.options.seed, *range(1, len(case.datasets))]
    sources = [PlanSource(*parts) for parts in zip(case.datasets, seeds, case.repeats, strict=True)]
    sizes = {name: leg.batch_sizes[name] for name in case.bucket_ids}
    return EpochPlan(sources, sizes, case.options, leg.num_ranks, cursor, case.costs)


def receive(step: Step, leg: Leg, chosen: PlanOptions) -> list[Row]:
    """Return the samples that the ranks receive at a step, checking batch sizes and buckets per rank."""
    rows: list[Row] = []
    lengths = []
    assert len(step.bucket_ids) == leg.num_ranks
    for rank in range(leg.num_ranks):
        part = step.for_rank(rank)
        columns = (part.sources, part.shards, part.indices, part.visits, part.is_repeat)
        lengths.append(len(part.shards))
        assert {len(column) for column in columns} == {lengths[-1]}
        assert lengths[-1] <= leg.batch_sizes[part.bucket_id]
        if chosen.tail not in ("shrink", "uneven"):
            assert lengths[-1] == leg.batch_sizes[part.bucket_id]
        assert part.num_step_samples == step.num_step_samples
        rows += [Row(part.bucket_id, *row) for row in zip(*(c.tolist() for c in columns), strict=True)]
    assert len(rows) == len(step.shards) == step.num_step_samples
    if len(set(step.bucket_ids)) == 1:
        assert max(lengths) - min(lengths) <= (chosen.tail == "uneven")
    else:
        assert chosen.sync == "cost"
    return rows


def run(case: Case, epochs: list[list[Leg]]) -> tuple[list[Received], Cursor]:
    """Run epochs; each leg but the last of an epoch is killed after its share, and its state goes through JSON."""
    cursor = Cursor()
    history = []
    for lives in epochs:
        received = Received()
        for leg in lives:
            plan = plan_of(case, leg, cursor)
            is_last = leg is lives[-1]
            taken = plan.num_steps_left if is_last else int(leg.share * plan.num_steps_left)
            steps = plan.steps(0, taken)
            assert len(steps) == taken
            mine = [row for step in steps for row in receive(step, leg, case.options)]
            received.rows += mine
            received.num_steps += taken
            if is_last:
                received.last_report, received.last_leg = plan.report(), leg
                assert_report_is_true(plan.report(), mine)
                cursor = plan.next_epoch()
            else:
                cursor = plan.cursor_after(taken)
            cursor = Cursor.from_json(json.loads(json.dumps(cursor.to_json())))
        history.append(received)
    return history, cursor


def assert_report_is_true(report: tuple[BucketReport, ...], rows: list[Row]) -> None:
    """Check that a report made before the first step matches the received samples."""
    for line in report:
        mine = [row for row in rows if row.bucket_id == line.bucket_id]
        assert line.num_delivered == len(mine)
        assert line.num_steps == -(-len(mine) // line.global_batch)
        assert line.num_repeated == sum(row.is_repeat for row in mine)


def assert_same_steps(some: list[Step], others: list[Step]) -> None:
    assert [step.bucket_ids for step in some] == [step.bucket_ids for step in others]
    for one, other in zip(some, others, strict=True):
        assert one.num_step_samples == other.num_step_samples
        for name in ("bounds", "sources", "shards", "indices", "visits", "is_repeat"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def assert_same_samples(some: list[Step], others: list[Step]) -> None:
    """Check that each step has the same samples, whichever rank receives them."""
    assert len(some) == len(others)
    for one, other in zip(some, others, strict=True):
        for name in ("sources", "shards", "indices", "visits", "is_repeat"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def samples_of(shards: list[int]) -> set[tuple[int, int]]:
    return {(shard, index) for shard, count in enumerate(shards) for index in range(count)}


def assert_passes_are_whole(rows: list[Row], shards: list[int], total: int) -> None:
    """Check that `total` deliveries of a dataset's bucket are consecutive passes with each sample once per pass."""
    num_samples = sum(shards)
    assert len(rows) == total
    assert len({row.delivery for row in rows}) == total
    if not num_samples:
        return
    whole, rest = divmod(total, num_samples)
    times = Counter((row.shard, row.index) for row in rows)
    assert set(times) <= samples_of(shards)
    expected = {whole: num_samples - rest} | ({whole + 1: rest} if rest else {})
    assert Counter(times[sample] for sample in samples_of(shards)) == Counter({k: v for k, v in expected.items() if v})
    assert all(0 <= row.visit < whole + bool(rest) for row in rows)
