"""Real S3 servers for all tests, inspected with boto3: moto, Ceph RGW, and the fault proxy in front of them.

    def test_it(moto_server: S3Server, s3_env: S3Env) -> None:
        s3_env(moto_server)                 # the environment of this process and its children
        bucket = moto_server.new_bucket()   # only this test uses f"s3://{bucket}/..."

A server starts when a test requests it, and ends with the process that runs the tests, even if that is killed.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from tools.fault_proxy import FaultProxy

ROOT = Path(__file__).resolve().parent.parent
CEPH_TOOLS = ("ceph", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")
CEPH_PACKAGES = "radosgw ceph-mon ceph-osd ceph-common"
AWS_VARIABLES = ("AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3", "AWS_CA_BUNDLE")
PR_SET_PDEATHSIG = 1

S3Env = Callable[["S3Server"], dict[str, str]]
ProxyFactory = Callable[..., FaultProxy]
_names = itertools.count()


@dataclass(frozen=True)
class S3Server:
    """A server with the keys of a user who has full access to their own buckets."""

    endpoint_url: str
    access_key: str
    secret_key: str = field(repr=False)
    folder: Path = field(repr=False)  # temporary folder of the test session, for the empty files that env() names

    def env(self) -> dict[str, str]:
        """Return the environment in which S3 clients find this server and ignore the machine's own configuration."""
        empty = self.folder / "empty"
        empty.touch()
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": str(empty),
            "AWS_SHARED_CREDENTIALS_FILE": str(empty),
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def behind(self, proxy: FaultProxy) -> S3Server:
        """Return the same server and keys, reached through a proxy."""
        return replace(self, endpoint_url=proxy.endpoint_url)

    def as_user(self, access_key: str, secret_key: str) -> S3Server:
        return replace(self, access_key=access_key, secret_key=secret_key)

    @cached_property
    def client(self) -> Any:
        """A boto3 client that ignores the environment and the configuration files."""
        import boto3
        import botocore.session
        from botocore.config import Config

        nothing = {"profile": (None, None, None, None)}
        nothing |= dict.fromkeys(("config_file", "credentials_file"), (None, None, os.devnull, None))
        session = boto3.Session(self.access_key, self.secret_key, botocore_session=botocore.session.Session(nothing))
        path_style = Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1})
        return session.client("s3", "us-east-1", endpoint_url=self.endpoint_url, config=path_style)

    def new_bucket(self) -> str:
        """Create an empty bucket and return its name."""
        name = f"test-{os.getpid()}-{next(_names)}-{random.SystemRandom().randrange(16**8):08x}"
        self.client.create_bucket(Bucket=name)
        return name

    def objects(self, bucket: str, prefix: str = "") -> dict[str, int]:
        """Return the size of every object by key."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        return {item["Key"]: item["Size"] for page in pages for item in page.get("Contents", ())}

    def uploads(self, bucket: str) -> list[str]:
        """Return the keys of multipart uploads that were neither completed nor aborted."""
        pages = self.client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket)
        return [item["Key"] for page in pages for item in page.get("Uploads", ())]

    def read(self, bucket: str, key: str) -> bytes:
        data: bytes = self.client.get_object(Bucket=bucket, Key=key)["Body"].read()
        return data

    def tree(self, bucket: str, prefix: str) -> dict[str, bytes]:
        """Return the content of every object below a prefix, by relative path, as boto3 reads it."""
        return {key.removeprefix(f"{prefix}/"): self.read(bucket, key) for key in self.objects(bucket, f"{prefix}/")}

    def put(self, bucket: str, key: str, data: bytes) -> str:
        """Upload an object and return its ETag."""
        return str(self.client.put_object(Bucket=bucket, Key=key, Body=data)["ETag"])

    def remove(self, bucket: str, key: str) -> None:
        self.client.delete_object(Bucket=bucket, Key=key)

    def upload_folder(self, folder: Path, bucket: str, prefix: str = "") -> None:
        """Upload every file below a folder; keys are the prefix followed by the relative path."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.put(bucket, prefix + path.relative_to(folder).as_posix(), path.read_bytes())


