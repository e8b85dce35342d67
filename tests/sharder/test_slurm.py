"""configs/slurm/shard.sh on a real Slurm cluster: arrays of tasks on three nodes, and the bytes of one machine."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.clips import ROOT
from tests.files import tree_of
from tests.servers import S3Env, S3Server
from tests.sharder.conftest import BUCKETS, Built
from tests.slurm import NODES, Slurm

SCRIPT = ROOT / "configs" / "slurm" / "shard.sh"
ARGUMENTS = [
    *("--buckets", ",".join(bucket.size_at_frames for bucket in BUCKETS), "--shard-size", "12000"),
    *("--val-fraction", "0.3", "--seed", "5"),
]


def submit(slurm: Slurm, built: Built, dest: str, folder: Path, tasks: int = 3) -> None:
    clips = ["--clips", str(built.options.get("clips", "copy"))]
    slurm.run(SCRIPT, built.source, dest, *ARGUMENTS, *clips, cwd=folder, TASKS=str(tasks), CPUS="1")


def test_arrays_of_tasks_build_the_dataset_of_one_machine(built: Built, slurm: Slurm, tmp_path: Path) -> None:
    """SHARD-1: copies, to a folder that the nodes share."""
    submit(slurm, built, str(tmp_path / "dataset"), tmp_path)
    slurm.wait_for_jobs(120)
    said = "".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert (tmp_path / "dataset" / "manifest.json").exists(), said
    assert tree_of(tmp_path / "dataset") == built.tree
    assert not (tmp_path / "dataset" / ".staging").exists()


@pytest.mark.slow
def test_to_an_object_store(native: Built, slurm: Slurm, moto_server: S3Server, s3_env: S3Env, tmp_path: Path) -> None:
    """SHARD-1: native clips from a bucket to a bucket."""
    s3_env(moto_server)
    bucket = moto_server.new_bucket()
    moto_server.upload_folder(native.source, bucket, "videos/")
    clips = ("--clips", "native", "--work-dir", str(tmp_path / "work"))
    dest = f"s3://{bucket}/ds"
    slurm.run(SCRIPT, f"s3://{bucket}/videos", dest, *ARGUMENTS, *clips, cwd=tmp_path, TASKS="5", CPUS="1")
    slurm.wait_for_jobs(300)
    assert moto_server.tree(bucket, "ds") == native.tree


@pytest.mark.slow
@pytest.mark.parametrize("seconds", range(1, 21))
def test_a_node_that_disappears_costs_nothing(native: Built, slurm: Slurm, seconds: int, tmp_path: Path) -> None:
    """SHARD-1: a node and its job steps are killed at any time; the script is run again if the last job was hit."""
    submit(slurm, native, str(tmp_path / "dataset"), tmp_path)
    time.sleep(seconds)
    victim = NODES[seconds % len(NODES)]
    slurm.kill_node(victim)
    slurm.start_node(victim)
    slurm.wait_for_jobs(300)
    if not (tmp_path / "dataset" / "manifest.json").exists():
        submit(slurm, native, str(tmp_path / "dataset"), tmp_path)
        slurm.wait_for_jobs(300)
    assert tree_of(tmp_path / "dataset") == native.tree
    assert not (tmp_path / "dataset" / ".staging").exists()
