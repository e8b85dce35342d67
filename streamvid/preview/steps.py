"""Batches of one step on all ranks, according to the plan that a loader of one or several datasets follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streamvid.dataset.reader import Dataset
from streamvid.errors import ConfigError
from streamvid.forecast.batches import set_up_run
from streamvid.forecast.run import PlannedRun
from streamvid.loader.delivery.requests import Selection
from streamvid.loader.mix import DatasetConfig, SampleRequest
from streamvid.plan import Cursor, PlanOptions, Step
from streamvid.plan.options import Shuffle, Sync
from streamvid.plan.tail import Tail
from streamvid.preview.find import SamplePlace, place_of

MAX_SHOWN = 96
"""Maximum number of samples that one page of a step shows."""


@dataclass(frozen=True)
class StepQuery:
    """Step `step` of epoch `epoch` in an uninterrupted run.

    repeats: number of deliveries per sample in an epoch, one number for each dataset. Missing numbers count as 1.
    """

    epoch: int = 0
    step: int = 0
    num_ranks: int = 1
    batch_size: int = 1
    seed: int = 0
    shuffle: Shuffle = "window"
    tail: Tail = "carry"
    sync: Sync = "bucket"
    split: str = "train"
    where: str | None = None
    accumulate: int = 1
    repeats: tuple[str, ...] = ()
    first_rank: int = 0


@dataclass(frozen=True, slots=True)
class StepSample:
    """One slot of a batch.

    dataset: index of the sample's dataset.
    visit: number of the visit; negative for a repeat that the tail policy adds.
    seed: seed for the sample's random choices. With several datasets, it is derived from the loader's seed.
    """

    dataset: int
    place: SamplePlace
    visit: int
    is_repeat: bool
    seed: int


@dataclass(frozen=True, slots=True)
class RankBatch:
    """Batch of one rank.

    bucket_id: None if the rank has no batch in this step.
    """

    rank: int
    bucket_id: str | None
    samples: tuple[StepSample, ...] = ()


@dataclass(frozen=True, slots=True)
class StepView:
    """A step: its batches, and the number of steps in the epoch.

    next_rank: first rank that is not shown, or None if no rank follows.
    """

    query: StepQuery
    num_steps: int
    batches: tuple[RankBatch, ...]
    next_rank: int | None = None


def step_of(datasets: Sequence[Dataset], query: StepQuery) -> StepView:
    """Return the batches of a step, for ranks starting at `query.first_rank`, up to about MAX_SHOWN samples.

    Raises the same errors as VideoLoader, and ConfigError for a step that the epoch does not contain.
    """
    options = PlanOptions(
        seed=query.seed, shuffle=query.shuffle, tail=query.tail, sync=query.sync, accumulate=query.accumulate
    )
    run = PlannedRun(
        num_ranks=query.num_ranks, batch_size=query.batch_size, options=options, split=query.split, where=query.where
    )
    selection = set_up_run(_configs(datasets, query), run).selection
    plan = selection.plan(Cursor(query.epoch))
    plan.check(query.epoch + 1)
    if not 0 <= query.step < plan.num_steps:
        raise ConfigError(
            f"step={query.step}: epoch {query.epoch} has {plan.num_steps} steps; use 0 to {plan.num_steps - 1}"
            if plan.num_steps
            else f"epoch={query.epoch}: the epoch has no steps; choose another epoch or fewer ranks"
        )
    if not 0 <= query.first_rank < query.num_ranks:
        raise ConfigError(f"rank={query.first_rank}: must be from 0 to {query.num_ranks - 1}")
    (step,) = plan.steps(query.step, query.step + 1)
    batches: list[RankBatch] = []
    shown, rank = 0, query.first_rank
    while rank < query.num_ranks and (not batches or shown + query.batch_size <= MAX_SHOWN):
        batches.append(_batch(selection, step.for_rank(rank), rank))
        shown, rank = shown + len(batches[-1].samples), rank + 1
        if rank - query.first_rank >= MAX_SHOWN:
            break
    return StepView(query, plan.num_steps, tuple(batches), rank if rank < query.num_ranks else None)


def _configs(datasets: Sequence[Dataset], query: StepQuery) -> list[DatasetConfig]:
    if len(query.repeats) > len(datasets):
        raise ConfigError(
            f"repeats={','.join(query.repeats)} has more values than there are datasets ({len(datasets)}); give one "
            "value per dataset"
        )
    repeats = [*query.repeats, *["1"] * (len(datasets) - len(query.repeats))]
    return [DatasetConfig(one, num_repeats=count) for one, count in zip(datasets, repeats, strict=True)]


def _batch(selection: Selection, step: Step, rank: int) -> RankBatch:
    if not len(step.shards):
        return RankBatch(rank, None)
    requests = selection.samples(step)
    samples = (StepSample(one.part.number, _place(one), one.visit, one.is_repeat, one.part.seed) for one in requests)
    return RankBatch(rank, step.bucket_id, tuple(samples))


def _place(sample: SampleRequest) -> SamplePlace:
    """Return the location of a requested sample in the unfiltered dataset."""
    dataset, shard, chosen = sample.part.dataset, sample.shard_info, sample.part.subset.filter
    index = sample.place
    if chosen is not None:  # places count the samples that pass the filter
        index = int(chosen.matching(dataset.samples(shard, chosen.columns))[sample.place])
    return place_of(dataset, shard.bucket_id, shard.number, index)
