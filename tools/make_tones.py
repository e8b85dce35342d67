"""Makes clips whose audio tells how the picture moves: the pitch of a tone follows the height of a disc.

    python -m tools.make_tones DEST [--clips 120] [--seed 0]

DEST receives NNN.mp4 (H.264 and AAC) and NNN.mkv (H.264 and Opus), in turn, and metadata.csv (path, caption). Each clip
has 64x64 pixels, 12 frames per second and a duration of 2 seconds. The disc follows a random smooth path. Neither the
first frame nor the caption, which names the color of the disc, shows how the path continues. The height of the picture
corresponds to three octaves of pitch.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

SIZE, FPS, SECONDS, RATE = 64, 12, 2, 48_000
RADIUS, LOWEST_HZ, OCTAVES, LOUDNESS = 13, 300.0, 3.0, 0.3
COLORS = {"red": (230, 60, 50), "green": (70, 200, 80), "white": (235, 235, 235)}
BACKGROUND = (25, 30, 45)
_AUDIO_CODECS = {".mp4": "aac", ".mkv": "libopus"}
_SUBSAMPLES = 4  # of a side of a pixel, so that the disc moves by fractions of one

Floats = NDArray[np.float64]


def heights(times: Floats, draw: np.random.Generator) -> Floats:
    """Return a random smooth path as heights from 0 (bottom) to 1 (top) at the given times in seconds."""
    waves = [np.sin(2 * np.pi * (draw.uniform(0.3, 1.2) * times + draw.uniform())) for _ in range(2)]
    return 0.5 + 0.25 * (waves[0] + waves[1])


def picture(height: float, color: tuple[int, int, int]) -> NDArray[np.uint8]:
    """Return RGB pixels with shape (SIZE, SIZE, 3) that show the disc at a height from 0 to 1."""
    grid = (np.arange(SIZE * _SUBSAMPLES) + 0.5) / _SUBSAMPLES
    y = RADIUS + (1 - height) * (SIZE - 2 * RADIUS)
    inside = (grid[None, :] - SIZE / 2) ** 2 + (grid[:, None] - y) ** 2 < RADIUS**2
    share = inside.reshape(SIZE, _SUBSAMPLES, SIZE, _SUBSAMPLES).mean(axis=(1, 3))[..., None]
    pixels: NDArray[np.uint8] = (share * color + (1 - share) * np.array(BACKGROUND)).round().astype(np.uint8)
    return pixels


def tone(path: Floats) -> NDArray[np.float32]:
    """Return a mono tone with shape (1, samples), whose pitch follows a path with one height per sample."""
    hertz = LOWEST_HZ * 2 ** (OCTAVES * path)
    return (LOUDNESS * np.sin(2 * np.pi * np.cumsum(hertz) / RATE)).astype(np.float32)[None]


def write_clip(target: Path, color: tuple[int, int, int], draw: np.random.Generator) -> None:
    """Encode one clip. The suffix determines its audio codec."""
    times = np.arange(RATE * SECONDS) / RATE
    path = heights(times, draw)
    # Each picture shows the middle of its time.
    shown = path[RATE // FPS // 2 :: RATE // FPS]
    with av.open(str(target), "w") as output:
        video: Any = output.add_stream("libx264", rate=FPS, options={"crf": "16", "g": "12", "bf": "0"})
        video.width, video.height, video.pix_fmt = SIZE, SIZE, "yuv420p"
        video.codec_context.thread_count = 1
        audio: Any = output.add_stream(_AUDIO_CODECS[target.suffix], rate=RATE)
        audio.layout = "mono"
        for number, height in enumerate(shown):
            frame = av.VideoFrame.from_ndarray(picture(height, color), format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, FPS)
            output.mux(video.encode(frame))
        for samples in _audio_frames(tone(path)):
            output.mux(audio.encode(samples))
        output.mux(video.encode())
        output.mux(audio.encode())


def _audio_frames(samples: NDArray[np.float32]) -> Iterator[av.AudioFrame]:
    for first in range(0, samples.shape[1], 960):
        frame = av.AudioFrame.from_ndarray(
            np.ascontiguousarray(samples[:, first : first + 960]), format="fltp", layout="mono"
        )
        frame.sample_rate, frame.pts, frame.time_base = RATE, first, Fraction(1, RATE)
        yield frame


def make_tones(dest: Path, num_clips: int = 120, seed: int = 0) -> Path:
    """Write the clips and metadata.csv into a folder, and return its path."""
    dest.mkdir(parents=True, exist_ok=True)
    rows, suffixes = [], list(_AUDIO_CODECS)
    for number in range(num_clips):
        draw = np.random.default_rng([seed, number])
        name, color = list(COLORS.items())[draw.integers(len(COLORS))]
        file = dest / f"{number:03d}{suffixes[number % len(suffixes)]}"
        write_clip(file, color, draw)
        rows.append((file.name, f"A {name} disc moves up and down."))
    with (dest / "metadata.csv").open("w", newline="") as table:
        csv.writer(table, lineterminator="\n").writerows([("path", "caption"), *rows])
    return dest


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("dest", metavar="DEST", type=Path, help="output folder for the clips")
    parser.add_argument("--clips", type=int, default=120, help="number of clips (default: 120)")
    parser.add_argument("--seed", type=int, default=0, help="seed for the paths and colors (default: 0)")
    options = parser.parse_args()
    make_tones(options.dest, options.clips, options.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
