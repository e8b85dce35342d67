"""Tests of PLAN-4, PLAN-5 and STOP-1 with real processes that are killed, checked against the logs of the ranks."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import psutil
import pytest

from streamvid.buckets.bucket import Bucket
from streamvid.dataset.versions.open import open_dataset
from streamvid.forecast.ledger import check_ledger
from streamvid.ledger.history import read_history
from streamvid.plan.options import Tail
from tests.clips import ROOT
from tests.loader.conftest import SMALL, TALL, build_dataset
from tests.loader.killed_run import WORKER_DIED
from tests.processes import is_alive

MARK = "STREAMVID_TEST_LAUNCHER"
STILL = Bucket(num_frames=1, height=64, width=96)
LAYOUT = {SMALL: [7, 5, 6, 4], TALL: [6, 3, 8], STILL: [9, 4]}
NUM_EPOCHS = 2
KINDS = ("rank", "worker", "all")
# With "uneven", a rank may have fewer batches than the others, so batch numbers do not identify steps.
TAILS = tuple(tail for tail in get_args(Tail) if tail != "uneven")

Keys = Mapping[str, frozenset[str]]  # bucket id → its keys


@dataclass(frozen=True)
class Launcher:
    """Process that forks ranks, and the mark by which all of its descendants are found."""

    process: subprocess.Popen[str]
    mark: str
    scratch: Path

    def ask(self, *question: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def others(self) -> list[int]:
        """Return the ids of all descendants, including orphaned ones."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
        return [pid for pid in found if pid != self.process.pid]

    def check_nothing_left(self) -> None:
        until = time.monotonic() + 20
        while others := self.others():
            assert time.monotonic() < until, f"still running: {others}"
            time.sleep(0.01)
        assert list(self.scratch.iterdir()) == []
        assert not list(Path("/dev/shm").glob("*streamvid*"))


@contextmanager
def launching(folder: Path) -> Iterator[Launcher]:
    """Start a launcher whose home and temporary directories are in a folder that nothing else writes to."""
    mark, scratch = uuid.uuid4().hex, folder / "scratch"
    scratch.mkdir()
    environment = {**os.environ, MARK: mark, "TMPDIR": str(scratch), "HOME": str(scratch)}
    command = [sys.executable, "-m", "tests.loader.killed_run"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, cwd=ROOT, env=environment) as process:
        launcher = Launcher(process, mark, scratch)
        try:
            yield launcher
        finally:
            for pid in launcher.others():
                os.kill(pid, signal.SIGKILL)
    assert process.returncode == 0


@dataclass
class Life:
    """Part of a run between two starts. Only steps up to the state from which the next start resumes count."""

    number: int
    num_ranks: int
    batch_size: int
    num_workers: int
    pids: list[int] = field(default_factory=list)
    lines: list[list[Any]] = field(default_factory=list)  # rank → all of its steps
    num_counted: int = 0

    @property
    def global_batch(self) -> int:
        return self.num_ranks * self.batch_size

    def steps(self) -> Iterator[tuple[int, str, list[list[Any]]]]:
        """Yield (epoch, bucket, samples of all ranks) for each step that counts."""
        for lines in zip(*(lines[: self.num_counted] for lines in self.lines), strict=True):
            places = {(epoch, bucket) for _, epoch, bucket, _ in lines}
            assert len(places) == 1, f"PLAN-3: one step has {places}"
            yield (*places.pop(), [sample for *_, samples in lines for sample in samples])


