"""Videos for viewing: pictures as PNG or JPEG, a contact sheet of frames, and an MP4 that browsers can play."""

from __future__ import annotations

import io
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from av.video.frame import VideoFrame

_MAX_COLUMNS = 8
_JPEG_QUALITY = 5  # FFmpeg's scale: 2 is best, 31 is worst


def contact_sheet(videos: npt.NDArray[np.uint8]) -> bytes:
    """Return a PNG of uint8 videos of shape (B, T, H, W, 3): one row per video, with up to 8 evenly spaced frames."""
    numbers = np.linspace(0, videos.shape[1] - 1, min(_MAX_COLUMNS, videos.shape[1])).round().astype(int)
    rows = [np.concatenate(list(video[numbers]), axis=1) for video in videos]
    sheet = np.ascontiguousarray(np.concatenate(rows, axis=0))
    return png(sheet)


def strip(video: npt.NDArray[np.uint8], num_frames: int, width: int) -> tuple[bytes, int]:
    """Return a JPEG that shows evenly spaced frames of a video side by side, and the number of frames shown.

    video: uint8 array of shape (T, H, W, 3).
    num_frames: maximum number of frames to show.
    width: width of each frame in pixels.
    """
    numbers = np.linspace(0, len(video) - 1, min(num_frames, len(video))).round().astype(int)
    small = [_frame(video[number]).reformat(*_size(video[number], width)) for number in numbers]
    return jpeg(np.concatenate([frame.to_ndarray(format="rgb24") for frame in small], axis=1)), len(numbers)


def png(picture: npt.NDArray[np.uint8]) -> bytes:
    """Return a lossless PNG of a uint8 picture, which has the shape (H, W, 3) for RGB or (H, W, 1) for gray."""
    return _encoded(_frame(picture), "png", "rgb24" if picture.shape[2] == 3 else "gray")


def jpeg(picture: npt.NDArray[np.uint8], max_width: int | None = None) -> bytes:
    """Return a JPEG of a uint8 picture, which has the shape (H, W, 3) for RGB or (H, W, 1) for gray.

    max_width: maximum width in pixels. Wider pictures are scaled down.
    """
    pixels, (width, height) = "yuvj420p", _size(picture, min(max_width or picture.shape[1], picture.shape[1]))
    frame = _frame(picture).reformat(width, height, pixels, dst_colorspace="ITU601", dst_color_range="JPEG")
    return _encoded(frame, "mjpeg", pixels)


def _size(picture: npt.NDArray[np.uint8], width: int) -> tuple[int, int]:
    """Return the (width, height) of a picture after it is scaled to the given width."""
    return width, max(1, round(picture.shape[0] * width / picture.shape[1]))


def _frame(picture: npt.NDArray[np.uint8]) -> VideoFrame:
    import av

    picture = np.ascontiguousarray(picture if picture.shape[2] == 3 else picture[:, :, 0])
    return av.VideoFrame.from_ndarray(picture, format="rgb24" if picture.ndim == 3 else "gray")


def _encoded(frame: VideoFrame, codec: Literal["png", "mjpeg"], pixels: str) -> bytes:
    import av

    encoder = av.CodecContext.create(codec, "w")
    encoder.height = frame.height
    encoder.width = frame.width
    encoder.pix_fmt = pixels
    encoder.time_base = Fraction(1, 25)
    if codec == "mjpeg":
        encoder.color_range = 2  # the encoder accepts full range only
        encoder.qmin = encoder.qmax = _JPEG_QUALITY
    return b"".join(bytes(packet) for packet in [*encoder.encode(frame), *encoder.encode(None)])


def movie(videos: npt.NDArray[np.uint8], fps: float) -> bytes:
    """Return an H.264 MP4 that shows uint8 videos of shape (B, T, H, W, 3) side by side at `fps` frames per second."""
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
