"""Conversion between PyAV's audio frames and arrays of samples, and filter graphs for audio.

This module avoids two defects of PyAV 17 and 18 that crash the process. PyAV counts the planes of a frame by reading
until a null pointer, which fails for planar frames of 8 and more channels; arrays are therefore exchanged in packed
formats. PyAV also frees the list of a custom channel order twice; such streams are refused.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from streamvid.errors import ProbeError
from streamvid.video.container import ffmpeg_errors
from streamvid.video.filters import Filters

if TYPE_CHECKING:
    from av.audio.frame import AudioFrame
    from av.audio.layout import AudioLayout

Float32s = npt.NDArray[np.float32]

_SAFE_PLANES = 7
#: Sample format → type of its values, value of silence, and bits of its largest value (0 for floating point).
_FORMATS = {
    "u8": ("u1", 128, 7),
    "s16": ("i2", 0, 15),
    "s32": ("i4", 0, 31),
    "flt": ("f4", 0, 0),
    "dbl": ("f8", 0, 0),
}


def check_layout(layout: AudioLayout) -> None:
    """Raise ProbeError for a channel order that has no name in FFmpeg.

    No other code may read the layout of such a stream or frame, because PyAV would free the same memory twice.
    """
    if " channels (" in layout.name or layout.name.startswith("ambisonic"):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(layout))  # so that this object never frees it
        raise ProbeError(
            f"the audio has the channel layout {layout.name}, which is not supported; re-encode the audio (ffmpeg -i "
            "IN -c:v copy -c:a aac -ac 2 OUT.mp4)",
            kind="audio-layout",
        )


def samples_of(frame: AudioFrame) -> Float32s:
    """Return a frame's samples as a float32 array of shape (channels, n). Integers are divided by 2^(bits - 1)."""
    from av.audio.resampler import AudioResampler

    name, channels = frame.format.name, frame.layout.nb_channels
    kind = name.removesuffix("p")
    if name != kind and channels > _SAFE_PLANES:
        packer = AudioResampler(format=kind, layout=frame.layout.name, rate=frame.sample_rate)
        (frame,) = packer.resample(frame)
    dtype, center, bits = _FORMATS[kind]
    count, planes = frame.samples, frame.planes
    # A plane of a decoded frame is longer than its samples. This is twice as fast as AudioFrame.to_ndarray.
    if frame.format.is_planar:
        out = np.empty((channels, count), np.float32)
        for channel, plane in zip(out, planes, strict=False):
            channel[:] = np.frombuffer(memoryview(plane), dtype, count)
    else:
        out = (
            np.frombuffer(memoryview(planes[0]), dtype, count * channels).reshape(count, channels).T.astype(np.float32)
        )
    if bits:
        out -= np.float32(center)
        out *= np.float32(2.0**-bits)
    return out


def frame_of(samples: Float32s, layout: str, sample_rate: int) -> AudioFrame:
    """Return a packed float frame that contains `samples`, an array of shape (channels, n)."""
    from av.audio.frame import AudioFrame

    packed = np.ascontiguousarray(samples.T, np.float32).reshape(1, -1)
    frame = AudioFrame.from_ndarray(packed, format="flt", layout=layout)
    frame.sample_rate = sample_rate
    return frame


class AudioChain:
    """Chain of FFmpeg filters for packed float audio.

    filters: (name, options) pairs, one per filter.
    layout, sample_rate: channel layout and sample rate of the input.
    out_layout: channel layout of the output, if it differs from the input's layout.
    """

    def __init__(self, filters: Filters, layout: str, sample_rate: int, out_layout: str = "") -> None:
        import av.filter

        self._layout, self._rate, self._count = layout, sample_rate, 0
        graph = av.filter.Graph()
        graph.threads = 1
        self._source = graph.add(
            "abuffer",
            sample_rate=str(sample_rate),
            sample_fmt="flt",
            channel_layout=layout,
            time_base=f"1/{sample_rate}",
        )
        self._sink = graph.add("abuffersink")
        every = [*filters, ("aformat", f"sample_fmts=flt:channel_layouts={out_layout or layout}")]
        nodes = [graph.add(name, options) for name, options in every]
        with ffmpeg_errors(f"the audio's channels ({layout}) cannot be converted; re-encode with ffmpeg -ac 2"):
            graph.link_nodes(self._source, *nodes, self._sink).configure()
        self._graph = graph

    def run(self, samples: Float32s | None) -> list[AudioFrame]:
        """Filter the next samples, an array of shape (channels, n), and return the frames that are ready.

        Pass None to end the input and get the remaining frames.
        """
        import av

        frame = None
        if samples is not None:
            frame = frame_of(samples, self._layout, self._rate)
            frame.pts = self._count
            self._count += samples.shape[1]
        self._source.push(frame)
        found = list["AudioFrame"]()
        while True:
            try:
                found.append(cast("AudioFrame", self._sink.pull()))
            except (av.error.BlockingIOError, av.error.EOFError):
                return found
