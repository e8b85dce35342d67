"""The order in which an epoch takes steps from several tracks, and in which a class of buckets takes its batches.

A track is something that has so many steps of its own, in an order of its own. Its step i has the key

    (offset + i * stride + stride * u) / length          u = uniform(kind, seed, epoch, hash, first_id + i * id_stride)

and the order is all steps by (key, track). A track's steps are thus spread over the whole epoch, each at random within
a stratum of its own, and keep their order; so any part of the epoch is a count of steps for each track, found by
bisecting the key. `offset` and the ids come from positions, not from where the run began: what follows a position is
what followed it before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from streamvid.plan.hashing import uniform_array

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]

# Bisecting stops at so many steps too many: sorting them costs less than halving on.
_SLACK = 64


@dataclass(frozen=True, slots=True)
class Track:
    """See above. first_key: a key of its own for step 0, below all others; None: like the rest."""

    hash: int
    num_steps: int
    offset: int
    stride: int
    length: float
    first_id: int
    id_stride: int
    first_key: float | None = None


class EpochOrder:
    """Finds the steps of the rest of an epoch by their number; memory is proportional to tracks."""

    def __init__(self, tracks: Sequence[Track], kind: int, seed: int, epoch: int, is_shuffled: bool) -> None:
        self._draw = (kind, seed, epoch)
        self._is_shuffled = is_shuffled
        self._hashes = np.array([track.hash for track in tracks], dtype=np.uint64)
        self._first_ids = np.array([track.first_id for track in tracks], dtype=np.int64)
        self._id_strides = np.array([track.id_stride for track in tracks], dtype=np.int64)
        # Relative to the epoch's start, so that float64 keeps every position of an epoch apart however late it is.
        self._offsets = np.array([track.offset for track in tracks], dtype=np.int64)
        self._strides = np.array([track.stride for track in tracks], dtype=np.int64)
        self._lengths = np.array([track.length for track in tracks], dtype=np.float64)
        self._num_steps = np.array([track.num_steps for track in tracks], dtype=np.int64)
        firsts = [np.nan if track.first_key is None else track.first_key for track in tracks]
        self._first_keys = np.array(firsts, dtype=np.float64)
        self._has_firsts = not np.isnan(self._first_keys).all()
        self.num_steps = int(self._num_steps.sum())

    def steps(self, start: int, stop: int) -> tuple[Int64Array, Int64Array]:
        """(track numbers, steps within the track) of steps [start, stop), 0 <= start <= stop <= num_steps."""
        _, tracks, indices, lower_total = self._bracket(start, stop)
        return tracks[start - lower_total : stop - lower_total], indices[start - lower_total : stop - lower_total]

    def counts(self, num_steps: int) -> Int64Array:
        """(num_tracks,) how many of the first `num_steps` steps each track has."""
        lower, tracks, _, lower_total = self._bracket(num_steps, num_steps)
        return lower + np.bincount(tracks[: num_steps - lower_total], minlength=len(lower))

    def _bracket(self, start: int, stop: int) -> tuple[Int64Array, Int64Array, Int64Array, int]:
        """Counts at a key at or before `start`, and all steps in order from there to a key at or after `stop`."""
        lower, _ = self._around(start)
        _, upper = self._around(stop)
        widths = upper - lower
        tracks = np.repeat(np.arange(len(widths)), widths)
        indices = np.arange(len(tracks)) - np.repeat(np.cumsum(widths) - widths, widths) + lower[tracks]
        order = np.lexsort((indices, tracks, self._keys(tracks, indices)))
        return lower, tracks[order], indices[order], int(lower.sum())

    def _around(self, num_steps: int) -> tuple[Int64Array, Int64Array]:
        """Counts (below, above) two keys, with below.sum() <= num_steps <= above.sum() as near as pays."""
        below, above = np.zeros_like(self._num_steps), self._num_steps
        if not self.num_steps:
            return below, above
        every = np.arange(len(self._num_steps))
        low = float(self._keys(every, below).min())
        high = float(self._keys(every, np.maximum(above - 1, 0)).max())
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
        """(num_tracks,) steps whose key is under `key`."""
        # The key lies in the stratum of step `guess`, give or take rounding; four keys settle it. All of these are
        # below it, a first step with a key of its own too, since that is below all others.
        guess = np.floor((key * self._lengths - self._offsets) / self._strides)
        first = np.clip(guess - 2, 0, self._num_steps).astype(np.int64)
        indices = first[:, None] + np.arange(4)
        tracks = np.broadcast_to(np.arange(len(first))[:, None], indices.shape)
        is_below = (self._keys(tracks, indices) < key) & (indices < self._num_steps[:, None])
        counts: Int64Array = first + is_below.sum(axis=1)
        return counts

    def _keys(self, tracks: Int64Array, indices: Int64Array) -> Float64Array:
        jitter: Float64Array | float = 0.5
        if self._is_shuffled:
            ids = self._first_ids[tracks] + indices * self._id_strides[tracks]
            jitter = uniform_array(*self._draw, self._hashes[tracks], ids)
        strides = self._strides[tracks]
        keys: Float64Array = (self._offsets[tracks] + indices * strides + strides * jitter) / self._lengths[tracks]
        if self._has_firsts:
            firsts = self._first_keys[tracks]
            keys = np.where((indices == 0) & ~np.isnan(firsts), firsts, keys)
        return keys
