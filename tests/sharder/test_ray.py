"""`--engine ray` on a real Ray cluster of three raylets: the bytes of one machine, whatever is lost."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.clips import ROOT
from tests.conftest import run_streamvid
from tests.files import tree_of
from tests.servers import S3Env, S3Server
from tests.sharder.conftest import BUCKETS, Built

ARGUMENTS = [
    *("--buckets", ",".join(bucket.size_at_frames for bucket in BUCKETS), "--shard-size", "12000"),
    *("--val-fraction", "0.3", "--seed", "5", "--workers", "1", "--engine", "ray"),
]


@dataclass
class Cluster:
    """tests/ray_cluster.py as a process."""

    process: subprocess.Popen[str]
    address: str = ""

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        assert self.answer() == "done"

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(
        [sys.executable, "-m", "tests.ray_cluster"], cwd=ROOT, env=env, text=True, **pipes
    ) as process:
        found = Cluster(process)
        found.address = found.answer()
        assert found.address
        yield found
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)


def command(built: Built, dest: object, cluster: Cluster, *more: object) -> list[object]:
    clips = ("--clips", built.options.get("clips", "copy"))
    return ["shard", built.source, dest, *ARGUMENTS, *clips, "--ray-address", cluster.address, *more]


@pytest.mark.parametrize("kind", ["built", pytest.param("native", marks=pytest.mark.slow)])
def test_a_ray_cluster_builds_the_dataset_of_one_machine(
    kind: str, request: pytest.FixtureRequest, cluster: Cluster, tmp_path: Path
) -> None:
    """SHARD-1: tasks on three raylets, sealed by the driver, with progress."""
    built = request.getfixturevalue(kind)
    done = run_streamvid(*command(built, tmp_path / "dataset", cluster))
    assert "sealed: " in done.stdout and "probe 16/16" in done.stderr
    assert tree_of(tmp_path / "dataset") == built.tree
    assert not (tmp_path / "dataset" / ".staging").exists()


@pytest.mark.slow
def test_machines_that_share_only_an_object_store(
    native: Built, cluster: Cluster, moto_server: S3Server, s3_env: S3Env, tmp_path: Path
) -> None:
    """SHARD-1: from a bucket to a bucket."""
    env = s3_env(moto_server)
    bucket = moto_server.new_bucket()
    moto_server.upload_folder(native.source, bucket, "videos/")
    settings = ("--endpoint-url", env["AWS_ENDPOINT_URL"]) if "AWS_ENDPOINT_URL" in env else ()
    found = command(native, f"s3://{bucket}/ds", cluster, "--work-dir", tmp_path / "work", *settings)
    found[1] = f"s3://{bucket}/videos"
    run_streamvid(*found)
    assert moto_server.tree(bucket, "ds") == native.tree


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [n / 2 for n in range(2, 22)])
def test_a_machine_that_disappears_costs_nothing(
    built: Built, cluster: Cluster, seconds: float, tmp_path: Path
) -> None:
    """SHARD-1: a raylet is killed with its workers at any time; Ray or the driver does what it left."""
    cluster.say("add")
    program = [sys.executable, "-m", "streamvid", *map(str, command(built, tmp_path / "dataset", cluster))]
    driver = subprocess.Popen([*program, "--num-tasks", "4"], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    time.sleep(seconds)
    cluster.say("kill")
    _, errors = driver.communicate(timeout=200)
    assert driver.returncode == 0, errors
    assert tree_of(tmp_path / "dataset") == built.tree
    assert not (tmp_path / "dataset" / ".staging").exists()


def test_what_is_wrong_is_said_as_on_one_machine(built: Built, cluster: Cluster, tmp_path: Path) -> None:
    """The error of a task is the driver's; nothing is started that could never run."""
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "clip.mp4").write_bytes(b"no video at all" * 20)
    found = command(built, tmp_path / "dataset", cluster)
    found[1] = tmp_path / "bad"
    done = run_streamvid(*found, check=False)
    assert done.returncode == 1 and "all 1 records were rejected, so nothing was built" in done.stderr
    assert "Traceback" not in done.stderr
    done = run_streamvid(*command(built, tmp_path / "dataset", cluster, "--workers", 3), check=False)
    assert "workers=3: must be at most 1, the number of CPUs of the largest machine in the Ray cluster" in done.stderr
    done = run_streamvid(*command(built, tmp_path / "other", cluster, "--ray-address", "127.0.0.1:1"), check=False)
    assert "ray_address='127.0.0.1:1': no Ray cluster answers there" in done.stderr
    assert not (tmp_path / "other").exists()
