"""Tests of real runs that are killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import psutil
import pytest

from streamvid.dataset.versions.open import open_dataset
from tests.clips import ROOT
from tests.files import tree_of
from tests.processes import run_command
from tests.sharder.conftest import BUCKETS, OPTIONS, Built

MARK = "STREAMVID_TEST_RUN"


def command(built: Built, dest: Path | str, **order: Any) -> list[str]:
    options = {**OPTIONS, "buckets": ",".join(bucket.size_at_frames for bucket in BUCKETS)} | order.pop("options", {})
    order |= {"source": str(built.source), "dest": str(dest), "options": options}
    return [sys.executable, "-m", "tests.sharder.run_shard", json.dumps(order)]


def run(built: Built, dest: Path, mark: str = "", **order: Any) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, MARK: mark}
    return run_command(command(built, dest, **order), check=False, cwd=ROOT, env=env)


def marked(mark: str) -> list[int]:
    """Return the processes of a run, including its workers."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def wait_until_gone(mark: str) -> None:
    deadline = time.monotonic() + 20
    while marked(mark):
        assert time.monotonic() < deadline, f"still there: {marked(mark)}"
        time.sleep(0.05)


def finished_shards(dest: Path) -> dict[str, tuple[int, int]]:
    """Return the identity of every tar that has a marker."""
    markers = {path.stem for path in dest.glob(".staging/*/*.json")}
    tars = [path for path in dest.glob("shards/*/*.tar") if path.stem in markers]
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in tars}


