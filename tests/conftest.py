"""Fixtures for many folders: the demo's corpus of real clips, and the dataset that `streamvid shard` makes of it."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.processes import run_command
from tools import make_corpus

pytest_plugins = [
    "tests.servers",
    "tests.slurm",
    "tests.ray_cluster",
]  # fixtures for real servers, which start only when a test requests them

# Machines are shared, so no test depends on timing.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")

# Skips allowed in CI, whose machine has no GPU. Any other skip would hide a test that does not run.
ALLOWED_SKIPS = ("no CUDA device on this machine",)
_skips: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not any(allowed in reason for allowed in ALLOWED_SKIPS):
            _skips.append(f"{report.nodeid}: {reason}")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if _skips and os.environ.get("CI"):
        print("\nskipped in CI, where nothing may be missing:", *_skips, sep="\n  ")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


# The slowest files start first, so that no process is still busy at the end while the others are idle.
# One of the first also builds the corpus, which other tests wait for.
LONGEST = (
    "test_end_to_end.py",
    "loader/test_s3_faults.py",
    "loader/test_kill.py",
    "loader/test_memory.py",
    "recipes/test_learning.py",
    "test_examples.py",
    "loader/test_exchange.py",
    "sharder/test_kill.py",
    "trainer/test_exact.py",
    "storage/test_s3_processes.py",
)


def pytest_collection_finish() -> None:
    gc.freeze()  # imported objects stay alive, so gc.collect() in tests need not scan them


def pytest_configure(config: pytest.Config) -> None:
    # Shells start background jobs with SIGINT ignored, and the tests' child processes would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # would order files by their number of tests


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


SHARD_ARGUMENTS = ("--resolution", "128px,256px", "--num-frames", "1,5,17", "--shard-size", "2MB")


def run_streamvid(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the streamvid command in a separate process."""
    return run_command([sys.executable, "-m", "streamvid", *arguments], **options)


def merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Merge arguments of VideoLoader: `second` overrides `first`, including keys within option mappings."""
    shared = first.keys() & {"view", "output", "schedule", "limits", "storage", "groups"} & second.keys()
    return first | second | {name: first[name] | second[name] for name in shared}


@dataclass(frozen=True)
class Corpus:
    """The corpus and the description of each of its files."""

    root: Path
    entries: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Sharded:
    """The dataset that `streamvid shard` makes of the corpus, and the command's report."""

    root: Path
    report: dict[str, Any]


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], dict[str, Any]]) -> tuple[Path, Any]:
    """Return a folder and the result of `make`, which runs once for all pytest processes; tests must not modify it."""
    base = factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    root.mkdir(exist_ok=True)
    said = root / "said.json"
    with (root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not said.exists():
            shutil.rmtree(root / name, ignore_errors=True)  # left behind by a failed attempt
            text = json.dumps(make(root / name))
            said.write_text(text)
        return root / name, json.loads(said.read_text())


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    root, described = made_once(tmp_path_factory, "corpus", make_corpus.make_corpus)
    return Corpus(root, {entry["path"]: entry for entry in described["files"]})


@pytest.fixture(scope="session")
def sharded(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Sharded:
    def make(root: Path) -> dict[str, Any]:
        return dict(json.loads(run_streamvid("shard", corpus.root, root, *SHARD_ARGUMENTS, "--json").stdout))

    return Sharded(*made_once(tmp_path_factory, "dataset", make))
