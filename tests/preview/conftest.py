"""Preview servers in separate processes, and their answers."""

from __future__ import annotations

import http.client
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from streamvid import shard
from streamvid.buckets.bucket import parse_buckets
from tests.conftest import Sharded
from tests.files import write_rows
from tests.media_clips import MEDIA, make_rows
from tests.processes import wait_for_end
from tests.servers import spawn
from tests.shard_options import shard_options

NUM_CLIPS = 3


@dataclass(frozen=True)
class Answer:
    """Answer to one request; header names are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return unescape(self.body.decode())

    @property
    def samples(self) -> list[str]:
        """Return the paths of the samples on the page, in order."""
        found = re.findall(r'class="picture" href="([^"?]+)', self.body.decode())
        return list(dict.fromkeys(found))


@dataclass(frozen=True)
class PreviewServer:
    """A running server. address: the link that the command printed. pid: its process."""

    address: str
    pid: int

    @property
    def base(self) -> str:
        parts = urlsplit(self.address)
        return f"{parts.scheme}://{parts.netloc}"

    def get(self, path: str, method: str = "GET", **headers: str) -> Answer:
        """Send one request without following redirects. headers: names have `_` in place of `-`."""
        connection = http.client.HTTPConnection(urlsplit(self.address).netloc, timeout=60)
        try:
            connection.request(method, path, headers={name.replace("_", "-"): v for name, v in headers.items()})
            answer = connection.getresponse()
            return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()


Serve = Callable[..., PreviewServer]


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """A function, serve(dataset, *flags), that starts a server; all servers end with the session."""
    running: list[tuple[subprocess.Popen[bytes], Path]] = []

    def start(dataset: object, *flags: object) -> PreviewServer:
        log = tmp_path_factory.mktemp("preview") / "log"
        words = [sys.executable, "-m", "streamvid", "--quiet", "preview", dataset, "--port", 0, *flags]
        process = spawn(list(map(str, words)), log)
        running.append((process, log))
        until = time.monotonic() + 60
        while not (found := re.match(r"(http://\S+)\n", log.read_text())):
            assert process.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.05)
        return PreviewServer(found[1], process.pid)

    yield start
    for process, log in running:
        children = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130 and "Traceback" not in log.read_text(), (
            "STOP-1: Ctrl-C must end the server without a traceback"
        )
        assert wait_for_end(children) == [], "STOP-1: a decode process outlives the server"


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run that `demo` shows; tests fill it."""
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="session")
def demo(serve: Serve, sharded: Sharded, run_folder: Path) -> PreviewServer:
    """The preview of the corpus dataset and of a run."""
    return serve(sharded.root, "--run", run_folder)


@pytest.fixture(scope="session")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A copied and a native dataset with conditioning inputs: a control video, a mask, and up to two references."""
    folder = tmp_path_factory.mktemp("media")
    rows = write_rows(folder / "metadata.jsonl", make_rows(folder, NUM_CLIPS))
    found = {}
    for clips in ("copy", "native"):
        options: dict[str, Any] = {"buckets": parse_buckets("96x64@9"), "workers": 1, "media": MEDIA, "clips": clips}
        found[clips] = tmp_path_factory.mktemp(clips) / "dataset"
        assert shard(rows, found[clips], shard_options(**options)).num_samples == NUM_CLIPS
    return found
