"""Videos with known hard cuts: excerpts from the scenes of real clips, with brightness fades within and across them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.clips import encode, frames_of

SCENES = (
    *(("bikes", *scene) for scene in ((0, 30), (30, 76), (76, 137), (137, 187), (187, 242))),
    ("bigbuckbunny", 0, 132),
    ("carphone_pristine", 0, 120),
)
"""Scenes of the real clips: (clip, first frame, frame after the last). The author of "bikes" made its cuts."""
ENCODINGS: tuple[dict[str, Any], ...] = (
    {"codec": "libx264"},
    {"codec": "libx264", "options": {"g": "250", "crf": "32", "preset": "veryfast"}},
    {"codec": "mpeg4", "container": "avi", "options": {"g": "60", "bf": "0", "qscale": "6", "flags": "+qscale"}},
    {"codec": "libx265", "options": {"preset": "ultrafast", "x265-params": "log-level=none"}},
    {"codec": "libvpx-vp9", "container": "webm", "options": {"deadline": "realtime", "cpu-used": "8"}},
    {"codec": "mpeg2video", "container": "mpegts", "options": {"g": "15", "bf": "2", "qscale": "5"}},
    {"codec": "ffv1", "container": "matroska"},
)
RATES = (12, 15, 24, 25, 30, 50, 60)
SIZES = ((192, 108), (160, 120), (108, 192), (256, 110), (320, 180))


@dataclass(frozen=True)
class SceneVideo:
    """An encoded video and its cuts: the frame numbers at which new scenes begin."""

    data: bytes
    cuts: tuple[int, ...]
    fps: int
    name: str


def scene_video(seed: int) -> SceneVideo:
    """Build a video of 3 to 8 excerpts of at least 8 frames each, some mirrored, enlarged or sped up."""
    rng = random.Random(seed)
    width, height = rng.choice(SIZES)
    fps, encoding = rng.choice(RATES), ENCODINGS[seed % len(ENCODINGS)]
    pieces: list[NDArray[np.uint8]] = []
    last = None
    for _ in range(rng.randint(3, 8)):
        last = rng.choice([scene for scene in SCENES if scene != last])
        pieces.append(_piece(rng, last, width, height))
    cuts = np.cumsum([len(piece) for piece in pieces])[:-1]
    frames = np.concatenate(pieces)
    gains = _gains(rng, len(frames))
    frames = np.clip(frames * gains[:, None, None, None], 0, 255).astype(np.uint8)
    name = f"{seed}: {encoding['codec']} {width}x{height} at {fps}"
    data = encode(frames, fps=fps, numbered=False, **encoding)
    return SceneVideo(data, tuple(map(int, cuts)), fps, name)


def _piece(rng: random.Random, scene: tuple[str, int, int], width: int, height: int) -> NDArray[np.uint8]:
    clip, first, stop = scene
    zoom, step = rng.choice([1, 1, 2]), rng.choice([1, 1, 2])
    frames = frames_of(clip, width * zoom, height * zoom, stop)[first:stop:step]
    length = min(len(frames), rng.randint(8, 60))
    begin = rng.randint(0, len(frames) - length)
    left, top = (rng.randint(0, side * (zoom - 1)) for side in (width, height))
    found = frames[begin : begin + length, top : top + height, left : left + width]
    return found[:, :, ::-1] if rng.random() < 0.3 else found


def _gains(rng: random.Random, count: int) -> NDArray[np.float64]:
    """Return a brightness factor per frame: up to three slow dips, and sometimes a fade-in or fade-out."""
    gains = np.ones(count)
    for _ in range(rng.randint(0, 3)):
        length, depth = rng.randint(10, 40), rng.uniform(0.4, 0.9)
        at = rng.randint(0, count - 1)
        dip = 1 - (1 - depth) * np.sin(np.linspace(0, np.pi, length))
        part = gains[at : at + length]
        part *= dip[: len(part)]
    ramp = np.linspace(0, 1, rng.randint(6, 8))
    if rng.random() < 0.3:
        gains[: len(ramp)] *= ramp
    if rng.random() < 0.3:
        gains[-len(ramp) :] *= ramp[::-1]
    return np.maximum(gains, 0)
