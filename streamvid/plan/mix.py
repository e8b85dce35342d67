"""Stream of one bucket's samples from several datasets. A dataset has the same share in every stretch of an epoch.

Dataset i has n_i samples in the bucket and is repeated r_i times per epoch. The dataset's own stream (stream.py) is
endless. Epoch e uses its m_i samples [b_i(e), b_i(e + 1)), where b_i(e) is e * r_i * n_i rounded. The bucket's stream
concatenates the blocks of all epochs, so the block of epoch e begins at B(e), the sum of all b_i(e).

A block has M samples, the sum of all m_i, and is cut into W windows of about 256 samples. Window w contains the places
[floor(w * m_i / W), floor((w + 1) * m_i / W)) of each dataset i, first concatenated, then permuted. The result does
not depend on the number of ranks. With a single dataset, the bucket's stream is that dataset's stream.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from itertools import accumulate
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from streamvid.config import require_integer
from streamvid.errors import ConfigError
from streamvid.plan.draws import DrawnStream, DrawSet
from streamvid.plan.hashing import hash64_array, hash_text, permute
from streamvid.plan.options import PlanOptions
from streamvid.plan.stream import BucketStream, ordinals_of

Int64Array = npt.NDArray[np.int64]
MixBy: TypeAlias = Literal["samples", "tokens"]

_WINDOW_SAMPLES = 256
_MAX_PARTS = 1 << 40  # limit on numerators and denominators; floor arithmetic on them is always exact
_ROUNDING = Fraction(1, 10**12)  # as a share: more than the error of a few floating-point operations
_MERGE_ORDER = 5  # keeps this use of the seed apart from those in stream.py and order.py
MAX_BLOCK_SAMPLES = 1 << 35
"""Maximum number of samples per epoch in a bucket of several datasets, so that W * m_i fits into int64."""


@dataclass(frozen=True, eq=False)
class PlanSource:
    """One dataset in a plan.

    num_samples: bucket id → number of samples per shard, in manifest order.
    seed: seed for the dataset's streams.
    num_repeats: mean number of times that an epoch delivers each sample.
    draws: bucket id → draw sets.
    """

    num_samples: Mapping[str, Sequence[int] | Int64Array]
    seed: int = 0
    num_repeats: Fraction = field(default_factory=lambda: Fraction(1))
    draws: Mapping[str, Sequence[DrawSet]] = field(default_factory=dict)

    def stream(self, bucket_id: str, shard_sizes: Int64Array, options: PlanOptions) -> BucketStream:
        """Return the dataset's stream for one bucket.

        shard_sizes: the bucket's entry in `num_samples`.
        """
        if self.draws.get(bucket_id):
            return DrawnStream(bucket_id, shard_sizes, options, self.seed, self.draws[bucket_id])
        return BucketStream(bucket_id, shard_sizes, options, self.seed)

    def __post_init__(self) -> None:
        if not isinstance(self.num_repeats, Fraction) or not 0 < self.num_repeats <= 1 << 20:
            raise ConfigError(f"num_repeats={self.num_repeats!r}: must be a Fraction above 0 and at most {1 << 20}")


class MixedStream:
    """Stream of one bucket's samples, addressed by position, from all datasets that contain the bucket."""

    def __init__(
        self,
        bucket_id: str,
        shard_sizes: Mapping[int, Int64Array],
        sources: Sequence[PlanSource],
        options: PlanOptions,
    ) -> None:
        """Create the stream.

        shard_sizes: source index → number of samples in each of this bucket's shards.
        """
        self._hash = hash_text(bucket_id)
        self._seed, self._is_shuffled = options.seed, options.shuffle != "none"
        self._numbers: list[int] = []
        self._streams: list[BucketStream] = []
        # Whole numbers are int, which is much faster with thousands of buckets.
        self._repeats: list[Fraction | int] = []
        for number, sizes in shard_sizes.items():
            stream = sources[number].stream(bucket_id, sizes, options)
            if stream.num_samples:
                self._numbers.append(number)
                self._streams.append(stream)
                repeats = sources[number].num_repeats
                self._repeats.append(repeats if repeats.denominator > 1 else repeats.numerator)
        sizes_of = [stream.num_samples for stream in self._streams]
        self._firsts = np.array([0, *accumulate(sizes_of)])  # ordinals count through one dataset after the other
        self.num_samples = sum(sizes_of)
        rates = [r * s.samples_per_pass for r, s in zip(self._repeats, self._streams, strict=True)]
        self.rate = sum(rates)
        """Mean number of samples per epoch."""
        self.samples_per_pass = int(sum(stream.samples_per_pass for stream in self._streams))

    def boundary(self, epoch: int) -> int:
        """Return B(epoch), the position at which the epoch's block begins."""
        return sum(self._begins(epoch))

    def _begins(self, epoch: int) -> list[int]:
        """Return the position in each dataset's stream at which the epoch's block begins."""
        return [stream.begin(repeats * epoch) for stream, repeats in zip(self._streams, self._repeats, strict=True)]

    def period(self, other: int) -> int:
        """Return the least common multiple of `other` and the number of epochs after which block lengths repeat."""
        rates = zip(self._repeats, self._streams, strict=True)
        return math.lcm(other, *((repeats * stream.num_samples).denominator for repeats, stream in rates))

    @property
    def is_drawn(self) -> bool:
        """True if a dataset has draw sets, so that block lengths do not repeat."""
        return any(isinstance(stream, DrawnStream) for stream in self._streams)

    def passes_in(self, epoch: int) -> tuple[Int64Array, Int64Array]:
        """For each dataset, return the first pass and the number of passes in an epoch's block, as two arrays."""
        bounds = list(zip(self._streams, self._begins(epoch), self._begins(epoch + 1), strict=True))
        first = [stream.pass_of(start) for stream, start, _ in bounds]
        last = [stream.pass_of(max(end - 1, start)) for stream, start, end in bounds]
        return np.array(first, np.int64), np.array(last, np.int64) - first + 1

    @property
    def has_several(self) -> bool:
        """True if more than one dataset has samples in this bucket."""
        return len(self._streams) > 1

    def member_of(self, ordinals: Int64Array) -> Int64Array:
        """Return each sample's dataset, as an index among the datasets that contain this bucket."""
        return np.searchsorted(self._firsts, ordinals, side="right") - 1

    def locate(self, ordinals: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return three arrays shaped like `ordinals`: source indices, shard indices and sample indices in the shard."""
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
        """Return the dataset index (see `member_of`) for each position, and the position in that dataset's stream."""
        if len(self._streams) == 1 or not positions.size:
            return np.zeros_like(positions), positions
        members, places = self._split(positions.ravel())
        return members.reshape(positions.shape), places.reshape(positions.shape)

    def members(self, members: Int64Array) -> Iterator[tuple[Any, BucketStream, int]]:
        """Yield (index into `members`, stream, first ordinal) for each dataset that occurs in `members`."""
        if len(self._streams) == 1:
            yield ..., self._streams[0], 0
            return
        for member, stream in enumerate(self._streams):
            where = members == member
            if where.any():
                yield where, stream, int(self._firsts[member])

    def _split(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the result of `split` for a flat array of positions in several datasets."""
        first, last = self._epoch_at(int(positions.min())), self._epoch_at(int(positions.max()))
        starts = np.array([self._begins(epoch) for epoch in range(first, last + 2)], np.int64).T
        bounds = starts.sum(axis=0)
        # If several epochs begin at a position, all but the last are empty.
        blocks = np.searchsorted(bounds, positions, side="right") - 1
        offsets = positions - bounds[blocks]
        counts = starts[:, blocks + 1] - starts[:, blocks]  # (datasets, positions), as everything below
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
        """Return the last epoch whose block begins at or before a position."""
        slack = sum((stream.slack for stream in self._streams), Fraction(0))
        low = max(0, math.floor((position - slack) / self.rate))
        high = math.floor((position + slack) / self.rate) + 1
        return low + bisect_right(range(low + 1, high), position, key=self.boundary)


def resolve(asked: Sequence[tuple[MixedStream, Int64Array]]) -> list[tuple[Int64Array, Int64Array, Int64Array]]:
    """Return (ordinals, passes, dataset indices) for each stream, as arrays shaped like the stream's positions.

    Dataset indices are as in `member_of`. Ordinals count all samples in the bucket, dataset by dataset, in manifest
    order. Many streams are resolved together, because the overhead of one call exceeds the cost of a few samples.
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
            passes[where] = stream.passes_of(places[where])
        resolved.append((ordinals, passes, members))
    return resolved


# Weights of datasets.


def exact_fraction(name: str, value: object) -> Fraction:
    """Convert a positive number to a fraction, exactly as written: 0.1 becomes 1/10.

    The number can be an int, a float, a Fraction, a Decimal or text ("3/2"). Raises ConfigError for other values and
    for numbers with more than about 12 digits, such as 1 / 3 in floating point.
    """
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str | Fraction | Decimal):
            raise ValueError("not a number")
        fraction = Fraction(value) if isinstance(value, int | Fraction | str) else Fraction(Decimal(str(value)))
    except (ValueError, ZeroDivisionError, InvalidOperation, OverflowError) as error:
        raise ConfigError(f"{name}={value!r}: must be a number above 0, such as 2, 0.5 or '3/2'") from error
    if not fraction > 0 or not _is_short(fraction):
        raise ConfigError(
            f"{name}={value!r}: must be a number above 0 with at most 12 digits, such as 2, 0.5 or '1/3'"
            + (_remedy(fraction) if fraction > 0 else "")
        )
    return fraction


def _is_short(fraction: Fraction) -> bool:
    return max(fraction.numerator, fraction.denominator) <= _MAX_PARTS


def _remedy(fraction: Fraction) -> str:
    """Return advice for writing a value such as 1 / 3 or 1 - 0.7, which has many digits in floating point."""
    meant = fraction.limit_denominator(1000)
    if abs(meant - fraction) > fraction * _ROUNDING or not _is_short(meant):
        return "; use a number with fewer digits"
    return f"; write the text '{meant}' or fractions.Fraction({meant.numerator}, {meant.denominator})"


def repeats_of_weights(
    weights: Sequence[Fraction],
    num_samples: Sequence[int],
    num_tokens: Sequence[int],
    samples_per_epoch: int | None,
    by: MixBy,
) -> list[Fraction]:
    """Return how often each dataset is repeated per epoch if its share of an epoch is proportional to its weight.

    num_samples, num_tokens: numbers of samples and tokens in each dataset, without repeats.
    samples_per_epoch: total number of samples per epoch; None for the sum of `num_samples`.
    by: unit in which shares are measured.
    """
    if by not in get_args(MixBy):
        raise ConfigError(f"mix_by={by!r}: must be {' or '.join(map(repr, get_args(MixBy)))}")
    total = sum(num_samples)
    if samples_per_epoch is not None:
        total = require_integer("samples_per_epoch", samples_per_epoch, 1, 1 << 40)
    sizes = num_samples if by == "samples" else num_tokens
    # Dataset i is taken scale * weight / size times, which adds up to `total` samples.
    per_scale = sum((w * n / size for w, n, size in zip(weights, num_samples, sizes, strict=True)), Fraction(0))
    return [total / per_scale * weight / size for weight, size in zip(weights, sizes, strict=True)]
