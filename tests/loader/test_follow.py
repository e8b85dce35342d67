"""Tests of training on a changing dataset: runs that follow its versions, and runs that keep their first version."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from streamvid.buckets.bucket import Bucket
from streamvid.dataset.versions.open import open_dataset
from streamvid.forecast.ledger import check_ledger
from streamvid.ledger.history import read_history
from tests.dataset.growing import grow, keys_of, remove_keys, rewrite, seal_keys
from tests.loader.ranks import Ranks

MANY, FEW = Bucket(9, 64, 96), Bucket(17, 64, 96)
LEAST = 30  # samples of MANY: enough for a step, so that no plan is empty


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    processes = Ranks(5, tmp_path_factory.mktemp("ranks"))
    yield processes
    processes.close()


@dataclass
class Life:
    """Dataset, with the keys in each version and the samples that were removed so far."""

    root: Path
    counter: Iterator[int] = field(default_factory=itertools.count)
    versions: dict[int, set[str]] = field(default_factory=dict)
    removed: set[str] = field(default_factory=set)
    is_rewritten: bool = False  # since runs last needed earlier versions

    def new_keys(self, bucket: Bucket, sizes: list[int]) -> list[list[str]]:
        name = "m" if bucket is MANY else "f"
        return [[f"{name}{next(self.counter)}" for _ in range(size)] for size in sizes]

    def publish(self, version: int) -> None:
        self.versions[version] = keys_of(self.root)

    @property
    def keys(self) -> set[str]:
        return self.versions[max(self.versions)]

    def begin(self, many: list[int], few: list[int]) -> None:
        layout = {MANY: self.new_keys(MANY, [LEAST, *many]), FEW: self.new_keys(FEW, few)}
        seal_keys(self.root, {bucket: shards for bucket, shards in layout.items() if shards})
        self.publish(1)
        self.first = set(self.keys)

    def append(self, bucket: Bucket, sizes: list[int]) -> None:
        self.publish(grow(self.root, {bucket: self.new_keys(bucket, sizes)}).version)

    def remove(self, seed: int, share: float, kept: set[str]) -> None:
        """Remove a share of the samples, but none in `kept` and never so many of MANY that no step remains."""
        found = sorted(self.keys - kept)
        gone = set(random.Random(seed).sample(found, int(share * len(found))))
        many = sorted(key for key in gone if key.startswith("m"))
        left = sum(key.startswith("m") for key in self.keys) - len(many)
        gone -= set(many[: max(0, LEAST - left)])
        if gone:
            self.publish(remove_keys(self.root, gone).version)
            self.removed |= gone

    def drop_few(self) -> None:
        gone = {key for key in self.keys if key.startswith("f")}
        if gone:
            self.publish(remove_keys(self.root, gone).version)
            self.removed |= gone

    def rewrite(self, seed: int) -> None:
        self.is_rewritten = True
        self.publish(rewrite(self.root, {number for number in range(8) if seed >> number & 1}).version)


@dataclass
class Run:
    """Training run. Only deliveries before the last saved state count as delivered."""

    ranks: Ranks
    life: Life
    tail: str
    follow: bool
    batch_size: int
    accumulate: int
    num_ranks: int = 1
    call: int = 0
    state: Any = None
    delivered: list[Any] = field(default_factory=list)
    gone: dict[int, set[str]] = field(default_factory=dict)  # call → samples that had been removed when its loop began
    gone_at_opening: set[str] | None = None
    is_resized: bool = False

    def open(self, num_ranks: int, state: Any) -> None:
        options = {
            "batch_size": self.batch_size,
            "tail": self.tail,
            "accumulate": self.accumulate,
            "output": {"decode": False, "ledger": str(self.ledger)},
            "schedule": {"follow": self.follow},
        }
        self.num_ranks, self.gone_at_opening = num_ranks, set(self.life.removed)
        self.ranks.request(num_ranks, "open", str(self.life.root), state, options)

    def run(self, num_steps: int | None, is_lost: bool = False) -> None:
        """Take steps on all ranks. Lost steps happen after the last state was saved, and do not count."""
        self.call += 1
        # The first loop knows the removals from when the loader was opened.
        self.gone[self.call] = set(self.life.removed) if self.gone_at_opening is None else self.gone_at_opening
        self.gone_at_opening = None
        told = self.ranks.request(self.num_ranks, "run", self.call, num_steps)
        assert all(one["state"] == told[0]["state"] for one in told), "PLAN-5: the state is the same on all ranks"
        assert all(one["ends"] == told[0]["ends"] for one in told), "PLAN-2"
        for _, length, count in told[0]["ends"]:
            assert length == count, "PLAN-2: the number of steps is known before the first step"
        for step in zip(*(one["batches"] for one in told), strict=True):
            assert len({tuple(row[:4]) for row in step}) == 1, "PLAN-3: all ranks have the same bucket"
            assert len({len(row[4]) for row in step}) == 1
        if not is_lost:
            self.delivered += [row for one in told for row in one["batches"]]
            self.state = told[0]["state"]

    def resume(self, num_ranks: int) -> None:
        self.is_resized |= num_ranks != self.num_ranks
        self.open(num_ranks, self.state)

    def new(self, epoch: int | None = None) -> Counter[str]:
        """Return the number of deliveries per sample, without repeats."""
        rows = (row for row in self.delivered if epoch in (None, row[0]))
        return Counter(key for row in rows for key, again in zip(row[4], row[5], strict=True) if not again)

    @property
    def ledger(self) -> Path:
        return self.life.root.with_name("ledger")

    # Checks.

    def check_ledger(self) -> None:
        report = check_ledger(read_history(self.ledger), [open_dataset(self.life.root)], lambda *_: None)
        assert report.is_right, report
        assert report.num_batches == len(self.delivered)

    def check(self) -> None:
        for row in self.delivered:
            assert not set(row[4]) & self.gone[row[2]], "removed samples are not delivered from the next loop on"
        epochs = {row[0]: row[1] for row in self.delivered}
        assert all(epochs[row[0]] == row[1] for row in self.delivered), "an epoch has one version"
        if not self.follow:
            assert set(epochs.values()) <= {1}
        last = self.state["epoch"]
        if self.tail == "carry":
            self.check_carried(epochs, last)
            return
        for epoch in range(last):
            expected, found = self.life.versions[epochs[epoch]], self.new(epoch)
            assert max(found.values()) == 1 and set(found) <= expected, f"PLAN-4 in epoch {epoch}"
            missing = expected - set(found) - self.life.removed
            if self.tail in ("pad", "shrink"):
                assert not missing, f"PLAN-4 in epoch {epoch}"
            elif not self.is_resized and self.accumulate == 1 and not self.life.removed:
                for name in "mf":
                    count = sum(key.startswith(name) for key in expected)
                    assert sum(key.startswith(name) for key in missing) == count % (self.num_ranks * self.batch_size)

    def check_carried(self, epochs: dict[int, int], last: int) -> None:
        """Check that all samples of all epochs were delivered, except for removed samples and carried ones."""
        versions = [epochs.get(epoch) for epoch in range(last)]
        known = None  # an epoch without steps has no batches; its version is that of the epoch before or after
        expected = Counter[str]()
        for number, version in enumerate(versions):
            known = version or known or next(v for v in versions[number:] if v)
            expected.update(self.life.versions[known])
        found = self.new()
        assert not [key for key in found if found[key] > expected[key]], "PLAN-4: no sample is delivered twice"
        for bucket, name in ((MANY, "m"), (FEW, "f")):
            missing = Counter({key: n for key, n in (expected - found).items() if key.startswith(name)})
            removed = Counter({key: n for key, n in missing.items() if key in self.life.removed})
            left = sum((missing - removed).values())
            carried = self.carried(bucket.id, name)
            assert left <= carried <= left + sum(removed.values()), "PLAN-4: samples are carried over, not lost"

    def carried(self, bucket_id: str, name: str) -> int:
        """Return the number of a bucket's samples that the state carries over to the next epoch."""
        epoch, total = self.state["epoch"], 0
        pairs = [(self.state["positions"], self.state["versions"])]
        if "carried" in self.state:
            pairs.append((self.state["carried"], self.state["carried_versions"]))
        for positions, (version,) in pairs:
            if bucket_id in positions:
                count = sum(key.startswith(name) for key in self.life.versions[version])
                total += epoch * count - positions[bucket_id]
        return total


SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=3)
ACTIONS = st.one_of(
    st.tuples(st.just("run"), st.integers(1, 25)),
    st.tuples(st.just("epoch")),
    st.tuples(st.just("killed"), st.integers(0, 4), st.integers(1, 5)),
    st.tuples(st.just("append"), st.sampled_from([MANY, FEW]), SIZES),
    st.tuples(st.just("remove"), st.integers(0, 1 << 16), st.sampled_from([0.05, 0.3, 0.8])),
    st.tuples(st.just("rewrite"), st.integers(0, 255)),
    st.tuples(st.just("drop")),
)
LIVES = st.fixed_dictionaries(
    {
        "many": SIZES,
        "few": st.lists(st.integers(1, 4), max_size=2),
        "tail": st.sampled_from(["carry", "carry", "drop", "pad", "shrink"]),
        "follow": st.sampled_from([True, True, False]),
        "batch_size": st.integers(1, 3),
        "accumulate": st.sampled_from([1, 1, 2]),
        "num_ranks": st.integers(1, 5),
        "actions": st.lists(ACTIONS, min_size=1, max_size=8),
    }
)


def live(ranks: Ranks, root: Path, example: dict[str, Any]) -> None:
    life = Life(root)
    life.begin(example["many"], example["few"])
    # A bucket must keep a sample if the run keeps its version or is resumed within an epoch.
    kept = {min((key for key in life.first if key.startswith(name)), default="") for name in "mf"}
    run = Run(ranks, life, *(example[name] for name in ("tail", "follow", "batch_size", "accumulate")))
    run.open(example["num_ranks"], None)
    run.run(1)
    for name, *arguments in example["actions"]:
        if name == "run":
            run.run(*arguments)
        elif name == "epoch":
            run.run(None)
        elif name == "killed":
            num_lost, num_ranks = arguments
            if num_lost:
                run.run(num_lost, is_lost=True)
            run.resume(num_ranks)
        elif name == "append":
            life.append(*arguments)
            kept.add(min(key for key in life.keys if key.startswith("m" if arguments[0] is MANY else "f")))
        elif name == "remove":
            life.remove(*arguments, kept)
        elif name == "rewrite":
            life.rewrite(*arguments)
        elif example["follow"]:  # removes all samples of a bucket from which the run has carried samples
            if life.is_rewritten:  # unread samples of deleted tars are looked up in the newest version
                run.run(None)
                run.run(None)  # delivers the samples that were carried into this epoch
                life.is_rewritten = False
            run.run(1)  # enters an epoch, because a loop that begins without the bucket's samples fails
            life.drop_few()
            kept = {key for key in kept if key.startswith("m")}
            run.run(None)
    run.run(None)
    run.run(None)
    run.check()
    ranks.request(run.num_ranks, "close")
    run.check_ledger()


