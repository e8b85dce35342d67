"""One decode pass over a file, in which an observer sees small pictures of chosen frames.

The pictures are upright, without the margins that the container crops, and full-range BT.601, whatever the source's
orientation and colors are. They have the same pixels on every processor, so that measurements are the same on every
machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from streamvid.errors import DecodeError
from streamvid.video.container import Source, VideoFile, open_video
from streamvid.video.decode.file import decode_from, from_key_frame
from streamvid.video.encode.cover import Cover
from streamvid.video.frame_format import read_frame_format
from streamvid.video.limits import LIMITS, Limits
from streamvid.video.packets import PacketTable, read_packets

if TYPE_CHECKING:
    from av.video.frame import VideoFrame
    from av.video.plane import VideoPlane

MIN_SIDE = 16
"""Smallest side of a picture. Frames with a smaller side are enlarged."""


class Picture(NamedTuple):
    """Planes of one picture in full-range BT.601: uint8 luma of shape (H, W), and uint8 chroma of shape (H/2, W/2)."""

    luma: npt.NDArray[np.uint8]
    u: npt.NDArray[np.uint8]
    v: npt.NDArray[np.uint8]


class FrameView:
    """Decoded frame, as passed to an observer, and its frame number. Valid only until `see` returns."""

    def __init__(self, number: int, frame: VideoFrame, pictures: _Pictures) -> None:
        self.number = number
        self._frame, self._pictures = frame, pictures

    def picture(self, longer_side: int) -> Picture:
        """Return the frame scaled down so that its longer side has `longer_side` pixels.

        The frame is enlarged only if a side would otherwise have fewer than MIN_SIDE pixels.
        """
        return self._pictures.picture(self._frame, longer_side)


class Observer(Protocol):
    """Receiver for the frames from one decode pass."""

    def see(self, frame: FrameView) -> None:
        """Process the next chosen frame. Frames are passed in ascending order."""


_Observer = TypeVar("_Observer", bound=Observer)


def survey(
    source: Source,
    choose: Callable[[PacketTable], Sequence[int]],
    begin: Callable[[PacketTable], _Observer],
    limits: Limits = LIMITS,
) -> _Observer:
    """Decode a video or an image once, show the chosen frames to an observer, and return the observer.

    source: as for `decode_into`.
    choose: function that returns at least one frame number. The numbers are distinct and ascending.
    begin: function that creates the observer. It is called again if decoding must restart from an earlier key frame.

    Raises ProbeError if the file is not supported (see `probe`), and DecodeError if a frame does not decode.
    """
    with open_video(source, limits) as video:
        table = read_packets(video)
        numbers = choose(table)

        def observe(key: tuple[int, int]) -> _Observer:
            observer, pictures, num_seen = begin(table), _Pictures(video), 0

            def take(frame: VideoFrame, place: int) -> None:
                nonlocal num_seen
                if place != num_seen:
                    raise DecodeError(
                        f"frame {numbers[place]} decodes before frame {numbers[num_seen]}: the timestamps of the "
                        "source are wrong; re-encode the source (ffmpeg -i IN OUT.mp4)"
                    )
                num_seen += 1
                observer.see(FrameView(numbers[place], frame, pictures))

            decode_from(video, table, key, numbers, take)
            return observer

        return from_key_frame(table, numbers, observe)


class _Pictures:
    """Converter that turns a video's frames into pictures of several sizes."""

    def __init__(self, video: VideoFile) -> None:
        self._video = video
        self._covers: dict[int, Cover] = {}

    def picture(self, frame: VideoFrame, longer_side: int) -> Picture:
        if longer_side not in self._covers:
            width, height = _size(read_frame_format(self._video, frame).display_size, longer_side)
            self._covers[longer_side] = Cover(self._video, frame, height, width, pixel_format="yuvj420p")
        found = self._covers[longer_side].picture(frame)
        luma, u, v = found.planes
        return Picture(_pixels(luma), _pixels(u), _pixels(v))


def _size(size: tuple[int, int], longer_side: int) -> tuple[int, int]:
    """Return a (width, height) with even sides and about the same aspect ratio as `size`."""
    most = max(size)
    wanted = min(most, longer_side)
    width, height = (max(MIN_SIDE, (side * wanted + most) // (2 * most) * 2) for side in size)
    return width, height


def _pixels(plane: VideoPlane) -> npt.NDArray[np.uint8]:
    shape, strides = (plane.height, plane.width), (plane.line_size, 1)
    return np.ndarray(shape, np.uint8, memoryview(plane), 0, strides).copy()
