"""Tests of two jobs on one machine that share a cache of half the dataset.

Both receive exact batches, and the folder stays within its limit, even if one job is killed while it uses the cache.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from streamvid.buckets.bucket import parse_buckets
from streamvid.sharder.sharder import shard
from streamvid.storage.cache.blocks import BLOCK_BYTES
from tests.clips import encode, frames_of
from tests.loader import s3_run
from tests.loader.s3_run import Source
from tests.servers import Rgw, S3Env
from tests.shard_options import shard_options

NUM_CLIPS, PADDING_BYTES = 20, 4 * 2**20


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory, rgw: Rgw) -> Source:
    """Dataset of 80 MiB in five shards: short clips, each followed by a box of random bytes."""
    folder, draw = tmp_path_factory.mktemp("large"), random.Random(1)
    (folder / "clips").mkdir()
    video = encode(frames_of("bikes", 96, 64, 14))
    box = (PADDING_BYTES + 8).to_bytes(4, "big") + b"free"
    for number in range(NUM_CLIPS):
        (folder / "clips" / f"{number:02}.mp4").write_bytes(video + box + draw.randbytes(PADDING_BYTES))
    options = shard_options(buckets=parse_buckets("96x64@5"), shard_size_bytes=17 * 10**6, workers=1)
    shard(folder / "clips", folder / "dataset", options)
    return s3_run.uploaded(folder / "dataset", rgw)


class Watcher(threading.Thread):
    """Thread that repeatedly sums the sizes of a folder's files and records the largest sum."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.most, self.is_over = folder, 0, threading.Event()

    def run(self) -> None:
        while not self.is_over.wait(0.002):
            self.most = max(self.most, self.sum())

    def sum(self) -> int:
        total = 0
        for root, _, names in os.walk(self.folder):
            for name in names:
                try:
                    total += (Path(root) / name).stat().st_blocks * 512
                except FileNotFoundError:
                    continue
        return total


@pytest.mark.parametrize(
    "killed", [pytest.param(seed, marks=pytest.mark.slow if seed > 0 else ()) for seed in range(12)]
)
def test_two_jobs_share_a_cache_of_half_the_dataset_and_one_is_killed(
    large: Source, rgw: Rgw, s3_env: S3Env, tmp_path: Path, killed: int
) -> None:
    """FETCH-2, STOP-1: batches are exact before and after the kill, and the cache stays within its limit."""
    s3_env(rgw)
    draw = random.Random(killed)
    half = NUM_CLIPS * PADDING_BYTES // 2
    options: dict[str, Any] = {
        "batch_size": 2,
        "num_epochs": 2,
        "output": {"decode": bool(killed % 2)},
        "num_workers": 0,
    }
    cache = {
        "storage": {"cache_dir": str(tmp_path / "cache"), "cache_bytes": half},
        "limits": {"prefetch_bytes": 40 << 20},
    }
    expected = [s3_run.run(large.root, **options, seed=seed) for seed in (1, 2)]
    after = draw.randrange(1, len(expected[0]))
    watcher = Watcher(tmp_path / "cache")
    watcher.start()
    try:
        # The job is killed when its caller has `after` batches and its threads are reading later ones.
        then = "import os\nPath(order['out']).write_text(json.dumps(got))\nos.kill(os.getpid(), 9)"
        jobs = [
            s3_run.start(
                dataset=large.url, options=options | cache | {"seed": 1}, out=tmp_path / "1", after=after, then=then
            ),
            s3_run.start(dataset=large.url, options=options | cache | {"seed": 2}, out=tmp_path / "2"),
        ]
        errors = [job.communicate(timeout=200)[1] for job in jobs]
    finally:
        watcher.is_over.set()
        watcher.join()
    assert [job.returncode for job in jobs] == [-signal.SIGKILL, 0], errors
    assert json.loads((tmp_path / "1").read_text()) == expected[0][:after]
    got, stats = s3_run.read_results(tmp_path / "2")
    assert got == expected[1]
    assert stats["cache"]["misses"] > 0
    # One object in flight per writer, plus one page each for the ledger and the marker.
    assert BLOCK_BYTES < watcher.most <= half + 2 * BLOCK_BYTES + 2 * 4096
    assert s3_run.run(large.url, **options, **cache, seed=1) == expected[0]
