"""Tests that all engines write the same bytes, to a folder and to a real object store."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias, get_args

import pytest

import streamvid
from streamvid.cluster.options import Engine
from tests.clips import encode, frames_of
from tests.conftest import SHARD_ARGUMENTS, Corpus, run_streamvid
from tests.files import Tree, tree_of
from tests.planted import plant
from tests.ray_cluster import RayCluster
from tests.scene_videos import scene_video
from tests.servers import Rgw, S3Env
from tests.slurm import Slurm

ENGINES = get_args(Engine)
NUM_CLIPS, NUM_ENCODED, MOST_SECONDS = 2000, 50, 7200
ShardWithAll: TypeAlias = Callable[[Sequence[object], Sequence[object]], dict[str, Tree]]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(6 * MOST_SECONDS)]


@pytest.fixture
def to_folders(ray_cluster: RayCluster, slurm: Slurm, tmp_path: Path) -> ShardWithAll:
    """Function that shards the same sources with each engine, on three raylets and on three nodes of Slurm."""

    def run(sources: Sequence[object], options: Sequence[object], dest: str = "", *more: object) -> dict[str, Tree]:
        for engine in ENGINES:
            own = {"local": (), "ray": ("--ray-address", ray_cluster.address), "slurm": ("--num-tasks", 3)}[engine]
            given = ("shard", *sources, f"{dest or tmp_path}/{engine}", *options, "--workers", 1, "--engine", engine)
            if engine == "slurm":
                slurm.run(sys.executable, "-m", "streamvid", *given, *own, *more, cwd=tmp_path)
                slurm.wait_for_jobs(MOST_SECONDS)
            else:
                run_streamvid(*given, *own, *more, timeout=MOST_SECONDS)
        return {engine: tree_of(tmp_path / engine) for engine in ENGINES if not dest}

    return run


@pytest.fixture
def to_ceph(to_folders: Callable[..., dict[str, Tree]], rgw: Rgw, s3_env: S3Env, tmp_path: Path) -> ShardWithAll:
    """Same function as `to_folders`, but for a bucket on Ceph."""

    def run(sources: Sequence[object], options: Sequence[object]) -> dict[str, Tree]:
        bucket = rgw.new_bucket()
        endpoint = ("--endpoint-url", s3_env(rgw)["AWS_ENDPOINT_URL"])
        to_folders(sources, options, f"s3://{bucket}", "--work-dir", tmp_path / "work", *endpoint)
        assert rgw.uploads(bucket) == []
        return {f"{engine} to ceph": rgw.tree(bucket, engine) for engine in ENGINES}

    return run


@pytest.fixture(scope="module")
def small_clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of many small clips: a few are encoded, and the rest are copies with a different box at the end."""
    folder = tmp_path_factory.mktemp("small")
    frames = frames_of("bikes", 160, 112, NUM_ENCODED + 20)
    encoded = [encode(frames[first : first + 6 + first % 14]) for first in range(NUM_ENCODED)]
    for number in range(NUM_CLIPS):
        free_box = (16).to_bytes(4, "big") + b"free" + number.to_bytes(8, "big")
        (folder / f"{number:04d}.mp4").write_bytes(encoded[number % NUM_ENCODED] + free_box)
        (folder / f"{number:04d}.txt").write_text(f"clip {number}")
    return folder


@pytest.mark.parametrize("clips", ["copy", "native"])
@pytest.mark.parametrize("input_size", ["few", "many"])
def test_all_engines_write_the_same_bytes_to_a_folder_and_to_ceph(
    input_size: str,
    clips: str,
    corpus: Corpus,
    request: pytest.FixtureRequest,
    to_folders: ShardWithAll,
    to_ceph: ShardWithAll,
) -> None:
    """SHARD-1, FETCH-2: the sources are the demo's corpus with a few clips, and with 2,000 (issue 18)."""
    sources = (corpus.root, request.getfixturevalue("source" if input_size == "few" else "small_clips"))
    options = (*SHARD_ARGUMENTS, "--clips", clips)
    trees = to_folders(sources, options) | to_ceph(sources, options)
    assert len(trees) == 2 * len(ENGINES) and len(trees["local"]) > 10
    assert [name for name, tree in trees.items() if tree != trees["local"]] == []


def test_all_engines_produce_the_same_curation(to_folders: ShardWithAll, tmp_path: Path) -> None:
    """SHARD-1: this covers scenes, black bars, scores and groups of near-duplicates, which each task derives from all
    findings."""
    plant(tmp_path / "source", 12, 6)
    for seed in range(3):
        (tmp_path / "source" / f"scenes-{seed}.mp4").write_bytes(scene_video(7 * seed).data)
    wanted = ("--scene-cuts", "--black-bars", "--scores", "motion,blur", "--dedup", "mark")
    buckets = ("--buckets", "48x32@8,32x48@8", "--shard-size", "20000", "--val-fraction", "0.3", "--caption-column", "")
    trees = to_folders([tmp_path / "source"], [*buckets, *wanted, "--clips", "native"])
    assert [name for name, tree in trees.items() if tree != trees["local"]] == []
    rows = streamvid.open_dataset(tmp_path / "local").samples_table().to_pylist()
    assert max(Counter(row["source"] for row in rows).values()) > 1, "videos were divided at their cuts"
    assert len({row["user.duplicate_group"] for row in rows}) > 1 and all(row["user.blur"] is not None for row in rows)
