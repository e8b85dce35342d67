"""Streaming side by side: streamvid, a plain DataLoader over the files, and webdataset over the same tars.

    python -m tools.bench_loader [--clips FOLDER] [--repeats 5] [--json]        (from the root of the checkout)

All deliver uint8 batches of the same samples, frame counts and sizes with the same number of worker processes:
- streamvid: VideoLoader;
- files: a torch DataLoader over the same files in the same batches; each is decoded whole with PyAV, then the wanted
  frames are resized (as Open-Sora does);
- webdataset: a torch DataLoader over webdataset over the same tars; PyAV seeks by time and decodes from there.

Without --clips, the clips are the demo's corpus. The files are in the page cache. Each run is a process of its own;
methods take turns within a repeat, in random order. Figures: samples delivered a second of wall time, from making
the loader to its end, start of its workers included; CPU seconds a sample, workers included; seconds to the first
batch; peak memory of the process tree as tools/bench_memory.py counts it. Medians of the repeats; ratios are of
paired runs, above 1 where the other method takes more.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

import streamvid
from tools.bench_memory import watching

ROOT = Path(__file__).resolve().parent.parent
SHARD_BYTES = 2 * 10**6  # many tars, so that webdataset can share them out evenly among workers
Size = tuple[int, int, int]


@dataclass(frozen=True)
class Job:
    """What one run streams: batches of (file, bucket id), and the (T, H, W) of each bucket."""

    dataset: str
    batch_size: int
    workers: int
    epochs: int
    batches: list[list[tuple[str, str]]]
    sizes: dict[str, Size]


# ---------------------------------------------------------------------------------------------- the methods


def run_streamvid(job: Job) -> Iterator[int]:
    """VideoLoader; yields the number of samples of each batch, as all methods do."""
    with streamvid.VideoLoader(
        job.dataset, batch_size=job.batch_size, num_epochs=job.epochs, num_workers=job.workers
    ) as loader:
        for batch in loader:
            yield batch.video.shape[0]


def run_files(job: Job) -> Iterator[int]:
    """A DataLoader over (file, size) pairs."""
    from torch.utils.data import DataLoader

    items = [item for batch in job.batches for item in batch]
    ends = np.cumsum([len(batch) for batch in job.batches]).tolist()
    batches = [list(range(end - len(batch), end)) for batch, end in zip(job.batches, ends, strict=True)]
    dataset: Any = _Files(items, job.sizes)
    for batch in DataLoader(dataset, batch_sampler=batches, num_workers=job.workers):
        yield batch.shape[0]


class _Files:
    def __init__(self, items: Sequence[tuple[str, str]], sizes: dict[str, Size]) -> None:
        self._items, self._sizes = items, sizes

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        path, bucket = self._items[index]
        size = self._sizes[bucket]
        with av.open(path) as container:
            container.streams.video[0].codec_context.thread_count = 1
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        start = random.randint(0, len(frames) - size[0])
        out = np.empty((*size, 3), np.uint8)
        for picture, pixels in zip(out, frames[start : start + size[0]], strict=True):
            cover(av.VideoFrame.from_ndarray(pixels, format="rgb24"), picture)
        return _to_tensor(out)


def run_webdataset(job: Job) -> Iterator[int]:
    """webdataset over the tars, samples gathered into batches of one bucket in the worker that decodes them."""
    import webdataset
    from torch.utils.data import DataLoader

    tars = [str(path) for path in sorted(Path(job.dataset).glob("shards/*/*.tar"))]

    def batched(samples: Iterable[dict[str, Any]]) -> Iterator[Any]:
        waiting: dict[str, list[Any]] = {}
        for sample in samples:
            bucket = Path(sample["__url__"]).parent.name
            clips = waiting.setdefault(bucket, [])
            clips.append(_seek_and_decode(_clip_of(sample), job.sizes[bucket]))
            if len(clips) == job.batch_size:
                yield _stack(waiting.pop(bucket))
        yield from map(_stack, waiting.values())

    for _ in range(job.epochs):
        dataset = webdataset.WebDataset(tars, shardshuffle=False, empty_check=False).compose(batched)
        for batch in DataLoader(dataset, batch_size=None, num_workers=job.workers):
            yield batch.shape[0]


def _clip_of(sample: dict[str, Any]) -> bytes:
    (name,) = [name for name in sample if not name.startswith("__") and name not in ("json", "txt")]
    return bytes(sample[name])


def _seek_and_decode(data: bytes, size: Size) -> Any:
    out = np.empty((*size, 3), np.uint8)
    with av.open(io.BytesIO(data), "r") as container:
        stream: Any = container.streams.video[0]
        stream.codec_context.thread_count = 1
        num_frames = stream.frames or round(float((container.duration or 0) / av.time_base * stream.average_rate))
        first = random.randint(0, max(0, num_frames - size[0]))
        wanted = first / stream.average_rate / stream.time_base + (stream.start_time or 0)
        container.seek(int(wanted), stream=stream)
        slot = 0
        for frame in container.decode(stream):
            if frame.pts is None or frame.pts >= int(wanted):
                cover(frame, out[slot])
                slot += 1
                if slot == size[0]:
                    break
        out[slot:] = out[max(0, slot - 1)]  # a guess from average rate and time may come short at the end
    return _to_tensor(out)


def _stack(clips: list[Any]) -> Any:
    import torch

    return torch.stack(clips)


def _to_tensor(frames: NDArray[np.uint8]) -> Any:
    import torch

    return torch.from_numpy(frames).permute(3, 0, 1, 2)


def cover(frame: av.VideoFrame, picture: NDArray[np.uint8]) -> None:
    """Scale a frame to cover `picture`, (H, W, 3), and crop the centre."""
    height, width = picture.shape[:2]
    scale = max(height / frame.height, width / frame.width)
    full_height, full_width = max(height, round(frame.height * scale)), max(width, round(frame.width * scale))
    pixels = frame.reformat(full_width, full_height, "rgb24", interpolation="AREA").to_ndarray()
    top, left = (full_height - height) // 2, (full_width - width) // 2
    picture[:] = pixels[top : top + height, left : left + width]


METHODS = {"streamvid": run_streamvid, "files": run_files, "webdataset": run_webdataset}


# ---------------------------------------------------------------------------------------------- measuring


def run_method(method: str, job: Job) -> dict[str, float]:
    """One run in this process; imports that all share are not counted."""
    import pyarrow.parquet  # noqa: F401
    import torch  # noqa: F401
    import webdataset  # noqa: F401

    random.seed(0)
    before, began, first, num_samples = _cpu_seconds(), time.perf_counter(), 0.0, 0
    for count in METHODS[method](job):
        first = first or time.perf_counter() - began
        num_samples += count
    seconds = time.perf_counter() - began
    return {
        "num_samples": num_samples,
        "samples_per_second": num_samples / seconds,
        "cpu_seconds_per_sample": (_cpu_seconds() - before) / num_samples,
        "first_batch_seconds": first,
    }


def _cpu_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def run_apart(method: str, job_file: Path) -> dict[str, float]:
    """One run in a process of its own, its peak memory included."""
    command = [sys.executable, "-m", "tools.bench_loader", "--role", method, str(job_file)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process,
        watching(process.pid) as watch,
    ):
        output, _ = process.communicate()
    if process.returncode != 0:
        raise SystemExit(f"{method}: the run ended with {process.returncode}")
    return {**json.loads(output), "peak_bytes": watch.peak(lambda memory: memory.total)}


def measure(job: Job, repeats: int) -> list[dict[str, Any]]:
    """A row a method: medians of its figures, and the ratios of paired runs to streamvid's."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in METHODS}
    with tempfile.TemporaryDirectory() as folder:
        job_file = Path(folder) / "job.json"
        job_file.write_text(json.dumps(asdict(job)))
        for repeat in range(repeats):
            for name in random.Random(repeat).sample(sorted(METHODS), len(METHODS)):
                runs[name].append(run_apart(name, job_file))
    rows = []
    for name, found in runs.items():
        row: dict[str, Any] = {"method": name}
        row |= {figure: statistics.median(run[figure] for run in found) for figure in found[0]}
        for ratio, figure in (("times_slower", "samples_per_second"), ("times_cpu", "cpu_seconds_per_sample")):
            pairs = [(run[figure], ours[figure]) for run, ours in zip(found, runs["streamvid"], strict=True)]
            row[ratio] = statistics.median(b / a if figure == "samples_per_second" else a / b for a, b in pairs)
        rows.append(row)
    return rows


