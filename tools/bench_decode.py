"""CPU cost of decoding: streamvid on stored copies and on native clips, its peers, and the decoder alone.

    python -m tools.bench_decode [--clips FILES_OR_FOLDERS...] [--peers PYTHON] [--sizes 192x336,480x848]
        [--num-frames 16,49,97] [--strides 1,2] [--windows 2] [--repeats 5] [--json]        (from the checkout's root)

The default clips are those of tools/bench_clips.py: real footage in 1080p and 720p. Any other clips can be used;
nothing is tuned to these. --peers is the Python of the peers' environment (`make peers`, .peers/bin/python). Without
it, the only peer is PyAV. Native clips (crf 18) are made once and stored in .cache/bench_clips/native.

Times are CPU milliseconds per sample, for random windows, one decoding thread, and the whole decoding process. All
methods decode the same windows, in random order in each repeat. Files are in memory. A peer's time includes opening the
file. streamvid's time includes `window()` of the packet index, and the checksums of the byte range. All times include
reading one byte in each cache line of the output. RGB "fast" is swscale's default, which the peers use; "exact" is
streamvid's default. The methods are:

- opensora, pyav_seek, torchcodec, decord: see tools/peers/decode.py. Open-Sora takes minutes, whatever the window, so
  it decodes one window per repeat, with the first of --num-frames and --strides only. torchcodec is the cheapest of
  three ways to use it; the approximate way counts only if its pixels equal those of the exact way. best_peer is the
  cheapest of PyAV seek, torchcodec and decord in each repeat.
- ours_*: the source, using its packet index; native_*: the native clip. *_aligned windows start at a key frame.
- native_plain: plain PyAV on the same native clip, reusing a reformatter with one thread.
- decode_only, native_decode_only: the same packets through a reused decoder, without conversion.

A cell is a combination of clip, size, number of frames and stride. Its ratios are medians over the repeats of paired
ratios. The summary lists the geometric mean over the cells, the worst cell and, in parentheses, the geometric means in
the lowest and highest repeat. If a peer fails on a clip, the output states the reason, and the clip does not count in
any ratio of this peer.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import random
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from streamvid.video.encode.profiles import Encoding, encoder_versions
from tools.bench_clips import FOLDER, corpus_sources, find_clips, make_clips
from tools.bench_native import machine
from tools.bench_ratios import Cell, Costs, Line, check, ratio
from tools.peers.client import PYTHON, Answer, PeerFailure, decode_ours, decode_peers

OURS = ("ours_fast", "ours_exact", "ours_yuv", "decode_only")
NATIVE = {"native_fast": "ours_fast", "native_exact": "ours_exact", "native_yuv": "ours_yuv"}
ALIGNED = {f"{name}_aligned": method for name, method in NATIVE.items()}
NATIVE_OTHERS = {"native_plain": "plain", "native_decode_only": "decode_only"}
TORCHCODEC = ("torchcodec", "torchcodec_approximate", "torchcodec_torch")
PEERS = ("pyav_seek", *TORCHCODEC, "decord")
BEST_OF = ("pyav_seek", "torchcodec", "decord")
ORDER = (
    *("opensora", "torchcodec", "decord", "pyav_seek", "best_peer", *OURS),
    *("native_plain", *NATIVE, *ALIGNED, "native_decode_only"),
)

_LOG = logging.getLogger(__name__)


class Asked(Protocol):
    def ask(self, **request: object) -> Answer: ...


@dataclass(frozen=True)
class Job:
    """A clip at one output size, and the windows to decode from it."""

    path: Path
    native: Path
    source_height: int
    clip_frames: int
    height: int
    width: int
    num_frames: int
    stride: int
    has_opensora: bool

    def starts(self, repeat: int, windows: int) -> list[int]:
        """Return the first frames of a repeat's windows. They are the same for every output size."""
        draw = random.Random(f"{self.path.name} {self.num_frames} {self.stride} {repeat}")
        return [draw.randint(0, self.clip_frames - 1 - self.reach) for _ in range(windows)]

    @property
    def reach(self) -> int:
        return (self.num_frames - 1) * self.stride


@dataclass
class Machines:
    """Processes that decode: one for streamvid, and one for the peers if they are available."""

    ours: Asked
    peers: Asked | None
    failed: dict[str, str]

    def calls(self, job: Job, start: int, with_opensora: bool) -> dict[str, tuple[Asked, str, Path, int]]:
        """Map each method to (process, name of the method in this process, file, first frame of the window)."""
        aligned = start // Encoding().gop * Encoding().gop
        calls = {name: (self.ours, name, job.path, start) for name in OURS}
        calls |= {name: (self.ours, method, job.native, start) for name, method in (NATIVE | NATIVE_OTHERS).items()}
        calls |= {name: (self.ours, method, job.native, aligned) for name, method in ALIGNED.items()}
        if self.peers is None:
            return calls | {"pyav_seek": (self.ours, "seek", job.path, start)}
        peers = (*PEERS, "opensora") if with_opensora else PEERS
        return calls | {name: (self.peers, name, job.path, start) for name in peers if name not in self.failed}


