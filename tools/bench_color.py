"""CPU cost and accuracy of converting yuv420p to RGB, with and without scaling.

    python tools/bench_color.py CLIPS... [--num-frames 16] [--repeats 5] [--only TEXT] [--json]

CLIPS are video files. Frames are taken from all of them, and first scaled to the source size of each case. All frames
are declared as BT.709 with limited range. Within each repeat, the methods take turns. Times are CPU
milliseconds per `--num-frames` frames: the median of the repeats, with the lowest and the highest. They include writing
the pixels to the caller's memory: (H, W, 3) as in the loader's ring, planes if the name ends in "planar", or yuv420p.

dB and bias (mean error of R, G and B, in levels) compare the result with float64 arithmetic that follows the standard
and does not round. This reference interpolates chroma linearly from the chroma location ("left", or "center" in a
separate column). If the size changes, it then averages each target pixel's exact area.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray

from streamvid.video.filters import FilterChain

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float64]
Method = Callable[[list[av.VideoFrame], Bytes], None]

BT709, LIMITED = 1, 1
KR, KB = 0.2126, 0.0722
CASES = {  # (height, width) of the source and of the result
    "480x848": ((480, 848), (480, 848)),
    "192x336": ((192, 336), (192, 336)),
    "720x1280 to 480x848": ((720, 1280), (480, 848)),
    "1080x1920 to 192x336": ((1080, 1920), (192, 336)),
}
EXACT = "accurate_rnd+full_chroma_int"
LEFT = ":in_chroma_loc=left"
#: Name → (options of the scale filter, pixel format).
SWSCALE = {
    "area": ("flags=area", "rgb24"),
    "area accurate": ("flags=area+accurate_rnd", "rgb24"),
    "area full_chroma": ("flags=area+full_chroma_int", "rgb24"),
    "area exact": (f"flags=area+{EXACT}", "rgb24"),
    "area exact bgr0": (f"flags=area+{EXACT}", "bgr0"),
    "area exact no dither": (f"flags=area+{EXACT}:sws_dither=none", "rgb24"),
    "area unstable": (f"flags=area+{EXACT}+unstable", "rgb24"),
    "bicubic exact": (f"flags=bicubic+{EXACT}", "rgb24"),
    "area gbrp": ("flags=area", "gbrp"),
    "area accurate gbrp": ("flags=area+accurate_rnd", "gbrp"),
    "area full_chroma gbrp": ("flags=area+full_chroma_int", "gbrp"),
    "area exact gbrp": (f"flags=area+{EXACT}", "gbrp"),
    "area exact left gbrp": (f"flags=area+{EXACT}{LEFT}", "gbrp"),
    "bilinear full_chroma gbrp": ("flags=bilinear+full_chroma_int", "gbrp"),
    "bilinear exact gbrp": (f"flags=bilinear+{EXACT}", "gbrp"),
    "bilinear exact left gbrp": (f"flags=bilinear+{EXACT}{LEFT}", "gbrp"),
    "bicubic exact gbrp": (f"flags=bicubic+{EXACT}", "gbrp"),
    "bicubic exact left gbrp": (f"flags=bicubic+{EXACT}{LEFT}", "gbrp"),
}


@dataclass(frozen=True)
class Row:
    """Measurements of one method in one case. dB and bias are None for methods that do not produce RGB."""

    case: str
    method: str
    ms: float
    ms_low: float
    ms_high: float
    db_left: float | None
    db_center: float | None
    bias: tuple[float, float, float] | None


# ------------------------------------------------------------------------------------------------ frames and planes


def source_frames(clips: list[Path], count: int, height: int, width: int) -> list[av.VideoFrame]:
    """Return `count` frames of this size as yuv420p, taken from all clips in turn."""
    found: list[list[av.VideoFrame]] = []
    for path in clips:
        with av.open(str(path)) as container:
            frames = [frame for number, frame in enumerate(container.decode(video=0)) if number % 10 == 0]
        found.append(frames)
    chosen = [frames[turn] for turn in range(max(map(len, found))) for frames in found if turn < len(frames)][:count]
    if len(chosen) < count:
        raise SystemExit(f"every tenth frame of the clips: {len(chosen)} frames, but {count} are needed; add clips")
    return [frame.reformat(width=width, height=height, format="yuv420p", interpolation="BICUBIC") for frame in chosen]


def plane(frame: av.VideoFrame, number: int) -> Bytes:
    """Return a view of a frame's plane, with shape (rows, columns), or (rows, bytes per row) for packed pixels."""
    of = frame.planes[number]
    rows = np.frombuffer(memoryview(of), np.uint8).reshape(-1, of.line_size)
    sides = {"rgb24": 3, "bgr0": 4}
    return rows[: of.height, : of.width * sides.get(frame.format.name, 1)]


