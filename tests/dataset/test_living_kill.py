"""Tests of killed dataset changes, in folders and in object stores with and without conditional writes."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

import streamvid
from tests.dataset.killed_change import Order, change
from tests.dataset.living import seal_living, seen
from tests.files import write_rows
from tests.processes import run_command
from tests.servers import ProxyFactory, Rgw, S3Env, S3Server

VERBS = ("remove", "compact", "expire", "merge")
NUM_MOMENTS = 20
SLOW = [pytest.mark.slow, pytest.mark.timeout(1800)]


def prepare(tmp_path: Path, verb: str) -> tuple[Path, Path]:
    """Create a dataset with something to change and another one to merge."""
    base, other = tmp_path / "base", tmp_path / "other"
    seal_living(base, range(8))
    seal_living(other, range(6, 10))
    if verb != "merge":
        streamvid.annotate(base, write_rows(tmp_path / "a.csv", [{"key": "c1", "motion": 1}]))
    if verb in ("compact", "expire"):
        streamvid.remove(base, keys=["c0", "c4", "c5"])
    return base, other


def check_killed(tmp_path: Path, verb: str, work: str, other: str, count: int) -> None:
    """Kill a change at seeded moments; check that the old or the new version remains and that the same command
    completes."""
    base, whole = tmp_path / "base", tmp_path / "whole"
    before = frozenset(seen(base))
    shutil.copytree(base, whole)
    change(verb, whole, tmp_path / "other")
    after = frozenset(seen(whole))
    order = json.dumps(asdict(Order(verb, str(base), work, other, count)))
    done = run_command([sys.executable, "-m", "tests.dataset.killed_change", order], timeout=1700)
    facts = [json.loads(line) for line in done.stdout.splitlines()]
    assert not [fact for fact in facts if "error" in fact], facts
    (total,) = [fact["moments"] for fact in facts if "moments" in fact and len(fact) == 1][:1]
    expected = min(count, total)
    kills = [fact["is_killed"] for fact in facts if "is_killed" in fact]
    assert len(kills) == sum(kills) == expected, (total, kills)
    states = [fact for fact in facts if "keys" in fact]
    assert len(states) == expected and all(state["is_right"] for state in states), states
    assert {frozenset(state["keys"]) for state in states} <= {before, after}
    ends = [fact for fact in facts if "end" in fact]
    assert all(end["is_right"] and not end["extra"] for end in ends), ends
    assert len(ends) == 1 + expected and len({end["end"] for end in ends}) == 1


@pytest.mark.parametrize("verb", ["remove", "compact", "merge"])
def test_a_kill_at_some_writes_leaves_the_old_version_or_the_new_one(tmp_path: Path, verb: str) -> None:
    """SHARD-2: after kill -9 before, during or after a write, the same command ends with exactly the same files."""
    _, other = prepare(tmp_path, verb)
    check_killed(tmp_path, verb, str(tmp_path / "work"), str(other), 3)


@pytest.mark.parametrize("verb", [pytest.param(verb, marks=SLOW) for verb in VERBS])
def test_killed_at_20_moments_in_a_folder(tmp_path: Path, verb: str) -> None:
    _, other = prepare(tmp_path, verb)
    check_killed(tmp_path, verb, str(tmp_path / "work"), str(other), NUM_MOMENTS)


def check_in_bucket(tmp_path: Path, verb: str, server: S3Server, count: int) -> None:
    """Check kills in a bucket that holds both datasets, so that a merge copies within the store."""
    _, other = prepare(tmp_path, verb)
    bucket = server.new_bucket()
    server.upload_folder(other, bucket, "other/")
    check_killed(tmp_path, verb, f"s3://{bucket}/work", f"s3://{bucket}/other", count)
    assert server.uploads(bucket) == []


@pytest.mark.parametrize("verb", [pytest.param(verb, marks=SLOW) for verb in VERBS])
def test_killed_at_20_moments_on_ceph(tmp_path: Path, verb: str, rgw: Rgw, s3_env: S3Env) -> None:
    s3_env(rgw)
    check_in_bucket(tmp_path, verb, rgw, NUM_MOMENTS)


@pytest.mark.parametrize("verb", [pytest.param(verb, marks=SLOW) for verb in VERBS])
def test_killed_at_20_moments_on_a_store_without_conditional_writes(
    tmp_path: Path, verb: str, moto_server: S3Server, s3_env: S3Env, fault_proxy: ProxyFactory
) -> None:
    """The store answers 501 to a write that must not replace an object, so the lease protects against other writers."""
    proxy = fault_proxy(moto_server, unknown_header="if-none-match")
    s3_env(moto_server.behind(proxy))
    check_in_bucket(tmp_path, verb, moto_server, NUM_MOMENTS)
    assert proxy.counts().faults["unknown_header"] >= NUM_MOMENTS
