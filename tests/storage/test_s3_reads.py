"""Tests of S3 reads: correct, from one version and in time, or an error with a reason; all requests are counted."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from streamvid.errors import StorageError
from streamvid.storage import MAX_RANGE_BYTES, StorageOptions, Store, open_store
from streamvid.storage.request_pool import RequestPool
from tests.processes import run_python
from tests.servers import ProxyFactory, Rgw, S3Env, S3Server
from tests.storage.stub_s3 import mute_server, stub_s3
from tools.fault_proxy import FaultProxy

BODY = hashlib.shake_256(b"body").digest(300_000)
PASSING = ("status_500", "slow_down", "too_many", "expired", "refused", "reset", "stalled", "truncated", "wrong_etag")
LONG_SECONDS = 25.0  # far longer than a test takes on a busy machine, far shorter than a failure would


SLOW_IMPORT = """
import sys, time
class Slow:
    def find_spec(self, name, *_):
        if name == "s3fs":
            time.sleep(2.5)
sys.meta_path.insert(0, Slow())
"""


def num_sent(proxy: FaultProxy) -> int:
    return sum(proxy.counts().requests.values())


def read_part(store: Store, path: str, offset: int, num_bytes: int) -> bytes:
    buffer = bytearray(num_bytes)
    store.read_ranges(path, [(offset, memoryview(buffer))])
    return bytes(buffer)


# One version.


def test_a_large_read_never_mixes_versions(s3_env: S3Env, moto_server: S3Server) -> None:
    """FETCH-1: the object is replaced between the requests of one read."""
    s3_env(moto_server)
    size = MAX_RANGE_BYTES + 2**20
    with stub_s3() as stub:
        stub.objects["x"] = b"0" * size
        stub.versions["x"] = [bytes([49 + number]) * size for number in range(7)]
        store = open_store("s3://stub", StorageOptions(endpoint_url=stub.endpoint_url))
        try:
            found = read_part(store, "x", 0, size)
        except StorageError as error:
            assert "replaced by another version" in str(error)
        else:
            assert len(set(found)) == 1
        assert len(set(read_part(store, "x", 0, size))) == 1 or stub.versions["x"]


def test_a_read_of_a_whole_object_is_not_truncated_to_the_size_of_an_older_version(
    s3_env: S3Env, moto_server: S3Server
) -> None:
    s3_env(moto_server)
    with stub_s3() as stub:
        stub.versions["x"] = [b"short", b"much longer than that", b"another"]
        store = open_store("s3://stub", StorageOptions(endpoint_url=stub.endpoint_url))
        state = store.state("x")
        assert state is not None and state.num_bytes == 5
        stub.objects["x"] = b"much longer than that"
        assert store.read("x") in (b"much longer than that", b"another")
        with pytest.raises(StorageError, match="replaced by another version"):
            store.read_ranges("x", [(0, memoryview(bytearray(5)))], state.version)


def test_reads_during_writes_return_one_version(rgw: Rgw, s3_env: S3Env) -> None:
    """FETCH-1."""
    s3_env(rgw)
    bucket, size, is_over = rgw.new_bucket(), 17 * 2**20, threading.Event()
    versions = [bytes([number]) * size for number in range(4)]
    rgw.put(bucket, "x", versions[0])

    def write() -> None:
        for version in versions[1:]:
            rgw.put(bucket, "x", version)
        is_over.set()

    writer = threading.Thread(target=write)
    writer.start()
    store, num_read = open_store(f"s3://{bucket}"), 0
    while not is_over.is_set() or num_read < 2:
        try:
            assert len(set(read_part(store, "x", 0, size))) == 1
            num_read += 1
        except StorageError as error:
            assert "replaced by another version" in str(error)
    writer.join()
    assert read_part(store, "x", 0, size) == versions[-1]


# Retries.


@pytest.mark.parametrize("num_faults", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fault", PASSING)
def test_a_transient_fault_is_counted_and_is_not_an_error(
    moto_server: S3Server, s3_env: S3Env, fault_proxy: ProxyFactory, fault: str, num_faults: int
) -> None:
    """FETCH-1: only one layer retries, so the proxy's number of requests equals the store's."""
    proxy = fault_proxy(moto_server, faults=(fault,), first_n=num_faults, stall_s=60)
    s3_env(moto_server.behind(proxy))
    bucket = moto_server.new_bucket()
    moto_server.put(bucket, "x", BODY)
    store = open_store(f"s3://{bucket}", StorageOptions(stall_seconds=0.7))
    assert store.read("x") == BODY
    stats, faults = store.stats(), proxy.counts().faults
    # The refusal (412) of a wrong ETag has no ETag header that could be changed.
    assert faults[fault] == num_faults or (fault == "wrong_etag" and faults[fault] >= 1)
    assert num_sent(proxy) == stats.num_requests
    if fault != "wrong_etag":
        assert stats.num_retries + stats.num_hedged >= 1 and sum(stats.by_error.values()) >= 1
    assert stats.num_bytes_wanted >= len(BODY)


@pytest.mark.parametrize(
    "fault",
    ["status_500", "refused", "lost_answer"]
    + [pytest.param(fault, marks=pytest.mark.slow) for fault in PASSING if fault not in ("status_500", "refused")],
)
def test_other_calls_are_retried_by_one_layer(
    moto_server: S3Server, s3_env: S3Env, fault_proxy: ProxyFactory, fault: str
) -> None:
    bucket = moto_server.new_bucket()
    proxy = fault_proxy(moto_server, faults=(fault,), stall_s=0.1)
    s3_env(moto_server.behind(proxy))
    store = open_store(f"s3://{bucket}")
    for call in ("put", "files", "create", "remove", "size"):
        proxy.set(first_n=1)
        if call in ("put", "create"):
            assert getattr(store, call)(call, BODY) in (None, True)
            assert moto_server.read(bucket, call) == BODY
        elif call == "files":
            assert [state.path for state in store.files()] == ["put"]
        else:
            assert getattr(store, call)("put") in (None, len(BODY))
        assert num_sent(proxy) == store.stats().num_requests, call
    assert set(moto_server.objects(bucket)) == {"create"}


@pytest.mark.slow
def test_a_long_list_resumes_after_a_fault(moto_server: S3Server, s3_env: S3Env, fault_proxy: ProxyFactory) -> None:
    """A fault repeats one page, not the whole list."""
    proxy = fault_proxy(moto_server, faults=("status_500",), fault_rate=0.4, seed=3)
    bucket = moto_server.new_bucket()
    for number in range(1100):
        moto_server.put(bucket, f"to/{number:04}", b"")
    s3_env(moto_server.behind(proxy))
    store = open_store(f"s3://{bucket}/to")
    assert [state.path for state in store.files()] == [f"{number:04}" for number in range(1100)]
    assert num_sent(proxy) == store.stats().num_requests == 2 + store.stats().num_retries


def test_a_permanent_error_is_not_retried(rgw: Rgw, s3_env: S3Env, fault_proxy: ProxyFactory) -> None:
    bucket = rgw.new_bucket()
    rgw.put(bucket, "x", BODY)
    for server, said in (
        (rgw, "no such object"),
        (rgw.as_user(rgw.access_key, "wrong"), "403 SignatureDoesNotMatch. .*AWS_SECRET_ACCESS_KEY"),
        (rgw.as_user("nobody", "wrong"), "403 InvalidAccessKeyId. .*AWS_ACCESS_KEY_ID"),
        (rgw.other, "403 AccessDenied. .*policy"),
    ):
        proxy = fault_proxy(server)
        s3_env(server.behind(proxy))
        store = open_store(f"s3://{bucket}")
        path = "missing" if server is rgw else "x"
        calls: list[Callable[[], object]] = [lambda s=store, p=path: read_part(s, p, 0, 10)]
        if server is not rgw:
            calls += [lambda s=store: s.put("y", b""), lambda s=store: s.size("x"), lambda s=store: list(s.files())]
            calls += [lambda s=store: s.create("y", b""), lambda s=store: s.remove("x")]
        for number, call in enumerate(calls, 1):
            with pytest.raises(StorageError, match=rf"s3://{bucket}: cannot .*{said}"):
                call()
            assert store.stats().num_requests == number
            # After "access denied", the store may list the object to find out whether it exists.
            assert num_sent(proxy) - number in ((0, 1) if server == rgw.other else (0,))
        assert store.stats().num_retries == 0
    assert rgw.objects(bucket) == {"x": len(BODY)}


# Deadlines.


def calls_of(store: Store) -> dict[str, Callable[[], object]]:
    return {
        "read": lambda: store.read("x"),
        "read_ranges": lambda: read_part(store, "x", 0, 10),
        "state": lambda: store.state("x"),
        "files": lambda: list(store.files()),
        "put": lambda: store.put("x", b"small"),
        "create": lambda: store.create("x", b"small"),
        "remove": lambda: store.remove("x"),
        "abort_uploads": lambda: store.abort_uploads(),
    }


@pytest.mark.parametrize("kind", ["dead", "mute", "drips", "nobody"])
def test_every_call_ends_at_its_deadline(
    kind: str, moto_server: S3Server, s3_env: S3Env, fault_proxy: ProxyFactory
) -> None:
    """FETCH-1: this holds for any server behavior and any timeout of a single request."""
    s3_env(moto_server)

    def check(endpoint_url: str) -> None:
        options = StorageOptions(
            endpoint_url=endpoint_url, deadline_seconds=0.8, stall_seconds=600, connect_seconds=600
        )
        store, said = open_store("s3://bucket/to", options), ""
        for name, call in calls_of(store).items():
            since = time.monotonic()
            with pytest.raises(StorageError, match=r"s3://bucket/to: cannot .*deadline_seconds=0.8\)\. \S+") as error:
                call()
            assert time.monotonic() - since < LONG_SECONDS, name
            said += str(error.value)
        assert {"dead": "was reset", "nobody": "was refused"}.get(kind, "no response") in said

    if kind == "dead":
        check(fault_proxy(moto_server, dead=True).endpoint_url)
    elif kind == "nobody":
        check("http://127.0.0.1:9")
    else:
        with mute_server(drips=b"HTTP/1.1 200 OK\r\nX-Drip: " if kind == "drips" else b"") as url:
            check(url)


@pytest.mark.parametrize("part", ["head", "continue", "body", "refusal"])
def test_a_slow_response_is_reported_and_leaves_no_thread(part: str, moto_server: S3Server, s3_env: S3Env) -> None:
    """FETCH-1, STOP-1: an occasional byte is neither a response nor a reason to keep waiting."""
    s3_env(moto_server)
    drips = {
        "head": b"HTTP/1.1 206 Partial Content\r\nX-Drip: ",
        "continue": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 206 Partial Content\r\nX-Drip: ",
        "body": b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-99/100\r\nContent-Length: 100\r\n\r\n",
        "refusal": b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 1000\r\n\r\n",
    }
    says = "too slow: 100 bytes did not arrive within" if part == "body" else "the connection timed out"
    with mute_server(drips=drips[part]) as url:
        options = StorageOptions(endpoint_url=url, deadline_seconds=1.5, stall_seconds=0.3)
        with pytest.raises(StorageError, match=f"cannot read x: .*{says}"):
            read_part(open_store("s3://bucket", options), "x", 0, 100)
        until = time.monotonic() + LONG_SECONDS
        while any(thread.name == "streamvid-request" for thread in threading.enumerate()):
            assert time.monotonic() < until
            time.sleep(0.05)


def test_a_slow_client_import_does_not_count_against_the_deadline(
    s3_env: S3Env, moto_server: S3Server, tmp_path: Path
) -> None:
    """FETCH-1: imports from a slow disk may take longer than a read's deadline, which starts after the import."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_IMPORT)
    code = (
        "import sys\nfrom streamvid.storage import StorageOptions, open_store\n"
        "store = open_store('s3://stub', StorageOptions(endpoint_url=sys.argv[1], deadline_seconds=1.0))\n"
        "print(store.read('x').decode())\n"
    )
    environment = os.environ | s3_env(moto_server) | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    with stub_s3(objects={"x": b"here"}) as stub:
        assert run_python(code, stub.endpoint_url, env=environment).stdout == "here\n"