# ------------------------------------------------------------------------------------------------ the reference


def interpolated(chroma: Bytes | Floats, shift: float, axis: int) -> Floats:
    places = np.clip((np.arange(chroma.shape[axis] * 2) - shift) / 2, 0, chroma.shape[axis] - 1)
    low = np.minimum(np.floor(places).astype(int), chroma.shape[axis] - 2)
    part = np.expand_dims(places - low, 1 - axis)
    values = chroma.astype(np.float64)
    full: Floats = values.take(low, axis) * (1 - part) + values.take(low + 1, axis) * part
    return full


def averaging(source: int, target: int) -> Floats:
    """Return the share that each source pixel has in the area of each target pixel, with shape (target, source)."""
    edges = np.arange(target + 1) * source / target
    low, high = edges[:-1, None], edges[1:, None]
    pixels = np.arange(source)[None]
    shares: Floats = np.clip(np.minimum(high, pixels + 1) - np.maximum(low, pixels), 0, None) * target / source
    return shares


def reference(frame: av.VideoFrame, height: int, width: int, shift_x: float) -> Floats:
    """Return the reference picture, with shape (height, width, 3). Its values are clamped but not rounded."""
    luma, u, v = (plane(frame, number) for number in range(3))
    y = (luma.astype(np.float64) - 16) / 219
    pb, pr = ((interpolated(interpolated(c, 0.5, 0), shift_x, 1) - 128) / 224 for c in (u, v))
    red, blue = y + 2 * (1 - KR) * pr, y + 2 * (1 - KB) * pb
    green = (y - KR * red - KB * blue) / (1 - KR - KB)
    rgb = np.clip(np.stack([red, green, blue]) * 255, 0, 255)
    if rgb.shape[1:] != (height, width):
        rgb = averaging(rgb.shape[1], height) @ rgb @ averaging(rgb.shape[2], width).T
    return np.moveaxis(rgb, 0, -1)


# ------------------------------------------------------------------------------------------------ methods


def swscale(options: str, pixel_format: str, size: tuple[int, int], *, is_planar: bool = False) -> Method:
    chains: list[FilterChain] = []
    height, width = size
    colors = "" if pixel_format == "yuv420p" else ":in_color_matrix=bt709:in_range=limited"
    filters = [("scale", f"{width}:{height}:{options}{colors}"), ("format", pixel_format)]

    def run(frames: list[av.VideoFrame], out: Bytes) -> None:
        if not chains:
            chains.append(FilterChain(frames[0], filters, matrix=BT709, color_range=LIMITED))
        for frame, picture in zip(frames, out.swapaxes(0, 1) if is_planar else out, strict=True):
            copy_out(chains[0].run(frame), picture, is_planar=is_planar)

    return run