@dataclass(frozen=True)
class Rgw(S3Server):
    """Ceph RGW, which has user accounts; `other` is a second user without access to the first user's buckets."""

    other_access_key: str = "otherkey"
    other_secret_key: str = field(default="othersecret", repr=False)

    @property
    def other(self) -> S3Server:
        return self.as_user(self.other_access_key, self.other_secret_key)


def free_port() -> int:
    """Return a free port outside the range of outgoing connections, so that it stays free until the server binds it."""
    for _ in range(100):
        port = random.SystemRandom().randrange(10000, 30000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port between 10000 and 30000")


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def spawn(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a server that ends with this process and writes its output to a file."""
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )


def end_server(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _started(process: subprocess.Popen[bytes], is_up: Callable[[], bool], log: Path, seconds: float) -> bool:
    """Wait until the server is up. Return False if it exited; raise after `seconds`."""
    end = time.monotonic() + seconds
    while process.poll() is None:
        if is_up():
            return True
        if time.monotonic() > end:
            end_server(process)
            raise RuntimeError(f"{process.args!r} did not come up in {seconds:.0f} s:\n{log.read_text()[-2000:]}")
        time.sleep(0.05)
    return False


def start(make: Callable[[int, Path], list[str]], is_up: Callable[[int, Path], bool], folder: Path) -> Any:
    """Start a server and return (process, port); retry with another port if it exits at once."""
    for attempt in range(3):
        port, log = free_port(), folder / f"log-{attempt}"
        process = spawn(make(port, folder / f"data-{attempt}"), log)
        if _started(process, lambda port=port, log=log: is_up(port, log), log, 90):
            return process, port
    raise RuntimeError(
        f"{process.args!r} ended three times, last with {process.returncode}:\n{log.read_text()[-2000:]}"
    )


def _moto_answers(port: int, log: Path) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/moto-api/", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.fixture(scope="session")
def moto_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """moto: an S3 server that accepts any key and starts in a second or two."""
    folder = tmp_path_factory.mktemp("moto")
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p"]
    process, port = start(lambda port, data: [*command, str(port)], _moto_answers, folder)
    yield S3Server(f"http://127.0.0.1:{port}", "motokey", "motosecret", folder)
    end_server(process)


@pytest.fixture(scope="session")
def rgw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rgw]:
    """Ceph RGW: a real object store with real authentication, which takes about ten seconds to start."""
    missing = [tool for tool in CEPH_TOOLS if shutil.which(tool) is None]
    if missing:
        reason = f"no {', '.join(missing)}: apt-get install --no-install-recommends {CEPH_PACKAGES}"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    folder = tmp_path_factory.mktemp("rgw")
    script = str(ROOT / "tools" / "ceph_rgw.sh")
    process, port = start(
        lambda port, data: [script, "run", str(data), str(port)], lambda port, log: "up\n" in log.read_text(), folder
    )
    yield Rgw(f"http://127.0.0.1:{port}", "testkey", "testsecret", folder)
    end_server(process)


@pytest.fixture
def s3_env(monkeypatch: pytest.MonkeyPatch) -> S3Env:
    """A function that sets a server's environment for the test's process and its children, and returns it."""

    def set_env(server: S3Server) -> dict[str, str]:
        for name in AWS_VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in server.env().items():
            monkeypatch.setenv(name, value)
        return server.env()

    return set_env


@pytest.fixture
def fault_proxy() -> Iterator[ProxyFactory]:
    """A function that starts a FaultProxy in front of a server; the proxy is closed at the end of the test."""
    proxies: list[FaultProxy] = []

    def make(server: S3Server, **settings: Any) -> FaultProxy:
        proxies.append(FaultProxy(server.endpoint_url, **settings))
        return proxies[-1]

    yield make
    for proxy in proxies:
        proxy.close()
