"""The random choices made for one delivery of a sample (SAMPLE-1): functions of (seed, key, visit) and nothing else."""

from __future__ import annotations

from streamvid.plan.hashing import hash_below, hash_text

_TEMPORAL_CROP = 1  # each kind of choice has a number of its own, so that adding one moves no other


def window_start(num_frames: int, wanted: int, *, seed: int, key: str, visit: int) -> int:
    """First frame of a window of `wanted` consecutive frames in a clip of `num_frames`, uniform over all that fit."""
    return hash_below(num_frames - wanted + 1, seed, _TEMPORAL_CROP, hash_text(key), visit)
