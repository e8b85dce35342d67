"""Audio files without video, whose samples identify their file and position."""

from __future__ import annotations

import wave
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.sounding import chirps

RATE = 48_000


@cache
def samples_of(number: int, seconds: float) -> NDArray[np.int16]:
    """Return the samples of file `number`, as an array (channels, samples)."""
    return chirps(seconds, RATE, seed=number)


def write_wav(path: Path, samples: NDArray[np.int16], rate: int = RATE) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(len(samples))
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.ascontiguousarray(samples.T).tobytes())
