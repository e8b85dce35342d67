"""Tests of the loader's verdict on why its caller waits."""

from __future__ import annotations

import logging
import time
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from streamvid.loader.monitor.stalls import StallWatch
from streamvid.loader.stats import BatchStats, LoaderStats
from streamvid.loader.verdict import Resources, Setting
from tests.loader.conftest import open_loader
from tests.loader.s3_run import uploaded
from tests.servers import ProxyFactory, S3Env, S3Server

SETTING = Setting(num_cores=8, clips="copy", pixels="rgb24", accuracy="fast")
RESOURCES = Resources(num_workers=4, num_fetch_threads=4, setting=SETTING)


def stats_of(
    num_steps: int = 100, seconds: float = 100.0, resources: Resources = RESOURCES, **work: float
) -> LoaderStats:
    """Return statistics of a loader whose caller waited half of the time.

    In 100 s, 4 workers and 4 threads can work 400 s each.
    """
    values: dict[str, Any] = {
        "wait_seconds": seconds / 2,
        **{k: work.pop(k) for k in ("wait_seconds", "batch_seconds") if k in work},
    }
    return LoaderStats(
        num_steps=num_steps,
        num_samples=num_steps,
        seconds=seconds,
        resources=resources,
        work=BatchStats(**work),
        **values,
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stats", "limit", "advice"),
    [
        (stats_of(wait_seconds=4.0, decode_seconds=390), "caller", None),
        (stats_of(decode_seconds=390, fetch_seconds=390), "decoders", "more workers"),
        (stats_of(decode_seconds=100, fetch_seconds=390), "store", "a faster store"),
        (stats_of(decode_seconds=100, batch_seconds=90.0), "main", "larger batches"),
        (stats_of(decode_seconds=100, store_wait_seconds=20, decode_wait_seconds=5), "store", "a faster store"),
        (stats_of(decode_seconds=100, store_wait_seconds=5, decode_wait_seconds=20), "decoders", "more workers"),
        (stats_of(decode_seconds=100, memory_wait_seconds=20, decode_wait_seconds=5), "ring", "more prefetch_bytes"),
        (stats_of(decode_seconds=100, memory_wait_seconds=9, prepare_wait_seconds=20), "main", "larger batches"),
    ],
)
def test_the_limit_is_the_resource_that_was_always_busy_or_delayed_batches(
    stats: LoaderStats, limit: str, advice: str | None
) -> None:
    verdict = stats.verdict
    assert verdict is not None and verdict.limit == limit
    assert f"the caller waited {stats.wait_share:.0%} of the time" in verdict.reasons
    assert (advice is None and not verdict.advice) or str(advice) in verdict.advice[0]
    assert stats.to_json()["verdict"]["limit"] == limit and str(verdict).startswith("the limit is ")


def test_busy_cores_are_distinguished_from_too_few_workers() -> None:
    busy = Resources(num_workers=8, num_fetch_threads=4, setting=SETTING)
    verdict = stats_of(resources=busy, decode_seconds=790).verdict
    assert verdict is not None and verdict.limit == "cores" and "--clips native" in verdict.advice[0]


def test_few_batches_give_no_verdict() -> None:
    assert stats_of(num_steps=9).verdict is None and LoaderStats(num_steps=100).verdict is None
    assert LoaderStats().to_json()["verdict"] is None


def test_a_stall_is_logged_once_and_again_after_minutes(caplog: pytest.LogCaptureFixture) -> None:
    watch, logged = StallWatch(rank=3), []
    for second in range(0, 1000, 10):
        total = stats_of(
            10 + 10 * second,
            float(second),
            wait_seconds=second * (0.3 if second > 200 else 0.01),
            store_wait_seconds=1 + second / 4,
        )
        if watch.is_due(total.num_steps, total.seconds):
            watch.look(total)
        logged += [second for _ in caplog.records]
        caplog.clear()
    assert 1 < len(logged) <= 4 and logged[0] in range(210, 250)
    assert all(later - before >= 300 for before, later in pairwise(logged))


def test_the_message_names_rank_share_and_remedy(caplog: pytest.LogCaptureFixture) -> None:
    watch = StallWatch(rank=3)
    watch.look(stats_of(10, 1.0, wait_seconds=1.0))
    watch.look(stats_of(110, 101.0, wait_seconds=41.0, store_wait_seconds=40.0))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message.startswith("rank 3 waited for data for 40% of the last 100 s: the limit is the store (")
    assert "To go faster: a faster store" in record.message
    watch.look(stats_of(111, 201.0, wait_seconds=141.0))
    assert len(caplog.records) == 1, "one batch is not enough for a verdict"


def test_a_slow_caller_is_the_limit_of_a_real_loader(dataset: Path) -> None:
    with open_loader(dataset, num_workers=1, num_epochs=None) as loader:
        batches = iter(loader)
        while not loader.stats().queue_depth:
            next(batches)
        before = loader.stats()
        for _ in range(12):
            start = time.monotonic()
            next(batches)
            time.sleep(max(0.05, 30 * (time.monotonic() - start)))  # keeps the ratio constant on a busy machine
        stats = loader.stats().since(before)
    assert stats.verdict is not None and stats.verdict.limit == "caller", stats


def test_a_slow_store_is_the_limit_of_a_real_loader(
    dataset: Path, moto_server: S3Server, s3_env: S3Env, fault_proxy: ProxyFactory
) -> None:
    source = uploaded(dataset, moto_server)
    proxy = fault_proxy(moto_server, latency_ms=0.0)
    s3_env(moto_server.behind(proxy))
    storage = {"max_requests": 2}
    with open_loader(source.url, num_epochs=None, storage=storage) as loader:
        batches = iter(loader)
        next(batches)
        proxy.set(latency_ms=150)
        before = loader.stats()
        for _ in islice(batches, 20):
            pass
        stats = loader.stats().since(before)
    assert stats.verdict is not None and stats.verdict.limit == "store", stats
