"""Mixing of channels by libswresample's default matrices (ITU-R BS.775 coefficients, without normalization)."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from streamvid.video.audio.grid import LAYOUTS
from streamvid.video.audio.samples import Float32s


def mix(samples: Float32s, layout: str, num_channels: int) -> Float32s:
    """Return `samples` (channels of `layout`, n) mixed to (num_channels, n)."""
    matrix = mixing_matrix(layout, len(samples), num_channels)
    if matrix is None:
        return samples
    # Explicit sums: a matrix product may round differently depending on a sample's place in the array.
    out = np.zeros((num_channels, samples.shape[1]), np.float32)
    for target, row in enumerate(matrix):
        for source, weight in enumerate(row):
            if weight == 1:
                out[target] += samples[source]
            elif weight:
                out[target] += samples[source] * weight
    return out


@lru_cache(64)
def mixing_matrix(layout: str, num_sources: int, num_channels: int) -> npt.NDArray[np.float32] | None:
    """Return libswresample's matrix (num_channels, num_sources), or None if no mixing is needed.

    Its columns are what the library makes of 1 in a single channel.
    """
    from av.audio.frame import AudioFrame
    from av.audio.resampler import AudioResampler

    target = LAYOUTS[num_channels]
    if layout == target:
        return None
    resampler = AudioResampler(format="fltp", layout=target)
    frame = AudioFrame.from_ndarray(np.eye(num_sources, dtype=np.float32), format="fltp", layout=layout)
    frame.sample_rate = 48000
    parts = [part.to_ndarray() for part in [*resampler.resample(frame), *resampler.resample(None)]]
    return np.concatenate(parts, axis=1).astype(np.float32)