def test_a_write_that_the_server_never_reads_ends(moto_server: S3Server, s3_env: S3Env) -> None:
    """SHARD-2: the deadline is extended in proportion to the bytes to write, but still holds."""
    s3_env(moto_server)
    with mute_server() as url:
        store = open_store("s3://bucket", StorageOptions(endpoint_url=url, deadline_seconds=0.5))
        with pytest.raises(StorageError, match="cannot write x: no response"):
            store.put("x", bytes(2**20))


def test_a_stalled_read_is_hedged(moto_server: S3Server, s3_env: S3Env, fault_proxy: ProxyFactory) -> None:
    """Once typical request times are known, a stalled read is hedged without waiting for `stall_seconds`."""
    proxy = fault_proxy(moto_server, faults=("stalled",), stall_s=600)
    s3_env(moto_server.behind(proxy))
    bucket = moto_server.new_bucket()
    moto_server.put(bucket, "x", BODY)
    store = open_store(f"s3://{bucket}", StorageOptions(stall_seconds=600, deadline_seconds=600))
    for _ in range(40):
        assert read_part(store, "x", 5, 50_000) == BODY[5:50_005]
    before = store.stats()
    proxy.set(first_n=1)
    since = time.monotonic()
    assert read_part(store, "x", 7, 50_000) == BODY[7:50_007]
    assert time.monotonic() - since < LONG_SECONDS
    stats = store.stats()
    assert proxy.counts().faults == {"stalled": 1} and stats.num_hedged >= before.num_hedged + 1
    assert 0 < stats.p50_seconds <= stats.p99_seconds < LONG_SECONDS
    assert stats.num_retries == 0 and stats.by_error == {}