def make_job(root: Path, clips: Path, options: argparse.Namespace) -> Job:
    """Shards the clips and notes the batches that streamvid delivers; warms the page cache on the way."""
    shard_options = streamvid.ShardOptions(
        resolution=tuple(options.resolution.split(",")),
        num_frames=tuple(int(count) for count in options.num_frames.split(",")),
        shard_size_bytes=SHARD_BYTES,
    )
    streamvid.shard(clips, root / "dataset", shard_options)
    dataset = streamvid.open_dataset(root / "dataset")
    sources = {row["key"]: row["source"] for row in dataset.samples_table().to_pylist()}
    for path in sources.values():
        (clips / path).read_bytes()
    arguments: dict[str, Any] = {"batch_size": options.batch_size, "num_epochs": options.epochs, "num_workers": 0}
    with streamvid.VideoLoader(dataset, **arguments) as loader:
        batches = [[(str(clips / sources[key]), batch.bucket.id) for key in batch.sample_keys] for batch in loader]
        sizes = {bucket.id: bucket.shape for bucket in loader.buckets}
    return Job(str(root / "dataset"), options.batch_size, options.workers, options.epochs, batches, sizes)


def main() -> None:
    """Parse the command line, measure, print."""
    if sys.argv[1:2] == ["--role"]:
        method, job_file = sys.argv[2:]
        job = json.loads(Path(job_file).read_text())
        print(json.dumps(run_method(method, Job(**job))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clips", type=Path, help="a folder of videos; the demo's corpus if not given")
    parser.add_argument("--resolution", default="256px")
    parser.add_argument("--num-frames", default="17", help="frame counts, separated by commas")
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        clips = options.clips.resolve() if options.clips else Path(folder) / "corpus"
        if options.clips is None:
            subprocess.run(
                [sys.executable, str(ROOT / "tools" / "make_corpus.py"), str(clips)],
                check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ,
            )  # fmt: skip
        rows = measure(make_job(Path(folder), clips, options), options.repeats)
    if options.json:
        print(json.dumps({"workers": options.workers, "repeats": options.repeats, "rows": rows}, indent=2))
    else:
        print_table(rows)


def print_table(rows: list[dict[str, Any]]) -> None:
    """The figures for people."""
    print(
        f"{'method':<12}{'samples':>8}{'samples/s':>11}{'slower':>8}"
        f"{'CPU s/sample':>14}{'x CPU':>7}{'first batch':>13}{'peak':>11}"
    )
    for row in rows:
        print(
            f"{row['method']:<12}{row['num_samples']:>8.0f}{row['samples_per_second']:>11.2f}"
            f"{row['times_slower']:>7.2f}x{row['cpu_seconds_per_sample']:>14.4f}{row['times_cpu']:>7.2f}"
            f"{row['first_batch_seconds']:>11.2f} s{row['peak_bytes'] / 2**20:>7.0f} MiB"
        )


if __name__ == "__main__":
    main()
