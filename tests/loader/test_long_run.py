"""Tests of long runs: later epochs of a loader take no more memory, files or threads than the first few.

Memory is measured over the loader's whole process tree, with each shared page counted once (tools/bench_memory.py). It
is sampled while batches are in flight, and an epoch is represented by its median. Files and threads are counted between
epochs.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.clips import ROOT
from tests.conftest import Sharded
from tools.bench_memory import watching

MIB = 2**20
STREAM = """
import json, sys, time, streamvid
root, epochs, workers, options = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
with streamvid.VideoLoader(root, num_workers=workers, **options) as loader:
    for epoch in range(epochs):
        seen = [key for batch in loader for key in batch.sample_keys]
        state = loader.state_dict()
        print(json.dumps([epoch, len(seen), len(set(seen))]), flush=True)
        sys.stdin.readline()
"""


def stream(root: Path, num_epochs: int, num_workers: int, **options: Any) -> dict[str, list[Any]]:
    """Run epochs in a subprocess and return measurements per epoch.

    samples: [delivered, distinct].
    bytes: median memory of the process tree.
    files, threads: sorted counts of all processes.
    """
    command = [sys.executable, "-c", STREAM, str(root), str(num_epochs), str(num_workers), json.dumps(options)]
    measured: dict[str, list[Any]] = {"samples": [], "bytes": [], "files": [], "threads": []}
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process,
        watching(process.pid) as watch,
    ):
        assert process.stdin is not None and process.stdout is not None
        watch.label = "0"
        for line in process.stdout:
            epoch, *samples = json.loads(line)
            while len(watch.of(str(epoch))) < 3:
                time.sleep(0.01)
            measured["samples"].append(samples)
            for name, counts in count(process.pid, 1 + num_workers, measured["threads"][-1:]).items():
                measured[name].append(counts)
            watch.label = str(epoch + 1)
            process.stdin.write("\n")
            process.stdin.flush()
    assert process.returncode == 0
    measured["bytes"] = [statistics.median(m.total for m in watch.of(str(epoch))) for epoch in range(num_epochs)]
    return measured


def count(pid: int, num_processes: int, last: list[list[int]]) -> dict[str, list[int]]:
    """Count the open files and threads of each process in a tree.

    A thread of the previous loop may take a moment to end.
    """
    until = time.monotonic() + 5
    while True:
        tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        assert len(tree) == num_processes
        counts = {
            "files": sorted(member.num_fds() for member in tree),
            "threads": sorted(member.num_threads() for member in tree),
        }
        if not last or counts["threads"] == last[0] or time.monotonic() > until:
            return counts
        time.sleep(0.01)


def check(measured: dict[str, list[Any]], *, first: int, span: int) -> None:
    """Compare the last `span` epochs with `span` epochs that start at number `first`, counted from 1.

    Libraries open files and threads before epoch `first`.
    """
    before = statistics.median(measured["bytes"][first - 1 : first - 1 + span])
    after = statistics.median(measured["bytes"][-span:])
    print(f"{before / MIB:.1f} MiB, later {after / MIB:.1f} MiB; by epoch", *(int(b / MIB) for b in measured["bytes"]))
    print(f"files {measured['files'][-1]}, threads {measured['threads'][-1]}")
    assert after - before <= max(0.03 * before, 8 * MIB)
    for name in ("files", "threads", "samples"):
        assert all(now == measured[name][first - 1] for now in measured[name][first - 1 :]), measured[name]


@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_eight_epochs_use_constant_resources(dataset: Path, num_workers: int) -> None:
    check(stream(dataset, 8, num_workers, batch_size=1, limits={"prefetch_bytes": 4 * MIB}), first=3, span=3)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fifty_epochs_of_the_corpus_use_constant_resources(sharded: Sharded) -> None:
    """Acceptance test: epochs 46 to 50 are compared with epochs 3 to 7."""
    check(stream(sharded.root, 50, 2, batch_size=2, tail="pad"), first=3, span=5)
