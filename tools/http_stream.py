"""Minimal HTTP/1.1 over a raw socket for tools.fault_proxy, sufficient to separate consecutive requests and answers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import AsyncIterator

CHUNK = 256 * 1024


class Gone(Exception):
    """The other side has closed its connection."""


class Stream:
    """Connection that can be read up to a mark or in pieces. Bytes read beyond the mark are kept for the next read."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._loop = asyncio.get_running_loop()
        self._buffer = memoryview(bytearray(CHUNK))
        self._rest = b""

    async def until(self, mark: bytes) -> bytes:
        """Return all bytes up to and including the mark."""
        while (end := self._rest.find(mark)) < 0:
            if len(self._rest) > 65536:
                raise ValueError("not HTTP: the first 64 KiB contain no end of the headers")
            more = await self._loop.sock_recv(self.sock, 65536)
            if not more:
                raise Gone
            self._rest += more
        got, self._rest = self._rest[: end + len(mark)], self._rest[end + len(mark) :]
        return got

    async def some(self, most: int) -> bytes | memoryview:
        """Return 1 to `most` bytes, or no bytes at the end of the stream. The result is valid until the next read."""
        if self._rest:
            got, self._rest = self._rest[:most], self._rest[most:]
            return got
        return self._buffer[: await self._loop.sock_recv_into(self.sock, self._buffer[:most])]

    async def send(self, data: bytes | memoryview) -> None:
        await self._loop.sock_sendall(self.sock, data)

    def is_over(self) -> bool:
        """Return True if the other side has closed an idle connection."""
        try:
            return self.sock.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self, *, reset: bool = False) -> None:
        if reset:
            with contextlib.suppress(OSError):
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()


class Head:
    """First line and headers of a request or an answer, with the way in which its body ends."""

    def __init__(self, raw: bytes, *, to: str = "") -> None:
        self.raw = raw
        lines = raw.decode("latin-1").split("\r\n")
        self.first = lines[0].split(" ")
        if len(self.first) < 2:
            raise ValueError(f"not HTTP: {lines[0]!r}")
        self.fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        self.chunked = self.fields.get("transfer-encoding", "").lower().endswith("chunked")
        self.length: int | None = int(self.fields.get("content-length", -1))
        is_answer = self.first[0].startswith("HTTP/")
        if to == "HEAD" or (is_answer and (self.first[1][0] == "1" or self.first[1] in ("204", "304"))):
            self.chunked, self.length = False, 0
        elif self.length == -1:  # an answer without a length ends with its connection, a request has no body
            self.length = None if is_answer or self.chunked else 0
        self.has_body = self.chunked or self.length != 0
        kept = self.fields.get("connection", "keep-alive" if "HTTP/1.1" in self.first else "close")
        self.last = kept.lower() == "close" or (self.length is None and not self.chunked)


async def pieces(stream: Stream, head: Head, most: int) -> AsyncIterator[tuple[bytes | memoryview, bool]]:
    """Yield a body piece by piece: (bytes, True for content or False for chunk framing)."""
    if not head.chunked:
        left = head.length
        while left is None or left > 0:
            data = await stream.some(most if left is None else min(most, left))
            if not data:
                if left is None:
                    return
                raise Gone
            left = None if left is None else left - len(data)
            yield data, True
        return
    while True:
        line = await stream.until(b"\r\n")
        yield line, False
        left = int(line.split(b";")[0], 16)
        if not left:
            break
        while left:
            data = await stream.some(min(most, left))
            if not data:
                raise Gone
            left -= len(data)
            yield data, True
        yield await stream.until(b"\r\n"), False
    while (line := await stream.until(b"\r\n")) != b"\r\n":
        yield line, False
    yield line, False


class Link:
    """Link with limited bandwidth that all connections share. It makes up for sleeps that were too long."""

    def __init__(self) -> None:
        self._free_at = 0.0

    async def take(self, count: int, megabytes_per_second: float) -> None:
        if not megabytes_per_second:
            return
        now = time.monotonic()
        self._free_at = max(self._free_at, now - 0.01) + count / (megabytes_per_second * 1e6)
        if self._free_at > now:
            await asyncio.sleep(self._free_at - now)
