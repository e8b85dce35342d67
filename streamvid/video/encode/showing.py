"""Videos for viewing: a contact sheet of frames as a PNG, and an MP4 that browsers can play."""

from __future__ import annotations

import io
from fractions import Fraction

import numpy as np
import numpy.typing as npt

_MAX_COLUMNS = 8


def contact_sheet(videos: npt.NDArray[np.uint8]) -> bytes:
    """Return a PNG of uint8 videos (B, T, H, W, 3): one row per video, with up to 8 evenly spaced frames."""
    import av

    numbers = np.linspace(0, videos.shape[1] - 1, min(_MAX_COLUMNS, videos.shape[1])).round().astype(int)
    rows = [np.concatenate(list(video[numbers]), axis=1) for video in videos]
    sheet = np.ascontiguousarray(np.concatenate(rows, axis=0))
    encoder = av.CodecContext.create("png", "w")
    encoder.height = sheet.shape[0]
    encoder.width = sheet.shape[1]
    encoder.pix_fmt = "rgb24"
    encoder.time_base = Fraction(1, 25)
    frame = av.VideoFrame.from_ndarray(sheet, format="rgb24")
    return b"".join(bytes(packet) for packet in [*encoder.encode(frame), *encoder.encode(None)])


def movie(videos: npt.NDArray[np.uint8], fps: float) -> bytes:
    """Return an H.264 MP4 of uint8 videos (B, T, H, W, 3), side by side, with `fps` frames per second."""
    import av

    pictures = np.concatenate(list(videos), axis=2)
    height, width = (size + size % 2 for size in pictures.shape[1:3])  # H.264 with 4:2:0 needs even sizes
    sink = io.BytesIO()
    with av.open(sink, "w", format="mp4") as container:
        rate = Fraction(fps).limit_denominator(1001)
        stream = container.add_stream("libx264", rate=rate, options={"crf": "18"})
        stream.height = height
        stream.width = width
        stream.pix_fmt = "yuv420p"
        for picture in pictures:
            padded = np.pad(picture, ((0, height - picture.shape[0]), (0, width - picture.shape[1]), (0, 0)), "edge")
            container.mux(stream.encode(av.VideoFrame.from_ndarray(padded, format="rgb24")))
        container.mux(stream.encode(None))
    return sink.getvalue()
