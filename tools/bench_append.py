"""Cost of an append: seconds, requests and bytes, depending on the number of samples in the dataset.

    python -m tools.bench_append [--samples 10000,100000,1000000] [--clips 100] [--json]

The dataset is synthetic. Its manifest, shard table, table of known rows and one samples file are as `streamvid shard`
would write them for this number of samples, with 500 samples per shard. Tars and the other samples files do not exist,
because an append does not read them. The dataset is in moto (S3) behind a proxy that counts. The new clips are small
and on the local disk, so that they take little time. Each append is a `streamvid append` in a separate process. `again`
appends the same clips a second time, and `folder` appends to a dataset in a folder. `down` and `up` are the bytes in
the bodies of responses and requests.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

from streamvid.buckets.bucket import parse_bucket
from streamvid.dataset.index import MAX_SHARDS_PER_FILE, ClipEntry, RowGroup, SampleRow, SourceEntry, encode_samples
from streamvid.dataset.manifest import FileInfo, ShardInfo, manifest_to_json
from streamvid.dataset.sealed_json import MANIFEST
from streamvid.dataset.versions.records import ROW, encode_records
from streamvid.sharder.options import ShardOptions
from streamvid.storage import Store, open_store
from tools.fault_proxy import FaultProxy
from tools.synthetic_dataset import put_file, put_index

ROOT = Path(__file__).resolve().parent.parent
SAMPLES_A_SHARD = 500
BUCKET = parse_bucket("96x64@9")
KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}


@dataclass(frozen=True)
class Cost:
    """Cost of one append."""

    samples: int
    run: str
    seconds: float
    requests: dict[str, int]
    down: int
    up: int

    def __str__(self) -> str:
        requests = ", ".join(f"{count} {method}" for method, count in sorted(self.requests.items()))
        bodies = f"down {self.down / 1e6:6.2f} MB  up {self.up / 1e6:6.2f} MB  {requests}" if self.requests else ""
        return f"{self.samples:>9,} samples  {self.run:<8} {self.seconds:6.1f} s  {bodies}"


def put_dataset(store: Store, num_samples: int) -> None:
    """Write the index of a synthetic dataset of this size."""
    rng = random.Random(num_samples)
    num_shards = num_samples // SAMPLES_A_SHARD

    parts = range(0, num_shards, MAX_SHARDS_PER_FILE)
    groups = [RowGroup(BUCKET.id, number, "train", rows_of(number)) for number in range(min(num_shards, parts.step))]
    real = put_file(store, "samples", 0, encode_samples(groups, {"score": "double"}))
    names = (f"index/samples-{number:05d}-{'0' * 12}.parquet" for number in range(1, len(parts)))
    absent = [replace(real, path=name, num_bytes=real.num_bytes + 1) for name in names]
    samples = (real, *absent)
    # The first file counts as the smallest, which an append reads.
    packets = tuple(replace(file, path=file.path.replace("samples", "packets")) for file in samples)
    shards = [shard_of(number, samples, rng) for number in range(num_shards)]
    known = np.zeros(num_samples, ROW)
    known["name"], known["row"] = np.random.default_rng(0).integers(0, 2**64, (2, num_samples), np.uint64)
    records = encode_records(known, 0)
    for file, data in records:
        store.put(file.path, data)
    build = {"options": ShardOptions(buckets={"buckets": [BUCKET.size_at_frames]}).to_json()}
    files = [file for file, _ in records]
    manifest = put_index(store, [BUCKET], shards, samples, packets=packets, records=files, build=build)
    store.put(MANIFEST, manifest_to_json(manifest))


def shard_of(number: int, samples: tuple[FileInfo, ...], rng: random.Random) -> ShardInfo:
    """Return a row of the shard table."""
    path = samples[number // MAX_SHARDS_PER_FILE].path
    digests = rng.randbytes(32).hex(), rng.randbytes(32).hex()
    sizes = (500 * 10**6, digests[0], 8 * SAMPLES_A_SHARD + 8, digests[1], 10**6)
    return ShardInfo(BUCKET.id, number, 0, "train", SAMPLES_A_SHARD, *sizes, path, number % MAX_SHARDS_PER_FILE)


def rows_of(number: int) -> list[SampleRow]:
    """Return the index rows of one shard."""
    rng = random.Random(number)
    rows = []
    for index in range(SAMPLES_A_SHARD):
        key = f"clip-{number}-{index}-{rng.randrange(2**64):016x}"
        clip = ClipEntry("mp4", 10**6 * index, 10**6, rng.randbytes(32), 100, 96, 64, 24.0, 4.2, "h264")
        source = SourceEntry(f"videos/{key}.mp4", 96, 64, 10**6, 0, 100, 0.0, 1.0)
        caption = " ".join(rng.choice(("a", "dog", "runs", "over", "grass", "slowly")) for _ in range(20))
        rows.append(SampleRow(key, key, index, caption, clip, source, {"score": rng.random()}))
    return rows


def make_clips(folder: Path, count: int) -> None:
    """Write this many small videos, each with different pictures."""
    folder.mkdir()
    for number in range(count):
        with av.open(str(folder / f"new{number:05d}.mp4"), "w") as output:
            stream: Any = output.add_stream("libx264", rate=Fraction(24))
            stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
            for frame in range(12):
                picture = np.full((64, 96, 3), (number * 7 + frame) % 256, np.uint8)
                output.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            output.mux(stream.encode())


@contextmanager
def moto(folder: Path) -> Iterator[str]:
    """Run an S3 server, and yield its URL."""
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with (folder / "moto.log").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
        try:
            while True:
                with socket.socket() as sock:
                    if sock.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


def append(dataset: str, clips: Path, work: Path | None) -> tuple[float, int]:
    """Append the clips. Return the elapsed seconds and the number of new samples."""
    words = [sys.executable, "-m", "streamvid", "-q", "append", dataset, str(clips), "--json"]
    words += ["--work-dir", str(work)] if work is not None else []
    start = time.monotonic()
    done = subprocess.run(words, check=True, capture_output=True, text=True, cwd=ROOT)
    return time.monotonic() - start, int(json.loads(done.stdout)["num_samples"])


def measure(num_samples: int, clips: Path, folder: Path, proxy: FaultProxy, num_clips: int) -> Iterator[Cost]:
    """Append the clips twice to a dataset in a bucket, and once to a dataset in a folder. Both have this size."""
    url, work = f"s3://bench/ds{num_samples}", folder / "work"
    put_dataset(open_store(url), num_samples)
    for run, expected in (("append", num_clips), ("again", 0)):
        proxy.reset_counts()
        seconds, added = append(url, clips, work)
        assert added == expected, f"{added} samples were added"
        counts, methods = proxy.counts(), Counter[str]()
        for request, count in counts.requests.items():
            methods[request.partition(" ")[0]] += count
        yield Cost(num_samples, run, seconds, dict(methods), counts.bytes_down, counts.bytes_up)
    local = folder / f"ds{num_samples}"
    put_dataset(open_store(local), num_samples)
    yield Cost(num_samples, "folder", append(str(local), clips, None)[0], {}, 0, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", default="10000,100000,1000000")
    parser.add_argument("--clips", type=int, default=100)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-append-") as name, moto(Path(name)) as url, FaultProxy(url) as proxy:
        folder = Path(name)
        os.environ |= {**KEYS, "AWS_ENDPOINT_URL": proxy.endpoint_url}
        subprocess.run(["curl", "-sf", "-X", "PUT", f"{url}/bench"], check=True)
        make_clips(folder / "clips", given.clips)
        for count in map(int, given.samples.split(",")):
            for cost in measure(count, folder / "clips", folder, proxy, given.clips):
                print(json.dumps(vars(cost)) if given.json else cost, flush=True)


if __name__ == "__main__":
    main()
