"""The random choices made for one delivery of a sample (SAMPLE-1): functions of (seed, key, visit) and nothing else."""

from __future__ import annotations

import numpy as np

from streamvid.plan.hashing import hash64, hash_below, hash_text, permute

# Each kind of choice has a number of its own, so that adding one moves no other.
_TEMPORAL_CROP = 1
CAPTION_DROPOUT = 2
_SUBSTITUTE = 3
_INTERVAL = 7
_CHUNK = 8
_PLACE_LEFT, _PLACE_TOP, _SCALE = 9, 10, 11
CAPTION_COLUMN, CAPTION, CAPTION_PART = 12, 13, 14
_SAMPLE_SEED = 15

FULL_SCALE = 1 << 16
"""A scale of 1."""


def window_start(num_frames: int, wanted: int, *, seed: int, key: str, visit: int) -> int:
    """First frame of a window of `wanted` consecutive frames in a clip of `num_frames`, uniform over all that fit."""
    return hash_below(num_frames - wanted + 1, seed, _TEMPORAL_CROP, hash_text(key), visit)


def interval(most: int, *, seed: int, key: str, visit: int) -> int:
    """From one frame taken to the next, uniform in 1 … `most`."""
    return 1 + hash_below(most, seed, _INTERVAL, hash_text(key), visit)


def chunk(num_chunks: int, *, seed: int, key: str, visit: int) -> int:
    """Which of a clip's chunks a visit shows: each once in a round of `num_chunks` visits, whose order is its own."""
    round_, place = divmod(visit, num_chunks)
    order = hash64(seed, _CHUNK, hash_text(key), round_)
    return int(permute(np.array([place]), np.array([num_chunks]), np.array([order], np.uint64))[0])


def crop_place(*, seed: int, key: str, visit: int) -> tuple[int, int]:
    """Where a crop lies, from the left and from the top: shares of the room there is, in 2**-32."""
    name = hash_text(key)
    return hash_below(1 << 32, seed, _PLACE_LEFT, name, visit), hash_below(1 << 32, seed, _PLACE_TOP, name, visit)


def crop_scale(least: int, most: int, *, seed: int, key: str, visit: int) -> int:
    """How large a crop's sides are, uniform in `least` … `most`, all in 1 / FULL_SCALE of the largest crop's."""
    return least + hash_below(most - least + 1, seed, _SCALE, hash_text(key), visit)


def sample_seed(*, seed: int, key: str, visit: int) -> int:
    """What a training step may draw a delivery's noise and timestep from: 0 to 2**63 - 1."""
    return hash64(seed, _SAMPLE_SEED, hash_text(key), visit) >> 1


def substitute_visit(key: str, visit: int) -> int:
    """The visit of what takes a bad sample's place (BAD-1): its own, whichever sample it is and however often.

    Negative and below -2**62, where no pass and no repeat of tail="pad" has its visits (plan/step.py).
    """
    return -((1 << 63) - 1 - hash_below(1 << 61, _SUBSTITUTE, hash_text(key), visit))
