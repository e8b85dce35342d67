"""Integrated loudness (EBU R128), measured by FFmpeg's ebur128 filter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from streamvid.video.audio.samples import Float32s

if TYPE_CHECKING:
    from av.filter.context import FilterContext

_GATE_LUFS = -70.0


class LoudnessMeter:
    """Meter for samples of one format. layout: FFmpeg's name of the channels."""

    def __init__(self, sample_rate: int, layout: str) -> None:
        import av.filter

        self._rate, self._layout, self._count = sample_rate, layout, 0
        self._graph = av.filter.Graph()
        self._graph.threads = 1
        source = self._graph.add(
            "abuffer",
            sample_rate=str(sample_rate),
            sample_fmt="fltp",
            channel_layout=layout,
            time_base=f"1/{sample_rate}",
        )
        meter = self._graph.add("ebur128", "metadata=1:framelog=quiet")
        self._source, self._sink = source, self._graph.add("abuffersink")
        self._graph.link_nodes(source, meter, self._sink).configure()
        self._found = _GATE_LUFS

    def add(self, samples: Float32s) -> None:
        """Measure further samples (channels, n)."""
        from av.audio.frame import AudioFrame

        frame = AudioFrame.from_ndarray(np.ascontiguousarray(samples), format="fltp", layout=self._layout)
        frame.sample_rate, frame.pts = self._rate, self._count
        self._count += samples.shape[1]
        self._source.push(frame)
        self._pull()

    def finish(self) -> float | None:
        """Return the loudness in LUFS, or None if nothing is louder than the gate of -70 LUFS."""
        self._source.push(None)
        self._pull()
        return None if self._found <= _GATE_LUFS else self._found

    def _pull(self) -> None:
        for frame in _frames(self._sink):
            found = frame.metadata.get("lavfi.r128.I")
            if found is not None:
                self._found = float(found)


def _frames(sink: FilterContext) -> list[Any]:
    import av

    found = []
    while True:
        try:
            found.append(sink.pull())
        except (av.error.BlockingIOError, av.error.EOFError):
            return found