@contextmanager
def machines(python: Path | None) -> Iterator[Machines]:
    """Start the decoding processes, and stop them on exit."""
    with ExitStack() as stack:
        ours = stack.enter_context(decode_ours())
        peers = stack.enter_context(decode_peers(python)) if python is not None else None
        failed = dict(peers.ask(method="versions")["missing"]) if peers is not None else {}
        yield Machines(ours, peers, failed)


def prepare(ours: Asked, paths: list[Path], sizes: list[tuple[int, int]], folder: Path) -> dict[Path, Any]:
    """Return facts about each usable clip, and make its native clips. Log the names of all other clips."""
    found = {}
    for path in paths:
        facts = ours.ask(method="facts", path=str(path))
        for height, width in sizes:
            target = native_path(path, height, width, folder)
            if "error" not in facts and not target.exists():
                _LOG.info("making %s", target)
                made = ours.ask(method="encode", path=str(path), height=height, width=width, save=str(target))
                facts |= {"error": made["error"]} if "error" in made else {}
        if "error" in facts:
            _LOG.warning("left out: %s: %s", path, facts["error"])
        else:
            found[path] = facts
    return found


def native_path(path: Path, height: int, width: int, folder: Path) -> Path:
    """Return the path of a native clip. It depends on the source, the encoding and the version of the encoder."""
    stat = path.stat()
    about = (str(path.resolve()), stat.st_size, stat.st_mtime_ns, Encoding().encoder_options(), encoder_versions())
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:12]
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{path.stem}-{height}x{width}-{digest}.mp4"


def make_jobs(facts: dict[Path, Any], options: argparse.Namespace) -> list[Job]:
    """Return the jobs for all clips that are long enough."""
    jobs = []
    for path, fact in facts.items():
        for height, width in options.sizes:
            for num_frames in options.num_frames:
                for stride in options.strides:
                    is_first = (num_frames, stride) == (options.num_frames[0], options.strides[0])
                    job = Job(
                        *(path, native_path(path, height, width, options.native), fact["height"], fact["num_frames"]),
                        *(height, width, num_frames, stride, is_first and not options.no_opensora),
                    )
                    if job.reach < job.clip_frames:
                        jobs.append(job)
                    else:
                        _LOG.warning(
                            "left out: %s has %d frames, too few for %d with stride %d",
                            path,
                            job.clip_frames,
                            num_frames,
                            stride,
                        )
    return jobs


def measure(machines: Machines, jobs: list[Job], repeats: int, windows: int) -> list[Cell]:
    """Measure all cells. Repeats are the outermost loop, so that temporary load affects all cells alike."""
    cells = [_cell(job) for job in jobs]
    for repeat in range(-1, repeats):  # the first warms up: decoders, graphs, pages, files
        for job, cell in zip(jobs, cells, strict=True):
            starts = job.starts(repeat, windows if repeat >= 0 else 1)
            samples = [
                _sample(machines, job, cell, start, job.has_opensora and repeat >= 0 and start is starts[0])
                for start in starts
            ]
            if repeat >= 0:
                _enter(cell, samples)
        _LOG.info("finished repeat %d of %d", repeat + 1, repeats)
    for cell in cells:
        for method in cell.failures:
            cell.costs.pop(method, None)
    return cells


def _cell(job: Job) -> Cell:
    size = f"{job.height}x{job.width}"
    return Cell(job.path.stem, job.source_height, size, job.num_frames, job.stride, {}, {})


def _sample(machines: Machines, job: Job, cell: Cell, start: int, with_opensora: bool) -> dict[str, float]:
    """Return the CPU seconds of each method for one window, and record failures in the cell."""
    calls = machines.calls(job, start, with_opensora)
    size = {"height": job.height, "width": job.width, "num_frames": job.num_frames, "stride": job.stride}
    answers = {}
    for name in random.Random(f"{start} {cell.name}").sample(sorted(calls), len(calls)):
        whom, method, path, begin = calls[name]
        if name not in cell.failures:
            answers[name] = whom.ask(method=method, path=str(path), start=begin, **size)
    for name, answer in answers.items():
        problem = answer.get("error") or _other_frames(answer, answers.get("pyav_seek"))
        if problem:
            cell.failures[name] = problem
    good = {name: answer for name, answer in answers.items() if name not in cell.failures}
    costs = {name: float(answer["cpu_seconds"]) for name, answer in good.items()}
    if "torchcodec" in good:
        approximate = good.get("torchcodec_approximate")
        if approximate and approximate["checksum"] != good["torchcodec"]["checksum"]:
            del costs["torchcodec_approximate"]
        costs["torchcodec"] = min(costs.pop(name) for name in TORCHCODEC if name in costs)
    return {name: cost for name, cost in costs.items() if name not in TORCHCODEC[1:]}


