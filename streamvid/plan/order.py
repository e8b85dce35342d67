"""Order of an epoch's steps, and of the batches in a cost class.

A track is a sequence of steps. Its step i has the key

    (offset + i * stride + stride * u) / length          u = uniform(kind, seed, epoch, hash, first_id + i * id_stride)

and all steps are sorted by (key, track). A track's steps are thus spread over the whole epoch, each at random within
its own stratum, and keep their order. About (x * length - offset) / stride of a track's steps have keys below x, with
an error of at most one. Any place in the epoch is therefore found by solving for x and sorting the few steps around it.
`offset` and the ids depend on positions and not on the start of the run, so the order after a position is always the
same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from streamvid.plan.hashing import uniform_array

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]

# Margin in steps that exceeds the rounding error of any count.
_ROUNDING = 0.5


@dataclass(frozen=True, slots=True)
class Track:
    """Sequence of steps that is spread over the whole epoch (see order.py).

    first_key: key of step 0, below all other keys; None for the usual key.
    """

    hash: int
    num_steps: int
    offset: int
    stride: int
    length: float
    first_id: int
    id_stride: int
    first_key: float | None = None


class EpochOrder:
    """Order of the remaining steps in an epoch, computed on demand.

    Memory use is proportional to the number of tracks.
    """

    def __init__(self, tracks: Sequence[Track], kind: int, seed: int, epoch: int, is_shuffled: bool) -> None:
        self._draw = (kind, seed, epoch)
        self._is_shuffled = is_shuffled
        self._hashes = np.array([track.hash for track in tracks], dtype=np.uint64)
        self._first_ids = np.array([track.first_id for track in tracks], dtype=np.int64)
        self._id_strides = np.array([track.id_stride for track in tracks], dtype=np.int64)
        # Relative to the epoch's start, so that float64 distinguishes all positions, even of a late epoch.
        self._offsets = np.array([track.offset for track in tracks], dtype=np.int64)
        self._strides = np.array([track.stride for track in tracks], dtype=np.int64)
        self._lengths = np.array([track.length for track in tracks], dtype=np.float64)
        self._num_steps = np.array([track.num_steps for track in tracks], dtype=np.int64)
        firsts = [np.nan if track.first_key is None else track.first_key for track in tracks]
        self._first_keys = np.array(firsts, dtype=np.float64)
        self._has_firsts = not np.isnan(self._first_keys).all()
        self.num_steps = int(self._num_steps.sum())
        ends = self._offsets + self._num_steps * self._strides
        self._corners, self._linear_sums = _linear_sums(self._offsets, ends, self._strides, self._lengths)

    def steps(self, start: int, stop: int) -> tuple[Int64Array, Int64Array]:
        """Return (tracks, step indices in the tracks) for steps [start, stop), with 0 <= start <= stop <= num_steps."""
        return self.stretches(np.array([start]), np.array([stop]))

    def stretches(self, starts: Int64Array, stops: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the results of `steps` for several stretches [starts[i], stops[i]), concatenated."""
        lower, stretches, tracks, indices = self._around(starts, stops)
        places = _count_up(stretches, len(starts)) + lower.sum(axis=1)[stretches]
        inside = (places >= starts[stretches]) & (places < stops[stretches])
        return tracks[inside], indices[inside]

    def counts(self, num_steps: int) -> Int64Array:
        """Return the number of each track's steps among the first `num_steps` steps, with shape (num_tracks,)."""
        counts: Int64Array = self.counts_at(np.array([num_steps]))[0]
        return counts

    def counts_at(self, places: Int64Array) -> Int64Array:
        """Return the result of `counts` for each place, with shape (len(places), num_tracks)."""
        lower, stretches, tracks, _ = self._around(places, places)
        is_before = _count_up(stretches, len(places)) < (places - lower.sum(axis=1))[stretches]
        cells = stretches[is_before] * lower.shape[1] + tracks[is_before]
        counts: Int64Array = lower + np.bincount(cells, minlength=lower.size).reshape(lower.shape)
        return counts

    def _around(self, starts: Int64Array, stops: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
        """Return (lower, stretches, tracks, indices).

        lower: lower bound on the number of each track's steps before each stretch, with shape (stretches, num_tracks).
        stretches, tracks, indices: parallel arrays with the steps in each stretch, preceded by the earlier steps that
            `lower` does not count.
        """
        lower, upper = self._bounds(starts, -1), self._bounds(stops, 1)
        widths = (upper - lower).ravel()
        which = np.repeat(np.arange(len(widths)), widths)
        indices = _count_up(which, len(widths)) + lower.ravel()[which]
        stretches, tracks = np.divmod(which, max(1, len(self._num_steps)))
        order = np.lexsort((indices, tracks, self._keys(tracks, indices), stretches))
        return lower, stretches[order], tracks[order], indices[order]

    def _bounds(self, places: Int64Array, side: int) -> Int64Array:
        """Return a lower (side -1) or upper (side 1) bound on the number of each track's steps before each place."""
        if not self.num_steps:
            return np.zeros((len(places), len(self._num_steps)), np.int64)
        # The real count below a key differs from the linear one by at most one per track, and so do their sums.
        margin = len(self._num_steps) * (1 + _ROUNDING)
        keys = np.interp(places + side * margin, self._linear_sums, self._corners)
        counts = np.floor(self._linear(keys) + 0.5 + side * (1.5 + _ROUNDING)).astype(np.int64)
        return np.clip(counts, 0, self._num_steps)

    def _linear(self, keys: Float64Array) -> Float64Array:
        """Return the number of each track's steps below each key, with shape (keys, num_tracks).

        Each number is an estimate with an error of at most one.
        """
        counts: Float64Array = (keys[:, None] * self._lengths - self._offsets) / self._strides
        return np.clip(counts, 0, self._num_steps)

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


def _linear_sums(
    offsets: Int64Array, ends: Int64Array, strides: Int64Array, lengths: Float64Array
) -> tuple[Float64Array, Float64Array]:
    """Return the ascending keys at which a track begins or ends, and the sum of `_linear` over all tracks at each key.

    Between these keys, the sum is linear. At each key, the slope of the sum changes by the slope of one track, so
    memory and time do not grow with the square of the number of tracks. Rounding errors are far below the margin of
    `_bounds`.
    """
    corners = np.concatenate([offsets, ends]) / np.tile(lengths, 2)
    changes = np.concatenate([lengths / strides, -lengths / strides])
    order = np.argsort(corners, kind="stable")
    corners, slopes = corners[order], np.cumsum(changes[order])
    sums = np.concatenate([[0.0], np.cumsum(slopes[:-1] * np.diff(corners))])[: len(corners)]
    return corners, np.maximum.accumulate(sums) if len(sums) else sums


def _count_up(groups: Int64Array, num_groups: int) -> Int64Array:
    """Number the elements of each run of equal values in `groups`, starting with 0.

    `groups` is sorted, with values in [0, num_groups).
    """
    starts = np.searchsorted(groups, np.arange(num_groups))
    return np.arange(len(groups)) - starts[groups]
