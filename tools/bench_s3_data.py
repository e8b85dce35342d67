"""Data for tools/bench_s3.py: a real S3 server, and datasets whose samples have a given size."""

from __future__ import annotations

import csv
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

import av
import numpy as np

import streamvid
from streamvid.buckets.bucket import parse_buckets
from streamvid.buckets.config import BucketConfig
from streamvid.dataset.sealed_json import MANIFEST
from streamvid.sharder.source_options import CaptionOptions, SourceOptions

ROOT = Path(__file__).resolve().parent.parent
FRAMES, NUM_SOURCES = 16, 4
KEYS = {"AWS_ACCESS_KEY_ID": "testkey", "AWS_SECRET_ACCESS_KEY": "testsecret"}
EMPTY = ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE")


@dataclass(frozen=True)
class Kind:
    """Kind of samples: approximate size in bytes, size of the pictures, number of samples, and shard size."""

    name: str
    sample_bytes: int
    width: int
    height: int
    num_samples: int
    shard_bytes: int

    @property
    def bucket(self) -> str:
        return f"{self.width}x{self.height}@{FRAMES}"


def kinds(num_bytes: int, shards: int) -> dict[str, Kind]:
    """Return the kinds 100KB and 1MB. The samples of each kind have `num_bytes` in total, in this many shards."""
    sizes = (("100KB", 100_000, 336, 192), ("1MB", 1_000_000, 832, 480))
    return {
        name: Kind(name, size, width, height, num_bytes // size, num_bytes // shards)
        for name, size, width, height in sizes
    }


def make_dataset(folder: Path, kind: Kind) -> Path:
    """Shard clips of about kind.sample_bytes, of which every frame is delivered. An existing dataset is kept.

    The dataset contains a few clips under many keys. Its shards differ because their keys differ.
    """
    dataset = folder / f"{kind.name}-{kind.num_samples}-{kind.shard_bytes}"
    if (dataset / MANIFEST).exists():
        return dataset
    clips = folder / f"clips-{kind.name}"
    clips.mkdir(parents=True, exist_ok=True)
    paths = []
    for number in range(NUM_SOURCES):
        paths.append(clips / f"{number}.mp4")
        paths[-1].write_bytes(clip_of_size(kind, number))
    table = folder / f"{kind.name}.csv"
    with table.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path"])
        rows.writerows([str(paths[number % NUM_SOURCES])] for number in range(kind.num_samples))
    options = streamvid.ShardOptions(
        source=SourceOptions(metadata=table, captions=CaptionOptions(column=""), whole_files=True),
        buckets=BucketConfig(buckets=parse_buckets(kind.bucket)),
        shard_size_bytes=kind.shard_bytes,
    )
    report = streamvid.shard(clips, dataset, options)
    print(report.summary(max_rejections=3), file=sys.stderr)
    return dataset


def clip_of_size(kind: Kind, seed: int) -> bytes:
    """Encode an H.264 clip of about the kind's size. Its pictures are noise, so the quantizer controls the size."""
    low, high = 0.0, 51.0
    for _ in range(8):
        middle = (low + high) / 2
        data = _encoded(kind, seed, middle)
        if abs(len(data) / kind.sample_bytes - 1) < 0.02:
            break
        low, high = (middle, high) if len(data) > kind.sample_bytes else (low, middle)
    return data


def _encoded(kind: Kind, seed: int, quantizer: float) -> bytes:
    random = np.random.default_rng(seed)
    still = random.integers(0, 256, (kind.height, kind.width, 3)).astype(np.float32)
    file = BytesIO()
    with av.open(file, "w", format="mp4") as container:
        options = {"preset": "ultrafast", "crf": f"{quantizer:.2f}", "threads": "1"}
        stream: Any = container.add_stream("libx264", rate=24, options=options)
        stream.width, stream.height, stream.pix_fmt = kind.width, kind.height, "yuv420p"
        for _ in range(FRAMES):
            noise = random.normal(0, 20, still.shape)
            picture = np.clip(still * 0.25 + 96 + noise, 0, 255).astype(np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, "rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


@contextmanager
def rgw(folder: Path, memory: str = "8G") -> Iterator[str]:
    """Set keys in the environment, run Ceph RGW on a free port with its objects in memory, and yield its endpoint."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (folder / "nothing").touch()
    os.environ.update({**KEYS, "AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1"})
    os.environ.update({"AWS_EC2_METADATA_DISABLED": "true", **dict.fromkeys(EMPTY, str(folder / "nothing"))})
    command = [str(ROOT / "tools" / "ceph_rgw.sh"), "run", str(folder / "rgw"), str(port)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, "CEPH_MEMORY": memory}
    ) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline().strip() != "up":
                raise SystemExit("RGW did not start; see its messages above")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def upload(folder: Path, endpoint: str, bucket: str) -> None:
    """Upload every file in a folder to a new bucket, following links."""
    config = import_module("botocore.config").Config(s3={"addressing_style": "path"})
    client = import_module("boto3").client("s3", endpoint_url=endpoint, config=config)
    client.create_bucket(Bucket=bucket)
    paths = [Path(root) / name for root, _, names in os.walk(folder, followlinks=True) for name in names]

    def put(path: Path) -> None:
        with path.open("rb") as file:
            client.put_object(Bucket=bucket, Key=path.relative_to(folder).as_posix(), Body=file)

    since = time.monotonic()
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(put, paths))
    print(f"{bucket}: {len(paths)} files uploaded in {time.monotonic() - since:.1f} s", file=sys.stderr)
