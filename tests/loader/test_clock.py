"""Tests of timeouts: a timeout is an error that names its cause, never a substitution or a hang (SAFE-1, STOP-1)."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from streamvid.buckets.bucket import Bucket
from streamvid.dataset.reader import Dataset
from streamvid.dataset.versions.open import open_dataset
from streamvid.errors import LoaderError, SampleError, StreamvidError, WorkerError
from streamvid.loader.delivery.pipeline import Pipeline, PipelineOptions
from streamvid.loader.delivery.requests import BatchRequest
from streamvid.loader.mix import SampleRequest
from streamvid.loader.options import LimitOptions
from streamvid.storage import LocalStore, Ranges
from tests.clips import encode
from tests.loader.conftest import SMALL, build_dataset, open_loader
from tests.loader.test_bad import damaged, part_of
from tests.processes import is_alive, streamvid_threads, wait_for_threads

pytestmark = pytest.mark.timeout(60)


def batched(samples: Sequence[SampleRequest], together: int) -> Iterator[Sequence[SampleRequest]]:
    return (samples[first : first + together] for first in range(0, len(samples), together))


@contextlib.contextmanager
def opened(
    source: Dataset,
    places: Sequence[tuple[int, int]],
    num_workers: int,
    num_fetch_threads: int = 4,
    together: int = 1,
    **options: Any,
) -> Iterator[tuple[Pipeline, int]]:
    """Open a pipeline over samples (shard, position) and start a run.

    Closing takes only seconds, even if something hangs.

    together: samples per batch.
    """
    part, bucket = part_of(source)
    settings = PipelineOptions(
        num_workers=num_workers,
        num_fetch_threads=num_fetch_threads,
        clip_bytes=1 << 20,
        frame_bytes=(7 + together) * (int(np.prod(bucket.shape)) * 3 + 4096),
        limits=LimitOptions(**options),
    )
    pipeline = Pipeline((part,), settings)
    try:
        pipeline.open()
        samples = [SampleRequest(part, bucket.id, *place, visit, False) for visit, place in enumerate(places)]
        run = pipeline.stop()
        pipeline.start(run, (BatchRequest(bucket, tuple(some), None) for some in batched(samples, together)))
        yield pipeline, run
    finally:
        before = time.monotonic()
        pipeline.close()
        assert time.monotonic() - before < 25, "closing waited for the hanging operation"


def read_until(pipeline: Pipeline, run: int, error: type[StreamvidError], says: str) -> list[str]:
    """Return the keys before the error. The error persists, and neither a new run nor an attempt to stop waits."""
    keys: list[str] = []
    with pytest.raises(error, match=says):
        while (batch := pipeline.next_batch(run)) is not None:
            keys.append(batch.deliveries[0].key)
            batch.block.release()
    with pytest.raises(error, match=says):
        pipeline.next_batch(run)
    number = pipeline.stop()
    with pytest.raises(error, match=says):
        pipeline.start(number, iter(()))
    return keys


@pytest.mark.parametrize(("num_workers", "when"), [(1, "at work"), (2, "at work"), (2, "idle")])
def test_stopped_workers_are_killed_and_named(tmp_path: Path, num_workers: int, when: str) -> None:
    """A worker without a first task has no sample to name.

    All workers are then killed, and the first waiting sample is named.
    """
    before = streamvid_threads()
    source = open_dataset(build_dataset(tmp_path, {SMALL: [3]}))
    with opened(source, [(0, i % 3) for i in range(5000)], num_workers=num_workers, sample_timeout_seconds=3.0) as (
        pipeline,
        run,
    ):
        pids = pipeline.worker_pids
        if when == "at work":
            assert pipeline.next_batch(run) is not None
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        read_until(
            pipeline,
            run,
            WorkerError,
            r"sample 96x64-5f-\d \(index .*000000.tar.*sample_timeout_seconds=3;.*create a new",
        )
        until = time.monotonic() + 20  # a stopped process takes a moment to end after it is killed
        while all(map(is_alive, pids)) and time.monotonic() < until:
            time.sleep(0.02)
        assert not all(map(is_alive, pids))
    wait_for_threads(before)
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_read_that_hangs_names_shard_and_store(tmp_path: Path, num_workers: int) -> None:
    """The file blocks, as on a network disk that has disappeared. Its sample is not replaced."""
    before = streamvid_threads()
    root = build_dataset(tmp_path, {SMALL: [2, 2]})
    shard = root / "shards/96x64-5f/96x64-5f-000001.tar"
    shard.unlink()
    os.mkfifo(shard)
    options: dict[str, Any] = {
        "num_workers": num_workers,
        "sample_timeout_seconds": 4.0,
    }  # longer than workers take to start
    says = rf"{root}: sample 96x64-5f-2 \(index 0 in .*-000001.tar.*reading its clip.*sample_timeout_seconds=4;"
    with opened(open_dataset(root), [(0, 0), (0, 1), (1, 0), (0, 0)], **options) as (pipeline, run):
        assert read_until(pipeline, run, SampleError, says) == ["96x64-5f-0", "96x64-5f-1"]
        assert pipeline.substituted == []
    with shard.open("wb"):  # unblocks the read, so that its thread ends
        wait_for_threads(before)


def test_a_substitute_whose_read_hangs_is_an_error_too(tmp_path: Path) -> None:
    """BAD-1: a timeout is no reason to try the next substitute."""
    before = streamvid_threads()
    root = damaged(tmp_path, {SMALL: [1, 1, 1]}, {"96x64-5f-0": "undecodable"})
    shard = root / "shards/96x64-5f/96x64-5f-000001.tar"
    shard.unlink()
    os.mkfifo(shard)
    with opened(open_dataset(root), [(0, 0)], num_workers=1, sample_timeout_seconds=1.0) as (pipeline, run):
        read_until(pipeline, run, SampleError, r"sample 96x64-5f-1 .*-000001.tar.*reading its clip")
    with shard.open("wb"):
        wait_for_threads(before)


@dataclass(frozen=True)
class BlockingStore(LocalStore):
    """Store whose reads of some files wait for an event."""

    blocks: str = "nothing"
    unblocked: threading.Event = field(default_factory=threading.Event)

    def cached_path(self, path: str, ranges: Sequence[tuple[int, int]]) -> str | None:
        return None  # as on a network file system

    def read_ranges(self, path: str, ranges: Ranges, version: str = "") -> None:
        if self.blocks in path:
            self.unblocked.wait(50)
        super().read_ranges(path, ranges, version)


def test_a_hanging_index_is_an_error(tmp_path: Path) -> None:
    before = streamvid_threads()
    store = BlockingStore(build_dataset(tmp_path, {SMALL: [2]}), blocks="index/samples")
    source = Dataset(store)
    try:
        with opened(source, [(0, 0)], num_workers=0, sample_timeout_seconds=0.5) as (pipeline, run):
            read_until(pipeline, run, SampleError, r"sample \(index 0 in .*-000000.tar.*reading the index has taken")
    finally:
        store.unblocked.set()
    wait_for_threads(before)


@pytest.mark.parametrize("limit", [0.5, None])
def test_only_the_time_that_the_caller_waits_counts(tmp_path: Path, limit: float | None) -> None:
    """A read that is slow while the caller is busy elsewhere is not an error; the caller gets its batch."""
    store = BlockingStore(build_dataset(tmp_path, {SMALL: [2]}), blocks=".tar")
    with opened(Dataset(store), [(0, 0), (0, 1)], num_workers=0, sample_timeout_seconds=limit) as (pipeline, run):
        time.sleep(1.0)
        if limit is None:
            threading.Timer(1.0, store.unblocked.set).start()
        else:
            store.unblocked.set()
        keys = [batch.deliveries[0].key for batch in iter(lambda: pipeline.next_batch(run), None)]
    assert keys == ["96x64-5f-0", "96x64-5f-1"]


@dataclass(frozen=True)
class SlowStore(LocalStore):
    """Store that behaves like a slow disk: each read of a clip takes a while."""

    def cached_path(self, path: str, ranges: Sequence[tuple[int, int]]) -> str | None:
        return None

    def read_ranges(self, path: str, ranges: Ranges, version: str = "") -> None:
        if path.endswith(".tar"):
            time.sleep(0.3)
        super().read_ranges(path, ranges, version)


def test_a_clip_that_waits_for_slow_reads_of_others_is_not_late(tmp_path: Path) -> None:
    """Each read takes 0.3 s and the last clip waits for 15 others, but only its own read is timed."""
    source = Dataset(SlowStore(build_dataset(tmp_path, {SMALL: [1] * 16})))
    places, limits = [(shard, 0) for shard in range(16)], {"sample_timeout_seconds": 2.0}
    with opened(source, places, num_workers=0, num_fetch_threads=1, together=16, **limits) as (pipeline, run):
        batch = pipeline.next_batch(run)
        assert batch is not None and len(batch.deliveries) == 16
        batch.block.release()


class Noise:
    """Frames that take a decoder a long time."""

    shape = (100, 720, 1280, 3)

    def __iter__(self) -> Iterator[Any]:
        pictures = np.random.default_rng(0).integers(0, 256, (4, *self.shape[1:]), dtype=np.uint8)
        return (pictures[i % 4] for i in range(self.shape[0]))


@pytest.fixture(scope="module")
def slow_clip() -> bytes:
    fast = {"g": "1000", "crf": "10", "preset": "ultrafast", "bf": "0"}
    return encode(Noise(), options=fast, numbered=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_decode_that_takes_too_long(
    tmp_path: Path,
    slow_clip: bytes,
    num_workers: int,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The worker's stack is printed to the error stream, and the loader's threads are written to the log.

    Without a worker to kill, the decoding thread ends once its decoder returns.
    """
    before = streamvid_threads()
    bucket = Bucket(num_frames=100, height=64, width=96)
    root = build_dataset(tmp_path, {bucket: [2]}, clip_frames=100, damage={"96x64-100f-1": slow_clip})
    options: dict[str, Any] = {"num_workers": num_workers, "sample_timeout_seconds": 0.4}
    says = r"sample 96x64-100f-1 \(index 1 in .*decoding it has taken more than limits.sample_timeout_seconds=0.4;"
    with opened(open_dataset(root), [(0, 0), (0, 1)], **options) as (pipeline, run):
        pids = pipeline.worker_pids
        while not pipeline.queue_depth:  # a worker takes a while to start
            time.sleep(0.01)
        assert read_until(pipeline, run, WorkerError, says) == ["96x64-100f-0"]
        assert pipeline.substituted == []
    wait_for_threads(before)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    # Only the worker's own report has this form; in the log, a comma follows the line number.
    assert bool(pids) == bool(re.search(r'worker\.py", line \d+ in ', capfd.readouterr().err))
    assert "streamvid-answers\n" in caplog.text


