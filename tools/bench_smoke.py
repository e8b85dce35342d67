"""Regression check for speed: paired CPU ratios, compared with a stored reference in a few minutes.

    python -m tools.bench_smoke [--repeats 15] [--only LINE...] [--update] [--slow LINE=1.25] [--json]
                                                                        (from the checkout's root; `make bench-smoke`)

Each line is a ratio of CPU seconds: the cost of a plain method divided by streamvid's cost for the same work. Both run
in one process, in turns and in random order, so the ratio depends little on the speed of the machine. The result is the
median of the repeats with its 95 % bootstrap interval. The exit status is 1 if the whole interval of any line is more
than 10 % below the reference in tools/bench_reference.json, 2 if something cannot be run, and 0 otherwise.

- index: reading a clip's packets with PyAV, compared with `index_clip`.
- copy_rgb: plain PyAV seek in a 720p clip with output in 480p, compared with streamvid (fast). copy_yuv: the decoder
  alone, compared with streamvid (yuv420p).
- native_rgb, native_exact: plain PyAV on a native 480p clip, compared with streamvid. native_yuv: the decoder alone,
  compared with streamvid.
- loader: reading and hashing all clips in a dataset's tars, compared with an epoch of VideoLoader(decode=False).

--update writes a new reference. Run it on a quiet machine, and state the reason in the commit. --slow burns CPU in
streamvid's part of a line, to show that a slowdown would be noticed.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import random
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np

from streamvid import ShardOptions, VideoLoader, shard
from streamvid.buckets.config import BucketConfig
from streamvid.errors import StreamvidError
from streamvid.video.clip_index import index_clip
from streamvid.video.encode.clip import encode_clip
from streamvid.video.encode.profiles import Encoding
from tools.bench_clips import corpus_sources, encode
from tools.bench_native import machine
from tools.decode_ours import Ours, Window, load_clip

REFERENCE = Path(__file__).parent / "bench_reference.json"
ALLOWED = 0.10
NUM_FRAMES, SIZE, SOURCE_SIZE, SOURCE_FRAMES, COPIES = 16, (480, 848), (720, 1280), 96, 150
Call = Callable[[], object]


@dataclass(frozen=True)
class Verdict:
    """A line's median ratio and its interval, with the reference. reference: None if there is no reference."""

    line: str
    ratio: float
    low: float
    high: float
    reference: float | None

    @property
    def is_slower(self) -> bool:
        """True if the whole interval is more than 10 % below the reference."""
        return self.reference is not None and self.high < (1 - ALLOWED) * self.reference

    def __str__(self) -> str:
        if self.reference is None:
            return f"{self.line}: {self.ratio:.3f} ({self.low:.3f} to {self.high:.3f}), no reference"
        change = [f"{100 * (value / self.reference - 1):+.1f}" for value in (self.ratio, self.low, self.high)]
        text = f"{self.line}: {self.ratio:.3f}, the reference is {self.reference:.3f}: "
        text += f"{change[0]} % (95 % interval {change[1]} to {change[2]} %)"
        return text + (f": SLOWER by more than {100 * ALLOWED:.0f} %" if self.is_slower else "")


