"""A chain of FFmpeg's filters as an object: a frame goes in, a frame comes out."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from av.video.frame import VideoFrame


class FilterChain:
    """Filters for frames of one size, pixel format, colour matrix and range (FFmpeg's numbers for the last two).

    FFmpeg's buffer source refuses frames that differ from what it was told, so that all four are told.
    """

    def __init__(self, frame: VideoFrame, filters: list[tuple[str, str]], *, matrix: int, color_range: int) -> None:
        import av.filter
        from av.video.format import VideoFormat

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

    def run(self, frame: VideoFrame) -> VideoFrame:
        """The filtered frame."""
        self._source.push(frame)
        return cast("VideoFrame", self._sink.pull())
