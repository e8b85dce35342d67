"""Tests of copies within a store, whose bytes do not pass through this machine."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from streamvid.storage import StorageOptions, open_store
from tests.servers import ProxyFactory, Rgw, S3Env, S3Server

LARGE = hashlib.shake_256(b"large").digest(36 * 2**20)  # two parts
NAME = "a b+/é?x=1#y"


@pytest.fixture(params=["moto_server", "rgw"])
def server(request: pytest.FixtureRequest) -> S3Server:
    found: S3Server = request.getfixturevalue(request.param)
    return found


def test_an_object_is_copied_by_its_store(server: S3Server, s3_env: S3Env, fault_proxy: ProxyFactory) -> None:
    proxy = fault_proxy(server)
    s3_env(server.behind(proxy))
    there, here = server.new_bucket(), server.new_bucket()
    source, dest = open_store(f"s3://{there}/from"), open_store(f"s3://{here}/to")
    for data in (LARGE, b"small", b""):
        server.put(there, f"from/{NAME}", data)
        assert dest.copy(source, NAME, NAME, len(data))
        assert server.read(here, f"to/{NAME}") == data == dest.read(NAME)
        assert server.read(there, f"from/{NAME}") == data
    counts = proxy.counts()
    assert counts.bytes_up < 2**16 and counts.bytes_down < len(LARGE) + 2**16  # read once, by this test
    assert server.uploads(here) == []


def test_copies_succeed_despite_faults(server: S3Server, s3_env: S3Env, fault_proxy: ProxyFactory) -> None:
    proxy = fault_proxy(server, faults=("status_500", "lost_answer"), methods=("PUT", "POST"), fault_rate=0.4, seed=2)
    s3_env(server.behind(proxy))
    bucket = server.new_bucket()
    server.put(bucket, "from/large", LARGE)
    source, dest = open_store(f"s3://{bucket}/from"), open_store(f"s3://{bucket}/to")
    for number in range(3):
        # If the response to CompleteMultipartUpload was lost, copy returns False and the caller reads and writes
        # instead.
        if dest.copy(source, "large", f"{number}", len(LARGE)):
            assert server.read(bucket, f"to/{number}") == LARGE
    assert proxy.counts().faults and server.uploads(bucket) == []


def test_copy_returns_false_if_the_store_cannot_copy(
    server: S3Server, s3_env: S3Env, fault_proxy: ProxyFactory, tmp_path: Path
) -> None:
    proxy = fault_proxy(server, unknown_header="x-amz-copy-source")
    s3_env(server)
    bucket = server.new_bucket()
    for name in ("a", "a%20"):
        server.put(bucket, f"from/{name}", b"data")
    source, dest = open_store(f"s3://{bucket}/from"), open_store(f"s3://{bucket}/to")
    (tmp_path / "a").write_bytes(b"data")
    assert not dest.copy(source, "a", "b", 5)  # wrong size
    assert not dest.copy(source, "missing", "b", 4)
    assert not dest.copy(source, "a%20", "b", 4)  # Ceph would look for "a "
    assert not dest.copy(open_store(tmp_path), "a", "b", 4)
    assert not open_store(tmp_path).copy(source, "a", "b", 4)
    other_server = StorageOptions(endpoint_url=proxy.endpoint_url)
    assert not dest.copy(open_store(f"s3://{bucket}/from", other_server), "a", "b", 4)
    old = open_store(f"s3://{bucket}/to", other_server)
    assert not old.copy(open_store(f"s3://{bucket}/from", other_server), "a", "b", 4)
    assert proxy.counts().faults["unknown_header"] == 1
    assert server.objects(bucket, "to/") == {}


def test_an_object_that_may_not_be_read_is_not_copied(rgw: Rgw, s3_env: S3Env) -> None:
    s3_env(rgw)
    private = rgw.new_bucket()
    rgw.put(private, "a", b"data")
    s3_env(rgw.other)
    mine = rgw.other.new_bucket()
    assert not open_store(f"s3://{mine}").copy(open_store(f"s3://{private}"), "a", "b", 4)
