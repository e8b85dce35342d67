"""All engines write the same bytes, to a folder and to a real object store."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import get_args

import pytest

from streamvid.cluster.options import Engine
from tests.conftest import SHARD_ARGUMENTS, Corpus, run_streamvid
from tests.files import Tree, tree_of
from tests.ray_cluster import RayCluster
from tests.servers import Rgw, S3Env
from tests.slurm import Slurm

ENGINES = get_args(Engine)


@pytest.mark.slow
@pytest.mark.parametrize("clips", ["copy", "native"])
def test_all_engines_write_the_same_bytes_to_a_folder_and_to_ceph(
    clips: str,
    corpus: Corpus,
    source: Path,
    ray_cluster: RayCluster,
    slurm: Slurm,
    rgw: Rgw,
    s3_env: S3Env,
    tmp_path: Path,
) -> None:
    """SHARD-1, FETCH-2: the demo's corpus and small clips, on three raylets and on three nodes of Slurm."""
    endpoint = ("--endpoint-url", s3_env(rgw)["AWS_ENDPOINT_URL"])
    bucket = rgw.new_bucket()
    trees: dict[str, Tree] = {}
    for engine in ENGINES:
        own = {"local": (), "ray": ("--ray-address", ray_cluster.address), "slurm": ("--num-tasks", 3)}[engine]
        words = (*SHARD_ARGUMENTS, "--workers", 1, "--clips", clips, "--engine", engine, *own)
        to_store = (f"s3://{bucket}/{engine}", *words, "--work-dir", tmp_path / "work", *endpoint)
        for more in ((tmp_path / engine, *words), to_store):
            given = ("shard", corpus.root, source, *more)
            if engine == "slurm":
                slurm.run(sys.executable, "-m", "streamvid", *given, cwd=tmp_path)
                slurm.wait_for_jobs(600)
            else:
                run_streamvid(*given, timeout=600)
        trees |= {engine: tree_of(tmp_path / engine), f"{engine} to ceph": rgw.tree(bucket, engine)}
    assert len(trees) == 2 * len(ENGINES) and len(trees["local"]) > 10
    assert [name for name, tree in trees.items() if tree != trees["local"]] == []
    assert rgw.uploads(bucket) == []
