"""Clips and images with control videos or with audio, and the options for sharding them."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from streamvid.video.encode.showing import png
from tests.clips import encode, frames_of
from tests.conftest import run_streamvid
from tests.video.clips import run_ffmpeg

#: Frames, height and width of a bucket.
Size: TypeAlias = tuple[int, int, int]


def shard(folder: Path, sizes: Sequence[Size], *options: object) -> Path:
    """Shard the videos of a folder into the dataset `ds` next to it, with a bucket for each size."""
    buckets = ",".join(f"{width}x{height}@{frames}" for frames, height, width in sizes)
    dataset = folder.with_name("ds")
    run_streamvid("shard", folder, dataset, *options, "--buckets", buckets, "--workers", "1")
    return dataset


def with_control(folder: Path, sizes: Sequence[Size], count: int, is_optional: bool = False) -> Path:
    """Make clips with control videos, `count` per size; if the control is optional, the last one of each size lacks
    it."""
    folder.mkdir(parents=True)
    rows = []
    for frames, height, width in sizes:
        for number in range(count):
            name = ("bikes", "carphone_pristine")[number % 2]
            row = {"caption": f"a red bike at night {number}"[: 10 + number]}
            for kind, first in (("video", number), ("depth", number + 3)):
                pictures = frames_of(name, width, height, frames + 7 + first)[first:]
                suffix = "mp4" if frames > 1 else "png"
                file = folder / f"{kind}-{frames}-{number}.{suffix}"
                file.write_bytes(encode(pictures) if frames > 1 else png(pictures[0]))
                row[kind] = file.name
            rows.append(row)
        if is_optional:
            rows[-1]["depth"] = ""
    with (folder / "rows.csv").open("w", newline="") as table:
        writer = csv.DictWriter(table, ("video", "caption", "depth"))
        writer.writeheader()
        writer.writerows(rows)
    mark = "?" if is_optional else ""
    return shard(folder, sizes, "--metadata", folder / "rows.csv", "--media", f"video:control{mark}=depth")


def with_audio(folder: Path, sizes: Sequence[Size], count: int) -> Path:
    """Make clips with tones, `count` per size, except for the last video; images have no audio."""
    folder.mkdir(parents=True)
    for frames, height, width in sizes:
        for number in range(count):
            file = folder / f"{frames}-{number}.{'mp4' if frames > 1 else 'png'}"
            file.with_suffix(".txt").write_text("a red bike")
            if frames == 1:
                file.write_bytes(png(frames_of("bikes", width, height, number + 1)[number]))
                continue
            pictures = ("-f", "lavfi", "-i", f"testsrc=s={width}x{height}:r=24:d=1:decimals={number % 4}")
            tone = ("-f", "lavfi", "-i", f"sine=frequency={220 * (number + 1)}:sample_rate=48000:duration=1")
            last = number == count - 1
            run_ffmpeg(*pictures, *(() if last else tone), "-c:v", "libx264", "-pix_fmt", "yuv420p", file)
    return shard(folder, sizes, "--fps", "24", "--fps-rule", "resample")
