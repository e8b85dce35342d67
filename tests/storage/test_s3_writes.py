"""Tests of S3 writes: despite faults, an object is written completely or not at all, and no billable parts are left."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from streamvid.errors import StorageError
from streamvid.storage import StorageOptions, Store, open_store
from tests.servers import ProxyFactory, Rgw, S3Env, S3Server
from tests.storage.stub_s3 import stub_s3

LARGE = hashlib.shake_256(b"large").digest(36 * 2**20)  # two parts
WRITES = ("PUT", "POST")
END = r"\?uploadId=[^&]*$"  # CompleteMultipartUpload


def large_file(folder: Path, data: bytes = LARGE) -> Path:
    path = folder / "large"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("faults", "path", "first_n"),
    [
        (("status_500",), "", 3),
        (("slow_down", "refused", "too_many"), "", 3),
        (("reset",), "partNumber", 3),
        (("lost_answer",), "partNumber", 3),
        (("lost_answer",), r"\?uploads", 2),  # started, but the response is lost
        (("lost_answer",), END, 1),  # completed, but the response is lost
    ],
)
def test_a_large_object_is_written_despite_faults(
    rgw: Rgw, s3_env: S3Env, fault_proxy: ProxyFactory, tmp_path: Path, faults: tuple[str, ...], path: str, first_n: int
) -> None:
    """SHARD-2."""
    proxy = fault_proxy(rgw, faults=faults, path=path, methods=WRITES, first_n=first_n)
    s3_env(rgw.behind(proxy))
    bucket, file = rgw.new_bucket(), large_file(tmp_path)
    store = open_store(f"s3://{bucket}/to")
    store.put("large", file)
    counts, stats = proxy.counts(), store.stats()
    assert sum(counts.requests.values()) == stats.num_requests
    assert sum(counts.faults.values()) >= first_n
    assert rgw.read(bucket, "to/large") == LARGE and rgw.uploads(bucket) == []
    assert not file.exists() and store.read("large") == LARGE
    assert stats.num_bytes_written == len(LARGE)
    assert stats.num_retries >= sum(counts.faults.values()) <= sum(stats.by_error.values())


@pytest.mark.parametrize("path", [r"\?uploads", "partNumber=2", END])
@pytest.mark.parametrize("fault", ["status_500", "lost_answer"])
def test_a_failed_write_of_a_large_object_leaves_nothing(
    rgw: Rgw, s3_env: S3Env, fault_proxy: ProxyFactory, tmp_path: Path, path: str, fault: str
) -> None:
    """SHARD-2: the old object stays, unless only the final response was lost; then the new object is complete."""
    proxy = fault_proxy(rgw, faults=(fault,), path=path, methods=WRITES, fault_rate=1.0)
    s3_env(rgw.behind(proxy))
    bucket, file = rgw.new_bucket(), large_file(tmp_path)
    rgw.put(bucket, "to/large", b"old")
    store = open_store(f"s3://{bucket}/to", StorageOptions(deadline_seconds=1.5))
    with pytest.raises(StorageError, match=rf"s3://{bucket}/to: cannot write large: .*deadline_seconds"):
        store.put("large", file)
    assert rgw.uploads(bucket) == []
    assert rgw.read(bucket, "to/large") == (LARGE if (path, fault) == (END, "lost_answer") else b"old")
    assert file.read_bytes() == LARGE


KILLED = """
import sys
from pathlib import Path
from streamvid.storage import open_store
open_store(sys.argv[1]).put("deep/large", Path(sys.argv[2]))
"""


def test_uploads_of_a_killed_writer_can_be_aborted(
    moto_server: S3Server, s3_env: S3Env, fault_proxy: ProxyFactory, tmp_path: Path
) -> None:
    """SHARD-2."""
    proxy = fault_proxy(moto_server, faults=("stalled",), path="partNumber", fault_rate=1.0, stall_s=600)
    s3_env(moto_server.behind(proxy))
    bucket = moto_server.new_bucket()
    command = [sys.executable, "-c", KILLED, f"s3://{bucket}/to", str(large_file(tmp_path))]
    with subprocess.Popen(command) as process:
        while not any(name.startswith("PUT") for name in proxy.counts().requests):
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    assert moto_server.uploads(bucket) == ["to/deep/large"] and moto_server.objects(bucket) == {}
    s3_env(moto_server)
    store = open_store(f"s3://{bucket}/to")
    assert list(store.files()) == [] and store.size("deep/large") is None
    assert store.abort_uploads("dee") == 0 and open_store(f"s3://{bucket}/t").abort_uploads() == 0
    assert store.abort_uploads("deep") == 1
    assert moto_server.uploads(bucket) == [] and store.abort_uploads() == 0


def test_a_reader_sees_no_part_of_an_unfinished_write(rgw: Rgw, s3_env: S3Env, tmp_path: Path) -> None:
    """SHARD-2, FETCH-1: a read returns one complete version, even if the versions differ in size."""
    s3_env(rgw)
    bucket = rgw.new_bucket()
    store, seen, is_over = open_store(f"s3://{bucket}/to"), set(), threading.Event()
    versions = [LARGE[: 34 * 2**20], LARGE[2**20 : 3 * 2**20], LARGE[5:]]
    store.put("small", versions[1])

    def read() -> None:
        reader = open_store(store.url)
        while not is_over.is_set():
            if reader.size("large") is not None:
                seen.add(hashlib.sha256(reader.read("large")).digest())

    with ThreadPoolExecutor(2) as threads:
        readers = [threads.submit(read) for _ in range(2)]
        for _ in range(1):
            for version in versions:
                store.put("large", large_file(tmp_path, version))
        is_over.set()
        for reader in readers:
            reader.result()
    assert seen and seen <= {hashlib.sha256(version).digest() for version in versions}


# Only one creator succeeds.


def makers(store: Store, path: str, number: int) -> list[bool]:
    barrier = threading.Barrier(number)

    def make(which: int) -> bool:
        barrier.wait()
        return store.create(path, b"%d" % which)

    with ThreadPoolExecutor(number) as threads:
        return list(threads.map(make, range(number)))


@pytest.mark.parametrize("kind", ["moto_server", "rgw", "local"])
def test_one_of_many_concurrent_creations_succeeds(
    kind: str, s3_env: S3Env, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """SHARD-3."""
    url = str(tmp_path)
    if kind != "local":
        server: S3Server = request.getfixturevalue(kind)
        s3_env(server)
        url = f"s3://{server.new_bucket()}"
    store = open_store(url)
    for path in ("a", "b", "c", "d", "e"):
        made = makers(store, path, 8)
        assert made.count(True) == 1
        assert store.read(path) == b"%d" % made.index(True)
    assert len(list(store.files())) == 5


def test_the_creator_succeeds_even_if_the_answer_was_lost(rgw: Rgw, s3_env: S3Env, fault_proxy: ProxyFactory) -> None:
    proxy = fault_proxy(rgw, faults=("lost_answer",), methods=("PUT",), first_n=1)
    s3_env(rgw.behind(proxy))
    store = open_store(f"s3://{rgw.new_bucket()}")
    assert store.create("claim", b"mine")
    assert proxy.counts().faults == {"lost_answer": 1}
    proxy.set(faults=("status_500",))
    assert not store.create("claim", b"yours") and store.read("claim") == b"mine"


def test_a_store_without_conditional_writes_checks_first(s3_env: S3Env, moto_server: S3Server) -> None:
    """SHARD-3: without conditional writes, the store checks first, so that an existing object is never replaced."""
    s3_env(moto_server)
    with stub_s3(knows_conditions=False) as stub:
        store = open_store("s3://stub", StorageOptions(endpoint_url=stub.endpoint_url))
        assert store.create("claim", b"mine")
        assert not store.create("claim", b"yours")
        assert store.read("claim") == b"mine"
        assert [name for name in stub.requests if name.startswith("PUT")] == ["PUT claim"] * 3
        stub.knows_conditions = True
        assert not store.create("claim", b"yours") and store.create("other", b"")


@pytest.mark.parametrize("refusal", [(501, "NotImplemented"), (403, "AccessDenied")])
def test_a_store_that_cannot_list_uploads_has_none_to_abort(
    s3_env: S3Env, moto_server: S3Server, refusal: tuple[int, str]
) -> None:
    """Regression: because this cleanup failed, sealing reported an error and left the staging folder."""
    s3_env(moto_server)
    with stub_s3(list_of_uploads=refusal) as stub:
        store = open_store("s3://stub", StorageOptions(endpoint_url=stub.endpoint_url))
        assert store.abort_uploads() == store.abort_uploads("shards") == 0
        assert len(stub.requests) == 2


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_lost_final_answer_is_resolved_by_the_stored_object(
    moto_server: S3Server, s3_env: S3Env, tmp_path: Path, is_ours: bool
) -> None:
    """SHARD-2: also without MD5 checksums as ETags; another process's object of the same size is an error."""
    s3_env(moto_server)
    with stub_s3() as stub:
        store, file = open_store("s3://stub", StorageOptions(endpoint_url=stub.endpoint_url)), large_file(tmp_path)
        if is_ours:
            store.put("large", file)
            assert stub.objects["large"] == LARGE
            return
        stub.objects["large"] = LARGE[:-1] + b"x"
        stub.loses_parts = True
        with pytest.raises(StorageError, match="another process aborted the upload"):
            store.put("large", file)


def test_uploads_of_other_objects_are_not_aborted(
    rgw: Rgw, s3_env: S3Env, fault_proxy: ProxyFactory, tmp_path: Path
) -> None:
    """After a lost response, only uploads of the same object are aborted."""
    proxy = fault_proxy(rgw, faults=("lost_answer",), path=r"\?uploads", methods=("POST",), first_n=1)
    s3_env(rgw.behind(proxy))
    bucket = rgw.new_bucket()
    for key in ("to/large.2", "to/large/x", "large"):
        rgw.client.create_multipart_upload(Bucket=bucket, Key=key)
    open_store(f"s3://{bucket}/to").put("large", large_file(tmp_path))
    assert sorted(rgw.uploads(bucket)) == ["large", "to/large.2", "to/large/x"]


def test_a_write_leaves_no_thread(moto_server: S3Server, s3_env: S3Env, tmp_path: Path) -> None:
    s3_env(moto_server)
    store = open_store(f"s3://{moto_server.new_bucket()}")
    store.put("large", large_file(tmp_path))
    for _ in range(100):
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith("streamvid")]
        if not left:
            return
        time.sleep(0.1)
    pytest.fail(f"after 10 s: {left} of {os.getpid()}")
