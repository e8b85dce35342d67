"""Channel mixing with libswresample's matrices (ITU-R BS.775).

The matrices are normalized as for integers, so that a mix of full-scale channels does not exceed full scale. A mono
track is copied unchanged to both stereo channels.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from streamvid.video.audio.frames import AudioChain, Float32s, samples_of
from streamvid.video.audio.grid import LAYOUTS

_ANY_RATE = 48000
_CHUNK = 1 << 14  # larger arrays get fresh memory from the system, whose first use is slow


def mix(samples: Float32s, layout: str, num_channels: int) -> Float32s:
    """Mix `samples`, which has shape (channels of `layout`, n), into an array of shape (num_channels, n)."""
    matrix = mixing_matrix(layout, len(samples), num_channels)
    if matrix is None:
        return samples
    out = np.empty((num_channels, samples.shape[1]), np.float32)
    for start in range(0, samples.shape[1], _CHUNK):
        places = slice(start, start + _CHUNK)
        _mix(samples[:, places], matrix, out[:, places])
    return out


def _mix(samples: Float32s, matrix: Float32s, out: Float32s) -> None:
    # Explicit sums: a matrix product may round differently depending on a sample's place in the array.
    for channel, row in zip(out, matrix, strict=True):
        channel[:] = 0
        for source, weight in zip(samples, row, strict=True):
            if weight:
                channel[:] += source if weight == 1 else source * weight


@lru_cache(64)
def mixing_matrix(layout: str, num_sources: int, num_channels: int) -> Float32s | None:
    """Return the mixing matrix, which has shape (num_channels, num_sources), or None if no mixing is needed.

    Each column is libswresample's output for an input of 1 in a single channel.
    """
    target = LAYOUTS[num_channels]
    if layout == target:
        return None
    if (layout, target) == ("mono", "stereo"):
        return np.ones((2, 1), np.float32)  # libswresample lowers it by 3 dB, and stereo to mono does not undo that
    chain = AudioChain([("aresample", "rematrix_maxval=1")], layout, _ANY_RATE, target)
    frames = [*chain.run(np.eye(num_sources, dtype=np.float32)), *chain.run(None)]
    return np.concatenate([samples_of(frame) for frame in frames], axis=1)
