"""Tests of `--engine slurm` for both verbs on a real Slurm cluster: arrays of tasks on three nodes write the same
bytes."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from streamvid.config import dump_config
from streamvid.errors import ConfigError
from streamvid.modules.config import ModelConfig
from tests.conftest import run_streamvid
from tests.files import tree_of
from tests.loader.conftest import SMALL, TALL, build_dataset
from tests.servers import S3Env, S3Server
from tests.shard_options import shard_options
from tests.sharder.conftest import BUCKETS, Built
from tests.sharder.kills import check_end, children_of, kill_one, wait_for_phase
from tests.sharder.test_kill import finished_shards
from tests.slurm import NODES, Slurm
from tests.trainer.runs import config_of

PROGRAM = (sys.executable, "-m", "streamvid")
ARGUMENTS = [
    *("--buckets", ",".join(bucket.size_at_frames for bucket in BUCKETS), "--shard-size", "12000"),
    *("--val-fraction", "0.3", "--seed", "5", "--workers", "1", "--engine", "slurm"),
]


def submit(slurm: Slurm, built: Built, dest: object, folder: Path, tasks: int = 3, *more: object) -> str:
    """Submit the jobs and return the output of the command."""
    clips = ("--clips", built.options.get("clips", "copy"), "--num-tasks", tasks)
    return slurm.run(*PROGRAM, "shard", built.source, dest, *ARGUMENTS, *clips, *more, cwd=folder)


def logs(folder: Path) -> str:
    return "".join(path.read_text() for path in folder.glob("*.log"))


def test_one_command_builds_the_dataset_of_one_machine_and_a_second_is_refused(
    built: Built, slurm: Slurm, tmp_path: Path
) -> None:
    """SHARD-1, SAFE-1: copies are built in a shared folder whose name contains shell commands, which are not run."""
    dest = tmp_path / 'it\'s $(touch stolen) `touch stolen` "set"'
    said = submit(slurm, built, dest, tmp_path, 3, "--sbatch-option=--comment=it's mine")
    assert "submitted Slurm jobs " in said and "progress: streamvid shard --status " in said
    again = [*PROGRAM, "shard", built.source, dest, *ARGUMENTS]
    done = subprocess.run(
        list(map(str, again)), cwd=tmp_path, env=slurm.env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "are queued or running: " in done.stderr and "`scancel --name=streamvid-shard-" in done.stderr
    slurm.wait_for_jobs(120)
    assert (dest / "manifest.json").exists(), logs(tmp_path)
    assert tree_of(dest) == built.tree
    assert not (dest / ".staging").exists() and not (tmp_path / "stolen").exists()


@pytest.mark.parametrize("word", ["cpu", "-p", "--", "--array=0-3", "--arr=0-3", "--wrap=id", "--dependency=after:1"])
def test_invalid_sbatch_options_are_refused(word: str) -> None:
    with pytest.raises(ConfigError, match=r"sbatch_options='.*': must be a long option such as --partition=cpu, and"):
        shard_options(engine="slurm", sbatch_option=word)


def test_errors_of_slurm_are_reported(built: Built, slurm: Slurm, tmp_path: Path) -> None:
    words = [*PROGRAM, "shard", built.source, tmp_path / "ds", *ARGUMENTS, "--sbatch-option=--partition=none"]
    done = subprocess.run(
        list(map(str, words)), cwd=tmp_path, env=slurm.env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "error: sbatch failed: " in done.stderr and "--sbatch-option" in done.stderr
    assert not (tmp_path / "ds").exists()


@pytest.mark.slow
def test_to_an_object_store(native: Built, slurm: Slurm, moto_server: S3Server, s3_env: S3Env, tmp_path: Path) -> None:
    """SHARD-1: native clips, with source and dataset in an object store."""
    s3_env(moto_server)
    bucket = moto_server.new_bucket()
    moto_server.upload_folder(native.source, bucket, "videos/")
    clips = ("--clips", "native", "--work-dir", str(tmp_path / "work"), "--num-tasks", 5)
    slurm.run(*PROGRAM, "shard", f"s3://{bucket}/videos", f"s3://{bucket}/ds", *ARGUMENTS, *clips, cwd=tmp_path)
    slurm.wait_for_jobs(300)
    assert moto_server.tree(bucket, "ds") == native.tree, logs(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_after_any_kill_the_same_command_ends_with_the_same_bytes(
    native: Built, slurm: Slurm, seed: int, tmp_path: Path
) -> None:
    """SHARD-1, STOP-1: a task, a decoder or a node with its processes is killed; the command is rerun if needed."""
    victim, phase = ("task", "decoder", "node")[seed % 3], ("probe", "encode", "build", "seal")[seed // 5]
    dest, rng = tmp_path / "dataset", random.Random(seed)
    submit(slurm, native, dest, tmp_path)
    wait_for_phase(dest, phase, lambda: not (dest / "manifest.json").exists())
    time.sleep(rng.choice([0.0, 0.05, 0.3]))
    finished = finished_shards(dest)
    if victim == "node":
        name = rng.choice(NODES)
        slurm.kill_node(name)
        slurm.start_node(name)
    else:
        tasks = slurm.processes("-m streamvid shard")
        kill_one(tasks if victim == "task" else children_of(tasks), rng)
    slurm.wait_for_jobs(300)
    if not (dest / "manifest.json").exists() or (dest / ".staging").exists():
        submit(slurm, native, dest, tmp_path)
        slurm.wait_for_jobs(300)
    check_end(dest, native, finished)


@pytest.mark.slow
def test_encoding_resumes_after_its_time_limit(slurm: Slurm, tmp_path: Path) -> None:
    """SHARD-1, STOP-1: SIGUSR1, as before a time limit, ends each task after its batch, and Slurm queues the task
    again."""
    base = build_dataset(tmp_path / "base", {SMALL: [5, 4, 3], TALL: [6, 5]})
    log = tmp_path / "log"
    log.mkdir()

    def words(name: str, **args: object) -> list[object]:
        model = ModelConfig(factory="tests.trainer.encoders:build", args={"draws": 0.5, **args})
        changes = {"task": "sft:data_process", "data.features.url": str(tmp_path / name), "model": model}
        (tmp_path / f"{name}.yaml").write_text(dump_config(config_of(base, tmp_path / "out", changes)))
        return ["encode", "--config", tmp_path / f"{name}.yaml"]

    run_streamvid(*words("alone"))
    command = [*PROGRAM, *words("slurm", log=str(log), pause=0.5), "--engine", "slurm", "--num-tasks", 2, "--json"]
    jobs = json.loads(slurm.run(*command, cwd=tmp_path))["jobs"]
    end = time.monotonic() + 120
    while not list(log.iterdir()) and time.monotonic() < end:
        time.sleep(0.1)
    slurm.run("scancel", "--signal=USR1", *jobs)
    slurm.wait_for_jobs(300)
    assert '"stopped_by": "SIGUSR1"' in logs(tmp_path)
    assert tree_of(tmp_path / "slurm") == tree_of(tmp_path / "alone"), logs(tmp_path)