def moments(num_shards: int, rng: random.Random) -> list[tuple[str, int, float]]:
    """Return 20 moments in the order of a run, some at a progress event and some slightly later."""
    delays = {"records": [0.0], "probe": [0.0, 0.002, 0.01, 0.03, 0.1], "build": [0.0, 0.01, 0.1], "seal": [0.0, 0.001]}
    at = [("records", 1)]
    at += [("probe", done) for done in (0, 0, 2, 5, 9, 13, 16)]
    at += [("build", done) for done in (0, 0, 1, num_shards // 2, num_shards)]
    at += [("seal", done) for done in (0, 1, 2, 3, 5, 6, 7)]
    assert len(at) == 20
    return [(phase, done, rng.choice(delays[phase])) for phase, done in at]


@pytest.mark.parametrize("count", [8, pytest.param(20, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_repeatedly_ends_with_the_same_bytes(built: Built, tmp_path: Path, count: int) -> None:
    """SHARD-1, SHARD-2: after kill -9 in every phase, the next run resumes and repeats no finished shard."""
    dest, rng = tmp_path / "dataset", random.Random(20)
    finished: dict[str, tuple[int, int]] = {}
    hit = set()
    every = moments(built.report.num_shards, rng)
    chosen = every if count == len(every) else [every[place] for place in (0, 2, 5, 8, 10, 11, 14, 18)]
    assert len(chosen) == count
    for number, moment in enumerate(chosen):
        result = run(built, dest, kill=moment, options={"workers": rng.choice([1, 2, 3])})
        assert result.returncode in (0, -signal.SIGKILL), result.stderr
        if result.returncode:
            hit.add(result.stdout.rpartition("\n")[0].split()[-3])  # the last line may be truncated
        if (dest / "manifest.json").exists():
            assert open_dataset(dest).samples_table().num_rows == built.report.num_samples, f"after kill {number}"
        else:
            now = finished_shards(dest)
            assert finished.items() <= now.items(), "a finished shard was built again"
            finished = now
    assert hit == {"records", "probe", "build", "seal"}
    result = run(built, dest, options={"workers": 1})
    assert result.returncode == 0, result.stderr
    assert tree_of(dest) == built.tree
    assert {path.name for path in dest.iterdir()} == {path.name for path in built.dest.iterdir()}


def native_moments(num_shards: int, rng: random.Random, count: int) -> list[tuple[str, int, float]]:
    """Return moments in the order of a run, most of them while clips are encoded and while shards take them."""
    at = [("encode", min(13, number * 14 // count)) for number in range(count - count // 3)]
    at += [("build", number * num_shards // (count // 3)) for number in range(count // 3)]
    delays = {"encode": [0.0, 0.01, 0.05, 0.3], "build": [0.0, 0.01, 0.05]}
    return [*((phase, done, rng.choice(delays[phase])) for phase, done in at), ("seal", 1, 0.0)]


@pytest.mark.parametrize("count", [4, pytest.param(30, marks=pytest.mark.slow)])
def test_native_clips_killed_at_any_point_end_with_the_same_bytes(native: Built, tmp_path: Path, count: int) -> None:
    """SHARD-1, SHARD-2: kill -9 comes while clips are encoded or while shards take clips from the staging directory."""
    dest, rng = tmp_path / "dataset", random.Random(count)
    hit = set()
    for moment in native_moments(native.report.num_shards, rng, count):
        result = run(native, dest, kill=moment, options={"clips": "native", "workers": rng.choice([1, 2, 3])})
        assert result.returncode in (0, -signal.SIGKILL), result.stderr
        if result.returncode:
            hit.add(result.stdout.rpartition("\n")[0].split()[-3])
        assert (dest / "manifest.json").exists() == (result.returncode == 0)
    assert {"encode", "build"} <= hit
    result = run(native, dest, options={"clips": "native", "workers": 1})
    assert result.returncode == 0, result.stderr
    assert tree_of(dest) == native.tree


def test_a_killed_encoder_loses_nothing(native: Built, tmp_path: Path) -> None:
    """SHARD-1, SHARD-3: the clip of a killed encoder is neither lost nor rejected but encoded again."""
    result = run(native, tmp_path / "dataset", kill_worker=["encode", 2], options={"clips": "native", "workers": 2})
    assert result.returncode == 0, result.stderr
    assert tree_of(tmp_path / "dataset") == native.tree


def test_a_killed_worker_loses_nothing(built: Built, tmp_path: Path) -> None:
    """SHARD-1, SHARD-3: the tasks of a killed worker are neither lost nor rejected but run again."""
    for phase, workers in (("probe", 2), ("build", 3)):
        result = run(built, tmp_path / phase, kill_worker=[phase, 1], options={"workers": workers})
        assert result.returncode == 0, result.stderr
        assert tree_of(tmp_path / phase) == built.tree


@pytest.mark.parametrize(
    ("phase", "number"),
    [
        *(
            (phase, number)
            for phase in ("probe", "build")
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
        ),
        ("encode", signal.SIGINT),
        ("encode", signal.SIGKILL),
    ],
)
def test_no_process_is_left(built: Built, tmp_path: Path, phase: str, number: signal.Signals) -> None:
    """STOP-1: Ctrl-C, SIGTERM and SIGKILL also end the workers, and completed work is kept for the next run."""
    mark = uuid.uuid4().hex
    words = command(built, tmp_path / "dataset", options={"clips": "native"} if phase == "encode" else {})
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(words, **pipes, cwd=ROOT, env={**os.environ, MARK: mark})
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(phase + ("" if phase == "build" else " 1 ")):
            break
    process.send_signal(number)
    _, errors = process.communicate(timeout=200)
    assert process.returncode != 0
    assert ("KeyboardInterrupt" in errors) == (number == signal.SIGINT)
    wait_until_gone(mark)
    assert (tmp_path / "dataset" / ".staging" / "probes.jsonl").exists()
    assert not (tmp_path / "dataset" / "manifest.json").exists()


def test_a_second_sharder_is_refused(built: Built, tmp_path: Path) -> None:
    """SHARD-2: two runs never work on one dataset at the same time."""
    first = subprocess.Popen(command(built, tmp_path / "dataset"), stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert first.stdout is not None
        for line in first.stdout:
            if line.startswith("probe"):
                break
        first.send_signal(signal.SIGSTOP)
        result = run(built, tmp_path / "dataset")
        assert result.returncode == 1
        assert "another run, process " in result.stderr and "is working on" in result.stderr
    finally:
        first.send_signal(signal.SIGCONT)
        first.communicate(timeout=200)
    assert first.returncode == 0
    assert tree_of(tmp_path / "dataset") == built.tree
