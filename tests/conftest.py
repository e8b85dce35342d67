"""What many rooms test against: the demo's corpus of real clips, and the dataset that the real command makes of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.clips import corpus_tool

pytest_plugins = ["tests.servers"]  # fixtures of real S3 servers; none starts before a test asks for it

# Tests assert no timings, and machines are shared.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")

# What CI may skip: its machine has no such device. Any other skip there is a test that silently does not run.
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


SHARD_ARGUMENTS = ("--resolution", "128px,256px", "--num-frames", "1,5,17", "--shard-size", "2MB")


def run_streamvid(*arguments: object, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
    """The streamvid command in a process of its own."""
    command = [sys.executable, "-m", "streamvid", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280, **options)
    assert not check or done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@dataclass(frozen=True)
class Corpus:
    """The corpus, and what is known of each of its files."""

    root: Path
    entries: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Sharded:
    """The dataset that `streamvid shard` made of the corpus, and its report."""

    root: Path
    report: dict[str, Any]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    root = tmp_path_factory.mktemp("corpus") / "corpus"
    described = corpus_tool().make_corpus(root)
    return Corpus(root, {entry["path"]: entry for entry in described["files"]})


@pytest.fixture(scope="session")
def sharded(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Sharded:
    root = tmp_path_factory.mktemp("dataset") / "dataset"
    done = run_streamvid("shard", corpus.root, root, *SHARD_ARGUMENTS, "--json")
    return Sharded(root, json.loads(done.stdout))
