"""Integrated loudness (EBU R128), measured by FFmpeg's ebur128 filter."""

from __future__ import annotations

from streamvid.video.audio.frames import AudioChain, Float32s

_GATE_LUFS = -70.0
_MIN_RATE, _MAX_RATE = 8000, 384_000  # FFmpeg's weighting filter is unstable or silent beyond


class LoudnessMeter:
    """Meter for samples of one format. layout: FFmpeg's name of the channels.

    It measures nothing below 8 kHz and above 384 kHz.
    """

    def __init__(self, sample_rate: int, layout: str) -> None:
        self._chain = None
        if _MIN_RATE <= sample_rate <= _MAX_RATE:
            self._chain = AudioChain("ebur128", "metadata=1:framelog=quiet", layout, sample_rate)
        self._found = _GATE_LUFS

    def add(self, samples: Float32s) -> None:
        """Measure further samples (channels, n)."""
        self._run(samples)

    def finish(self) -> float | None:
        """Return the loudness in LUFS, or None if nothing is louder than the gate of -70 LUFS."""
        self._run(None)
        return None if self._found <= _GATE_LUFS else self._found

    def _run(self, samples: Float32s | None) -> None:
        for frame in self._chain.run(samples) if self._chain is not None else []:
            found = frame.metadata.get("lavfi.r128.I")
            if found is not None:
                self._found = float(found)
