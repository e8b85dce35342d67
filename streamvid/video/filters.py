"""Chains of FFmpeg filters."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, TypeAlias, cast

if TYPE_CHECKING:
    from av.video.frame import VideoFrame

Filters: TypeAlias = list[tuple[str, str]]
"""(name, options) pairs of FFmpeg filters, in the order in which frames pass through them."""


class FilterChain:
    """Chain of FFmpeg filters that returns one frame for each input frame.

    frame: any frame with the same size and pixel format as the inputs.
    matrix, color_range: color matrix and range of all inputs, as FFmpeg numbers.
    """

    def __init__(self, frame: VideoFrame, filters: Filters, *, matrix: int, color_range: int) -> None:
        import av.filter
        from av.video.format import VideoFormat

        self._colors = (matrix, color_range)
        self._graph = av.filter.Graph()
        self._graph.threads = 1
        source = self._graph.add(
            "buffer",
            video_size=f"{frame.width}x{frame.height}",
            pix_fmt=str(int(VideoFormat(frame.format.name))),  # type: ignore[call-overload]
            time_base="1/1",
            pixel_aspect="1/1",
            colorspace=str(matrix),
            range=str(color_range),
        )
        nodes = [source, *(self._graph.add(name, options) for name, options in filters)]
        nodes.append(self._graph.add("buffersink"))
        self._graph.link_nodes(*nodes).configure()
        self._source, self._sink = nodes[0], nodes[-1]
        # A graph of PyAV 19 and its filters reference each other, so that pictures would stay in memory until the
        # garbage collector runs. The graph needs its registers of filters only until it is configured.
        for register in gc.get_referents(self._graph):
            if isinstance(register, dict):
                register.clear()

    def run(self, frame: VideoFrame) -> VideoFrame:
        """Return the filtered frame."""
        # The filter source was configured with these color tags, and would reject a frame with different ones.
        frame.colorspace, frame.color_range = self._colors
        self._source.push(frame)
        return cast("VideoFrame", self._sink.pull())