@dataclass
class Run:
    """Run of two epochs over a dataset, in as many lives as necessary."""

    folder: Path
    dataset: Path
    seed: int
    tail: str
    rng: random.Random
    lives: list[Life] = field(default_factory=list)
    state: Path | None = None
    kills: Counter[str] = field(default_factory=Counter)

    def log(self, life: Life, rank: int) -> list[list[Any]]:
        path = self.folder / f"log-{life.number}-{rank}"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def errors(self, life: Life) -> str:
        return "".join(path.read_text() for path in self.folder.glob(f"errors-{life.number}-*"))

    def begin_life(self, launcher: Launcher, num_workers: int) -> Life:
        num_ranks, batch_size = self.rng.randint(1, 4), self.rng.choice([1, 1, 2, 3])
        life = Life(len(self.lives), num_ranks, batch_size, num_workers)
        order = {"folder": str(self.folder), "dataset": str(self.dataset), "seed": self.seed, "tail": self.tail}
        order |= {"life": life.number, "num_ranks": num_ranks, "batch_size": batch_size, "num_workers": num_workers}
        order["state"] = str(self.state) if self.state else None
        order["ledger"] = str(self.folder / "ledger")
        life.pids = [launcher.ask("start", {**order, "rank": rank}) for rank in range(num_ranks)]
        self.lives.append(life)
        return life

    def kill(self, life: Life, kind: str, num_steps_left: int) -> None:
        """Send SIGKILL at a random moment during the start or the remaining steps."""
        rank = self.rng.randrange(life.num_ranks)
        if self.rng.random() < 0.2:
            time.sleep(self.rng.uniform(0, 0.5))
        else:
            target = self.rng.randint(0, max(1, num_steps_left // life.global_batch))
            path = self.folder / f"log-{life.number}-{rank}"
            while is_alive(life.pids[rank]) and num_lines(path) < target:
                time.sleep(0.001)
            time.sleep(self.rng.uniform(0, 0.01))
        victims = [life.pids[rank]]
        if kind == "worker":
            victims = [self.rng.choice(workers)] if (workers := children(life.pids[rank])) else []
        elif kind == "all":
            victims = life.pids + [worker for pid in life.pids for worker in children(pid)]
            self.rng.shuffle(victims)
        for pid in victims:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end_life(self, life: Life, launcher: Launcher, is_struck: bool) -> list[int]:
        """Return the exit statuses.

        After a kill, the other ranks are terminated as by a launcher, or run to their end.
        """
        how = self.rng.choice([signal.SIGKILL, signal.SIGTERM, None])
        statuses: list[int | None] = [None] * life.num_ranks
        until, is_ended = time.monotonic() + 90, False
        while None in statuses:
            for rank in (rank for rank, status in enumerate(statuses) if status is None):
                statuses[rank] = launcher.ask("wait", life.pids[rank], 0.01)
            if is_struck and how is not None and not is_ended and any(statuses):
                is_ended = True
                for pid in (pid for pid, status in zip(life.pids, statuses, strict=True) if status is None):
                    with suppress(ProcessLookupError):
                        os.kill(pid, how)
            assert time.monotonic() < until, f"{statuses} of {life}: {self.errors(life)}"
        launcher.check_nothing_left()
        allowed = {0, -signal.SIGKILL, -signal.SIGTERM, WORKER_DIED} if is_struck else {0}
        assert set(statuses) <= allowed, f"{statuses} of {life}: {self.errors(life)}"
        return [status for status in statuses if status is not None]

    def take_stock(self, life: Life, statuses: list[int]) -> bool:
        """Determine which steps of a life count, and return whether it was the last life."""
        logs = [self.log(life, rank) for rank in range(life.num_ranks)]
        for log, status in zip(logs, statuses, strict=True):
            assert status != 0 or log[-1][0] == "end"
            assert status != WORKER_DIED or "was killed by SIGKILL" in log[-1][1]
        life.lines = [[line for line in log if isinstance(line[0], int)] for log in logs]
        if not any(statuses):
            assert len({tuple(log[-1]) for log in logs}) == 1, "PLAN-2: ranks with unequal numbers of steps"
            life.num_counted = len(life.lines[0])
            return True
        reached = min(map(len, life.lines))
        states: dict[int, set[str]] = {}
        for path in self.folder.glob(f"state-{life.number}-*[0-9]"):
            states.setdefault(int(path.name.split("-")[2]), set()).add(path.read_text())
        assert all(len(of_step) == 1 for of_step in states.values()), f"PLAN-5: ranks with unequal states: {states}"
        # A rank that saves a state may be ahead of others; only steps that all ranks have taken count.
        if usable := [step for step in states if step <= reached]:
            life.num_counted = max(usable)
            self.state = next(self.folder.glob(f"state-{life.number}-{life.num_counted}-*[0-9]"))
        return False


def children(pid: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except psutil.NoSuchProcess:
        return []


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def run_to_the_end(launcher: Launcher, folder: Path, dataset: Path, keys: Keys, seed: int, max_kills: int) -> Run:
    """Start and kill lives until `max_kills` is reached. The ranks of the last life run to the end."""
    folder.mkdir()
    run = Run(folder, dataset, seed, TAILS[seed % len(TAILS)], random.Random(seed))
    num_samples = NUM_EPOCHS * sum(map(len, keys.values()))
    while True:
        num_left = num_samples - sum(len(samples) for life in run.lives for _, _, samples in life.steps())
        kind = KINDS[(seed + len(run.lives)) % len(KINDS)] if run.kills.total() < max_kills else None
        life = run.begin_life(launcher, num_workers=run.rng.randint(kind == "worker", 2))
        if kind is not None:
            run.kill(life, kind, num_left)
        statuses = run.end_life(life, launcher, is_struck=kind is not None)
        if {-signal.SIGKILL, WORKER_DIED} & set(statuses):
            run.kills[str(kind)] += 1
        if run.take_stock(life, statuses):
            judge(run, keys)
            check_ledger_of(run)
            return run
        check_counted_samples_are_not_repeated(run, keys)


# ---------------------------------------------------------------------------------------------- the checks


def delivered(lives: Sequence[Life], bucket: str, *, epochs: Sequence[int], repeats: bool = False) -> Counter[str]:
    """Return the number of deliveries per key."""
    return Counter(
        key
        for life in lives
        for epoch, of_bucket, samples in life.steps()
        for key, is_repeat, _ in samples
        if of_bucket == bucket and epoch in epochs and is_repeat == repeats
    )


def check_counted_samples_are_not_repeated(run: Run, keys: Keys) -> None:
    """Check counts after a resume: under "carry", a bucket is one stream of passes; else, no epoch has duplicates."""
    for bucket, names in keys.items():
        if run.tail == "carry":
            counts = delivered(run.lives, bucket, epochs=range(NUM_EPOCHS))
            passes = [counts[name] for name in names]
            assert max(passes) - min(passes) <= 1, f"{bucket}: {counts}"
        else:
            for epoch in range(NUM_EPOCHS):
                counts = delivered(run.lives, bucket, epochs=[epoch])
                assert set(counts) <= names and set(counts.values()) <= {1}, f"{bucket}, epoch {epoch}: {counts}"


def judge(run: Run, keys: Keys) -> None:
    """Check that the counted deliveries of all lives make up each epoch as its tail mode requires."""
    check_counted_samples_are_not_repeated(run, keys)
    for bucket, names in keys.items():
        for epoch in range(NUM_EPOCHS):
            judge_epoch(run, bucket, names, epoch)
    if run.tail != "carry":
        check_contents(run)


def judge_epoch(run: Run, bucket: str, names: frozenset[str], epoch: int) -> None:
    # An epoch ends in the first life that delivered samples of the next epoch, or in the last life.
    ending = [life.number for life in run.lives if any(e > epoch for e, _, _ in life.steps())] or [len(run.lives) - 1]
    epochs = range(epoch + 1) if run.tail == "carry" else [epoch]
    wanted = len(names) * len(epochs)
    for life in run.lives[: ending[0] + 1]:
        before = delivered(run.lives[: life.number], bucket, epochs=epochs).total()
        after = delivered(run.lives[: life.number + 1], bucket, epochs=epochs).total()
        repeats = delivered([life], bucket, epochs=[epoch], repeats=True)
        missing, rest = wanted - after, wanted - before
        says = f"{bucket}, epoch {epoch}, life {life.number} of {run.tail}: {rest} were left"
        is_padded = run.tail in ("pad", "shrink")
        step = life.global_batch if run.tail == "pad" else life.num_ranks
        expected = -rest % step if is_padded and rest > 0 and missing == 0 else 0
        assert repeats.total() == expected and set(repeats) <= names, f"{says}, {repeats} were repeated"
        if life.number == ending[0]:
            assert missing == (0 if is_padded else rest % life.global_batch), f"{says}, {missing} are missing"


def check_contents(run: Run) -> None:
    """Check SAMPLE-1: in all deliveries of a sample in an epoch, counted or not, its frames are the same."""
    seen: dict[tuple[int, str], int] = {}
    for life in run.lives:
        for _, epoch, _, samples in (line for lines in life.lines for line in lines):
            for key, is_repeat, checksum in samples:
                assert is_repeat or seen.setdefault((epoch, key), checksum) == checksum, f"{key} in epoch {epoch}"


def check_ledger_of(run: Run) -> None:
    """Check that the ledger holds what the ranks logged, without steps that a later life delivered again."""
    attempts = read_history(run.folder / "ledger")
    logged: Counter[tuple[int, str, bool]] = Counter()
    for attempt in attempts:
        for rank in attempt.logs:
            for _, batch, counts in attempt.batches(rank):
                epoch = batch.position.epoch
                logged.update((epoch, sample.key, sample.is_repeat) for sample in batch.samples if counts)
    told: Counter[tuple[int, str, bool]] = Counter()
    for life in run.lives:
        for epoch, _, samples in life.steps():
            told.update((epoch, key, is_repeat) for key, is_repeat, _ in samples)
    says = f"{run.folder.name}, {run.tail}, {[(one.sessions, one.start, one.until) for one in attempts]}"
    assert logged == told, f"{says}: missing {told - logged}, too many {logged - told}"
    report = check_ledger(attempts, [open_dataset(run.dataset)], lambda *_: None)
    assert report.is_right and sum(epoch.num_samples for epoch in report.epochs) == told.total(), f"{says}: {report}"


# ---------------------------------------------------------------------------------------------- the campaigns


@pytest.fixture(scope="module")
def killed_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dataset with three buckets, nine shards and 52 samples."""
    return build_dataset(tmp_path_factory.mktemp("killed"), LAYOUT)


def campaign(dataset: Path, folder: Path, num_kills: int, kills_in_a_run: int, first_seed: int) -> Counter[str]:
    """Run all tail modes in turn until `num_kills` kills have hit, and return the number of kills per kind."""
    rows = open_dataset(dataset).samples_table().to_pylist()
    buckets = {bucket.id for bucket in LAYOUT}
    keys = {name: frozenset(row["key"] for row in rows if row["key"].startswith(f"{name}-")) for name in buckets}
    assert sum(map(len, keys.values())) == len(rows)
    kills: Counter[str] = Counter()
    tails, seed = Counter[str](), first_seed
    with launching(folder) as launcher:
        while kills.total() < num_kills:
            left = min(kills_in_a_run, num_kills - kills.total())
            run = run_to_the_end(launcher, folder / f"run-{seed}", dataset, keys, seed, left)
            kills += run.kills
            tails[run.tail] += 1
            seed += 1
    print(f"{dict(kills)} in runs of {dict(tails)}")
    return kills


def test_epochs_are_exact_after_kills_and_resumes(killed_dataset: Path, tmp_path: Path) -> None:
    """PLAN-4, PLAN-5, STOP-1: ranks, workers and whole runs are killed, and new ranks resume from the last state."""
    assert campaign(killed_dataset, tmp_path, 6, kills_in_a_run=2, first_seed=0).total() == 6


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_a_hundred_times(killed_dataset: Path, tmp_path: Path) -> None:
    """Acceptance test; takes about 2 minutes on 2 cores."""
    kills = campaign(killed_dataset, tmp_path, 100, kills_in_a_run=5, first_seed=1000)
    assert kills.total() == 100 and min(kills[kind] for kind in KINDS) > 10
