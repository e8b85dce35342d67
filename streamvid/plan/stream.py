"""Endless stream of a bucket's samples: pass 0, pass 1, …, each a shuffle of all samples.

A position consists of a pass and a place in that pass. The place is permuted within its window of shards. The permuted
place is an index into the samples of the pass, in the pass's shard order. Each position is computed without earlier
positions, in memory proportional to the number of shards in the bucket.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from streamvid.plan.hashing import hash64, hash64_array, hash_text, permute
from streamvid.plan.options import PlanOptions

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]
IntArray = npt.NDArray[Any]  # int32 where the numbers fit, else int64

_NUM_PASSES_KEPT = 2
# Hash parts that keep uses of the seed apart.
_SHARD_ORDER, _WINDOW_ORDER = 1, 2


@dataclass(frozen=True, slots=True)
class Pass:
    """Order of shards in one pass. The first k shards contain the first `ends[k]` samples of the pass."""

    number: int
    shards: npt.NDArray[np.int32]  # (num_shards,) shard indices in the order of the pass
    ends: IntArray  # (num_shards + 1,)
    window_starts: IntArray  # (num_windows + 1,)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Requested positions that belong to one pass, as places in that pass."""

    where: Any  # index of that part in the requested positions
    order: Pass | None  # None: manifest order
    places: IntArray
    windows: tuple[IntArray, IntArray, UInt64Array] | None = None  # (starts, sizes, keys) of their windows