def _other_frames(answer: Answer, right: Answer | None) -> str | None:
    found, wanted = answer.get("pts_seconds"), (right or {}).get("pts_seconds")
    if not found or not wanted or len(wanted) < 2:
        return None
    slack = min(b - a for a, b in pairwise(wanted)) / 2
    wrong = sum(abs(a - b) > slack for a, b in zip(found, wanted, strict=True))
    return f"{wrong} of {len(wanted)} frames have wrong timestamps" if wrong else None


def _enter(cell: Cell, samples: list[dict[str, float]]) -> None:
    """Record one repeat's mean CPU time per sample, for each method and for the best peer."""
    means: dict[str, float] = {}
    for name in {name for sample in samples for name in sample}:
        means[name] = statistics.fmean(sample[name] for sample in samples if name in sample)
    if "pyav_seek" in means:
        means["best_peer"] = min(means[name] for name in BEST_OF if name in means and name not in cell.failures)
    for name, mean in means.items():
        cell.costs.setdefault(name, []).append(mean)


def lines() -> list[Line]:
    """Return the performance promises with which the results are compared."""

    def large(cell: Cell) -> bool:
        return (cell.source_height, cell.size) == (720, "480x848")

    def small(cell: Cell) -> bool:
        return (cell.source_height, cell.size) == (1080, "192x336")

    def at(size: str) -> Any:
        return lambda cell: cell.size == size

    def every(cell: Cell) -> bool:
        return True

    found = []
    for text, cheap, of, least in (
        ("copy, 720p to 480p: 20 x Open-Sora", "ours_fast", large, 20),
        ("copy, 1080p to 256px: 30 x Open-Sora", "ours_fast", small, 30),
        ("native, 720p to 480p: 90 x Open-Sora", "native_fast", large, 90),
        ("native, 1080p to 256px: 1100 x Open-Sora", "native_fast", small, 1100),
    ):
        found.append(Line(text, "opensora", cheap, least, of))
    found += [
        Line("copy, RGB: 1.2 x the best peer, no cell below 1", "best_peer", "ours_fast", 1.2, every, 1.0),
        Line("copy, YUV: 1.35 x the best peer", "best_peer", "ours_yuv", 1.35, every),
        Line("native, 720p to 480p: 4.5 x the best peer", "best_peer", "native_fast", 4.5, large),
        Line("native, 1080p to 256px: 40 x the best peer", "best_peer", "native_fast", 40, small),
        Line("native, 256px: no slower than plain PyAV on it", "native_plain", "native_fast", 1.0, at("192x336")),
        Line("native, 480p: no slower than plain PyAV on it", "native_plain", "native_fast", 0.95, at("480x848")),
        Line("native, YUV: within 10 % of decoding", "native_decode_only", "native_yuv", 1 / 1.1, every),
        Line("copy, YUV: within 20 % of decoding", "decode_only", "ours_yuv", 1 / 1.2, every),
    ]
    return [line for one in found for line in (one, *_beside(one))]


def _beside(line: Line) -> list[Line]:
    """Return lines that make the same comparison for exact RGB and for other ways of decoding native clips."""
    others = {"ours_fast": ("ours_exact",), "native_fast": ("native_exact", "native_yuv", "native_fast_aligned")}
    return [Line(f"   beside it, {name}", line.dear, name, line.least, line.of) for name in others.get(line.cheap, ())]


def rows(cells: list[Cell]) -> list[dict[str, object]]:
    """Return one row per source height, output size, window and method."""
    found: list[dict[str, object]] = []
    for key in sorted({(cell.source_height, cell.size, cell.num_frames, cell.stride) for cell in cells}):
        group = [cell for cell in cells if (cell.source_height, cell.size, cell.num_frames, cell.stride) == key]
        for method in ORDER:
            costs = [cell.costs[method] for cell in group if cell.costs.get(method)]
            if costs:
                repeats = [1000 * statistics.fmean(values) for values in zip(*costs, strict=True)]
                about = dict(zip(("source_height", "size", "num_frames", "stride"), key, strict=True))
                told = {"cpu_ms": statistics.median(repeats), "cpu_ms_low": min(repeats), "cpu_ms_high": max(repeats)}
                against = {f"times_{dear}": ratio(group, dear, method) for dear in ("opensora", "best_peer")}
                means = {name: value.mean for name, value in against.items() if value is not None}
                found.append({**about, "method": method, "num_clips": len(costs), **told, **means})
    return found


