"""Tests of `--engine ray` for both verbs on a real Ray cluster of three raylets: it writes the bytes of one machine."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from streamvid.cluster.lease import held
from streamvid.config import dump_config
from streamvid.errors import DatasetError
from streamvid.modules.config import ModelConfig
from streamvid.storage import LocalStore
from tests.clips import ROOT
from tests.conftest import run_streamvid
from tests.files import tree_of
from tests.loader.conftest import SMALL, TALL, build_dataset
from tests.processes import is_alive
from tests.ray_cluster import RayCluster
from tests.servers import S3Env, S3Server
from tests.sharder.conftest import BUCKETS, Built
from tests.sharder.kills import check_end, children_of, kill_one, run_and_kill
from tests.trainer.runs import config_of

ARGUMENTS = [
    *("--buckets", ",".join(bucket.size_at_frames for bucket in BUCKETS), "--shard-size", "12000"),
    *("--val-fraction", "0.3", "--seed", "5", "--workers", "1", "--engine", "ray"),
]


def command(built: Built, dest: object, cluster: RayCluster, *more: object) -> list[object]:
    clips = ("--clips", built.options.get("clips", "copy"))
    return ["shard", built.source, dest, *ARGUMENTS, *clips, "--ray-address", cluster.address, *more]


@pytest.mark.parametrize("kind", ["built", pytest.param("native", marks=pytest.mark.slow)])
def test_a_ray_cluster_builds_the_dataset_of_one_machine(
    kind: str, request: pytest.FixtureRequest, ray_cluster: RayCluster, tmp_path: Path
) -> None:
    """SHARD-1: tasks run on three raylets, and the driver seals the dataset and shows progress."""
    built = request.getfixturevalue(kind)
    done = run_streamvid(*command(built, tmp_path / "dataset", ray_cluster))
    assert "sealed: " in done.stdout and "probe 16/16" in done.stderr
    assert tree_of(tmp_path / "dataset") == built.tree
    assert not (tmp_path / "dataset" / ".staging").exists()


@pytest.mark.slow
def test_machines_that_share_only_an_object_store(
    native: Built, ray_cluster: RayCluster, moto_server: S3Server, s3_env: S3Env, tmp_path: Path
) -> None:
    """SHARD-1: source and dataset are in an object store."""
    env = s3_env(moto_server)
    bucket = moto_server.new_bucket()
    moto_server.upload_folder(native.source, bucket, "videos/")
    settings = ("--endpoint-url", env["AWS_ENDPOINT_URL"]) if "AWS_ENDPOINT_URL" in env else ()
    found = command(native, f"s3://{bucket}/ds", ray_cluster, "--work-dir", tmp_path / "work", *settings)
    found[1] = f"s3://{bucket}/videos"
    run_streamvid(*found)
    assert moto_server.tree(bucket, "ds") == native.tree


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_after_any_kill_the_same_command_ends_with_the_same_bytes(
    native: Built, ray_cluster: RayCluster, seed: int, tmp_path: Path
) -> None:
    """SHARD-1, STOP-1: the driver, a task, a decoder or a raylet with its tasks is killed in any phase."""
    victim, phase = ("driver", "task", "decoder", "raylet")[seed % 4], ("probe", "encode", "build", "seal")[seed // 5]
    dest = tmp_path / "dataset"
    if victim == "raylet":
        ray_cluster.say("add")
    words = [sys.executable, "-m", "streamvid", *command(native, dest, ray_cluster, "--num-tasks", 4)]

    def kill(driver: subprocess.Popen[str]) -> None:
        if victim == "driver":
            driver.kill()
        elif victim == "raylet":
            ray_cluster.say("kill")
        else:
            tasks = ray_cluster.tasks() if phase != "seal" else [psutil.Process(driver.pid)]
            kills_decoder = victim == "decoder" or phase == "seal"
            kill_one(children_of(tasks) if kills_decoder else tasks, random.Random(seed))

    finished = run_and_kill(words, dest, phase, random.Random(seed), kill, may_fail=victim == "driver")
    if not (dest / "manifest.json").exists() or (dest / ".staging").exists():
        assert victim == "driver"
        run_streamvid(*command(native, dest, ray_cluster))
    check_end(dest, native, finished)


def test_errors_are_the_same_as_on_one_machine(built: Built, ray_cluster: RayCluster, tmp_path: Path) -> None:
    """The driver reports the error of a task, and starts nothing that could never run."""
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "clip.mp4").write_bytes(b"no video at all" * 20)
    found = command(built, tmp_path / "dataset", ray_cluster)
    found[1] = tmp_path / "bad"
    done = run_streamvid(*found, check=False)
    assert done.returncode == 1 and "all records were rejected, so nothing was built" in done.stderr
    assert "Traceback" not in done.stderr
    done = run_streamvid(*command(built, tmp_path / "dataset", ray_cluster, "--workers", 3), check=False)
    assert "workers=3: must be at most 1, the number of CPUs on the largest machine in the Ray cluster" in done.stderr
    done = run_streamvid(*command(built, tmp_path / "other", ray_cluster, "--ray-address", "127.0.0.1:1"), check=False)
    assert "ray_address='127.0.0.1:1': no Ray cluster responds at this address" in done.stderr
    assert not (tmp_path / "other").exists()


@pytest.mark.timeout(1000)  # the longest of all: three starts of torch, and as many on a busy machine take minutes
def test_encoding_on_ray_takes_the_gpus_and_survives_a_killed_task(ray_cluster: RayCluster, tmp_path: Path) -> None:
    """SHARD-1: there is one task per GPU. A killed task is started again, and no finished shard is encoded twice."""
    base, logs = build_dataset(tmp_path / "base", {SMALL: [5, 4, 3], TALL: [6, 5]}), tmp_path / "logs"
    logs.mkdir()

    def config(name: str, **args: object) -> list[object]:
        model = ModelConfig(factory="tests.trainer.encoders:build", args={"draws": 0.5, **args})
        changes = {
            "task": "sft:data_process",
            "data.features.url": str(tmp_path / name),
            "model": model,
            "accelerate.cpu": False,
        }
        file = tmp_path / f"{name}.yaml"
        file.write_text(dump_config(config_of(base, tmp_path / "out", changes)))
        return ["encode", "--config", file]

    run_streamvid(*config("alone"))
    words = [
        *config("ray", log=str(logs), pause=0.3),
        "--engine",
        "ray",
        "--ray-address",
        ray_cluster.address,
        "--json",
    ]
    program = [sys.executable, "-m", "streamvid", *map(str, words)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(program, cwd=ROOT, **pipes) as driver:
        while not (begun := list(logs.glob("encoded-*"))) and driver.poll() is None:
            time.sleep(0.01)
        with pytest.raises(DatasetError, match=f"another run, process {driver.pid} on .* is working on"):
            held(LocalStore(tmp_path / "ray"), ".staging/leases", "run").__enter__()
        killed = int(begun[0].name.split("-")[1])
        os.kill(killed, signal.SIGKILL)
        answer, errors = driver.communicate(timeout=900)
    assert driver.returncode == 0, errors
    assert json.loads(answer)["is_sealed"] and "encode 23/23" in errors and not is_alive(killed)
    assert tree_of(tmp_path / "ray") == tree_of(tmp_path / "alone")
    assert {log.name.split("-")[2] for log in logs.iterdir()} == {"0"} and len(list(logs.iterdir())) == 3
    keys = Counter(key for log in logs.iterdir() for key in log.read_text().split())
    assert len(keys) == 23 and max(keys.values()) <= 2
