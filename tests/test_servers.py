"""Tests of the test servers: they behave like a real S3, are found through the environment, and end with the tests."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from botocore.exceptions import ClientError

from tests.processes import run_python
from tests.servers import ProxyFactory, Rgw, S3Env, S3Server

BODY = hashlib.shake_256(b"body").digest(1_000_000)

HOLDER = """
import sys, time
from pathlib import Path
from tests.servers import rgw, moto_server
from tools.fault_proxy import FaultProxy
class Folders:
    def mktemp(self, name):
        path = Path(sys.argv[1]) / name
        path.mkdir()
        return path
servers = [make.__wrapped__(Folders()) for make in (rgw, moto_server)]
urls = [next(server).endpoint_url for server in servers]
proxy = FaultProxy(urls[0])
print(*urls, proxy.endpoint_url, flush=True)
time.sleep(600)
"""


def is_served(url: str) -> bool:
    host, port = url.removeprefix("http://").split(":")
    try:
        socket.create_connection((host, int(port)), 5).close()
    except ConnectionRefusedError:
        return False
    return True


def test_no_server_outlives_a_killed_test_run(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("rgw")  # skips if Ceph is not installed
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        urls = process.stdout.readline().split()
        assert len(urls) == 3 and all(is_served(url) for url in urls)
        pids = [int(path.read_text()) for path in tmp_path.glob("rgw/data-*/*.pid")]
        assert len(pids) == 3
        process.kill()
    deadline = threading.Event()
    for _ in range(600):
        if not any(is_served(url) for url in urls) and not any(Path(f"/proc/{pid}/exe").exists() for pid in pids):
            return
        deadline.wait(0.1)
    pytest.fail(f"still running after a minute: {urls}, {pids}")


def code_of(error: pytest.ExceptionInfo[ClientError]) -> int:
    return int(error.value.response["ResponseMetadata"]["HTTPStatusCode"])


def test_rgw_denies_access_to_strangers(rgw: Rgw) -> None:
    bucket = rgw.new_bucket()
    rgw.put(bucket, "key", b"theirs")
    for stranger in (rgw.as_user("nokey", rgw.secret_key), rgw.as_user(rgw.access_key, "wrong"), rgw.other):
        for attempt in (lambda s=stranger: s.read(bucket, "key"), lambda s=stranger: s.put(bucket, "key", b"mine")):
            with pytest.raises(ClientError) as error:
                attempt()
            assert code_of(error) == 403
    assert rgw.read(bucket, "key") == b"theirs"
    assert rgw.other.objects(rgw.other.new_bucket()) == {}


@pytest.mark.parametrize("name", ["rgw", "moto_server"])
def test_a_server_behaves_like_s3_through_the_proxy(
    request: pytest.FixtureRequest, fault_proxy: ProxyFactory, name: str
) -> None:
    server: S3Server = request.getfixturevalue(name)
    bucket = server.new_bucket()
    proxied = server.behind(fault_proxy(server))
    etag = proxied.put(bucket, "a/key", BODY)
    assert etag == f'"{hashlib.md5(BODY).hexdigest()}"' and server.read(bucket, "a/key") == BODY
    assert proxied.client.get_object(Bucket=bucket, Key="a/key", Range="bytes=5-9")["Body"].read() == BODY[5:10]
    for condition, status in [({"IfNoneMatch": "*"}, 412), ({}, 200)]:
        try:
            got = proxied.client.put_object(Bucket=bucket, Key="a/key", Body=b"2", **condition)
            assert got["ResponseMetadata"]["HTTPStatusCode"] == status
        except ClientError as error:
            assert error.response["ResponseMetadata"]["HTTPStatusCode"] == status
    proxied.client.create_multipart_upload(Bucket=bucket, Key="b")
    assert proxied.objects(bucket) == {"a/key": 1} and proxied.uploads(bucket) == ["b"]
    proxied.remove(bucket, "a/key")
    assert server.objects(bucket) == {}


def test_the_environment_leads_to_the_server_and_to_nothing_else(
    moto_server: S3Server, s3_env: S3Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "of-this-machine")
    set_here = s3_env(moto_server)
    assert "AWS_PROFILE" not in os.environ and os.environ["AWS_ENDPOINT_URL"] == moto_server.endpoint_url
    assert Path(set_here["AWS_CONFIG_FILE"]).read_bytes() == b""
    bucket = f"by-environment-{os.getpid()}"
    script = f"import boto3; boto3.client('s3').create_bucket(Bucket={bucket!r})"
    run_python(script)
    assert moto_server.objects(bucket) == {}
    assert "motosecret" not in repr(moto_server)