def interval(ratios: list[float], draws: int = 4000) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median. Equal ratios give equal intervals."""
    values = np.array(ratios)
    chosen = np.random.default_rng(0).integers(0, len(values), (draws, len(values)))
    low, high = np.percentile(np.median(values[chosen], axis=1), [2.5, 97.5])
    return float(low), float(high)


def judge(measured: dict[str, list[float]], reference: dict[str, float]) -> list[Verdict]:
    """Return one verdict per line."""
    return [
        Verdict(line, statistics.median(ratios), *interval(ratios), reference.get(line))
        for line, ratios in measured.items()
    ]


def exit_code(verdicts: Iterable[Verdict]) -> int:
    """Return 1 if any line is slower, otherwise 0."""
    return int(any(verdict.is_slower for verdict in verdicts))


def measure(pairs: dict[str, tuple[Call, Call]], repeats: int, slow: dict[str, float]) -> dict[str, list[float]]:
    """Return the ratio plain / ours of each repeat, after one repeat as a warm-up."""
    found: dict[str, list[float]] = {line: [] for line in pairs}
    draw = random.Random(0)
    for repeat in range(repeats + 1):
        for line in draw.sample(sorted(pairs), len(pairs)):
            calls = [(0, pairs[line][0], 1.0), (1, pairs[line][1], slow.get(line, 1.0))]
            spent = [0.0, 0.0]
            for which, call, factor in draw.sample(calls, 2):
                spent[which] = cpu_seconds(call, factor)
            if repeat:
                found[line].append(spent[0] / spent[1])
    return found


def cpu_seconds(call: Call, factor: float) -> float:
    """Return the CPU seconds of a call in all threads. A `factor` above 1 burns CPU to simulate a slower call."""
    begin = time.process_time()
    call()
    end = begin + (time.process_time() - begin) * factor
    while time.process_time() < end:
        pass
    return time.process_time() - begin


def make_pairs(folder: Path, source: Path, only: list[str]) -> dict[str, tuple[Call, Call]]:
    """Map each line to its calls (plain, ours). folder: scratch folder for the clips and the dataset."""
    copied, native = folder / "copy.mp4", folder / "native" / "0.mp4"
    native.parent.mkdir()
    encode(source, copied, SOURCE_SIZE, 48, SOURCE_FRAMES)
    native.write_bytes(encode_clip(copied, height=SIZE[0], width=SIZE[1], encoding=Encoding()).data)
    data = copied.read_bytes()
    pairs: dict[str, tuple[Call, Call]] = {
        "index": (lambda: _demux(data), lambda: index_clip(data)),
        "copy_rgb": (_windows("seek", copied, 4), _windows("ours_fast", copied, 4)),
        "copy_yuv": (_windows("decode_only", copied, 4), _windows("ours_yuv", copied, 4)),
        "native_rgb": (_windows("plain", native, 8), _windows("ours_fast", native, 8)),
        "native_exact": (_windows("plain", native, 8), _windows("ours_exact", native, 8)),
        "native_yuv": (_windows("decode_only", native, 8), _windows("ours_yuv", native, 8)),
    }
    chosen = {line: calls for line, calls in pairs.items() if not only or line in only}
    if not only or "loader" in only:
        chosen["loader"] = _loader_pair(native, folder / "dataset")
    return chosen


def _demux(data: bytes) -> int:
    total = 0
    for _ in range(4):  # short beside the clock otherwise
        with av.open(io.BytesIO(data), "r") as container:
            total += sum(packet.size for packet in container.demux(video=0))
    return total


def _windows(method: str, path: Path, count: int) -> Call:
    clip, ours, draw = load_clip(str(path)), Ours(), random.Random(7)
    starts = [draw.randint(0, clip.index.num_frames - NUM_FRAMES) for _ in range(count)]

    def call() -> None:
        for start in starts:
            ours.call(method, Window(clip, start, NUM_FRAMES, 1, *SIZE))()

    return call


def _loader_pair(native: Path, target: Path) -> tuple[Call, Call]:
    for number in range(1, COPIES):
        (native.parent / f"{number}.mp4").write_bytes(native.read_bytes())
    shard(native.parent, target, ShardOptions(buckets=BucketConfig(resolution=("480p",), num_frames=(NUM_FRAMES,))))
    tars = sorted(target.rglob("*.tar"))

    def plain() -> None:
        for path in tars:
            with tarfile.open(path) as tar:
                for member in tar:
                    content = tar.extractfile(member)
                    if content is not None:
                        hashlib.sha256(content.read()).digest()

    def ours() -> None:
        with VideoLoader(target, batch_size=10, num_workers=0, output={"decode": False}) as loader:
            for batch in loader:
                for clip in batch.clips:
                    int(clip.data[-1])

    return plain, ours


def slow_of(text: str) -> tuple[str, float]:
    """Parse LINE=FACTOR."""
    line, factor = text.split("=")
    return line, float(factor)


def arguments() -> argparse.Namespace:
    """Parse the command line. Invalid values end the program with code 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    lines = ("index", "copy_rgb", "copy_yuv", "native_rgb", "native_exact", "native_yuv", "loader")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", nargs="+", choices=lines, default=[])
    parser.add_argument("--reference", type=Path, default=REFERENCE)
    parser.add_argument("--update", action="store_true", help="write the reference")
    parser.add_argument("--slow", type=slow_of, action="append", default=[], help="slow a line down: LINE=FACTOR")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    options.slow = dict(options.slow)
    if options.repeats < 3:
        parser.error(f"--repeats {options.repeats}: must be at least 3 to give an interval")
    if unknown := set(options.slow) - set(lines):
        parser.error(f"--slow: unknown lines {', '.join(sorted(unknown))}; available: {', '.join(lines)}")
    if options.update and (options.slow or options.only):
        parser.error("--update must measure all lines; omit --only and --slow")
    if not options.update and not options.reference.exists():
        parser.error(f"{options.reference} does not exist; run with --update to write it")
    return options


def main() -> int:
    """Measure, compare, and print the results."""
    options = arguments()
    reference: dict[str, Any] = {} if options.update else json.loads(options.reference.read_text())
    try:
        with tempfile.TemporaryDirectory() as folder:
            pairs = make_pairs(Path(folder), corpus_sources()[0], options.only)
            measured = measure(pairs, options.repeats, options.slow)
    except (StreamvidError, OSError) as error:
        print(f"cannot be run: {error}", file=sys.stderr)
        return 2
    verdicts = judge(measured, {line: value["ratio"] for line, value in reference.get("lines", {}).items()})
    if options.update:
        lines = {one.line: {"ratio": one.ratio, "low": one.low, "high": one.high} for one in verdicts}
        text = json.dumps({"machine": machine(), "repeats": options.repeats, "lines": lines}, indent=2)
        options.reference.write_text(text + "\n")
    if options.json:
        told = [{**asdict(verdict), "is_slower": verdict.is_slower} for verdict in verdicts]
        print(json.dumps({"machine": machine(), "reference": reference.get("machine"), "lines": told}, indent=2))
    else:
        print(*verdicts, sep="\n")
        with suppress(KeyError):
            print("reference:", ", ".join(f"{name} {value}" for name, value in reference["machine"].items()))
    return exit_code(verdicts)


if __name__ == "__main__":
    sys.exit(main())
