"""Tests of the benchmark of a user's machine and store, on real datasets: its figures agree with the stored data."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import psutil
import pytest

import streamvid
from streamvid.bench.bench import bench
from streamvid.bench.options import BenchOptions
from streamvid.buckets.bucket import Bucket
from streamvid.errors import ConfigError, DatasetError
from tests.loader.conftest import SMALL, build_dataset

LARGE = Bucket(num_frames=17, height=192, width=320)
QUICK = BenchOptions(batch_size=1, num_workers=(1,), seconds=0.4)


def children() -> set[int]:
    """Return the process IDs of this process's children."""
    return {process.pid for process in psutil.Process().children()}


@pytest.fixture(scope="module")
def two_sizes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_dataset(tmp_path_factory.mktemp("sizes"), {SMALL: [3, 2], LARGE: [5]})


def test_figures_agree_with_the_index_and_no_process_is_left(two_sizes: Path) -> None:
    """STOP-1: samples, bytes and sums agree with the index, larger frames decode slower, and no process is left."""
    before, threads = children(), threading.active_count()
    phases: dict[str, list[tuple[int, int]]] = {}
    report = bench(two_sizes, QUICK, lambda phase, done, total: phases.setdefault(phase, []).append((done, total)))
    assert (children(), threading.active_count()) == (before, threads)
    table = streamvid.open_dataset(two_sizes).samples_table()
    stored = sum(table.column("clip_bytes").to_pylist())
    first, second = report.store
    assert first.num_samples == report.num_samples == table.num_rows == 10
    assert first.num_stored_bytes == stored and 0 < first.num_bytes <= stored
    assert not any("checksum mismatch" in one or "replaced" in one for one in report.warnings)
    assert second.num_samples >= 1 and first.num_bad == second.num_bad == 0
    (run,) = report.runs
    assert run.num_samples == run.num_steps == sum(bucket.num_samples for bucket in run.buckets) > 0
    assert abs(run.decode_seconds - sum(bucket.decode_seconds for bucket in run.buckets)) < 1e-6
    assert 0 < run.decoders_busy <= 1 and run.worker_cpu_seconds is not None and run.main_cpu_seconds is not None
    costs = {bucket.bucket_id: bucket.decode_seconds / bucket.num_samples for bucket in run.buckets}
    assert costs[LARGE.id] > costs[SMALL.id]
    assert list(phases) == ["store, first pass", "store, second pass", "1 worker"]
    for steps in phases.values():
        assert steps[0][0] == 0 and steps[-1][0] == steps[-1][1] and steps == sorted(steps)


def test_a_step_time_gets_an_answer_and_the_report_is_json(two_sizes: Path) -> None:
    options = BenchOptions(max_tokens_per_batch=2000, num_workers=(0,), seconds=0.3, step_seconds=1000.0)
    report = bench(streamvid.open_dataset(two_sizes), options)
    assert report.need is not None and report.need.num_workers == 1 and not report.need.obstacles
    assert report.runs[0].main_cpu_seconds is None and report.runs[0].main_cpu_per_step is None
    record = json.loads(json.dumps(report.to_json()))
    assert record["runs"][0]["samples_per_second"] == report.runs[0].samples_per_second
    assert record["store"][0]["bytes_per_second"] == report.store[0].bytes_per_second
    assert record["need"]["num_workers"] == 1 and record["verdict"]["limit"] == report.verdict.limit


def test_one_sample_is_enough(tmp_path: Path) -> None:
    """Batches are filled with repeats of the sample, because the benchmark measures the machine and not an epoch."""
    root = build_dataset(tmp_path, {SMALL: [1]}, split="val")
    report = bench(root, BenchOptions(num_workers=(0,), seconds=0.2, split="val"))
    assert report.num_samples == report.store[0].num_samples == 1
    assert report.batch_sizes == {SMALL.id: 4} and report.runs[0].num_samples % 4 == 0


@pytest.mark.slow
def test_bad_samples_are_counted_and_reported(tmp_path: Path) -> None:
    """BAD-1: neither the store pass nor the loader stops at a bad sample."""
    root = build_dataset(tmp_path, {SMALL: [6]})
    dataset = streamvid.open_dataset(root)
    (tar,) = root.rglob("*.tar")
    row = dataset.samples_table().to_pylist()[2]
    data = bytearray(tar.read_bytes())
    data[row["clip_offset"] + row["clip_bytes"] // 2] ^= 0xFF
    tar.write_bytes(data)
    report = bench(root, BenchOptions(batch_size=2, num_workers=(0,), seconds=0.3))
    assert report.store[0].num_bad == 1 and report.store[0].num_samples == 6
    assert any("1 of 6 samples have a checksum mismatch" in one for one in report.warnings)


def test_invalid_input_is_refused_before_any_read(two_sizes: Path, tmp_path: Path) -> None:
    before = children()

    def begun(phase: str, done: int, total: int) -> None:
        raise AssertionError(phase)

    for options, error, message in (
        (BenchOptions(split="test"), DatasetError, "split='test' has no samples"),
        (BenchOptions(where="year > 9999"), ConfigError, "matches none"),
        (BenchOptions(batch_size=0), ConfigError, "batch_size=0"),
        (BenchOptions(batch_size=1, max_tokens_per_batch=9), ConfigError, "exactly one"),
        (BenchOptions(prefetch_bytes=-1), ConfigError, "prefetch_bytes=-1"),
    ):
        with pytest.raises(error, match=message):
            bench(two_sizes, options, begun)
    with pytest.raises(DatasetError, match="no dataset at"):
        bench(tmp_path / "missing", QUICK, begun)
    assert children() == before


def test_invalid_options_are_refused() -> None:
    for values, message in (
        ({"seconds": 0}, "seconds=0"),
        ({"seconds": float("nan")}, "seconds=nan"),
        ({"step_seconds": -1.0}, "step_seconds=-1.0"),
        ({"num_local_ranks": 0}, "num_local_ranks=0"),
        ({"num_workers": (1, 1)}, r"num_workers=\[1, 1\]"),
        ({"num_workers": (-1,)}, r"num_workers=\[-1\]"),
    ):
        with pytest.raises(ConfigError, match=message):
            BenchOptions(**values)  # type: ignore[arg-type]
