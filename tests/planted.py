"""Visually distinct scenes made of pieces of real clips, and modified copies like those found on the web."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import av
import numpy as np

from tests.clips import encode, frames_of

Frames: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
WIDTH, HEIGHT, NUM_FRAMES, FPS = 96, 64, 16, 16
_CLIPS = (("bigbuckbunny", 320, 180, 130), ("bikes", 320, 136, 250), ("carphone_pristine", 176, 144, 120))
_SHARE = 0.05  # part of each side that a crop removes
_STILL = 0.2  # share of scenes without motion


def scenes(seed: int) -> Iterator[Frames]:
    """Yield different scenes endlessly: one to three moving pieces over a panning background; one in five is still."""
    rng = np.random.default_rng(seed)
    sources = [frames_of(*clip)[::10] for clip in _CLIPS]
    while True:
        speed = 0.0 if rng.random() < _STILL else 1.0
        back = _piece(rng, sources, WIDTH + 32, HEIGHT, 0.2, 0.6)
        frames = np.stack([back[:, place : place + WIDTH] for place in _path(rng, 16, 16 * speed, 32)])
        for _ in range(rng.integers(1, 4)):
            height, width = int(rng.uniform(0.3, 0.7) * HEIGHT), int(rng.uniform(0.25, 0.6) * WIDTH)
            piece = _piece(rng, sources, width, height, 0.15, 0.4)
            tops = _path(rng, rng.uniform(0, HEIGHT - height), 10 * speed, HEIGHT - height)
            lefts = _path(rng, rng.uniform(0, WIDTH - width), 20 * speed, WIDTH - width)
            for frame, top, left in zip(frames, tops, lefts, strict=True):
                frame[top : top + height, left : left + width] = piece
        yield frames


def _path(rng: np.random.Generator, start: float, reach: float, most: int) -> list[int]:
    """Return positions along a straight line."""
    places = start + rng.uniform(-reach, reach) * np.linspace(0, 1, NUM_FRAMES)
    return [int(place) for place in np.clip(places, 0, most)]


def _piece(rng: np.random.Generator, sources: Sequence[Frames], width: int, height: int, *shares: float) -> Frames:
    """Cut a part out of a real frame, with random flips, levels and color order."""
    clip = sources[rng.integers(len(sources))]
    frame = clip[rng.integers(len(clip))]
    rows = int(frame.shape[0] * rng.uniform(*shares))
    columns = min(frame.shape[1], rows * width // height)
    top, left = rng.integers(frame.shape[0] - rows + 1), rng.integers(frame.shape[1] - columns + 1)
    part = frame[top : top + rows, left : left + columns][:: rng.choice([1, 1, -1]), :: rng.choice([1, -1])]
    levels = 255 * (np.arange(256) / 255) ** rng.uniform(0.6, 1.6)
    return levels.astype(np.uint8)[_scaled(part[None], width, height)[0]][..., rng.permutation(3)]


def _scaled(frames: Frames, width: int, height: int) -> Frames:
    whole = (av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24") for frame in frames)
    return np.stack([frame.reformat(width, height, interpolation="BICUBIC").to_ndarray() for frame in whole])


def scale(rng: np.random.Generator, frames: Frames) -> Frames:
    factor = rng.uniform(0.5, 1.6)
    return _scaled(frames, *(int(side * factor) // 2 * 2 for side in (frames.shape[2], frames.shape[1])))


def crop(rng: np.random.Generator, frames: Frames) -> Frames:
    """Cut 5 % off the width and the height, split at random between opposite edges."""
    rows, columns = (round(side * _SHARE) for side in frames.shape[1:3])
    top, left = rng.integers(rows + 1), rng.integers(columns + 1)
    part = frames[:, top : top + frames.shape[1] - rows, left : left + frames.shape[2] - columns]
    return _scaled(part, *(side // 2 * 2 for side in (part.shape[2], part.shape[1])))


def logo(rng: np.random.Generator, frames: Frames) -> Frames:
    """Draw white blocks on a colored background in a corner, covering 2 % of the picture."""
    height, width = (int(side * share) for side, share in zip(frames.shape[1:3], (0.14, 0.16), strict=True))
    top, left = rng.choice([2, frames.shape[1] - height - 2]), rng.choice([2, frames.shape[2] - width - 2])
    blocks = np.kron(rng.integers(0, 2, (3, 6)), np.ones((height, width), int))[::3, ::6][:height, :width, None]
    copy = frames.copy()
    copy[:, top : top + height, left : left + width] = np.where(blocks, 235, rng.integers(0, 256, 3))
    return copy


def crf(rng: np.random.Generator, frames: Frames) -> Frames:
    return frames  # `plant` encodes these with a high crf


Change: TypeAlias = Callable[[np.random.Generator, Frames], Frames]
CHANGES: tuple[tuple[Change, ...], ...] = (
    (scale,),
    (crf,),
    (crop,),
    (logo,),
    (scale, crf),
    (crop, crf),
    (logo, scale),
    (crop, scale, crf),
)


def plant(folder: Path, num_scenes: int, num_copies: int, seed: int = 0) -> dict[str, str]:
    """Write scenes and modified copies of some of them into a folder. Return the name of each copy's original."""
    folder.mkdir()
    rng, originals = np.random.default_rng(seed), dict[str, str]()
    for number, frames in zip(range(num_scenes), scenes(seed), strict=False):
        name = f"{number:05d}.mp4"
        (folder / name).write_bytes(_encode(frames, 22))
        if number < num_copies:
            changes = CHANGES[number % len(CHANGES)]
            for change in changes:
                frames = change(rng, frames)
            copy = f"copy-{number:05d}-{'-'.join(change.__name__ for change in changes)}.mp4"
            (folder / copy).write_bytes(_encode(frames, 34 if crf in changes else 24))
            originals[copy] = name
    return originals


def _encode(frames: Frames, quality: int) -> bytes:
    options = {"preset": "ultrafast", "crf": str(quality), "g": "16"}
    return encode(frames, fps=FPS, options=options, numbered=False)
