"""Tests of streamvid bench in real processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.cli.conftest import Tiny
from tests.conftest import run_streamvid
from tests.files import tree_of

SHORT = ("--seconds", "0.3")


def test_rates_limit_and_workers_are_reported_and_the_dataset_is_unchanged(tiny: Tiny) -> None:
    before = tree_of(tiny.dataset)
    done = run_streamvid("bench", tiny.dataset, *SHORT, "--num-workers", "0,1", "--step-seconds", "100")
    text = done.stdout
    assert text.startswith(f"{tiny.dataset}: 2 samples in split train; clips: copy; pixels: rgb24, exact; ")
    for part in ("\nfirst ", "\nsecond ", "\n      0  ", "\n      1  ", "\n96x64-5f ", "\nlimit: ", "\nto go faster: "):
        assert part in text, part
    assert "\na step of 100 s: a rank needs 1 worker(s), with 20% in reserve" in text
    assert "store, first pass 0/1\nstore, first pass 1/1\n" in done.stderr and done.stderr.endswith("1 worker 1/1\n")
    assert tree_of(tiny.dataset) == before


def test_json_is_complete_and_too_short_a_step_fails_with_its_reason(tiny: Tiny) -> None:
    arguments = ("--batch-size", "*=2", "--num-workers", "0", "--step-seconds", "0.000001", "--local-ranks", "8")
    done = run_streamvid("bench", tiny.dataset, *SHORT, *arguments, "--json", check=False)
    facts = json.loads(done.stdout)
    assert facts["batch_sizes"] == {"96x64-5f": 2, "64x96-5f": 2} and [run["num_workers"] for run in facts["runs"]] == [
        0
    ]
    assert facts["need"]["obstacles"] and facts["need"]["num_local_ranks"] == 8
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and last.startswith(
        "error: this machine and store cannot deliver data fast enough for steps of 1e-06 s: "
    )
    assert facts["need"]["obstacles"][0] in last and facts["verdict"]["advice"][0] in last


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--num-workers", "two"), 2, "'two' is not a comma-separated list of numbers"),
        (("--seconds", "nan"), 2, "--seconds nan: must be a number from 0.001 to 3600"),
        (("--split", "test"), 1, "split='test' has no samples"),
    ],
)
def test_mistakes_are_named(tiny: Tiny, arguments: tuple[str, ...], code: int, message: str) -> None:
    done = run_streamvid("bench", tiny.dataset, *arguments, check=False)
    assert done.returncode == code and message in done.stderr, done.stderr
    assert not done.stdout and "Traceback" not in done.stderr


def test_a_missing_dataset_is_reported(tmp_path: Path) -> None:
    done = run_streamvid("bench", tmp_path / "missing", check=False)
    assert done.returncode == 1 and done.stderr.startswith(f"error: no dataset at {tmp_path / 'missing'}")


def test_an_interrupt_leaves_nothing_behind(tiny: Tiny) -> None:
    """STOP-1: Ctrl-C while workers decode ends all processes."""
    command = [sys.executable, "-m", "streamvid", "bench", str(tiny.dataset), "--seconds", "3", "--num-workers", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while not process.stderr.readline().startswith("2 workers 0/"):
        assert process.poll() is None
    workers: set[psutil.Process] = set()
    until = time.monotonic() + 60
    try:
        while len(workers) < 2 and time.monotonic() < until:
            workers |= set(psutil.Process(process.pid).children())
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=200)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130 and not out and "interrupted" in err and "Traceback" not in err, err
    assert len(workers) == 2
    _, alive = psutil.wait_procs(list(workers), timeout=15)
    # Orphaned workers remain as zombies if the container's first process does not reap them.
    assert all(worker.status() == psutil.STATUS_ZOMBIE for worker in alive), alive
