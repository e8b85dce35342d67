"""Integrated loudness (EBU R128), measured by FFmpeg's ebur128 filter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamvid.video.audio.frames import AudioChain, Float32s

if TYPE_CHECKING:
    from av.audio.frame import AudioFrame

_GATE_LUFS = -70.0


class LoudnessMeter:
    """Meter for samples of one format. layout: FFmpeg's name of the channels."""

    def __init__(self, sample_rate: int, layout: str) -> None:
        self._chain = AudioChain("ebur128", "metadata=1:framelog=quiet", layout, sample_rate)
        self._found = _GATE_LUFS

    def add(self, samples: Float32s) -> None:
        """Measure further samples (channels, n)."""
        self._see(self._chain.run(samples))

    def finish(self) -> float | None:
        """Return the loudness in LUFS, or None if nothing is louder than the gate of -70 LUFS."""
        self._see(self._chain.run(None))
        return None if self._found <= _GATE_LUFS else self._found

    def _see(self, frames: list[AudioFrame]) -> None:
        for frame in frames:
            found = frame.metadata.get("lavfi.r128.I")
            if found is not None:
                self._found = float(found)
