"""The order in which an epoch takes steps from its buckets.

The step of bucket b that begins at position q has the key

    (q - S + G * u(seed, epoch, b, q)) / n        u uniform in [0, 1); S, G, n as in tail.py

and the epoch is all steps by (key, bucket id). A bucket's steps are thus spread over the whole epoch, each at random
within a stratum of its own, and keep their order; so any part of the epoch is a count of steps for each bucket, found
by bisecting the key. A key depends on q and not on where the run stands: what follows a position is what followed it
before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from streamvid.plan.hashing import hash_text, uniform_array
from streamvid.plan.options import PlanOptions
from streamvid.plan.tail import BucketSpan

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]

# Bisecting stops at so many steps too many: sorting them costs less than halving on.
_SLACK = 64
_STEP_ORDER = 3  # keeps this use of the seed apart from those in stream.py


class EpochOrder:
    """Finds the steps of the rest of an epoch by their number; memory is proportional to buckets."""

    def __init__(self, spans: Sequence[BucketSpan], options: PlanOptions, epoch: int) -> None:
        """spans: those with steps left, sorted by bucket id."""
        self._seed = options.seed
        self._epoch = epoch
        self._is_shuffled = options.shuffle != "none"
        self._hashes = np.array([hash_text(span.bucket_id) for span in spans], dtype=np.uint64)
        self._positions = np.array([span.position for span in spans], dtype=np.int64)
        # Relative to the epoch's start, so that float64 keeps every position of an epoch apart however late it is.
        self._offsets = np.array([span.position - span.start for span in spans], dtype=np.int64)
        self._batches = np.array([span.global_batch for span in spans], dtype=np.int64)
        self._lengths = np.array([span.num_samples for span in spans], dtype=np.float64)
        self._num_steps = np.array([span.num_steps_left for span in spans], dtype=np.int64)
        self.num_steps = int(self._num_steps.sum())

    def steps(self, start: int, stop: int) -> tuple[Int64Array, Int64Array]:
        """(bucket numbers, steps within the bucket) of steps [start, stop), 0 <= start <= stop <= num_steps."""
        _, buckets, indices, lower_total = self._bracket(start, stop)
        return buckets[start - lower_total : stop - lower_total], indices[start - lower_total : stop - lower_total]

    def counts(self, num_steps: int) -> Int64Array:
        """(num_buckets,) how many of the first `num_steps` steps each bucket has."""
        lower, buckets, _, lower_total = self._bracket(num_steps, num_steps)
        return lower + np.bincount(buckets[: num_steps - lower_total], minlength=len(lower))

    def _bracket(self, start: int, stop: int) -> tuple[Int64Array, Int64Array, Int64Array, int]:
        """Counts at a key at or before `start`, and all steps in order from there to a key at or after `stop`."""
        lower, _ = self._around(start)
        _, upper = self._around(stop)
        widths = upper - lower
        buckets = np.repeat(np.arange(len(widths)), widths)
        indices = np.arange(len(buckets)) - np.repeat(np.cumsum(widths) - widths, widths) + lower[buckets]
        order = np.lexsort((indices, buckets, self._keys(buckets, indices)))
        return lower, buckets[order], indices[order], int(lower.sum())

    def _around(self, num_steps: int) -> tuple[Int64Array, Int64Array]:
        """Counts (below, above) two keys, with below.sum() <= num_steps <= above.sum() as near as pays."""
        below, above = np.zeros_like(self._num_steps), self._num_steps
        if not self.num_steps:
            return below, above
        every = np.arange(len(self._num_steps))
        low = float(self._keys(every, below).min())
        high = float(self._keys(every, above - 1).max())
        while int(above.sum() - below.sum()) > _SLACK + len(every):
            middle = low + (high - low) / 2
            if not low < middle < high:
                break
            counts = self._counts_below(middle)
            if int(counts.sum()) <= num_steps:
                low, below = middle, counts
            else:
                high, above = middle, counts
        return below, above

    def _counts_below(self, key: float) -> Int64Array:
        """(num_buckets,) steps whose key is under `key`."""
        # The key lies in the stratum of step `guess`, give or take rounding; four keys settle it.
        guess = np.floor((key * self._lengths - self._offsets) / self._batches)
        first = np.clip(guess - 2, 0, self._num_steps).astype(np.int64)
        indices = first[:, None] + np.arange(4)
        buckets = np.broadcast_to(np.arange(len(first))[:, None], indices.shape)
        is_below = (self._keys(buckets, indices) < key) & (indices < self._num_steps[:, None])
        counts: Int64Array = first + is_below.sum(axis=1)
        return counts

    def _keys(self, buckets: Int64Array, indices: Int64Array) -> Float64Array:
        steps = indices * self._batches[buckets]
        jitter: Float64Array | float = 0.5
        if self._is_shuffled:
            positions = self._positions[buckets] + steps
            jitter = uniform_array(_STEP_ORDER, self._seed, self._epoch, self._hashes[buckets], positions)
        keys: Float64Array = (self._offsets[buckets] + steps + self._batches[buckets] * jitter) / self._lengths[buckets]
        return keys
