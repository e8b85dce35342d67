"""Tests of appends that are killed, to folders and to buckets."""

from __future__ import annotations

import json
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import streamvid
from streamvid.sharder.append import append
from streamvid.sharder.sharder import shard
from tests.clips import ROOT
from tests.files import Tree, tree_of
from tests.processes import run_command
from tests.servers import S3Env, S3Server
from tests.shard_options import shard_options
from tests.sharder.test_append import NUM_GOOD, NUM_OLD, PLAIN, Growing, assert_kept

PHASES = [
    *[("records", 0), ("probe", 0), ("probe", 2), ("probe", 5), ("build", 0), ("build", 1), ("build", 2)],
    *[("seal", done) for done in range(8)],
]
SLOW = [pytest.mark.slow, pytest.mark.timeout(3600)]


def killed(source: Path, dest: str, moment: tuple[str, int, float] | None, work: dict[str, Any]) -> int:
    """Append in a process that is killed at a moment; return its exit code."""
    order = {"verb": "append", "source": str(source), "dest": dest, "options": {"work": work}, "kill": moment}
    words = [sys.executable, "-m", "tests.sharder.run_shard", json.dumps(order)]
    result = run_command(words, check=False, cwd=ROOT)
    assert result.returncode in (0, -signal.SIGKILL), result.stderr
    return result.returncode


def check_kills(source: Path, dest: str, tree: Callable[[], Tree], expected: Tree, count: int, work: Path) -> None:
    """Kill an append repeatedly; check that each kill leaves the old or the new version, and complete the append."""
    rng, old = random.Random(count), tree()
    places = rng.sample(range(len(PHASES)), min(count, len(PHASES))) + rng.choices(
        range(len(PHASES)), k=count - min(count, len(PHASES))
    )
    options = {"workers": 1, **({"work_dir": str(work)} if "://" in dest else {})}
    hit = 0
    for place in sorted(places):
        phase, done = PHASES[place]
        hit += killed(source, dest, (phase, done, rng.choice([0.0, 0.0, 0.003, 0.02])), options) != 0
        assert_kept(old, tree())
        dataset = streamvid.open_dataset(dest)
        assert dataset.samples_table().num_rows in (NUM_OLD, NUM_GOOD)
        assert streamvid.verify_dataset(dest).num_problems == 0
    assert hit > count // 2
    assert killed(source, dest, None, options) == 0
    assert tree() == expected


@pytest.mark.parametrize("count", [4, pytest.param(40, marks=SLOW)])
def test_an_append_that_is_killed_repeatedly_ends_with_the_same_bytes(source: Path, tmp_path: Path, count: int) -> None:
    """SHARD-1, SHARD-2: kill -9 comes in every phase, including while the version is published."""
    growing = Growing(source, tmp_path)
    growing.build(growing.rows[:NUM_OLD])
    shutil.copytree(growing.dest, tmp_path / "killed")
    growing.append(growing.rows)
    dest = tmp_path / "killed"
    check_kills(growing.source, str(dest), lambda: tree_of(dest), tree_of(growing.dest), count, tmp_path / "work")


@pytest.mark.parametrize("count", [1, pytest.param(30, marks=SLOW)])
def test_an_append_to_a_bucket_writes_the_same_bytes_as_to_a_folder(
    source: Path, tmp_path: Path, moto_server: S3Server, s3_env: S3Env, count: int
) -> None:
    """SHARD-1, SHARD-2, FETCH-2: kills do not change this, and nothing is left in the bucket or working directory."""
    s3_env(moto_server)
    bucket, work = moto_server.new_bucket(), tmp_path / "work"
    growing = Growing(source, tmp_path)
    growing.build(growing.rows[:NUM_OLD])
    dest = f"s3://{bucket}/ds"
    shard(growing.source, dest, shard_options(**PLAIN, work_dir=work))
    growing.append(growing.rows)
    assert append(dest, growing.source, {"work": {"workers": 1, "work_dir": work}}, dry_run=True).num_known == NUM_OLD
    check_kills(growing.source, dest, lambda: moto_server.tree(bucket, "ds"), tree_of(growing.dest), count, work)
    assert moto_server.uploads(bucket) == [] and list(work.iterdir()) == []