# Fewer requests when the store asks for it.


def most_at_once(pool: RequestPool, number: int) -> int:
    lock, is_done, now, most, left = threading.Lock(), threading.Event(), 0, 0, number

    def job() -> None:
        nonlocal now, most, left
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.005)
        with lock:
            now -= 1
            left -= 1
            if not left:
                is_done.set()

    for _ in range(number):
        pool.submit(1, job)
    assert is_done.wait(60)
    return most


def test_slow_down_halves_the_concurrent_requests_and_they_recover() -> None:
    pool = RequestPool(64, 2**30)
    first = pool.limit
    assert 1 < first <= 64 and most_at_once(pool, 100) <= first
    pool.slow_down()
    pool.slow_down()  # part of the same burst
    assert pool.limit == first // 2 and most_at_once(pool, 60) <= first // 2
    pool.succeeded()
    assert pool.limit == first // 2  # recovers gradually
    for _ in range(64 * 64):
        pool.succeeded()
    assert pool.limit == 64


def test_no_more_bytes_are_in_flight_than_allowed() -> None:
    pool = RequestPool(64, 3)
    assert most_at_once(pool, 60) <= 3


def test_a_store_that_asks_for_fewer_requests_gets_all_its_reads(
    moto_server: S3Server, s3_env: S3Env, fault_proxy: ProxyFactory
) -> None:
    proxy = fault_proxy(moto_server, faults=("slow_down", "too_many"), methods=("GET",), first_n=12)
    s3_env(moto_server.behind(proxy))
    bucket = moto_server.new_bucket()
    moto_server.put(bucket, "x", BODY)
    store = open_store(f"s3://{bucket}")
    threads = [threading.Thread(target=read_part, args=(store, "x", 1000 * at, 1000)) for at in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = store.stats()
    assert {name.split()[0] for name in stats.by_error} == {"503", "429"}
    assert sum(stats.by_error.values()) == 12 and stats.num_requests == 32 + stats.num_hedged
    assert stats.num_bytes_wanted == 20_000 and stats.seconds_lost > 0
