"""Signature of a part of a video: 80 bytes that change little if the video is scaled, re-encoded or slightly cropped.

The signature is computed from four samples (see figures.py) at fixed fractions of the part. Flat samples, such as black
ones, are omitted. Each sample is reduced to the lowest frequencies of its cosine transform, 8 in each direction.

- Appearance: for each sample and each frequency, whether the value is high, low, or near 0. Values near 0 are a third
  case because a copy easily changes their sign.
- Motion: the same for the three differences between the samples, in absolute levels. It distinguishes parts of the
  same fixed view. A logo or a border does not move and leaves it unchanged.

All arithmetic is in integers, so that a signature has the same bits on every machine.
"""

from __future__ import annotations

import base64
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Integers: TypeAlias = npt.NDArray[np.int64]
Words: TypeAlias = npt.NDArray[np.uint64]

_NUM_SAMPLES = 4
NUM_APPEARANCE_WORDS, NUM_WORDS = 2 * _NUM_SAMPLES, 2 * _NUM_SAMPLES + 2
"""Each sample has one word for high values and one for low values; motion also has one word of each kind."""
_NUM_VALUES = 63  # bits used of each word
_SIDE, _LEVEL = 8, 64  # frequencies per direction, and units per luma level
_COSINE = 1 << 10
_FLAT_LEVELS, _MOTION_LEVELS = 3, 0.5
_MOST_MOTION = 5  # sum of the frequencies of both directions

_U, _V = np.divmod(np.arange(_SIDE**2), _SIDE)
_SCALES = np.rint(_LEVEL * np.sqrt(2) ** ((_U > 0).astype(int) + (_V > 0))).astype(np.int64)
_WEIGHTS = np.rint(8 * np.hypot(_U, _V)).astype(np.int64)
"""Weights that compensate for the fact that, in natural pictures, values decrease as the frequency increases."""
_MOTION = np.flatnonzero(_U + _V <= _MOST_MOTION)
APPEARANCE_BITS = tuple(
    (word, 64 - value)
    for word in range(NUM_APPEARANCE_WORDS)
    for value in range(1, _NUM_VALUES + 1)
    if _U[value] + _V[value] < _SIDE - 1
)
"""Bits of the lower frequencies, which differ least between a video and its copy, as pairs (word, bit)."""
_DIFFERENCES = np.array([[1, 1, -1, -1], [1, -1, -1, 1], [1, -1, 1, -1]])


def spectrum(luma: npt.NDArray[np.uint8]) -> Integers:
    """Return the 64 lowest frequencies of a picture, in units of 1/64 luma level. luma: array with shape (H, W)."""
    height, width = luma.shape
    # Floating-point products of integers are exact here: no sum exceeds 2**53.
    found = _cosines(height) @ luma.astype(np.float64) @ _cosines(width).T
    return _divided(np.rint(found).astype(np.int64).ravel() * _SCALES, luma.size * _COSINE**2)


def signature_of(spectra: Integers) -> Words | None:
    """Return the signature of part of a video, or None if most of the samples in that part are flat.

    spectra: array with shape (number of samples, 64), in sample order.
    """
    clear = np.flatnonzero((spectra[:, 1:] ** 2).sum(axis=1) >= (_FLAT_LEVELS * _LEVEL) ** 2)
    if 2 * len(clear) < len(spectra) or not len(clear):
        return None
    chosen = spectra[clear[(2 * np.arange(_NUM_SAMPLES) + 1) * len(clear) // (2 * _NUM_SAMPLES)]]
    weighted = 2 * (chosen * _WEIGHTS)[:, 1:]
    near = np.median(np.abs(weighted), axis=1, keepdims=True) / 2
    appearance = np.stack([weighted > near, weighted < -near], axis=1)
    moves = (_DIFFERENCES @ chosen[:, _MOTION]).reshape(1, -1)
    least = int(_MOTION_LEVELS * _NUM_SAMPLES * _LEVEL)
    motion = np.stack([moves > least, moves < -least], axis=1)
    bits = np.concatenate([appearance, motion]).reshape(NUM_WORDS, _NUM_VALUES)
    return np.packbits(bits, axis=1).view(">u8").ravel().astype(np.uint64)


def to_text(words: Words) -> str:
    """Convert a signature to text for the index."""
    return base64.b64encode(words.astype(">u8").tobytes()).decode()


def from_text(text: str) -> Words:
    """Parse the output of `to_text`."""
    return np.frombuffer(base64.b64decode(text), ">u8").astype(np.uint64)


@lru_cache(64)
def _cosines(size: int) -> npt.NDArray[np.float64]:
    """Return the lowest-frequency cosine basis functions for `size` values, scaled to integers."""
    places = np.arange(_SIDE)[:, None] * (2 * np.arange(size) + 1)[None]
    return np.asarray(np.rint(_COSINE * np.cos(np.pi * places / (2 * size))))


def _divided(values: Integers, divisor: int) -> Integers:
    """Divide integers, and round the quotients to the nearest integer."""
    return np.asarray((2 * values + divisor) // (2 * divisor))
