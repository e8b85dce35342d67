"""Tests of loaders under storage faults, judged by the batches that a consumer receives.

The store fails one request in five, is unreachable, refuses access, or contains damaged objects (FETCH-1, FETCH-2,
BAD-1, STOP-1).
"""

from __future__ import annotations

import gc
import logging
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

import streamvid
from streamvid.errors import DatasetError, LoaderError, SampleError, StorageError, StreamvidError
from streamvid.loader.workers.cache import SharedCache
from streamvid.storage import StorageOptions, StoreStats, while_wanted
from tests.loader import s3_run
from tests.loader.conftest import SMALL, build_dataset
from tests.loader.s3_run import Source
from tests.loader.test_bad import LAYOUT, damaged
from tests.processes import wait_for_end
from tests.servers import ProxyFactory, Rgw, S3Env
from tools.fault_proxy import FaultProxy

pytestmark = pytest.mark.timeout(200)

DEADLINE_SECONDS = 30.0
OPTIONS = StorageOptions(deadline_seconds=DEADLINE_SECONDS, connect_seconds=1.0, stall_seconds=0.5)
IMPATIENT = StorageOptions(deadline_seconds=5.0, connect_seconds=0.5, stall_seconds=0.5)
TWICE_SECONDS = 2 * IMPATIENT.deadline_seconds  # minimum time of a second attempt; slack for a busy machine
LONG_SECONDS = 20.0  # far above what a busy machine needs, far below the default deadline
SLACK_SECONDS = 10.0  # for a machine that is busy with other work
DEAD: dict[str, Any] = {"dead": True}
STALLED: dict[str, Any] = {"fault_rate": 1.0, "faults": ("stalled",), "stall_s": 100.0}


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory, rgw: Rgw) -> Source:
    """Dataset with forty shards, more than a loader reads ahead."""
    return s3_run.uploaded(build_dataset(tmp_path_factory.mktemp("many") / "many", {SMALL: [2] * 40}), rgw)


@pytest.fixture
def proxy(rgw: Rgw, s3_env: S3Env, fault_proxy: ProxyFactory) -> FaultProxy:
    """Proxy in front of RGW, to which the clients of this process connect."""
    proxy = fault_proxy(rgw, stall_s=2.0, slow_s=0.2)
    s3_env(rgw.behind(proxy))
    return proxy


# The campaign.


@dataclass
class Campaign:
    """Costs of the faults."""

    seconds: float = 0.0
    stores: list[StoreStats] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)


def one_run(
    seed: int, sources: dict[str, Source], proxy: FaultProxy, folder: Path, fault_rate: float = 0.2
) -> Campaign:
    """Run all ranks one after the other, and check that each receives the same batches as without a store."""
    choose, done = random.Random(seed), Campaign()
    source = sources[choose.choice(["plain", "plain", "native"])]
    num_ranks = choose.randint(1, 3)
    options: dict[str, Any] = {
        "batch_size": choose.randint(1, 4),
        "output": {"decode": choose.random() < 0.6},
        "seed": seed,
    }
    options["tail"] = "pad" if source is sources["native"] else "carry"
    how: dict[str, Any] = {
        "num_workers": choose.choice([0, 0, 0, 1, 2]),
        "limits": {"prefetch_bytes": choose.choice([0, 1 << 22])},
    }
    storage = OPTIONS
    if choose.random() < 0.4:
        storage = replace(OPTIONS, cache_dir=folder / f"cache-{seed}-{fault_rate}", cache_bytes=1 << 26)
    for rank in range(num_ranks):
        world = streamvid.World(rank, num_ranks)
        expected = s3_run.run(source.root, world=world, **options)
        proxy.set(fault_rate=fault_rate, seed=seed * 3 + rank)
        since, got = time.monotonic(), []
        with streamvid.VideoLoader(source.url, world=world, storage=storage, **options, **how) as loader:
            done.waits.append(time.monotonic() - since)
            for batch in s3_run.timed(iter(loader), done.waits):
                got.append(s3_run.received(batch))
            stats = loader.stats()
        done.seconds += time.monotonic() - since
        assert got == expected, f"seed {seed}, rank {rank} of {num_ranks}, {source.root.name}, {options}, {how}"
        assert stats.work.num_substituted == 0 and stats.store is not None
        done.stores.append(stats.store)
        # Opening takes several reads.
        assert max(done.waits[1:]) < DEADLINE_SECONDS + SLACK_SECONDS and done.waits[0] < 3 * DEADLINE_SECONDS
    return done


