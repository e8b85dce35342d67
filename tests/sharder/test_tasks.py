"""Tests of builds that are divided into tasks, as on a cluster: whatever fails, the bytes are those of one machine."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from streamvid.cluster.share import Share
from streamvid.errors import ConfigError, DatasetError
from streamvid.sharder.report import TASK_ENDED
from streamvid.sharder.sharder import abandon, dry_run, shard, status
from streamvid.storage import open_store
from tests.clips import ROOT
from tests.cluster.test_lease import note
from tests.conftest import run_streamvid
from tests.files import tree_of
from tests.servers import S3Env, S3Server
from tests.shard_options import shard_options
from tests.sharder.conftest import OPTIONS, Built, Stop, noted, stop_at
from tests.sharder.test_kill import command, finished_shards

ROUNDS = 3
"""Number of times an array of tasks is submitted: for probing, encoding and building."""


@dataclass
class Cluster:
    """Processes that each run one task of a build; `folders` gives each process its own disk for unfinished work."""

    built: Built
    dest: str
    num_tasks: int
    folders: Path | None = None
    kills: dict[int, tuple[str, int, float]] = field(default_factory=dict)
    """Moment at which each task is killed in its next run."""

    def command(self, number: int | None) -> list[str]:
        options = {"clips": self.built.options.get("clips", "copy")}
        if number is not None:
            options["task"] = f"{number}/{self.num_tasks}"
        if self.folders is not None:
            options["work_dir"] = str(self.folders / str(number))
        kill = self.kills.pop(-1 if number is None else number, None)
        return command(self.built, self.dest, kill=kill, options=options)

    def run(self, *numbers: int | None) -> list[int]:
        """Run tasks at the same time and return their exit codes."""
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
        processes = [subprocess.Popen(self.command(number), **pipes) for number in numbers]
        codes = []
        for process in processes:
            _, errors = process.communicate(timeout=200)
            assert process.returncode in (0, -signal.SIGKILL), errors
            codes.append(process.returncode)
        return codes


def do_task(built: Built, dest: Path | str, task: str | None, **changes: Any) -> Any:
    return shard(built.source, dest, shard_options(**{**built.options, "task": task, **changes}))


def test_shares_are_disjoint_and_complete() -> None:
    units = list(range(23))
    for num_shares in (1, 2, 5, 23, 40):
        shares = [Share(number, num_shares).of(units) for number in range(num_shares)]
        assert sorted(unit for share in shares for unit in share) == units
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_tasks_build_the_dataset_of_one_machine(either: Built, tmp_path: Path) -> None:
    """SHARD-1: each task does only its share, reports the remaining work of other tasks, and seals nothing."""
    dest = tmp_path / "dataset"
    phases = []
    for _ in range(ROUNDS):
        for number in range(3):
            report = do_task(either, dest, f"{number}/3")
            assert report.state == TASK_ENDED and not (dest / "manifest.json").exists()
            phases.append(report.remaining and report.remaining.phase)
    in_order = ["probe", "encode", "build", None]
    assert phases[0] == "probe" and phases[-1] is None
    assert [in_order.index(phase) for phase in phases] == sorted(in_order.index(phase) for phase in phases)
    finished = finished_shards(dest)
    assert len(finished) == either.report.num_shards
    counts: list[int] = []
    report = shard(either.source, dest, shard_options(**either.options), noted("build", counts))
    assert report.state == "built" and counts == [either.report.num_shards], "a finished shard was built again"
    assert tree_of(dest) == either.tree
    assert {path.name for path in dest.iterdir()} == {path.name for path in either.dest.iterdir()}
    assert do_task(either, dest, "1/3").state == "already sealed"


@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        ("native", 0),
        pytest.param("built", 1, marks=pytest.mark.slow),
        *(pytest.param("native", n, marks=pytest.mark.slow) for n in range(2, 12)),
    ],
)
def test_tasks_that_run_together_and_die(kind: str, seed: int, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """SHARD-1, SHARD-2: if tasks are killed in any phase and run again or finished by another run, the bytes are the
    same."""
    rng = random.Random(seed)
    cluster = Cluster(
        request.getfixturevalue(kind), str(tmp_path / "dataset"), rng.choice([2, 3, 4] if seed > 1 else [2])
    )
    for _ in range(ROUNDS):
        phase, lost = rng.choice(["records", "probe", "encode", "build"]), rng.randrange(cluster.num_tasks)
        cluster.kills[lost] = (phase, rng.choice([0, 1, 2]), rng.choice([0.0, 0.01, 0.1]))
        codes = cluster.run(*range(cluster.num_tasks))
        assert all(code == 0 for number, code in enumerate(codes) if number != lost)
        cluster.kills.clear()
    assert cluster.run(None) == [0]
    assert tree_of(tmp_path / "dataset") == cluster.built.tree
    assert not (tmp_path / "dataset" / ".staging").exists()


@pytest.mark.parametrize("kind", ["built", pytest.param("native", marks=pytest.mark.slow)])
def test_machines_that_share_only_an_object_store(
    kind: str, request: pytest.FixtureRequest, moto_server: S3Server, s3_env: S3Env, tmp_path: Path
) -> None:
    """SHARD-1: no disk is shared, the disk of a killed task is lost, and another machine seals. Nothing is left."""
    s3_env(moto_server)
    bucket, built = moto_server.new_bucket(), request.getfixturevalue(kind)
    moto_server.upload_folder(built.source, bucket, "videos/")
    cluster = Cluster(built, f"s3://{bucket}/ds", 2, tmp_path / "disks")
    for number in range(ROUNDS):
        cluster.folders = tmp_path / f"disks {number}"  # unsent work of a killed task is lost
        if number == 1:
            cluster.kills[1] = ("encode", 1, 0.0)
            cluster.run(1)
        cluster.run(0, 1)
        left = [path for task in (0, 1) for path in (cluster.folders / str(task)).iterdir()]
        assert left == [], "a task that succeeded left something on its machine"
    counts: list[int] = []
    options = shard_options(**{**built.options, "work_dir": tmp_path / "another"})
    report = shard(built.source, cluster.dest, options, noted("encode", counts))
    assert replace(report, encode_seconds=None) == replace(built.report, encode_seconds=None)
    assert not counts or len(counts) == 1, "a clip that a task had encoded was encoded again"
    assert moto_server.tree(bucket, "ds") == built.tree
    assert moto_server.uploads(bucket) == [] and list((tmp_path / "another").iterdir()) == []


def test_a_task_excludes_its_repetition_and_a_run_without_tasks(built: Built, tmp_path: Path) -> None:
    """Other tasks may run at the same time."""
    dest = tmp_path / "dataset"

    def others(phase: str, done: int, total: int) -> None:
        if phase == "probe" and done == 0:
            with pytest.raises(
                DatasetError, match="task 0/2, process .*, is working on .*; wait until that process ends"
            ):
                do_task(built, dest, "0/2")
            with pytest.raises(DatasetError, match="task 0/2, process .*, is working on"):
                do_task(built, dest, None)
            with pytest.raises(DatasetError, match="task 0/2, process .*, is working on"):
                abandon(dest, shard_options(**OPTIONS))
            assert do_task(built, dest, "1/2").remaining.phase == "probe"

    shard(built.source, dest, shard_options(**OPTIONS, task="0/2"), others)

    def task(phase: str, done: int, total: int) -> None:
        if phase == "build" and done == 0:
            with pytest.raises(DatasetError, match="another run, process .*, is working on"):
                do_task(built, dest, "1/2")

    assert shard(built.source, dest, shard_options(**OPTIONS), task) == built.report
    assert tree_of(dest) == built.tree


def test_tasks_of_different_datasets_exclude_each_other(built: Built, tmp_path: Path) -> None:
    """Work of a task with other options or of an earlier run is not overwritten, and the error names a remedy."""
    dest = tmp_path / "dataset"
    do_task(built, dest, "0/2")
    with pytest.raises(DatasetError, match="unfinished work on a different dataset at .*--abandon"):
        do_task(built, dest, "1/2", seed=77)
    assert abandon(dest, shard_options(**OPTIONS))
    with pytest.raises(Stop):
        shard(built.source, dest, shard_options(**{**OPTIONS, "seed": 77}), stop_at("build", 2))
    with pytest.raises(DatasetError, match="unfinished work on a different dataset at .*--abandon"):
        do_task(built, dest, "0/2")
    assert abandon(dest, shard_options(**OPTIONS))
    do_task(built, dest, "0/2")
    assert do_task(built, dest, None) == built.report and tree_of(dest) == built.tree


@pytest.mark.parametrize("task", ["2/2", "1", "a/b", "-1/4", "0/0", "1/100001"])
def test_an_invalid_task_is_an_error(task: str) -> None:
    with pytest.raises(
        ConfigError, match=r"task='.*': must be I/N, such as 0/8, with N from 1 to 100000 and I from 0 to N-1"
    ):
        shard_options(task=task)


def test_options_that_cannot_be_combined_with_a_task(built: Built, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match="cannot be combined with work.cluster.task, or with a work.cluster.engine other than 'local'",
    ):
        shard_options(task="0/2", overwrite=True)
    with pytest.raises(ConfigError, match="cannot be combined with a dry run"):
        dry_run(built.source, tmp_path / "dataset", shard_options(**OPTIONS, task="0/2"))


def test_the_command_names_the_next_step(source: Path, tmp_path: Path) -> None:
    arguments = ("shard", source, tmp_path / "ds", "--buckets", "96x64@9,64x96@9", "--workers", 1)
    said = [run_streamvid(*arguments, "--task", f"{number}/2").stdout for number in (0, 1, 0)]
    assert "8 of 16 files are not probed yet; next: wait until all tasks have ended, then run them again" in said[0]
    assert "shards are not built yet" in said[1]
    assert "all shards are built; next: run the same command without --task to seal the dataset" in said[2]
    status = run_streamvid("shard", "--status", tmp_path / "ds").stdout
    assert "stopped (2 tasks have started, last: process " in status and "run the tasks again to resume" in status
    assert "rejected so far as " in status
    told = json.loads(run_streamvid("shard", "--status", tmp_path / "ds", "--json").stdout)
    phases = {phase["name"]: (phase["done"], phase["total"]) for phase in told["phases"]}
    assert phases["probe"] == (16, 16) and phases["build"][0] == phases["build"][1] and told["num_tasks"] == 2
    report = json.loads(run_streamvid(*arguments, "--task", "1/2", "--json").stdout)
    assert (report["state"], report["remaining"]) == ("task ended", None)
    assert "sealed: " in run_streamvid(*arguments).stdout


def test_the_status_of_a_build_on_another_machine(
    built: Built, moto_server: S3Server, s3_env: S3Env, tmp_path: Path
) -> None:
    """With only the object store in common, a running or stopped build is visible, with and without tasks."""
    s3_env(moto_server)
    bucket = moto_server.new_bucket()
    dest, here = f"s3://{bucket}/ds", shard_options(**built.options, work_dir=tmp_path / "here")
    with pytest.raises(DatasetError, match="neither a dataset nor an unfinished build at s3://"):
        status(dest, here)

    def look(phase: str, done: int, total: int) -> None:
        if (phase, done) == ("build", 2):
            found = status(dest, here)
            assert found.state == "running" and found.pid == os.getpid() and found.phases[0].name == "probe"
            raise Stop

    with pytest.raises(Stop):
        shard(built.source, dest, shard_options(**built.options, work_dir=tmp_path / "there"), look)
    stopped = status(dest, here)
    assert stopped.state == "stopped" and stopped.phases[0].done == stopped.phases[0].total == 16
    store, lease = open_store(dest), ".staging/leases/run-000001.json"
    for renewed, state in ((time.time(), "running"), (time.time() - 1000, "stopped")):
        store.put(lease, note(renewed))  # from a process on another machine
        assert status(dest, here).state == state
    store.remove(lease)
    do_task(built, dest, "0/2", work_dir=tmp_path / "there")
    assert status(dest, here).num_tasks == 1
    shard(built.source, dest, shard_options(**built.options, work_dir=tmp_path / "there"))
    assert status(dest, here).state == "sealed" and not list(store.files(".staging"))


PLANTED: list[object] = [
    {"host": 1, "pid": "x", "time": "late", "phases": []},
    {"host": "h", "pid": 1, "time": 1, "phases": [{"name": "none", "done": 1, "total": 1, "done_before": 0, "seconds": 1}]},
    {"host": "h", "pid": 1, "time": 1, "phases": [{"name": "probe", "done": "1", "total": [], "done_before": 0, "seconds": 1}]},
    {"host": "h", "pid": 1, "time": float("nan"), "phases": 3},
    [],
    7,
]  # fmt: skip


@pytest.mark.parametrize("note", PLANTED)
def test_planted_notes_and_findings_are_ignored(built: Built, tmp_path: Path, note: object) -> None:
    """SAFE-1: anyone who can write to the destination can create files below `.staging/tasks/`."""
    dest, options = tmp_path / "dataset", shard_options(**built.options)
    do_task(built, dest, "0/2")
    before = status(dest, options)
    planted = dest / ".staging" / "tasks" / "1-of-2"
    planted.mkdir(exist_ok=True)
    (planted / "status.json").write_text(json.dumps(note))
    journal = dest / ".staging" / "tasks" / "0-of-2" / "probes.jsonl"
    lines = [journal.read_bytes().splitlines()[0]]
    for value in ([["list"], 1, {}], [{}, {}], ["x", 1, "0", 7], ["y", 1, "0", {"rejected": 1, "kind": []}], "no list"):
        payload = json.dumps(value).encode()
        lines.append(hashlib.sha256(payload).hexdigest()[:16].encode() + b" " + payload)
    lines.append(hashlib.sha256(b"{no json").hexdigest()[:16].encode() + b" {no json")
    (planted / "probes.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    found = status(dest, options)
    assert found.phases == before.phases and found.rejections == before.rejections
    assert do_task(built, dest, None) == built.report and tree_of(dest) == built.tree
