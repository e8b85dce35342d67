"""The datasets of a loader as its plan counts them: each with its split, its filter and its settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from streamvid.dataset.filter import Filter
from streamvid.dataset.manifest import ShardInfo
from streamvid.dataset.reader import Dataset


@dataclass(frozen=True, eq=False)
class MixPart:
    """One dataset of a loader. Holds nothing of the loader, so that its threads keep no loader alive.

    seed: what SAMPLE-1 draws from: the loader's seed, or for one of several datasets a seed of its own.
    shards: bucket id → shards of the split that have samples which pass the filter, in plan order.
    counts: bucket id → how many samples of each of those shards pass.
    columns: the caller's name of a column → its name in this index.
    """

    number: int
    dataset: Dataset
    seed: int
    shards: Mapping[str, tuple[ShardInfo, ...]]
    counts: Mapping[str, npt.NDArray[np.int64]]
    filter: Filter | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    caption_column: str = "text"
    caption_prefix: str = ""
    caption_dropout: float = 0.0


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One slot of a batch: which stored sample, at which visit.

    shard: number of the shard in `part.shards[bucket_id]`. place: number of the sample among those of the shard that
    pass the part's filter.
    """

    part: MixPart
    bucket_id: str
    shard: int
    place: int
    visit: int
    is_repeat: bool

    @property
    def shard_info(self) -> ShardInfo:
        return self.part.shards[self.bucket_id][self.shard]


def substitutes(sample: SampleRequest) -> Iterator[tuple[int, int]]:
    """(shard, place) of what may take a bad sample's place, in order (BAD-1): the rest of its shard in a circle,
    then the shards that follow in the bucket, in a circle; each other sample once."""
    counts = sample.part.counts[sample.bucket_id]
    for step in range(len(counts)):
        shard = (sample.shard + step) % len(counts)
        num_samples = int(counts[shard])
        first = sample.place + 1 if step == 0 else 0
        for place in range(num_samples - 1 if step == 0 else num_samples):
            yield shard, (first + place) % num_samples
