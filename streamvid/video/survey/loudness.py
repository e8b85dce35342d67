"""Integrated loudness (EBU R128, ITU-R BS.1770-4).

FFmpeg's biquad filters weight the samples, and numpy measures blocks of 400 ms. FFmpeg's own meter (ebur128) reports
its result as metadata of frames, which PyAV 17 does not expose.
"""

from __future__ import annotations

import math
from array import array

import numpy as np

from streamvid.video.audio.frames import AudioChain, Float32s, samples_of

_ABSOLUTE_GATE, _RELATIVE_GATE = -70.0, -10.0  # LUFS, LU
_MIN_RATE = 8000  # below, most of the weighting filter's range is missing
_BATCH = 1 << 14
_STEPS_PER_SECOND, _STEPS_PER_BLOCK = 10, 4
#: BS.1770: low-frequency channels do not count, and channels to the sides and behind count by 1.5 dB more.
_WEIGHTS = {"LFE": 0.0, "LFE2": 0.0, **dict.fromkeys(("BL", "BR", "BC", "SL", "SR"), 1.41)}


class LoudnessMeter:
    """Loudness meter for samples of one format. `layout` is FFmpeg's name for the channel layout."""

    def __init__(self, sample_rate: int, layout: str) -> None:
        from av.audio.layout import AudioLayout

        if layout.endswith(" channels"):  # they have no names, so FFmpeg's default layout of as many channels applies
            layout = _default_layout(layout)
        self._is_possible = sample_rate >= _MIN_RATE
        self._chain = AudioChain(_weighting(max(sample_rate, _MIN_RATE)), layout, sample_rate)
        self._weights = np.array([[_WEIGHTS.get(channel.name, 1.0)] for channel in AudioLayout(layout).channels])
        self._step = round(sample_rate / _STEPS_PER_SECOND)
        self._waiting: list[Float32s] = []
        self._rest = np.zeros(0)
        self._powers = array("d")

    def add(self, samples: Float32s) -> None:
        """Measure the next audio samples, an array of shape (channels, n)."""
        self._waiting.append(samples)
        if sum(part.shape[1] for part in self._waiting) >= _BATCH:
            self._run()

    def finish(self) -> float | None:
        """Return the loudness in LUFS.

        Return None if all audio is below the gate of -70 LUFS, or if the sample rate is below 8 kHz.
        """
        self._run()
        powers = np.array(self._powers)
        if len(powers) < _STEPS_PER_BLOCK or not self._is_possible:
            return None
        blocks = np.convolve(powers, np.full(_STEPS_PER_BLOCK, 1 / _STEPS_PER_BLOCK), "valid")
        blocks = blocks[blocks > _power(_ABSOLUTE_GATE)]
        if not len(blocks):
            return None
        gate = _loudness(float(blocks.mean())) + _RELATIVE_GATE
        return _loudness(float(blocks[blocks > _power(gate)].mean()))

    def _run(self) -> None:
        if not self._waiting:
            return
        for frame in self._chain.run(np.concatenate(self._waiting, axis=1)):
            self._rest = np.append(self._rest, (samples_of(frame).astype(np.float64) ** 2 * self._weights).sum(axis=0))
        self._waiting.clear()
        whole = len(self._rest) // self._step * self._step
        self._powers.extend(self._rest[:whole].reshape(-1, self._step).mean(axis=1))
        self._rest = self._rest[whole:]


def _default_layout(layout: str) -> str:
    """Return `layout`, or FFmpeg's default layout if `layout` states only a number of channels ("2 channels")."""
    from av.audio.layout import AudioLayout

    try:
        return AudioLayout(f"{layout.split(maxsplit=1)[0]}c").name
    except ValueError:
        return layout


def _loudness(power: float) -> float:
    return -0.691 + 10 * math.log10(power)


def _power(loudness: float) -> float:
    return float(10 ** ((loudness + 0.691) / 10))


def _weighting(rate: int) -> list[tuple[str, str]]:
    """Return the BS.1770 filters (high-shelf and high-pass), converted from 48 kHz to another sample rate."""
    k = math.tan(math.pi * 1681.974450955533 / rate)
    gain, q = 10 ** (3.999843853973347 / 20), 0.7071752369554196
    band, scale = gain**0.4996667741545416, 1 + k / q + k * k
    shelf = (gain + band * k / q + k * k, 2 * (k * k - gain), gain - band * k / q + k * k)
    poles = (2 * (k * k - 1) / scale, (1 - k / q + k * k) / scale)
    k = math.tan(math.pi * 38.13547087602444 / rate)
    low_q = 0.5003270373238773
    low = 1 + k / low_q + k * k
    low_poles = (2 * (k * k - 1) / low, (1 - k / low_q + k * k) / low)
    return [
        _biquad((shelf[0] / scale, shelf[1] / scale, shelf[2] / scale), poles),
        _biquad((1.0, -2.0, 1.0), low_poles),
    ]


def _biquad(zeros: tuple[float, float, float], poles: tuple[float, float]) -> tuple[str, str]:
    names = [("b0", zeros[0]), ("b1", zeros[1]), ("b2", zeros[2]), ("a0", 1.0), ("a1", poles[0]), ("a2", poles[1])]
    return "biquad", ":".join(f"{name}={value:.17g}" for name, value in names) + ":precision=f64"
