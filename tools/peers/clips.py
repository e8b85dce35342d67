"""What the peers' methods share: a clip in memory with its packets, the scaling that all do, one PyAV window.

Nothing of streamvid is imported here or beside: these files run in the peers' environment, which has none of it.
"""

from __future__ import annotations

import importlib.util
import io
import random
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import av
import numpy as np
from av.video.reformatter import VideoReformatter
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]


class PeerError(Exception):
    """What a peer cannot do, said to whoever asked."""


@dataclass(frozen=True)
class Clip:
    """A file in memory, and what a training set's metadata would say of it.

    - times: of the shown frames, ascending, in ticks of time_base (seconds).
    - packets: in decode order, data included, read beforehand.
    """

    data: bytes
    width: int
    height: int
    times: tuple[int, ...]
    time_base: float
    codec: str
    extradata: bytes | None
    packets: tuple[Any, ...]


@lru_cache(maxsize=64)
def load_clip(path: str) -> Clip:
    """The clip at `path`. PeerError where its packets do not name its frames."""
    data = Path(path).read_bytes()
    with av.open(io.BytesIO(data), "r") as container:
        stream = container.streams.video[0]
        packets = [packet for packet in container.demux(stream) if packet.size]
        context = stream.codec_context
        facts = (context.width, context.height, float(stream.time_base or 0), context.name, context.extradata)
    starts = [packet.pts for packet in packets if packet.is_keyframe and packet.pts is not None]
    shown = [packet.pts for packet in packets if not packet.is_discard]
    if not starts or None in shown:
        raise PeerError(f"{path}: its packets have no timestamps or no key frame")
    times = sorted(pts for pts in shown if pts is not None and pts >= starts[0])
    width, height, time_base, codec, extradata = facts
    return Clip(data, width, height, tuple(times), time_base, codec, extradata, tuple(packets))


def wanted_times(clip: Clip, start: int, num_frames: int, stride: int) -> list[int]:
    """Timestamps of the window's frames. PeerError if the clip has not so many."""
    if min(num_frames, stride) < 1 or not 0 <= start < len(clip.times) - (num_frames - 1) * stride:
        raise PeerError(f"no such window: {num_frames} frames from {start} by {stride}, of {len(clip.times)}")
    return [clip.times[start + i * stride] for i in range(num_frames)]


def covering(source: tuple[int, int], target: tuple[int, int]) -> tuple[int, int]:
    """The smallest (height, width) of the source's shape, (height, width), that covers the target."""
    scale = max(target[0] / source[0], target[1] / source[1])
    return max(target[0], round(source[0] * scale)), max(target[1], round(source[1] * scale))


def crop_offsets(full: tuple[int, int], target: tuple[int, int]) -> tuple[int, int]:
    """(top, left) of the centre crop."""
    return (full[0] - target[0]) // 2, (full[1] - target[1]) // 2


class Cover:
    """Frames of one size to RGB pictures (height, width, 3), uint8: scaled to cover by area, centre-cropped.

    One object a clip, so that swscale is set up once; one thread.
    """

    def __init__(self, height: int, width: int) -> None:
        self._target, self._reformatter = (height, width), VideoReformatter()

    def __call__(self, frame: Any, out: Pixels) -> None:
        full = covering((frame.height, frame.width), self._target)
        top, left = crop_offsets(full, self._target)
        scaled = self._reformatter.reformat(
            frame, width=full[1], height=full[0], format="rgb24", interpolation="AREA", threads=1
        )
        plane: Any = scaled.planes[0]
        pixels: Pixels = np.frombuffer(plane, np.uint8).reshape(plane.height, plane.line_size)
        rows = pixels[top : top + self._target[0], 3 * left : 3 * (left + self._target[1])]
        out[:] = rows.reshape(*self._target, 3)


def one_thread(stream: Any) -> None:
    """Decode in the calling thread."""
    stream.codec_context.thread_count = 1
    stream.codec_context.thread_type = "NONE"


def random_window(data: bytes, num_frames: int, size: tuple[int, int] | None) -> Pixels:
    """A random window of consecutive frames, (T, H, W, 3): seek, decode from the key frame, as a PyAV user does it.

    size: (height, width) to cover, None where clips have their size already. No index: the first frame is found by
    the average frame rate; a window that comes short at the end repeats its last frame.
    """
    with av.open(io.BytesIO(data), "r") as container:
        stream: Any = container.streams.video[0]
        one_thread(stream)
        rate, tick = stream.average_rate, stream.time_base
        seconds = stream.duration * tick if stream.duration else (container.duration or 0) / av.time_base
        count = stream.frames or round(float(seconds * rate))
        first = random.randint(0, max(0, count - num_frames))
        target = int((stream.start_time or 0) + first / rate / tick)
        height, width = size or (stream.codec_context.height, stream.codec_context.width)
        out, cover, slot = np.empty((num_frames, height, width, 3), np.uint8), Cover(height, width), 0
        container.seek(target, stream=stream)
        for frame in container.decode(stream):
            if frame.pts is None or frame.pts >= target:
                cover(frame, out[slot])
                slot += 1
                if slot == num_frames:
                    return out
    if not slot:
        raise PeerError(f"no frame came out from number {first} of {count} on")
    out[slot:] = out[slot - 1]
    return out


@cache
def stand_in_for_torchvision() -> None:
    """Lets torchvision be imported beside a torch without CUDA; nothing measured calls what is stood in for.

    The wheels of torchvision are built for CUDA. Beside another torch their library does not load, and the import ends
    at operators that are not there; torchcodec's transforms and mosaic streaming import it only to name its classes.
    """
    spec = importlib.util.find_spec("torchvision")
    libraries = [
        file for place in (spec and spec.submodule_search_locations) or () for file in Path(place).glob("_C*.so")
    ]
    if not libraries:
        return
    import torch

    try:
        torch.ops.load_library(str(libraries[0]))
    except OSError:
        operators = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept.append(operators)


_kept: list[object] = []  # a library that is collected takes its operators along
