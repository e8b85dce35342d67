"""The plan's steps as the batches of this rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from streamvid.buckets.bucket import Bucket
from streamvid.dataset.manifest import ShardInfo
from streamvid.dataset.reader import Dataset
from streamvid.errors import DatasetError, StateError
from streamvid.loader.mix import MixPart, SampleRequest
from streamvid.plan.cursor import Cursor
from streamvid.plan.options import PlanOptions
from streamvid.plan.plan import EpochPlan
from streamvid.plan.world import World

_STEPS_PER_SLICE = 256


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One batch of this rank; `position` is the loader's own note of where in the run it stands."""

    bucket: Bucket
    samples: tuple[SampleRequest, ...]
    position: Any

    @property
    def num_bytes(self) -> int:
        frames, height, width = self.bucket.shape
        return len(self.samples) * frames * height * width * 3


@dataclass(frozen=True)
class Selection:
    """What one rank plans over: the shards of a split by bucket, batch sizes, options and the rank's position.

    Holds nothing of the loader, so that a thread which works through `requests` keeps no loader alive.
    """

    part: MixPart
    buckets: Mapping[str, Bucket]
    batch_sizes: Mapping[str, int]
    options: PlanOptions
    world: World

    def plan(self, cursor: Cursor) -> EpochPlan:
        """The rest of the cursor's epoch. Raises StateError for a cursor of another dataset."""
        return EpochPlan(self.part.counts, self.batch_sizes, self.options, self.world.num_ranks, cursor)

    def check(self, cursor: Cursor) -> None:
        """StateError for a position that no run leaves: past the end of the cursor's epoch there would be no step."""
        for bucket_id, position in cursor.positions.items():
            end = (cursor.epoch + 1) * sum(self.part.counts.get(bucket_id, ()))
            if position > end:
                raise StateError(
                    f"positions[{bucket_id!r}]={position} in the state: epoch {cursor.epoch} ends at {end}; "
                    "it is damaged, or of another dataset. Take an older state, or start without one"
                )

    def requests(self, plan: EpochPlan, end_epoch: int | None) -> Iterator[BatchRequest]:
        """Batches of this rank from `plan` on, through all epochs before `end_epoch`; None: endless.

        A request's position is (its epoch's plan, steps done after it).
        """
        while True:
            for first in range(0, plan.num_steps_left, _STEPS_PER_SLICE):
                steps = plan.rank_steps(first, first + _STEPS_PER_SLICE, self.world.rank)
                for number, step in enumerate(steps, first + 1):
                    mine = step
                    slots = zip(mine.shards, mine.indices, mine.visits, mine.is_repeat, strict=True)
                    samples = tuple(
                        SampleRequest(self.part, step.bucket_id, int(s), int(i), int(v), bool(r))
                        for s, i, v, r in slots
                    )
                    yield BatchRequest(self.buckets[step.bucket_id], samples, (plan, number))
            cursor = plan.next_epoch()
            if cursor.epoch == end_epoch:
                return
            plan = self.plan(cursor)


def shards_by_bucket(dataset: Dataset, split: str) -> dict[str, list[ShardInfo]]:
    """Bucket id → shards of a split, in the order that plans count them. DatasetError where there is none."""
    shards: dict[str, list[ShardInfo]] = {}
    for shard in dataset.shards:
        if shard.split == split:
            dataset.manifest.bucket(shard.bucket_id)
            shards.setdefault(shard.bucket_id, []).append(shard)
    if not shards:
        there = sorted({shard.split for shard in dataset.shards})
        raise DatasetError(f"split={split!r} has no samples in {dataset.url}; it has {', '.join(map(repr, there))}")
    return shards
