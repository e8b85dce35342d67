"""One step: the samples that all ranks take together, dealt so that each rank reads few shards."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from streamvid.errors import ConfigError
from streamvid.plan.stream import BucketStream, Int64Array
from streamvid.plan.tail import BucketSpan


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """Samples of one bucket, those of all ranks or, after `for_rank`, of one.

    All arrays are (global_batch,), sorted by shard, then index.

    shards: int64, shard number within the bucket, in manifest order. indices: int64, place in the shard.
    visits: int64, which pass over its bucket the sample is in, from 0; repeats of tail="pad" have negative visits,
        -(epoch * 2**32 + wrap), wrap from 1 counting how often the pass began anew: no visit occurs twice for a sample.
    is_repeat: bool, whether it is such a repeat.
    """

    bucket_id: str
    shards: Int64Array
    indices: Int64Array
    visits: Int64Array
    is_repeat: npt.NDArray[np.bool_]

    def for_rank(self, rank: int, batch_size: int) -> Step:
        """The part of a rank: samples [rank * batch_size, (rank + 1) * batch_size)."""
        if rank < 0 or batch_size < 1 or (rank + 1) * batch_size > len(self.shards):
            raise ConfigError(
                f"rank={rank} with batch_size={batch_size} is outside of a step of {len(self.shards)} samples; "
                "take the world and batch sizes that the plan was made for"
            )
        part = slice(rank * batch_size, (rank + 1) * batch_size)
        return Step(self.bucket_id, self.shards[part], self.indices[part], self.visits[part], self.is_repeat[part])


def deal(span: BucketSpan, stream: BucketStream, indices: Int64Array) -> list[Step]:
    """The steps of a bucket with these numbers, counted from the span's position."""
    # (steps, global_batch), as everything below
    positions = span.position + indices[:, None] * span.global_batch + np.arange(span.global_batch)
    visits = positions // span.num_samples
    if span.tail == "pad":
        wraps = np.maximum(positions - span.end, -1) // span.num_samples + 1
        positions = positions - wraps * span.num_samples
        visits = np.where(wraps > 0, -((span.epoch << 32) + wraps), visits)
    ordinals = stream.ordinals(positions)
    # Stable: of equal samples, which repeats make, the earlier position comes first.
    order = np.argsort(ordinals, axis=1, kind="stable")
    shards, places = stream.locate(np.take_along_axis(ordinals, order, axis=1))
    visits = np.take_along_axis(visits, order, axis=1)
    return [Step(span.bucket_id, *row) for row in zip(shards, places, visits, visits < 0, strict=True)]
