"""Stub servers for behavior that a real S3 server cannot produce on demand."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import re
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from tests.processes import serving


@dataclass
class StubS3:
    """S3 server with one bucket, "stub", that records each request as "METHOD key".

    An object in `versions` is replaced by its next version before each read without If-Match. Without
    `knows_conditions`, a conditional PUT gets status 501. ETags are not MD5 checksums. The response to
    CompleteMultipartUpload is always lost.
    """

    endpoint_url: str = ""
    objects: dict[str, bytes] = field(default_factory=dict)
    versions: dict[str, list[bytes]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    knows_conditions: bool = True
    parts: dict[str, bytes] = field(default_factory=dict)
    loses_parts: bool = False
    list_of_uploads: tuple[int, str] = (501, "NotImplemented")
    lock: threading.Lock = field(default_factory=threading.Lock)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    stub: StubS3

    def _begin(self) -> str:
        key = unquote(self.path.partition("?")[0]).removeprefix("/stub/")
        with self.stub.lock:
            self.stub.requests.append(f"{self.command} {key}")
            if self.stub.versions.get(key) and "If-Match" not in self.headers:
                self.stub.objects[key] = self.stub.versions[key].pop(0)
        return key

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code></Error>".encode())

    def do_GET(self) -> None:
        if self.path.partition("?")[2].startswith("uploads"):
            self._begin()
            self._refuse(*self.stub.list_of_uploads)
            return
        data = self.stub.objects.get(self._begin())
        if data is None:
            self._refuse(404, "NoSuchKey")
            return
        tag = f'"{hashlib.sha256(data).hexdigest()}"'
        if self.headers.get("If-Match", tag) != tag:
            self._refuse(412, "PreconditionFailed")
            return
        first, last = (int(text) for text in self.headers["Range"].removeprefix("bytes=").split("-"))
        if first >= len(data):
            self._refuse(416, "InvalidRange")
            return
        last = min(last, len(data) - 1)
        where = f"bytes {first}-{last}/{len(data)}"
        self._answer(206, data[first : last + 1], ETag=tag, Content_Range=where)

    def do_POST(self) -> None:
        key, stub = self._begin(), self.stub
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path.endswith("?uploads"):
            self._answer(200, b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>")
        elif stub.parts:
            stub.objects[key] = b"".join(data for _, data in sorted(stub.parts.items()))
            stub.parts.clear()
            self.close_connection = True
        else:
            self._refuse(404, "NoSuchUpload")

    def do_DELETE(self) -> None:
        self._begin()
        self._answer(204)

    def do_PUT(self) -> None:
        key, data = self._begin(), self.rfile.read(int(self.headers["Content-Length"]))
        if "partNumber" in self.path:
            if not self.stub.loses_parts:
                self.stub.parts[re.findall("partNumber=([0-9]+)", self.path)[0]] = data
            self._answer(200, ETag='"part"')
            return
        if "If-None-Match" in self.headers:
            if not self.stub.knows_conditions:
                self._refuse(501, "NotImplemented")
                return
            if key in self.stub.objects:
                self._refuse(412, "PreconditionFailed")
                return
        self.stub.objects[key] = data
        self._answer(200, ETag=f'"{hashlib.sha256(data).hexdigest()}"')

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def stub_s3(**settings: Any) -> Iterator[StubS3]:
    stub = StubS3(**settings)
    handler = type("Bound", (_Handler,), {"stub": stub})
    with serving(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)) as stub.endpoint_url:
        yield stub


class _Mute(socketserver.BaseRequestHandler):
    drips: bytes
    is_over: threading.Event

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            if self.drips:
                self.request.recv(65536)
                self.request.sendall(self.drips)
            while not self.is_over.wait(0.1):
                if self.drips:
                    self.request.sendall(b"x")


@contextlib.contextmanager
def mute_server(*, drips: bytes = b"") -> Iterator[str]:
    """Yield the URL of a server that reads nothing, or that sends `drips` and then one byte at a time."""
    is_over = threading.Event()
    handler = type("Bound", (_Mute,), {"drips": drips, "is_over": is_over})
    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler)
    server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    with serving(server) as url:
        try:
            yield url
        finally:
            is_over.set()
    time.sleep(0.1)  # clients notice the end