def test_a_campaign_of_faults(sources: dict[str, Source], proxy: FaultProxy, tmp_path: Path) -> None:
    """FETCH-1, PLAN-5: 20 % of requests have a fault of any kind, but no byte is wrong, lost or repeated.

    Nothing hangs.
    """
    for seed in range(3):
        one_run(seed, sources, proxy, tmp_path)
    counts = proxy.counts()
    assert sum(counts.faults.values()) > 0.1 * sum(counts.requests.values()) > 10


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_long_campaign_of_faults(
    sources: dict[str, Source], proxy: FaultProxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cost of the faults is reported against the same runs through the same proxy without faults."""
    runs = [one_run(seed, sources, proxy, tmp_path) for seed in range(100, 600)]
    faults = proxy.reset_counts().faults
    clean = [one_run(seed, sources, proxy, tmp_path, 0.0) for seed in range(100, 600)]
    stores = [store for run in runs for store in run.stores]
    with capsys.disabled():
        print(
            f"\n{len(runs)} runs, {len(stores)} ranks, {sum(s.num_requests for s in stores)} requests, faults {faults}:"
            f" {sum(run.seconds for run in runs):.0f} s, without faults {sum(run.seconds for run in clean):.0f} s;"
            f" reads lost {sum(s.seconds_lost for s in stores):.0f} s; longest wait for a batch"
            f" {max(max(run.waits) for run in runs):.1f} s, without faults {max(max(run.waits) for run in clean):.1f} s"
        )
    assert len(faults) >= 10


@pytest.mark.slow
def test_rank_processes_survive_faults(sources: dict[str, Source], proxy: FaultProxy, tmp_path: Path) -> None:
    """FETCH-1: three concurrent ranks with workers share one cache."""
    source = sources["plain"]
    cache = {"cache_dir": str(tmp_path / "cache"), "cache_bytes": 1 << 26}
    options = {"batch_size": 2, "num_workers": 1, "storage": {"stall_seconds": 0.5, **cache}}
    proxy.set(fault_rate=0.2, seed=5)
    s3_run.check_processes(source, tmp_path, 3, options)


@pytest.mark.parametrize("name", ["plain", "native"])
def test_an_index_corrupted_in_transit_is_read_again(sources: dict[str, Source], proxy: FaultProxy, name: str) -> None:
    """FETCH-1: footers, pages and packet tables are wrong four times in a row, and no wrong data is kept."""
    source, options = sources[name], {"batch_size": 2, "num_workers": 0}
    expected = s3_run.run(source.root, **options)
    wrong: dict[str, Any] = {"faults": ("flipped",), "path": "/index/", "first_n": 4}
    for _ in range(3):
        proxy.set(**wrong)
        with streamvid.VideoLoader(source.url, **options) as loader:
            proxy.set(**wrong)  # restarts the count
            assert s3_run.all_of(loader) == expected
    assert proxy.counts().faults["flipped"] >= 20


def test_a_manifest_corrupted_in_transit_is_read_again(sources: dict[str, Source], proxy: FaultProxy) -> None:
    """FETCH-1: bytes that differ on each read were corrupted in transit. Opening raises only after five such reads."""
    expected = streamvid.open_dataset(sources["plain"].root).manifest
    for num_wrong in (1, 4):
        proxy.reset_counts()
        proxy.set(faults=("flipped",), path="manifest.json", methods=("GET",), first_n=num_wrong)
        assert streamvid.open_dataset(sources["plain"].url).manifest == expected
        assert proxy.counts().faults["flipped"] == num_wrong
    proxy.set(faults=("flipped",), path="manifest.json", methods=("GET",), fault_rate=1.0)
    with pytest.raises(StorageError, match="each of 5 reads returned different bytes"):
        streamvid.open_dataset(sources["plain"].url)


# An unreachable store.


def test_the_default_deadline() -> None:
    assert StorageOptions().deadline_seconds < 60 and StorageOptions().stall_seconds < 60


@pytest.mark.parametrize("settings", [DEAD, pytest.param(STALLED, marks=pytest.mark.slow)], ids=["dead", "stalled"])
@pytest.mark.parametrize("how", ["decode", "clips", "together"])
def test_a_store_that_becomes_unreachable_is_an_error_within_the_deadline(
    many: Source, proxy: FaultProxy, settings: dict[str, Any], how: str
) -> None:
    """FETCH-1: during a run, the error names store, key and cause, for one clip and for several clips per request."""
    options: dict[str, Any] = {"batch_size": 4 if how == "together" else 1, "output": {"decode": how != "clips"}}
    with streamvid.VideoLoader(
        many.url, num_epochs=None, storage=IMPATIENT, limits={"prefetch_bytes": 0}, num_workers=0, **options
    ) as loader:
        waits: list[float] = []
        batches = s3_run.timed(iter(loader), waits)
        for _ in range(3):
            next(batches)
        proxy.set(**settings)
        with pytest.raises(SampleError) as told:
            list(map(id, batches))
    assert waits[-1] < TWICE_SECONDS  # only one wait: neither a second read nor a second check
    assert many.url in str(told.value) and ".tar" in str(told.value) and "deadline_seconds=5" in str(told.value)
    assert ("reset" if settings is DEAD else "timed out") in str(told.value)


@pytest.mark.parametrize("settings", [DEAD, STALLED], ids=["dead", "stalled"])
def test_a_store_that_is_unreachable_from_the_start(many: Source, proxy: FaultProxy, settings: dict[str, Any]) -> None:
    """FETCH-1: the dataset cannot be opened, and if the manifest has been read before, a loop cannot start."""
    proxy.set(**settings)
    since = time.monotonic()
    with pytest.raises(StorageError, match=r"cannot access manifest\.json: .*deadline_seconds=5"):
        streamvid.VideoLoader(many.url, batch_size=1, storage=IMPATIENT)
    assert time.monotonic() - since < TWICE_SECONDS
    proxy.set(dead=False, fault_rate=0.0)
    with streamvid.VideoLoader(many.url, batch_size=1, storage=IMPATIENT, num_workers=0) as loader:
        proxy.set(**settings)
        since = time.monotonic()
        with pytest.raises(SampleError, match=r"cannot (read|access) index/samples-.*deadline_seconds=5"):
            list(map(id, loader))
        assert time.monotonic() - since < TWICE_SECONDS


@dataclass(frozen=True)
class Made:
    num_bytes: int = 1


def test_a_shared_read_fails_for_all_readers_at_once() -> None:
    """Eight readers of one row group wait for one deadline instead of eight.

    A reader that was stopped does not fail the others.
    """
    kept: SharedCache[Made] = SharedCache(10)
    begun, may_end = threading.Event(), threading.Event()
    calls: list[str] = []
    told: list[object] = []

    def make() -> Made:
        calls.append(threading.current_thread().name)
        begun.set()
        may_end.wait()
        raise StorageError("it is gone")

    def read(is_wanted: bool, make: Callable[[], Made]) -> None:
        try:
            with while_wanted(lambda: is_wanted):
                told.append(kept.get((0, "a", 0), make))
        except StorageError as error:
            told.append(str(error))

    for is_wanted in (True, False):
        begun.clear()
        may_end.clear()
        told.clear()
        threads = [threading.Thread(target=read, args=(is_wanted, make))]
        threads[0].start()
        begun.wait()
        threads += [threading.Thread(target=read, args=(True, make if is_wanted else Made)) for _ in range(7)]
        for thread in threads[1:]:
            thread.start()
        time.sleep(0.3)
        may_end.set()
        for thread in threads:
            thread.join()
        assert sorted(map(str, told)) == sorted(
            map(str, ["it is gone"] * 8 if is_wanted else ["it is gone"] + [Made()] * 7)
        )
    assert len(calls) == 2


# Refused access and missing objects.


def opened(url: str) -> str:
    """Return the error message of a dataset that cannot be opened."""
    with pytest.raises(StreamvidError) as told:
        streamvid.VideoLoader(url, batch_size=1)
    return str(told.value)


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("AWS_ACCESS_KEY_ID", "nobody-knows-me", "AWS_ACCESS_KEY_ID"),
        ("AWS_SECRET_ACCESS_KEY", "canary-wrong-secret", "AWS_SECRET_ACCESS_KEY"),
        ("AWS_ACCESS_KEY_ID", None, "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        ("AWS_PROFILE", "no-such-profile", "AWS_PROFILE"),
    ],
)
def test_bad_keys_are_an_immediate_error_that_names_the_variable(
    many: Source, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, variable: str, value: str | None, says: str
) -> None:
    """The error shows no secret."""
    if value is None:
        monkeypatch.delenv(variable)
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    else:
        monkeypatch.setenv(variable, value)
    told = opened(many.url)
    assert says in told and many.url in told and "manifest.json" in told
    assert "canary-wrong-secret" not in told and "testsecret" not in told
    assert sum(proxy.counts().requests.values()) <= 1


def test_expired_keys_are_renewed_or_an_error(many: Source, proxy: FaultProxy) -> None:
    proxy.set(fault_rate=1.0, faults=("expired",))
    told = opened(many.url)
    assert "ExpiredToken" in told and "AWS_SESSION_TOKEN" in told and many.url in told
    proxy.set(fault_rate=0.0, first_n=2)
    assert s3_run.run(many.url, batch_size=20) == s3_run.run(many.root, batch_size=20)
    assert proxy.counts().statuses["403"] >= 2


def test_missing_or_forbidden_data_is_an_immediate_error(
    many: Source, rgw: Rgw, s3_env: S3Env, fault_proxy: ProxyFactory
) -> None:
    proxy = fault_proxy(rgw)
    s3_env(rgw.other.behind(proxy))
    told = opened(many.url)
    assert "403" in told and many.url in told and "AWS_ACCESS_KEY_ID" in told
    s3_env(rgw.behind(proxy))
    told = opened("s3://no-such-bucket-here/some/dataset")
    assert "NoSuchBucket" in told and "no-such-bucket-here" in told and "endpoint_url" in told
    with pytest.raises(DatasetError, match=f"no dataset at s3://{many.bucket}/elsewhere"):
        streamvid.VideoLoader(f"s3://{many.bucket}/elsewhere", batch_size=1)
    assert sum(proxy.counts().requests.values()) <= 4


# Damaged objects.


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("decode", [True, False])
def test_damage_in_the_store_is_replaced_as_on_disk(
    rgw: Rgw, s3_env: S3Env, tmp_path: Path, decode: bool, is_cached: bool
) -> None:
    """BAD-1: clips with wrong bytes and a truncated tar have the same substitutes and the same reasons."""
    bad = {"96x64-5f-1": "flip", "96x64-5f-10": "cut", "64x96-9f-2": "zero", "64x96-9f-8": "flip"}
    source = s3_run.uploaded(damaged(tmp_path / "damaged", LAYOUT, bad), rgw)
    s3_env(rgw)
    cache = {"storage": {"cache_dir": tmp_path / "cache", "cache_bytes": 1 << 26}} if is_cached else {}
    told = []
    for dataset, options in ((source.root, {}), (source.url, cache), (source.url, cache)):
        options = {"batch_size": 3, "tail": "uneven", "num_workers": 0, "output": {"decode": decode}} | options
        with streamvid.VideoLoader(dataset, **options) as loader:
            got = s3_run.all_of(loader)
            told.append((got, [(s.key, s.shard, s.reason, s.substitute_key) for s in loader.substituted]))
    assert told[0] == told[1] == told[2]
    assert {key for key, *_ in told[0][1]} >= set(bad)


@pytest.mark.parametrize("decode", [True, False])
def test_a_missing_tar_is_named(rgw: Rgw, s3_env: S3Env, tmp_path: Path, decode: bool) -> None:
    """FETCH-1: the error is raised at once, and the sample is not treated as bad."""
    source = s3_run.uploaded(build_dataset(tmp_path / "dataset", {SMALL: [3, 3]}), rgw)
    s3_env(rgw)
    path = "shards/96x64-5f/96x64-5f-000001.tar"
    rgw.remove(source.bucket, f"{source.prefix}/{path}")
    with pytest.raises(SampleError, match=f"{source.url}: cannot read {path}: no such object"):
        s3_run.run(source.url, batch_size=2, output={"decode": decode})


@pytest.mark.parametrize("is_same", [True, False])
def test_a_tar_that_is_replaced_while_in_use_is_detected(
    rgw: Rgw, s3_env: S3Env, tmp_path: Path, caplog: pytest.LogCaptureFixture, is_same: bool
) -> None:
    """FETCH-1, BAD-1: the checksums in the index determine whether the new data is valid."""
    source = s3_run.uploaded(build_dataset(tmp_path / "dataset", {SMALL: [12]}), rgw)
    s3_env(rgw)
    options: dict[str, Any] = {
        "batch_size": 1,
        "shuffle": "none",
        "limits": {"prefetch_bytes": 0, "max_bad_fraction": 1.0},
    }
    expected = s3_run.run(source.root, **options)
    path = "shards/96x64-5f/96x64-5f-000000.tar"
    data = bytearray((source.root / path).read_bytes())
    last = streamvid.open_dataset(source.root).samples_table().to_pylist()[-1]
    data[last["clip_offset"] + 9 if not is_same else -1] ^= 1
    with (
        caplog.at_level(logging.WARNING, "streamvid"),
        streamvid.VideoLoader(source.url, num_workers=0, **options) as loader,
    ):
        batches = iter(loader)
        got = [s3_run.received(next(batches))]
        rgw.put(source.bucket, f"{source.prefix}/{path}", bytes(data))
        got += [s3_run.received(batch) for batch in batches]
        assert [record.key for record in loader.substituted] == ([] if is_same else [last["key"]])
    assert f"{source.url}: {path} was replaced while in use" in caplog.text
    assert got[:-1] == expected[:-1] and (got == expected) == is_same


# Shutdown while reads hang.


def own_threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("streamvid"))


def ended(batches: Iterator[Any]) -> None:
    with pytest.raises(LoaderError, match="closed"):
        for _ in batches:
            pass


@pytest.mark.parametrize("settings", [pytest.param(DEAD, marks=pytest.mark.slow), STALLED], ids=["dead", "stalled"])
@pytest.mark.parametrize(
    "options", [{"num_workers": 0}, {"num_workers": 1}, {"num_workers": 0, "output": {"decode": False}}], ids=str
)
def test_closing_does_not_wait_for_a_store(
    many: Source, proxy: FaultProxy, settings: dict[str, Any], options: dict[str, Any]
) -> None:
    """STOP-1: only requests remain, which end once they notice, and resources that all loaders share."""
    me = psutil.Process()
    patient = StorageOptions(stall_seconds=1.0)
    s3_run.run(many.url, batch_size=40, **options)  # creates everything that is created once and remains
    gc.collect()
    time.sleep(1.5)
    files, children = me.num_fds(), set(me.children(recursive=True))
    loader = streamvid.VideoLoader(
        many.url, batch_size=1, num_epochs=None, storage=patient, limits={"prefetch_bytes": 0}, **options
    )
    batches = iter(loader)
    next(batches)
    proxy.set(**settings)
    waiting = threading.Thread(target=ended, args=(batches,))  # the caller's own loop, until the loader is closed
    waiting.start()
    time.sleep(1.0)
    assert waiting.is_alive()
    since = time.monotonic()
    loader.close()
    assert time.monotonic() - since < LONG_SECONDS
    waiting.join()
    assert set(own_threads()) <= {"streamvid-request"}
    assert set(me.children(recursive=True)) <= children
    del loader, batches, waiting
    gc.collect()
    until = time.monotonic() + 10
    while own_threads() and time.monotonic() < until:
        time.sleep(0.05)
    gc.collect()
    assert own_threads() == [] and me.num_fds() <= files


@pytest.mark.parametrize("settings", [DEAD, pytest.param(STALLED, marks=pytest.mark.slow)], ids=["dead", "stalled"])
@pytest.mark.parametrize(("number", "num_workers"), [(signal.SIGINT, 0), (signal.SIGINT, 1), (signal.SIGKILL, 1)])
def test_a_process_that_waits_for_a_store_ends_on_a_signal(
    many: Source, proxy: FaultProxy, settings: dict[str, Any], number: signal.Signals, num_workers: int
) -> None:
    """STOP-1: Ctrl-C and kill -9 end it within seconds, and no worker remains."""
    options = {"batch_size": 1, "num_epochs": None, "num_workers": num_workers, "limits": {"prefetch_bytes": 0}}
    process = s3_run.start(dataset=many.url, options=options, after=2, then="sys.stdin.readline()")
    assert process.stdout is not None and process.stdin is not None
    while not (line := process.stdout.readline()).startswith("batch 2"):
        assert line
    workers = [int(pid) for pid in line.split()[2:]]
    assert len(workers) == num_workers
    proxy.set(**settings)
    process.stdin.write("\n")
    process.stdin.flush()
    time.sleep(1.0)
    process.send_signal(number)
    since = time.monotonic()
    _, errors = process.communicate(timeout=200)
    assert time.monotonic() - since < LONG_SECONDS
    assert process.returncode != 0 and (number == signal.SIGKILL or "KeyboardInterrupt" in errors), errors
    assert wait_for_end(workers) == []