def test_a_worker_killed_during_substitution_is_an_error(tmp_path: Path) -> None:
    """STOP-1, BAD-1: the worker is killed while it looks for a substitute for a bad sample."""
    root = damaged(tmp_path, {SMALL: [6]}, {f"96x64-5f-{i}": "undecodable" for i in range(4)})
    with opened(open_dataset(root), [(0, i % 6) for i in range(5000)], num_workers=1, max_bad_fraction=1.0) as (
        pipeline,
        run,
    ):
        first = pipeline.next_batch(run)
        assert first is not None and first.deliveries[0].key == "96x64-5f-4"
        os.kill(pipeline.worker_pids[0], signal.SIGKILL)
        with pytest.raises(WorkerError, match="was killed by SIGKILL"):
            while pipeline.next_batch(run) is not None:
                pass
        with pytest.raises(LoaderError, match="was killed by SIGKILL"):
            pipeline.start(pipeline.stop(), iter(()))


def test_a_worker_killed_while_it_holds_answers_loses_no_sample(tmp_path: Path, slow_clip: bytes) -> None:
    """The worker answers once for the short clips of a batch, and is killed while it decodes the last one."""
    bucket = Bucket(num_frames=100, height=64, width=96)
    root = build_dataset(tmp_path, {bucket: [16]}, clip_frames=100, damage={"96x64-100f-15": slow_clip})
    options: dict[str, Any] = {"batch_size": 8, "num_workers": 1, "shuffle": "none"}
    with open_loader(root, **options) as loader:
        batches = iter(loader)
        first = next(batches)
        worker = psutil.Process(loader.worker_pids[0])
        before = worker.cpu_times().user
        while worker.cpu_times().user < before + 0.6:
            time.sleep(0.005)
        worker.kill()
        with pytest.raises(WorkerError, match=r"was killed by SIGKILL.*was processing .*sample 96x64-100f-15 "):
            next(batches)
        state = loader.state_dict()
    with open_loader(root, state, output={"decode": False}, **options) as loader:
        rest = [batch.sample_keys for batch in loader]
    assert [first.sample_keys, *rest] == [[f"96x64-100f-{i}" for i in range(n, n + 8)] for n in (0, 8)]
