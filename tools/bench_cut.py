"""Cost of copying time ranges: bytes beyond the packets of the range itself, and CPU time per clip.

    python tools/bench_cut.py VIDEO_OR_FOLDER ... [--seconds 1,2,5,10] [--ranges 20] [--seed 0]

A copy starts at the last key frame before its range, so it stores a lead-in that readers decode but do not show.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from streamvid.errors import StreamvidError
from streamvid.video.container import open_video
from streamvid.video.encode.cut import Cutter
from streamvid.video.limits import LIMITS
from streamvid.video.packets import read_packets
from streamvid.video.probe import probe

_OTHERS = (".csv", ".json", ".md", ".txt")


@dataclass(frozen=True)
class Cut:
    """One copied range. own_bytes: size of the packets that belong to its frames. num_bytes: size of the file."""

    num_frames: int
    num_packets: int
    own_bytes: int
    num_bytes: int
    cpu_seconds: float


def cuts_of(path: Path, seconds: float, num_ranges: int, seed: int) -> Iterator[Cut]:
    """Cut random ranges of a video; yield nothing if it is too short."""
    draw = random.Random(f"{seed} {path.name} {seconds}")
    info = probe(path)
    total = info.duration_seconds
    count = round(seconds * info.num_frames / total) if total > seconds else 0
    if not 0 < count < info.num_frames:
        return
    with open_video(path, LIMITS) as video:
        table = read_packets(video)
    with open_video(path, LIMITS) as video:
        cutter = Cutter(path, video)
        for _ in range(num_ranges):
            start = draw.randrange(len(table.timestamps) - count)
            begin = time.process_time()
            clip = cutter.cut(start, count)
            spent = time.process_time() - begin
            ordinals = table.ordinals[start : start + count]
            first = table.decode_starts(start, start + count - 1)[0][1]
            own = sum(table.rows[ordinal][2] for ordinal in ordinals)
            yield Cut(count, max(ordinals) + 1 - first, own, len(clip.data), spent)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("videos", nargs="+", type=Path)
    parser.add_argument("--seconds", default="1,2,5,10")
    parser.add_argument("--ranges", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    paths = [
        path
        for one in options.videos
        for path in (sorted(one.rglob("*")) if one.is_dir() else [one])
        if path.is_file() and path.suffix not in _OTHERS
    ]
    print("seconds  ranges  files  bytes: median  mean   packets: median  CPU ms: median")
    for seconds in map(float, options.seconds.split(",")):
        found: dict[Path, list[Cut]] = {}
        for path in paths:
            try:
                found[path] = list(cuts_of(path, seconds, options.ranges, options.seed))
            except StreamvidError as error:
                print(f"{path.name}: {error}", file=sys.stderr)
        cuts = [cut for several in found.values() for cut in several]
        if cuts:
            ratios = [cut.num_bytes / cut.own_bytes for cut in cuts]
            whole = sum(cut.num_bytes for cut in cuts) / sum(cut.own_bytes for cut in cuts)
            packets = statistics.median(cut.num_packets / cut.num_frames for cut in cuts)
            spent = statistics.median(cut.cpu_seconds for cut in cuts) * 1000
            row = f"{seconds:7g} {len(cuts):7d} {sum(map(bool, found.values())):6d} {statistics.median(ratios):14.2f}"
            print(f"{row} {whole:5.2f} {packets:17.2f} {spent:15.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