class BucketStream:
    """Stream of one bucket's samples, addressed by position. It caches the shard orders of recent passes."""

    def __init__(self, bucket_id: str, shard_sizes: Int64Array, options: PlanOptions, seed: int | None = None) -> None:
        """Create the stream.

        shard_sizes: number of samples in each shard of the bucket, in manifest order, with shape (num_shards,).
        seed: seed for the stream; None for the seed in `options`.
        """
        self._bucket_hash = hash_text(bucket_id)
        self._seed = options.seed if seed is None else seed
        self._shard_sizes = shard_sizes
        self._options = options
        self._starts = prefix_sums(shard_sizes)
        self.num_samples = int(self._starts[-1])
        self._passes: dict[int, Pass] = {}

    def ordinals(self, positions: Int64Array) -> Int64Array:
        """Return the ordinals of the samples at `positions`: their indices in manifest order, over all shards."""
        return ordinals_of([(self, positions)])[0]

    def locate(self, ordinals: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return (shard indices, sample indices in the shards) for the samples with these ordinals."""
        # With another dtype, numpy would copy the sums.
        shards = np.searchsorted(self._starts, ordinals.astype(self._starts.dtype), side="right") - 1
        return shards, ordinals - self._starts[shards]

    @property
    def samples_per_pass(self) -> Fraction | int:
        """Mean number of samples per pass."""
        return self.num_samples

    @property
    def slack(self) -> Fraction:
        """Maximum difference between `begin(passes)` and `samples_per_pass * passes`."""
        return Fraction(1, 2)

    def begin(self, passes: Fraction | int) -> int:
        """Return the position after `passes` passes, rounded to a whole sample."""
        if isinstance(passes, int):
            return self.num_samples * passes
        return math.floor(self.num_samples * passes + Fraction(1, 2))

    def pass_of(self, position: int) -> int:
        """Return the number of the pass that contains a position."""
        return position // self.num_samples

    def passes_of(self, positions: Int64Array) -> Int64Array:
        """Return the number of the pass that contains each position."""
        return positions // self.num_samples

    def _pass_start(self, number: int) -> int:
        return number * self.num_samples

    def _sizes_in(self, number: int) -> Int64Array:
        """Return the number of samples per shard in a pass."""
        return self._shard_sizes

    @property
    def _needs_order(self) -> bool:
        return self._options.shuffle != "none"

    def pieces(self, positions: Int64Array) -> Iterator[_Piece]:
        """Yield the positions, grouped by pass."""
        if not self._needs_order:
            yield _Piece(..., None, positions % self.num_samples)
            return
        if not positions.size:
            return
        first = self.pass_of(int(positions.min()))
        if self.pass_of(int(positions.max())) == first:  # the usual case; saves a division per position
            yield self._piece(..., first, positions)
            return
        passes = self.passes_of(positions)
        for number in sorted({*passes.ravel().tolist()}):
            where = passes == number
            yield self._piece(where, number, positions[where])

    def _piece(self, where: Any, number: int, positions: Int64Array) -> _Piece:
        order = self._pass(number)
        places = (positions - self._pass_start(number)).astype(order.ends.dtype)
        if self._options.shuffle != "window":
            return _Piece(where, order, places)
        windows = np.searchsorted(order.window_starts, places, side="right") - 1
        starts = order.window_starts[windows]
        sizes = order.window_starts[windows + 1] - starts
        keys = hash64_array(_WINDOW_ORDER, self._seed, number, self._bucket_hash, windows)
        return _Piece(where, order, places, (starts, sizes, keys))

    def count(self, order: Pass | None, places: IntArray) -> IntArray:
        """Return the ordinals of the samples at the given places in a pass."""
        if order is None:
            return places
        turns = np.searchsorted(order.ends, places, side="right") - 1
        ordinals: IntArray = self._starts[order.shards[turns]] + (places - order.ends[turns])
        return ordinals

    def _pass(self, number: int) -> Pass:
        if number not in self._passes:
            while len(self._passes) >= _NUM_PASSES_KEPT:
                del self._passes[next(iter(self._passes))]
            turns = np.arange(len(self._shard_sizes))
            if self._options.shuffle != "none":
                seed = hash64(_SHARD_ORDER, self._seed, number, self._bucket_hash)
                # Stable, so that equal hashes keep the manifest's order with every version of numpy.
                turns = np.argsort(hash64_array(seed, turns), kind="stable")
            shards = turns.astype(np.int32)
            ends = prefix_sums(self._sizes_in(number)[shards])
            window_starts = np.append(ends[: -1 : self._options.window], ends[-1])
            self._passes[number] = Pass(number, shards, ends, window_starts)
        return self._passes[number]


def ordinals_of(asked: Sequence[tuple[BucketStream, Int64Array]]) -> list[Int64Array]:
    """Return the result of `ordinals` for each pair (stream, positions).

    One call to this function is faster than one call to `ordinals` per stream, because it needs only one permutation.
    """
    pieces = [list(stream.pieces(positions)) for stream, positions in asked]
    shuffled = [(piece.places, *piece.windows) for part in pieces for piece in part if piece.windows]
    moved = iter(_permuted(shuffled) if shuffled else [])
    found = []
    for (stream, positions), part in zip(asked, pieces, strict=True):
        ordinals = np.empty(positions.shape, np.int64)
        for piece in part:
            ordinals[piece.where] = stream.count(piece.order, next(moved) if piece.windows else piece.places)
        found.append(ordinals)
    return found


def _permuted(parts: Sequence[tuple[IntArray, IntArray, IntArray, UInt64Array]]) -> list[IntArray]:
    """Return the places of each part, permuted within their windows.

    A part consists of four arrays: places, and the start, size and key of each place's window.
    """
    offsets = np.concatenate([(places - starts).ravel() for places, starts, _, _ in parts])
    sizes, keys = (np.concatenate([part[column].ravel() for part in parts]) for column in (2, 3))
    moved = np.split(permute(offsets, sizes, keys), np.cumsum([part[0].size for part in parts])[:-1])
    pairs = zip((starts for _, starts, _, _ in parts), moved, strict=True)
    return [starts + offsets.reshape(starts.shape).astype(starts.dtype) for starts, offsets in pairs]


def prefix_sums(counts: IntArray) -> IntArray:
    """Return the n + 1 prefix sums, starting with 0.

    The result is int32 if the sums fit, because int32 takes half the memory of int64.
    """
    total = int(counts.sum(dtype=np.int64))
    sums: IntArray = np.zeros(len(counts) + 1, dtype=np.int32 if total < 1 << 31 else np.int64)
    counts.cumsum(out=sums[1:])
    return sums
