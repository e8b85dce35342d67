"""A bucket's samples as one endless stream: pass 0, pass 1, … each a shuffle of all of them.

A position divides into a pass and a place in it; the place, permuted within its window of shards, counts through the
shards in the pass's order. Any position is found without the ones before it, in memory proportional to the
bucket's shards.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from streamvid.plan.hashing import hash64, hash64_array, hash_text, permute
from streamvid.plan.options import PlanOptions

Int64Array = npt.NDArray[np.int64]

_NUM_PASSES_KEPT = 2
# Parts that keep uses of the seed apart.
_SHARD_ORDER, _WINDOW_ORDER = 1, 2


@dataclass(frozen=True, slots=True)
class _Pass:
    """The order of shards in one pass: `ends[k]` samples lie in its first k shards."""

    shards: Int64Array  # (num_shards,) shard numbers in the order of the pass
    ends: Int64Array  # (num_shards + 1,)
    window_starts: Int64Array  # (num_windows + 1,)


class BucketStream:
    """Finds the samples of one bucket by position; keeps the shard orders of the last passes that were asked for."""

    def __init__(self, bucket_id: str, shard_sizes: Int64Array, options: PlanOptions, seed: int | None = None) -> None:
        """shard_sizes: (num_shards,) samples in each shard of the bucket, in manifest order. seed: None for that of
        the options."""
        self._bucket_hash = hash_text(bucket_id)
        self._seed = options.seed if seed is None else seed
        self._shard_sizes = shard_sizes
        self._options = options
        self._starts = _prefix_sums(shard_sizes)
        self.num_samples = int(self._starts[-1])
        self._passes: dict[int, _Pass] = {}

    def ordinals(self, positions: Int64Array) -> Int64Array:
        """Numbers of the samples at `positions`, counted through the shards in manifest order; shape of `positions`."""
        passes, places = np.divmod(positions, self.num_samples)
        if self._options.shuffle == "none":
            return places
        ordinals = np.empty_like(places)
        for number in np.unique(passes):
            here = passes == number
            ordinals[here] = self._ordinals_in_pass(int(number), places[here])
        return ordinals

    def locate(self, ordinals: Int64Array) -> tuple[Int64Array, Int64Array]:
        """(shard numbers, indices in their shards) of samples counted in manifest order."""
        shards = np.searchsorted(self._starts, ordinals, side="right") - 1
        return shards, ordinals - self._starts[shards]

    def _ordinals_in_pass(self, number: int, places: Int64Array) -> Int64Array:
        order = self._pass(number)
        if self._options.shuffle == "window":
            windows = np.searchsorted(order.window_starts, places, side="right") - 1
            starts = order.window_starts[windows]
            keys = hash64_array(_WINDOW_ORDER, self._seed, number, self._bucket_hash, windows)
            places = starts + permute(places - starts, order.window_starts[windows + 1] - starts, keys)
        turns = np.searchsorted(order.ends, places, side="right") - 1
        return self._starts[order.shards[turns]] + places - order.ends[turns]

    def _pass(self, number: int) -> _Pass:
        if number not in self._passes:
            while len(self._passes) >= _NUM_PASSES_KEPT:
                del self._passes[next(iter(self._passes))]
            seed = hash64(_SHARD_ORDER, self._seed, number, self._bucket_hash)
            # Stable, so that equal hashes keep the manifest's order on every version of numpy.
            shards = np.argsort(hash64_array(seed, np.arange(len(self._shard_sizes))), kind="stable")
            ends = _prefix_sums(self._shard_sizes[shards])
            window_starts = np.append(ends[: -1 : self._options.window], ends[-1])
            self._passes[number] = _Pass(shards, ends, window_starts)
        return self._passes[number]


def _prefix_sums(counts: Int64Array) -> Int64Array:
    sums = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=sums[1:])
    return sums