def copy_out(made: av.VideoFrame, picture: Bytes, *, is_planar: bool) -> None:
    name = made.format.name
    if name == "yuv420p":
        at = 0
        for number in range(3):
            pixels = plane(made, number)
            picture[at : at + pixels.size].reshape(pixels.shape)[...] = pixels
            at += pixels.size
    elif name == "gbrp":
        for number, channel in enumerate((1, 2, 0)):
            (picture[channel] if is_planar else picture[..., channel])[...] = plane(made, number)
    elif name == "bgr0":
        picture[...] = plane(made, 0).reshape(*picture.shape[:2], 4)[..., 2::-1]
    else:
        picture[...] = plane(made, 0).reshape(picture.shape)


def planes_only(frames: list[av.VideoFrame], out: Bytes) -> None:
    """Copy the decoded planes to the output without conversion."""
    for frame, picture in zip(frames, out, strict=True):
        copy_out(frame, picture, is_planar=False)


@cache
def contributions() -> tuple[NDArray[np.int16], ...]:
    """Return the contribution of each level as tables: Y to all, V to R, U to G, V to G and U to B.

    Values are in sixteenths of a level.
    """
    levels = np.arange(256)
    gray = (levels - 16) * 255 / 219 * 16 + 8  # and half a level, since the shift rounds down
    red, blue, green = 2 * (1 - KR), 2 * (1 - KB), 1 - KR - KB
    sides = [(levels - 128) * 255 / 224 * 16 * gain for gain in (red, -blue * KB / green, -red * KR / green, blue)]
    return tuple(np.round(table).astype(np.int16) for table in (gray, *sides))