# Killed where an epoch begins in a version without the carried samples of one bucket, or of all buckets.
GONE: dict[str, Any] = {"few": [1], "tail": "carry", "follow": True, "batch_size": 1, "accumulate": 1, "num_ranks": 2}
GONE |= {"actions": [("drop",), ("killed", 0, 1)]}
# Killed two versions after the state, which carries samples of a bucket that neither version contains.
REPLACED: dict[str, Any] = GONE | {"many": [1], "batch_size": 3, "num_ranks": 4}
REPLACED |= {"actions": [("drop",), ("remove", 0, 0.05), ("killed", 4, 1)]}
# A resumed run has no steps left in its epoch, and the next loop begins after samples were removed.
EMPTY: dict[str, Any] = GONE | {"many": [1], "few": [], "num_ranks": 1}
EMPTY |= {"actions": [*[("run", 1)] * 3, ("run", 23), ("killed", 0, 5), ("epoch",), ("remove", 0, 0.05)]}
HEALTH = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=20, suppress_health_check=HEALTH)
@given(LIVES)
@example(GONE | {"many": [1]})
@example(GONE | {"many": [2]})
@example(REPLACED)
@example(EMPTY)
def test_exactly_once_per_epoch_and_version(
    ranks: Ranks, tmp_path_factory: pytest.TempPathFactory, life: dict[str, Any]
) -> None:
    """PLAN-2, PLAN-4, PLAN-5: the dataset grows, shrinks and is rewritten, and runs are killed and resized."""
    live(ranks, tmp_path_factory.mktemp("life") / "ds", life)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@settings(max_examples=2000, suppress_health_check=HEALTH)
@given(LIVES)
def test_exactly_once_in_many_lives(
    ranks: Ranks, tmp_path_factory: pytest.TempPathFactory, life: dict[str, Any]
) -> None:
    """PLAN-2, PLAN-4, PLAN-5: many more random cases pass the same checks."""
    live(ranks, tmp_path_factory.mktemp("life") / "ds", life)
