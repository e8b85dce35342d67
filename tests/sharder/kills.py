"""Kills of parts of a cluster in a given phase of a build, and the checks that follow."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from tests.clips import ROOT
from tests.files import tree_of
from tests.sharder.conftest import Built
from tests.sharder.test_kill import finished_shards

Identities = dict[str, tuple[int, int]]


def phases_begun(dest: Path) -> set[str]:
    """Return the phases that a run or a task at `dest` has begun."""
    found = set()
    with contextlib.suppress(OSError, ValueError):  # files are being replaced and folders removed
        for file in dest.glob(".staging/**/status.json"):
            found |= {phase["name"] for phase in json.loads(file.read_bytes())["phases"]}
    return found


def wait_for_phase(dest: Path, phase: str, is_alive: Callable[[], bool]) -> None:
    end = time.monotonic() + 200
    while phase not in phases_begun(dest) and is_alive():
        assert time.monotonic() < end, f"phase {phase} did not begin"
        time.sleep(0.01)


def children_of(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Return the children of those processes that still run."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += process.children()
    return found


def kill_one(processes: Sequence[psutil.Process], rng: random.Random) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        if processes:
            rng.choice(processes).kill()


def run_and_kill(
    words: Sequence[object],
    dest: Path,
    phase: str,
    rng: random.Random,
    kill: Callable[[subprocess.Popen[str]], None],
    *,
    may_fail: bool,
) -> Identities:
    """Run a command and call `kill` in a phase; return the shards that were finished at that moment."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(list(map(str, words)), cwd=ROOT, text=True, **pipes) as driver:  # type: ignore[call-overload]
        wait_for_phase(dest, phase, lambda: driver.poll() is None)
        time.sleep(rng.choice([0.0, 0.05, 0.3]))
        finished = finished_shards(dest)
        kill(driver)
        said, _ = driver.communicate(timeout=250)
        assert may_fail or driver.returncode == 0, said
    return finished


def check_end(dest: Path, built: Built, finished: Identities) -> None:
    """Assert that the bytes are the same, no finished shard was built again, and no file or process is left."""
    assert tree_of(dest) == built.tree
    assert {path.name for path in dest.iterdir()} == {path.name for path in built.dest.iterdir()}
    tars = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in dest.glob("shards/*/*.tar")}
    assert finished.items() <= tars.items(), "a finished shard was built again"
    end = time.monotonic() + 20
    while left := processes_in(dest):
        assert time.monotonic() < end, left
        time.sleep(0.1)


def processes_in(dest: Path) -> list[int]:
    """Return the processes that have a file below `dest` open, even if the file has been removed."""
    found = set()
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(descriptor).startswith(f"{dest}/"):  # noqa: PTH115
                found.add(int(descriptor.parts[2]))
    return sorted(found)