def report(cells: list[Cell]) -> dict[str, object]:
    """Return all results as JSON values."""
    return {
        "rows": rows(cells),
        "lines": [check(line, cells) for line in lines()],
        "cells": [{**asdict(cell), "cpu_ms": _medians(cell.costs)} for cell in cells],
        "failures": [f"{cell.name}: {name}: {why}" for cell in cells for name, why in cell.failures.items()],
    }


def _medians(costs: Costs) -> dict[str, float]:
    return {name: 1000 * statistics.median(values) for name, values in costs.items()}


def print_report(found: dict[str, Any]) -> None:
    """Print the results as tables."""
    print(", ".join(f"{name} {value}" for name, value in found["machine"].items()))
    title = None
    for row in found["rows"]:
        key = (row["source_height"], row["size"], row["num_frames"], row["stride"])
        if key != title:
            title = key
            print(f"\n{key[0]} lines to {key[1]}, {key[2]} frames, stride {key[3]}")
            print(f"{'':22}{'clips':>6}{'CPU ms':>10}{'(low to high)':>22}{'x Open-Sora':>13}{'x best peer':>13}")
        spread = f"({row['cpu_ms_low']:.2f} to {row['cpu_ms_high']:.2f})"
        against = "".join(
            f"{row[name]:>13.2f}" if name in row else f"{'':13}" for name in ("times_opensora", "times_best_peer")
        )
        print(f"{row['method']:22}{row['num_clips']:>6}{row['cpu_ms']:>10.2f}{spread:>22}{against}")
    print("\nLines: geometric mean over cells (lowest to highest repeat), the worst cell")
    for line in found["lines"]:
        if line["met"] is None:
            print(f"  not measured  {line['line']}")
            continue
        met = "" if line["line"].startswith(" ") else ("met" if line["met"] else "MISSED")
        figures = f"{line['mean']:.3f} ({line['low']:.3f} to {line['high']:.3f}), worst {line['worst']:.3f}"
        print(f"  {met:7}{line['line']:52}{figures} at {line['worst_cell']}; wanted {line['least']:.3f}")
    for failure in found["failures"]:
        print(f"left out: {failure}")


def sizes_of(text: str) -> list[tuple[int, int]]:
    """Parse a comma-separated list of HxW sizes."""
    return [(int(height), int(width)) for height, width in (size.split("x") for size in text.split(","))]


def numbers_of(text: str) -> list[int]:
    """Parse a comma-separated list of integers."""
    return [int(number) for number in text.split(",")]


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clips", nargs="+", type=Path, default=[], help="video files, or folders with video files")
    parser.add_argument("--peers", type=Path, default=PYTHON if PYTHON.exists() else None, help="the peers' Python")
    parser.add_argument("--sizes", type=sizes_of, default="192x336,480x848", help="output sizes, as HxW,HxW")
    parser.add_argument("--num-frames", type=numbers_of, default="16,49,97", help="numbers of frames per sample")
    parser.add_argument("--strides", type=numbers_of, default="1,2", help="strides between frames")
    parser.add_argument("--windows", type=int, default=2, help="number of windows per clip and repeat")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-opensora", action="store_true", help="omit Open-Sora, which takes longest by far")
    parser.add_argument("--native", type=Path, default=FOLDER / "native", help="folder for native clips")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args()


def main() -> int:
    """Parse the command line, measure, and print the results."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    options = arguments()
    paths = find_clips(options.clips) if options.clips else make_clips(corpus_sources(), FOLDER)
    try:
        with machines(options.peers) as asked:
            jobs = make_jobs(prepare(asked.ours, paths, options.sizes, options.native), options)
            if not jobs:
                sys.exit(f"none of the {len(paths)} files can be used")
            cells = measure(asked, jobs, options.repeats, options.windows)
            versions = asked.peers.ask(method="versions")["versions"] if asked.peers else {}
    except PeerFailure as error:
        sys.exit(f"a decoding process failed: {error}")
    about = {"machine": machine(), "peers": versions, "missing_peers": asked.failed, "repeats": options.repeats}
    found = {**about, "windows": options.windows, **report(cells)}
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        print_report(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
