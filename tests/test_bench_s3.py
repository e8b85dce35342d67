"""Tests of tools/bench_s3.py: its figures match what was read from a real server through a counting proxy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.servers import ProxyFactory, S3Env, S3Server
from tools.bench_s3 import apart, medians
from tools.bench_s3_data import Kind, clip_of_size, make_dataset

KIND = Kind("small", 20_000, 64, 48, 24, 160_000)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small dataset, made by the benchmark's own function."""
    return make_dataset(tmp_path_factory.mktemp("bench"), KIND)


def test_clips_have_about_the_size_that_is_asked_for() -> None:
    """Clips have about the requested size; smaller ones would flatter every figure per sample."""
    assert 0.7 < len(clip_of_size(KIND, 1)) / KIND.sample_bytes < 1.3


def test_a_dataset_is_made_once_for_a_folder(dataset: Path) -> None:
    """The dataset has several shards, and a second call reuses them."""
    before = {path: path.stat().st_mtime_ns for path in dataset.rglob("*.tar")}
    assert len(before) > 1
    assert make_dataset(dataset.parent, KIND) == dataset
    assert {path: path.stat().st_mtime_ns for path in dataset.rglob("*.tar")} == before


@pytest.mark.slow
def test_one_epoch_is_counted_whole(
    dataset: Path, moto_server: S3Server, s3_env: S3Env, fault_proxy: ProxyFactory, tmp_path: Path
) -> None:
    """The samples, requests and bytes of a cold epoch are counted; a cache does not increase the requests."""
    bucket, proxy = moto_server.new_bucket(), fault_proxy(moto_server)
    moto_server.upload_folder(dataset, bucket)
    s3_env(moto_server.behind(proxy))
    found = {}
    for name, cache in (
        ("plain", {}),
        ("cached", {"storage": {"cache_dir": str(tmp_path / "cache"), "cache_bytes": 2**30}}),
    ):
        arguments = {"batch_size": 4, "num_workers": 0, "shuffle": "none"} | cache
        found[name] = apart(proxy, url=f"s3://{bucket}", arguments=arguments, seconds=None)
    for run in found.values():
        assert run["num_samples"] == KIND.num_samples
        assert 0.7 * KIND.sample_bytes < run["useful_bytes"] / run["num_samples"] < 1.3 * KIND.sample_bytes
        assert run["all_bytes"] >= run["useful_bytes"]
        assert run["peak_bytes"] > 0
    assert 0 < found["cached"]["requests"] <= found["plain"]["requests"]


def test_medians_cover_only_figures() -> None:
    """Each figure is summarized as median, lowest and highest value; texts are left out."""
    assert medians([{"a": 1.0, "b": "x"}, {"a": 3.0, "b": "y"}, {"a": 2.0, "b": "z"}]) == {"a": [2.0, 1.0, 3.0]}
