"""Resampling by libswresample, independent of where a window begins.

The library's first output sample coincides with its first input sample. Input that starts at a multiple of
in_rate / gcd(in_rate, out_rate) therefore keeps the phase of the global grid, and every output sample is the same sum.
"""

from __future__ import annotations

import math
from typing import cast

import numpy as np

from streamvid.video.audio.samples import Float32s

_FILTER_SIZE = 32
_CUTOFF = 0.97
_CHUNK = 1 << 16


def phase_step(in_rate: int, out_rate: int) -> int:
    """Return the step, in input samples, at which input and output samples coincide."""
    return in_rate // math.gcd(in_rate, out_rate)


def reach(in_rate: int, out_rate: int) -> int:
    """Return how many input samples before and after an output sample's time contribute to it."""
    if in_rate == out_rate:
        return 0
    return math.ceil(_FILTER_SIZE / 2 / min(1.0, out_rate * _CUTOFF / in_rate)) + 2


def resample(samples: Float32s, in_rate: int, out_rate: int) -> Float32s:
    """Return `samples` (channels, n) at `out_rate`; the first samples of input and output coincide."""
    import av
    import av.filter
    from av.audio.frame import AudioFrame

    channels = len(samples)
    graph = av.filter.Graph()
    graph.threads = 1
    layout = {1: "mono", 2: "stereo", 6: "5.1", 8: "7.1"}[channels]
    source = graph.add(
        "abuffer", sample_rate=str(in_rate), sample_fmt="fltp", channel_layout=layout, time_base=f"1/{in_rate}"
    )
    sink = graph.add("abuffersink")
    graph.link_nodes(
        source, graph.add("aresample", f"{out_rate}:filter_size={_FILTER_SIZE}:cutoff={_CUTOFF}"), sink
    ).configure()
    parts = [np.zeros((channels, 0), np.float32)]

    def pull() -> None:
        while True:
            try:
                parts.append(cast("Float32s", cast("AudioFrame", sink.pull()).to_ndarray()))
            except (av.error.BlockingIOError, av.error.EOFError):
                return

    for start in range(0, samples.shape[1], _CHUNK):
        chunk = np.ascontiguousarray(samples[:, start : start + _CHUNK])
        frame = AudioFrame.from_ndarray(chunk, format="fltp", layout=layout)
        frame.sample_rate = in_rate
        source.push(frame)
        pull()
    source.push(None)
    pull()
    return np.concatenate(parts, axis=1)
