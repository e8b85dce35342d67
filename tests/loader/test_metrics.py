"""Tests of the metrics of running loaders: the Prometheus endpoint and the JSON lines."""

from __future__ import annotations

import json
import math
import re
import socket
import urllib.request
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import streamvid
from streamvid.errors import ConfigError, StorageError
from streamvid.loader.stats import WAIT_BOUNDS, BatchStats, StatsMeter
from tests.loader.conftest import open_loader
from tests.loader.s3_run import uploaded
from tests.processes import run_python
from tests.servers import S3Env, S3Server

Samples = dict[tuple[str, str], float]  # (name, value of the label that distinguishes samples) → value

DASHBOARD = Path(__file__).parents[2] / "configs" / "grafana" / "loader.json"
VARIABLES = ("STREAMVID_METRICS_PORT", "LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def scrape(port: int, host: str = "127.0.0.1") -> list[Any]:
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=20) as answer:
        return list(text_string_to_metric_families(answer.read().decode()))


def samples_of(families: list[Any], **labels: str) -> Samples:
    """Return the samples that have these labels."""
    extra = ("le", "by", "cause")
    return {
        (one.name.removeprefix("streamvid_loader_"), "".join(one.labels.get(name, "") for name in extra)): one.value
        for family in families
        for one in family.samples
        if labels.items() <= one.labels.items()
    }


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_every_number_agrees_with_stats(dataset: Path, port: int) -> None:
    with open_loader(dataset, batch_size=2, num_workers=1, num_epochs=2, output={"metrics_port": port}) as loader:
        assert is_free(port), "nothing starts before the first loop"
        for _ in islice(loader, 12):
            pass
        stats, families = loader.stats(), scrape(port)
    assert all(family.documentation for family in families)
    found = samples_of(families, rank="0", split="train")
    for name, value in {
        "steps_total": stats.num_steps,
        "samples_total": stats.num_samples,
        "batch_seconds_total": stats.batch_seconds,
        "fetch_seconds_total": stats.work.fetch_seconds,
        "decode_seconds_total": stats.work.decode_seconds,
        "fetched_bytes_total": stats.work.num_bytes_fetched,
        "reread_samples_total": stats.work.num_retries,
        "substituted_samples_total": stats.work.num_substituted,
        "wait_seconds_sum": stats.wait_seconds,
        "wait_seconds_count": stats.num_steps,
    }.items():
        assert found[name, ""] == value, name
    assert found["seconds_total", ""] >= stats.seconds > 0 and stats.num_samples == 24
    held_up = {by: value for (name, by), value in found.items() if name == "held_up_seconds_total"}
    assert held_up.keys() == {"store", "decode", "memory", "prepare"}
    assert math.isclose(held_up["decode"], stats.work.decode_wait_seconds)
    buckets = [value for (name, _), value in found.items() if name == "wait_seconds_bucket"]
    assert buckets == sorted(buckets) and buckets[-1] == 12 and len(buckets) == len(WAIT_BOUNDS) + 1
    assert ("queue_depth", "") in found and ("ring_batches", "") in found
    assert is_free(port), "closing frees the port"


def test_counters_never_fall_and_the_store_is_among_them(
    dataset: Path, port: int, moto_server: S3Server, s3_env: S3Env, tmp_path: Path
) -> None:
    s3_env(moto_server)
    storage = {"cache_dir": tmp_path, "cache_bytes": 1 << 26}
    url = uploaded(dataset, moto_server).url
    with open_loader(url, num_epochs=None, storage=storage, output={"metrics_port": port}) as loader:
        read = []
        for _ in islice(loader, 30):
            if loader.stats().num_steps % 10 == 0:
                read.append(samples_of(scrape(port)))
        stats = loader.stats()
    assert stats.store is not None and stats.cache is not None and len(read) == 3
    for before, after in pairwise(read):
        falling = [name for name in before if name[0].endswith("_total") and after[name] < before[name]]
        assert not falling
    assert 0 < read[-1]["store_requests_total", ""] <= stats.store.num_requests  # the loader reads ahead
    assert 0 < read[-1]["cache_hits_total", ""] <= stats.cache.hits
    assert read[-1]["cache_max_bytes", ""] == 1 << 26
    shown = set(re.findall(r"streamvid_loader_(\w+)\{", DASHBOARD.read_text().replace('\\"', "'")))
    exported = {name for name, _ in read[-1]} | {"store_errors_total"}  # there were no errors
    assert len(shown) > 15 and not shown - exported, "the dashboard shows only metrics that exist"


