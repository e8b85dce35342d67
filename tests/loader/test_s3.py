"""Tests of FETCH-2: batches from a bucket and from disk are bit-identical, for any ranks, workers, cache and state."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import fsspec
import psutil
import pytest

import streamvid
from streamvid.storage import StorageOptions
from tests.conftest import Sharded
from tests.loader import s3_run
from tests.loader.s3_run import Source
from tests.servers import ProxyFactory, Rgw, S3Env
from tools.fault_proxy import FaultProxy

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def proxy(rgw: Rgw, s3_env: S3Env, fault_proxy: ProxyFactory) -> FaultProxy:
    """Proxy that causes no faults and counts requests."""
    proxy = fault_proxy(rgw)
    s3_env(rgw.behind(proxy))
    return proxy


def tar_requests(proxy: FaultProxy) -> int:
    return sum(count for request, count in proxy.counts().requests.items() if request.endswith(".tar"))


@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("name", ["plain", "native"])
def test_every_rank_receives_the_same_batches_as_from_disk(
    sources: dict[str, Source], proxy: FaultProxy, tmp_path: Path, name: str, decode: bool
) -> None:
    """PLAN-5, FETCH-2: batches are the same with 1, 2 and 3 ranks, and with a cold and a warm cache."""
    source = sources[name]
    cache = {"storage": {"cache_dir": tmp_path / "cache", "cache_bytes": 1 << 26}}
    for num_ranks in (1, 2, 3):
        for rank in range(num_ranks):
            options: dict[str, Any] = {
                "batch_size": 2,
                "output": {"decode": decode},
                "world": streamvid.World(rank, num_ranks),
            }
            expected = s3_run.run(source.root, **options)
            assert s3_run.run(source.url, **options) == expected
            assert s3_run.run(source.url, **options, **cache) == expected
            assert tar_requests(proxy) > 0
            proxy.reset_counts()
            assert s3_run.run(source.url, **options, **cache) == expected
            counts = proxy.reset_counts()
            # With a warm cache, a loader requests only the manifest, which identifies the cached files.
            assert {request.rpartition("/")[2] for request in counts.requests} == {"manifest.json"}
            assert sum(counts.requests.values()) <= 4


@pytest.mark.parametrize("decode", [True, False])
def test_rank_processes_share_a_cache(
    sources: dict[str, Source], rgw: Rgw, s3_env: S3Env, tmp_path: Path, decode: bool
) -> None:
    """FETCH-2: two ranks with decode workers receive the same batches as from disk."""
    s3_env(rgw)
    check_cached(sources["plain"], tmp_path, decode)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("decode", [True, False])
def test_the_demo_corpus(sharded: Sharded, rgw: Rgw, s3_env: S3Env, tmp_path: Path, decode: bool) -> None:
    """FETCH-2: the corpus contains everything that the real command creates from all kinds of sources."""
    s3_env(rgw)
    check_cached(s3_run.uploaded(sharded.root, rgw), tmp_path, decode)


def check_cached(source: Source, folder: Path, decode: bool) -> None:
    cache = {"cache_dir": str(folder / "cache"), "cache_bytes": 1 << 28}
    options = {"batch_size": 2, "output": {"decode": decode}, "num_workers": 1, "storage": cache}
    for stats in s3_run.check_processes(source, folder, 2, options):
        assert stats["cache"]["num_bytes"] > 0 and stats["num_substituted"] == 0


@pytest.mark.parametrize("decode", [True, False])
def test_a_store_in_memory(sources: dict[str, Source], decode: bool) -> None:
    """FETCH-2: another kind of store is used through its fsspec package."""
    memory, root = fsspec.filesystem("memory"), sources["native"].root
    try:
        memory.put(str(root), "/of-a-test/dataset", recursive=True)
        for workers in (0, 1):
            options: dict[str, Any] = {"batch_size": 2, "output": {"decode": decode}, "num_workers": workers}
            assert s3_run.run("memory://of-a-test/dataset", **options) == s3_run.run(root, **options)
    finally:
        memory.rm("/of-a-test", recursive=True)


@pytest.mark.parametrize("num_done", [1, 4, 9])
def test_a_state_can_be_resumed_between_disk_and_bucket(
    sources: dict[str, Source], rgw: Rgw, s3_env: S3Env, num_done: int
) -> None:
    """RESUME-1: the state is saved in the middle of an epoch."""
    s3_env(rgw)
    source, options = sources["plain"], {"batch_size": 2, "num_workers": 0, "num_epochs": 2}
    whole = s3_run.run(source.root, **options)
    for first, second in ((source.root, source.url), (source.url, source.root)):
        with streamvid.VideoLoader(first, **options) as loader:
            batches = iter(loader)
            got = [s3_run.received(next(batches)) for _ in range(num_done)]
            state = json.loads(json.dumps(loader.state_dict()))
        assert got + s3_run.run(second, state=state, **options) == whole


def test_filters_and_mixtures(sources: dict[str, Source], rgw: Rgw, s3_env: S3Env) -> None:
    """PLAN-5: `where`, columns, and mixes of local and remote datasets give the same batches as on disk."""
    s3_env(rgw)
    plain, native = sources["plain"], sources["native"]
    options: dict[str, Any] = {"batch_size": 1, "where": "score > 1", "columns": ["score"]}
    got = s3_run.run(plain.url, **options)
    assert got == s3_run.run(plain.root, **options) and 0 < len(got) < 23
    mixtures = []
    for first, second in ((plain.root, native.root), (plain.root, native.url), (plain.url, native.root)):
        configs = [streamvid.DatasetConfig(first), streamvid.DatasetConfig(second, num_repeats=2)]
        mixtures.append(s3_run.run(configs, batch_size=1, num_workers=1))
    assert mixtures[0] == mixtures[1] == mixtures[2] and len(mixtures[0]) == 23 + 2 * 6


def test_a_closed_loader_keeps_no_connection(sources: dict[str, Source], proxy: FaultProxy) -> None:
    """STOP-1: a closed loader may remain in a notebook for days. Its store can still be used."""
    with streamvid.VideoLoader(sources["plain"].url, batch_size=2) as loader:
        num_batches = len(list(map(id, loader)))
    end = time.monotonic() + 10
    while left := [one for one in psutil.Process().net_connections() if one.raddr and one.raddr.port == proxy.port]:
        assert time.monotonic() < end, left
        time.sleep(0.05)
    assert loader.stats().store is not None and len(loader.dataset.samples_table()) >= num_batches  # from the store


def test_statistics_match_the_server(sources: dict[str, Source], proxy: FaultProxy, tmp_path: Path) -> None:
    """Requests, bytes and the cache's blocks match, and all values can be written as JSON."""
    source, cache = sources["plain"], {"storage": {"cache_dir": tmp_path / "cache", "cache_bytes": 1 << 26}}
    with streamvid.VideoLoader(source.root, batch_size=2, num_workers=0) as loader:
        list(map(id, loader))
        assert loader.stats().store is None and loader.stats().cache is None
    for options in ({}, cache):
        proxy.reset_counts()
        with streamvid.VideoLoader(source.url, batch_size=2, num_workers=0, **options) as loader:
            list(map(id, loader))
            stats = loader.stats()
        seen, record = proxy.counts(), json.loads(json.dumps(stats.to_json(), allow_nan=False))
        assert stats.store is not None
        assert stats.store.num_requests == sum(seen.requests.values()) == record["store"]["num_requests"]
        # Checking a file takes a request for one byte of it.
        assert 0 <= seen.bytes_down - stats.store.num_bytes_read <= stats.store.num_requests
        assert stats.store.num_bytes_wanted <= stats.store.num_bytes_read
        assert (stats.store.num_retries, stats.store.by_error, stats.store.seconds_lost) == (0, {}, 0.0)
        assert 0 < stats.store.p50_seconds <= stats.store.p99_seconds
        assert (stats.cache is not None) == bool(options) == bool(record["cache"])
    assert stats.cache is not None
    assert 0 < stats.cache.num_bytes <= stats.cache.max_bytes and stats.cache.misses > 0
    assert stats.cache.bytes_fetched <= stats.store.num_bytes_read


@pytest.mark.parametrize("num_local_ranks", [1, 8])
def test_the_ranks_of_a_machine_share_its_requests(
    sources: dict[str, Source], proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, num_local_ranks: int
) -> None:
    """One of eight ranks may use an eighth of `max_requests`.

    It never has more connections than concurrent requests.
    """
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_local_ranks))
    proxy.set(latency_ms=20)
    source, options = sources["plain"], StorageOptions(max_requests=16)
    with streamvid.VideoLoader(source.url, batch_size=4, num_workers=0, storage=options) as loader:
        assert s3_run.all_of(loader) == s3_run.run(source.root, batch_size=4)
        store = loader.stats().store
    assert store is not None
    connections = proxy.counts().connections - store.num_hedged  # the slower of two hedged requests is dropped
    assert connections <= 2 if num_local_ranks == 8 else connections > 2
