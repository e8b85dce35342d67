"""What decoding 16 frames costs: whole-file decode, plain PyAV seek, and streamvid, on the same windows.

    python tools/bench_decode.py CLIPS... [--repeats 5] [--json]

CLIPS are video files or folders of them. Methods take turns within each repeat, so that a noisy machine hurts all
alike; CPU milliseconds a sample (one core), the median of the repeats, ratios of paired runs.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray

from streamvid.errors import ProbeError, StreamvidError
from streamvid.video import VideoInfo, decode_into, probe

SIZES = {"256px 192x336": (192, 336), "480p 480x848": (480, 848)}
SUFFIXES = {".mp4", ".mkv", ".webm", ".mov", ".avi", ".ts"}
Method = Callable[[bytes, VideoInfo, int, NDArray[np.uint8]], None]


class _Bytes:
    """A file over bytes, for PyAV."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = memoryview(data), 0

    def read(self, size: int) -> bytes:
        piece = bytes(self._data[self._at : self._at + size])
        self._at += len(piece)
        return piece

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, len(self._data))[whence]
        return self._at

    def tell(self) -> int:
        return self._at


def whole_file(data: bytes, info: VideoInfo, start: int, out: NDArray[np.uint8]) -> None:
    """Every frame to RGB at full size, then the wanted ones resized: what training code often does."""
    with av.open(_Bytes(data), "r") as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    for picture, pixels in zip(out, frames[start : start + len(out)], strict=True):
        _cover(av.VideoFrame.from_ndarray(pixels, format="rgb24"), picture)


def plain_seek(data: bytes, info: VideoInfo, start: int, out: NDArray[np.uint8]) -> None:
    """Seek by timestamp, decode from the key frame on, convert the wanted frames; one thread."""
    wanted = info.timestamps[start : start + len(out)]
    with av.open(_Bytes(data), "r") as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        stream.codec_context.thread_type = av.codec.context.ThreadType(0)
        container.seek(wanted[0], stream=stream)
        slot = 0
        for frame in container.decode(stream):
            if frame.pts is not None and frame.pts >= wanted[slot]:
                _cover(frame, out[slot])
                slot += 1
                if slot == len(out):
                    return


def streamvid(data: bytes, info: VideoInfo, start: int, out: NDArray[np.uint8]) -> None:
    """decode_into."""
    decode_into(data, start, out, num_frames=info.num_frames)


METHODS: dict[str, Method] = {"whole file": whole_file, "plain seek": plain_seek, "streamvid": streamvid}


def _cover(frame: av.VideoFrame, picture: NDArray[np.uint8]) -> None:
    height, width = picture.shape[:2]
    scale = max(height / frame.height, width / frame.width)
    full_height, full_width = max(height, round(frame.height * scale)), max(width, round(frame.width * scale))
    pixels = frame.reformat(full_width, full_height, "rgb24", interpolation="AREA").to_ndarray()
    top, left = (full_height - height) // 2, (full_width - width) // 2
    picture[:] = pixels[top : top + height, left : left + width]


def start_of(info: VideoInfo, repeat: int, num_frames: int) -> int:
    """The window that a repeat takes of a clip."""
    return random.Random(f"{repeat} {info.timestamps[-1]}").randint(0, info.num_frames - num_frames)


def load(path: Path, repeats: int, num_frames: int) -> tuple[bytes, VideoInfo] | None:
    """A clip that every window of decodes; None, with a line on standard error, for one that cannot be compared."""
    data, out = path.read_bytes(), np.empty((num_frames, 64, 64, 3), np.uint8)
    try:
        info = probe(data)
        if info.num_frames < num_frames:
            raise ProbeError(f"has {info.num_frames} frames, {num_frames} are wanted")
        for repeat in range(repeats):
            decode_into(data, start_of(info, repeat, num_frames), out)
    except StreamvidError as error:
        print(f"left out: {path}: {error}", file=sys.stderr)
        return None
    return data, info


def measure(clips: list[tuple[bytes, VideoInfo]], repeats: int, num_frames: int) -> list[dict[str, object]]:
    """One row a size and method: cpu_ms (median over repeats of the mean a sample), and ratios to streamvid."""
    rows: list[dict[str, object]] = []
    for size, (height, width) in SIZES.items():
        out = np.empty((num_frames, height, width, 3), np.uint8)
        costs: dict[str, list[float]] = {name: [] for name in METHODS}
        for repeat in range(repeats):
            draw = random.Random(repeat)
            starts = [start_of(info, repeat, num_frames) for _, info in clips]
            spent = dict.fromkeys(METHODS, 0.0)
            for (data, info), start in zip(clips, starts, strict=True):
                for name in draw.sample(sorted(METHODS), len(METHODS)):
                    begin = time.process_time()
                    METHODS[name](data, info, start, out)
                    spent[name] += time.process_time() - begin
            for name, seconds in spent.items():
                costs[name].append(1000 * seconds / len(clips))
        for name, values in costs.items():
            ratio = statistics.median(a / b for a, b in zip(values, costs["streamvid"], strict=True))
            row = {"size": size, "method": name, "cpu_ms": statistics.median(values), "times_streamvid": ratio}
            rows.append(row)
    return rows


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clips", nargs="+", type=Path, help="video files, or folders of them")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--num-frames", type=int, default=16, help="frames a sample")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    paths = [file for path in options.clips for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    found = (load(path, options.repeats, options.num_frames) for path in paths if path.suffix.lower() in SUFFIXES)
    clips = [clip for clip in found if clip is not None]
    if not clips:
        parser.error(f"no clip with {options.num_frames} frames or more among {len(paths)} files")
    rows = measure(clips, options.repeats, options.num_frames)
    if options.json:
        print(json.dumps({"num_clips": len(clips), "repeats": options.repeats, "rows": rows}, indent=2))
        return
    print(f"{len(clips)} clips, {options.repeats} repeats, {options.num_frames} frames a sample, CPU ms")
    for row in rows:
        print(
            f"{row['size']:<16} {row['method']:<12} {row['cpu_ms']:>9.1f}  {row['times_streamvid']:>6.2f} x streamvid"
        )


if __name__ == "__main__":
    main()