def test_loaders_of_a_process_share_a_port_and_are_distinguished(dataset: Path, port: int) -> None:
    first = open_loader(dataset, output={"metrics_port": port})
    second = open_loader(dataset, batch_size=2, output={"metrics_port": port}, world=streamvid.World(1, 2))
    next(iter(first))
    next(iter(second))
    families = scrape(port)
    assert samples_of(families, rank="0")["samples_total", ""] == 1
    assert samples_of(families, rank="1")["samples_total", ""] == 2
    assert len({family.name for family in families}) == len(families)
    first.close()
    assert not samples_of(scrape(port), rank="0")
    second.close()
    second.close()
    assert is_free(port)
    with open_loader(dataset, output={"metrics_port": port}) as again:
        next(iter(again))
        assert scrape(port)


def test_a_loader_that_is_dropped_frees_the_port(dataset: Path, port: int) -> None:
    loader = open_loader(dataset, output={"metrics_port": port})
    next(iter(loader))
    del loader
    assert is_free(port)


def test_the_environment_sets_the_port_of_each_local_rank(
    dataset: Path, port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("STREAMVID_METRICS_PORT", str(port - 3))
    monkeypatch.setenv("LOCAL_RANK", "3")
    with open_loader(dataset) as loader:
        next(iter(loader))
        assert samples_of(scrape(port))["steps_total", ""] == 1
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of the first loader may linger
        other.bind(("127.0.0.1", port))
        other.listen()
        with open_loader(dataset) as loader:
            next(iter(loader))
        assert "STREAMVID_METRICS_PORT: 127.0.0.1:" in caplog.text and "cannot serve metrics" in caplog.text
        with (
            open_loader(dataset, output={"metrics_port": port - 3}) as loader,
            pytest.raises(ConfigError, match=r"output\.metrics_port: 127\.0\.0\.1:.*; choose another"),
        ):
            next(iter(loader))
    for text in ("http", "-1", "70000"):
        monkeypatch.setenv("STREAMVID_METRICS_PORT", text)
        with pytest.raises(ConfigError, match="STREAMVID_METRICS_PORT"):
            open_loader(dataset)
    with pytest.raises(ConfigError, match="metrics_port=0"):
        open_loader(dataset, output={"metrics_port": 0})


def test_the_endpoint_is_local_by_default(dataset: Path, port: int) -> None:
    for host, reached in (("127.0.0.1", False), ("127.0.0.2", True)):
        with open_loader(dataset, output={"metrics_port": port, "metrics_host": host}) as loader:
            next(iter(loader))
            with socket.socket() as probe:
                assert (probe.connect_ex(("127.0.0.2", port)) == 0) == reached


def test_without_the_extra_the_error_names_it(dataset: Path) -> None:
    code = f"""
import sys
sys.modules["prometheus_client"] = None
import streamvid
try:
    streamvid.VideoLoader({str(dataset)!r}, batch_size=1, num_workers=0, output={{"metrics_port": 9000}})
except streamvid.StreamvidError as error:
    print(error)
"""
    said = run_python(code).stdout
    assert "requires the prometheus-client package; run pip install 'streamvid[metrics]'" in said


def lines_of(folder: Path) -> Iterator[dict[str, Any]]:
    (path,) = folder.iterdir()
    assert path.name == "metrics-rank00000.jsonl"
    return map(json.loads, path.read_text().splitlines())


def test_json_lines_match_stats(dataset: Path, tmp_path: Path) -> None:
    with open_loader(dataset, output={"metrics_folder": tmp_path / "metrics"}) as loader:
        for _ in loader:
            pass
        stats = loader.stats()
    first, last = lines_of(tmp_path / "metrics")
    assert (first["num_steps"], last["num_steps"], last["split"], last["rank"]) == (1, stats.num_steps, "train", 0)
    assert last["wait_p99_seconds"] == stats.wait_quantile(0.99) and last["decode_seconds"] > first["decode_seconds"]
    (tmp_path / "file").write_text("")
    with (
        open_loader(dataset, output={"metrics_folder": tmp_path / "file"}) as loader,
        pytest.raises(StorageError, match=r"output\.metrics_folder: cannot write"),
    ):
        next(iter(loader))
    with pytest.raises(ConfigError, match="metrics_folder="):
        open_loader(dataset, output={"metrics_folder": "s3://bucket/metrics"})


def test_quantiles_of_waits() -> None:
    meter = StatsMeter()
    assert meter.stats().wait_quantile(0.99) == 0.0
    for wait in [0.0015] * 98 + [0.3, 99.0]:
        meter.add(BatchStats(), 1, wait_seconds=wait, batch_seconds=0.0, queue_depth=0)
    stats = meter.stats()
    assert [stats.wait_quantile(share) for share in (0.5, 0.98, 0.99, 1.0)] == [0.002, 0.002, 0.5, math.inf]
    assert stats.since(stats).wait_quantile(0.5) == 0.0 and json.dumps(stats.to_json(), allow_nan=False)