def numpy_tables(frames: list[av.VideoFrame], out: Bytes, rows: int = 16) -> None:
    """Convert with int16 tables, in blocks of rows that fit in the cache. Chroma is converted before it is upscaled."""
    gray, v_to_r, u_to_g, v_to_g, u_to_b = contributions()
    for frame, picture in zip(frames, out, strict=True):
        luma, u, v = (plane(frame, number) for number in range(3))
        last = u.shape[0] - 1
        for top in range(0, luma.shape[0], rows):
            block = luma[top : top + rows]
            places = np.clip(np.arange(top // 2 - 1, (top + len(block)) // 2 + 1), 0, last)
            low, high = u[places], v[places]
            y = gray.take(block)
            sides = (v_to_r.take(high), u_to_g.take(low) + v_to_g.take(high), u_to_b.take(low))
            for channel, side in enumerate(sides):
                total = _double_left(side, block.shape)
                total += y
                total >>= 4
                np.clip(total, 0, 255, out=total)
                picture[top : top + rows, :, channel] = total


def _double_left(side: NDArray[np.int16], shape: tuple[int, ...]) -> NDArray[np.int16]:
    """Upscale chroma by two in both directions, for samples at "left". Omit the outermost two rows."""
    tall = np.empty((shape[0], side.shape[1]), np.int16)
    three = side[1:-1] * np.int16(3)
    np.add(three, side[:-2], out=tall[::2])
    np.add(three, side[2:], out=tall[1::2])
    tall += 2
    tall >>= 2
    wide = np.empty(shape, np.int16)
    wide[:, ::2] = tall
    between = tall[:, :-1] + tall[:, 1:]
    between >>= 1
    wide[:, 1:-1:2] = between
    wide[:, -1] = tall[:, -1]
    return wide


def torch_step() -> Method:
    """Return the loader's own conversion, limited to one CPU thread."""
    import torch

    from streamvid.loader.batch.color import color_table, yuv420p_to_rgb

    torch.set_num_threads(1)
    table = color_table(["bt709"], ["limited"], ["left"])

    def run(frames: list[av.VideoFrame], out: Bytes) -> None:
        height, width = out.shape[1:3]
        yuv = np.empty((len(frames), height * width * 3 // 2), np.uint8)
        planes_only(frames, yuv)
        torch.from_numpy(out)[None].copy_(yuv420p_to_rgb(torch.from_numpy(yuv)[None], table, height, width, "BTHWC"))

    return run


def methods_of(case: str) -> dict[str, Method]:
    source, target = CASES[case]
    methods = {name: swscale(options, fmt, target) for name, (options, fmt) in SWSCALE.items()}
    for name in ("area gbrp", "area exact gbrp", "area exact left gbrp", "bicubic exact left gbrp"):
        methods[f"{name} planar"] = swscale(*SWSCALE[name], target, is_planar=True)
    methods["area yuv420p"] = swscale("flags=area", "yuv420p", target)
    if source == target:
        methods |= {"planes as they are yuv420p": planes_only, "numpy int16 tables": numpy_tables}
        methods["torch int32 step"] = torch_step()
    return methods


# ------------------------------------------------------------------------------------------------ measuring


def measured(case: str, clips: list[Path], num_frames: int, repeats: int, only: str) -> list[Row]:
    source, (height, width) = CASES[case]
    frames = source_frames(clips, num_frames, *source)
    methods = {name: method for name, method in methods_of(case).items() if only in name}
    outs = {
        "planar": np.zeros((3, num_frames, height, width), np.uint8),
        "yuv420p": np.zeros((num_frames, height * width * 3 // 2), np.uint8),
        "rgb": np.zeros((num_frames, height, width, 3), np.uint8),
    }
    kinds = {name: name.split()[-1] if name.split()[-1] in outs else "rgb" for name in methods}
    times: dict[str, list[float]] = {name: [] for name in methods}
    for repeat in range(repeats + 1):  # the first one warms up: filter graphs are made, pages are there
        for name, method in methods.items():
            before = time.process_time()
            method(frames, outs[kinds[name]])
            if repeat:
                times[name].append((time.process_time() - before) * 1000)
    refs = [np.stack([reference(frame, height, width, shift) for frame in frames]) for shift in (0.0, 0.5)]
    rows = []
    for name, method in methods.items():
        method(frames, out := outs[kinds[name]])
        quality = (None, None, None) if kinds[name] == "yuv420p" else accuracy(out, refs, kinds[name])
        rows.append(Row(case, name, statistics.median(times[name]), min(times[name]), max(times[name]), *quality))
    return rows


def accuracy(out: Bytes, refs: list[Floats], kind: str) -> tuple[float, float, tuple[float, float, float]]:
    """Return the PSNR in dB against each reference, and the mean error of R, G and B against the first reference."""
    pictures = np.moveaxis(out, 0, -1) if kind == "planar" else out
    left, center = (float(10 * np.log10(255**2 / np.mean((pictures - ref) ** 2))) for ref in refs)
    red, green, blue = (pictures - refs[0]).mean(axis=(0, 1, 2)).tolist()
    return left, center, (red, green, blue)


def table(rows: list[Row]) -> str:
    lines = [f"{'case':22}{'method':34}{'ms':>8}{'low':>8}{'high':>8}{'dB':>7}{'center':>8}  bias R, G, B"]
    for row in rows:
        text = f"{row.case:22}{row.method:34}{row.ms:8.1f}{row.ms_low:8.1f}{row.ms_high:8.1f}"
        if row.bias is not None:
            text += f"{row.db_left:7.1f}{row.db_center:8.1f}  " + ", ".join(f"{bias:+.2f}" for bias in row.bias)
        lines.append(text)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clips", nargs="+", type=Path)
    parser.add_argument("--num-frames", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="run only methods whose names contain this text")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    how = (options.clips, options.num_frames, options.repeats, options.only)
    rows = [row for case in CASES for row in measured(case, *how)]
    versions = {"python": platform.python_version(), "av": av.__version__, "numpy": np.__version__}
    machine = {"machine": platform.machine(), "ffmpeg": str(av.library_versions), "argv": sys.argv[1:]}
    if options.json:
        sys.stdout.write(json.dumps({**versions, **machine, "rows": [asdict(row) for row in rows]}) + "\n")
    else:
        sys.stdout.write(f"{json.dumps(versions | machine)}\n{table(rows)}\n")


if __name__ == "__main__":
    main()
