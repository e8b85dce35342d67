"""A bucket's stream over several datasets: in every stretch of an epoch each has the share that it has of the epoch.

Dataset i has n_i samples in the bucket and is repeated r_i times an epoch. Its own stream (stream.py) is endless, and
epoch e takes [b_i(e), b_i(e + 1)) of it, m_i samples, where b_i(e) is e * r_i * n_i rounded. The bucket's stream is the
blocks of the epochs one after the other, so the block of epoch e begins at B(e), the sum of all b_i(e).

A block of M = sum of m_i samples is cut into W windows of about 256. Window w has the places
[floor(w * m_i / W), floor((w + 1) * m_i / W)) of dataset i, one dataset after the other, and then permuted. All of it
is arithmetic on the position; nothing depends on the number of ranks. A bucket of one dataset is that dataset's stream.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from streamvid.errors import ConfigError
from streamvid.plan.hashing import hash64_array, hash_text, permute
from streamvid.plan.options import PlanOptions
from streamvid.plan.stream import BucketStream, ordinals_of

Int64Array = npt.NDArray[np.int64]

_WINDOW_SAMPLES = 256
_MERGE_ORDER = 5  # keeps this use of the seed apart from those in stream.py and order.py
MAX_BLOCK_SAMPLES = 1 << 35
"""Of a bucket of several datasets in one epoch: W * m_i stays in int64."""


@dataclass(frozen=True, eq=False)
class PlanSource:
    """One dataset of a plan.

    num_samples: bucket id → samples in each of its shards, in manifest order. seed: of its own streams.
    num_repeats: how often an epoch takes its samples; fractions too.
    """

    num_samples: Mapping[str, Sequence[int] | Int64Array]
    seed: int = 0
    num_repeats: Fraction = field(default_factory=lambda: Fraction(1))

    def __post_init__(self) -> None:
        if not isinstance(self.num_repeats, Fraction) or not 0 < self.num_repeats <= 1 << 20:
            raise ConfigError(f"num_repeats={self.num_repeats!r}: allowed are fractions above 0, up to {1 << 20}")


class MixedStream:
    """Finds the samples of one bucket by position, over all datasets that have it."""

    def __init__(self, bucket_id: str, shard_sizes: Mapping[int, Int64Array], sources: Sequence[PlanSource],
                 options: PlanOptions) -> None:  # fmt: skip
        """shard_sizes: number of a source → samples in each of its shards of this bucket."""
        self._hash = hash_text(bucket_id)
        self._seed, self._is_shuffled = options.seed, options.shuffle != "none"
        self._numbers: list[int] = []
        self._streams: list[BucketStream] = []
        self._rates: list[Fraction] = []
        for number, sizes in shard_sizes.items():
            stream = BucketStream(bucket_id, sizes, options, sources[number].seed)
            if stream.num_samples:
                self._numbers.append(number)
                self._streams.append(stream)
                self._rates.append(sources[number].num_repeats * stream.num_samples)
        sizes_of = [stream.num_samples for stream in self._streams]
        self._firsts = np.cumsum([0, *sizes_of])  # a sample's ordinal counts through the datasets one after the other
        self.num_samples = sum(sizes_of)
        self.rate = sum(self._rates, Fraction(0))
        """Samples an epoch, on average."""

    def boundary(self, epoch: int) -> int:
        """B(epoch): the position at which the epoch's block begins."""
        return sum(_begin(rate, epoch) for rate in self._rates)

    def period(self, other: int) -> int:
        """Epochs after which the lengths of blocks come again, this bucket's and those of period `other`."""
        return math.lcm(other, *(rate.denominator for rate in self._rates))

    def passes_in(self, epoch: int) -> tuple[Int64Array, Int64Array]:
        """(first pass, number of passes) that each dataset's part of an epoch's block lies in."""
        bounds = [(_begin(rate, epoch), _begin(rate, epoch + 1)) for rate in self._rates]
        sizes = [stream.num_samples for stream in self._streams]
        first = [start // size for (start, _), size in zip(bounds, sizes, strict=True)]
        last = [max(end - 1, start) // size for (start, end), size in zip(bounds, sizes, strict=True)]
        return np.array(first, np.int64), np.array(last, np.int64) - first + 1

    @property
    def has_several(self) -> bool:
        """Whether more than one dataset has samples here."""
        return len(self._streams) > 1

    def member_of(self, ordinals: Int64Array) -> Int64Array:
        """Which of the datasets that have the bucket each sample is of, shaped as `ordinals`."""
        return np.searchsorted(self._firsts, ordinals, side="right") - 1

    def locate(self, ordinals: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """(number of the source, number of the shard in its bucket, index in the shard), shaped as `ordinals`."""
        if len(self._streams) == 1:
            shards, indices = self._streams[0].locate(ordinals)
            return np.full_like(shards, self._numbers[0]), shards, indices
        members = self.member_of(ordinals)
        shards, indices = np.empty_like(ordinals), np.empty_like(ordinals)
        for member, stream in enumerate(self._streams):
            here = members == member
            shards[here], indices[here] = stream.locate(ordinals[here] - self._firsts[member])
        return np.asarray(self._numbers, np.int64)[members], shards, indices

    def split(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """(which of the datasets that have the bucket, position in its own stream) of positions, shaped as them."""
        if len(self._streams) == 1 or not positions.size:
            return np.zeros_like(positions), positions
        members, places = self._split(positions.ravel())
        return members.reshape(positions.shape), places.reshape(positions.shape)

    def members(self, members: Int64Array) -> Iterator[tuple[Any, BucketStream, int]]:
        """(where in `members`, stream, its first ordinal) of each dataset that occurs there."""
        if len(self._streams) == 1:
            yield ..., self._streams[0], 0
            return
        for member, stream in enumerate(self._streams):
            where = members == member
            if where.any():
                yield where, stream, int(self._firsts[member])

    def _split(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """`split` of a flat array over several datasets."""
        first, last = self._epoch_at(int(positions.min())), self._epoch_at(int(positions.max()))
        starts = np.array([[_begin(rate, e) for e in range(first, last + 2)] for rate in self._rates], np.int64)
        bounds = starts.sum(axis=0)
        # Of several epochs that begin at a position, all but the last are empty.
        blocks = np.searchsorted(bounds, positions, side="right") - 1
        offsets = positions - bounds[blocks]
        counts = starts[:, blocks + 1] - starts[:, blocks]  # (datasets, positions), as all below
        totals = counts.sum(axis=0)
        num_windows = -(-totals // _WINDOW_SAMPLES)
        windows = offsets * num_windows // totals
        while True:
            upper = (windows + 1) * counts // num_windows
            late = upper.sum(axis=0) <= offsets
            if not late.any():
                break
            windows = windows + late
        lower = windows * counts // num_windows
        begins = lower.sum(axis=0)
        places = offsets - begins
        if self._is_shuffled:
            keys = hash64_array(_MERGE_ORDER, self._seed, self._hash, first + blocks, windows)
            places = permute(places, upper.sum(axis=0) - begins, keys)
        ends = np.cumsum(upper - lower, axis=0)
        members = (places >= ends).sum(axis=0)
        every = np.arange(len(positions))
        places = places - (ends - (upper - lower))[members, every]
        return members, starts[members, blocks] + lower[members, every] + places

    def _epoch_at(self, position: int) -> int:
        """The epoch whose block holds a position: the last that begins at or before it."""
        # All roundings together make up half a sample a dataset at most.
        slack = Fraction(len(self._rates), 2)
        low = max(0, math.floor((position - slack) / self.rate))
        high = math.floor((position + slack) / self.rate) + 1
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (middle, high) if self.boundary(middle) <= position else (low, middle)
        return low


def resolve(asked: Sequence[tuple[MixedStream, Int64Array]]) -> list[tuple[Int64Array, Int64Array, Int64Array]]:
    """(ordinal, pass, which of the datasets that have the bucket) of the samples; each shaped as its positions.

    Ordinals count through all samples of the bucket, dataset by dataset, in manifest order. Those of many streams are
    found together: most of what a few samples cost is the call.
    """
    split = [stream.split(positions) for stream, positions in asked]
    parts = [list(stream.members(members)) for (stream, _), (members, _) in zip(asked, split, strict=True)]
    every = zip(split, parts, strict=True)
    found = iter(ordinals_of([(stream, places[where]) for (_, places), part in every for where, stream, _ in part]))
    resolved = []
    for (members, places), part in zip(split, parts, strict=True):
        ordinals, passes = np.empty_like(places), np.empty_like(places)
        for where, stream, first in part:
            ordinals[where] = next(found) + first
            passes[where] = places[where] // stream.num_samples
        resolved.append((ordinals, passes, members))
    return resolved


def _begin(rate: Fraction, epoch: int) -> int:
    """b_i(e); to the nearest, so that the first epoch has the size that was asked for, too."""
    return math.floor(rate * epoch + Fraction(1, 2))
