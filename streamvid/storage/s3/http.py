"""GET requests over connections that are kept: what thousands of reads a second need of HTTP, and nothing else.

A request by way of http.client or urllib3 takes half a millisecond of the interpreter, which all threads share; this
takes a fifth of it.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import weakref
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

_HEAD_BYTES, _MAX_HEAD_BYTES = 16 * 2**10, 64 * 2**10
_PIECE_BYTES = 2**20
_DEFAULT_PORTS = {"http": 80, "https": 443}
_NO_BODY = (204, 304)


class Headers(dict[str, str]):
    """Fields of an answer; `get` takes names in any case."""

    def get(self, name: str, default: str = "") -> str:  # type: ignore[override]
        return super().get(name.lower(), default)


class Connections:
    """To one server, kept when an answer was read to its end. Safe in several threads; each has one of its own.

    tls: made at the first connection to an https URL. connect_seconds: until connected; stall_seconds: without a byte,
    then TimeoutError, after twice that at most. Nothing is sent twice. Raises OSError; ValueError for what is no HTTP.
    """

    def __init__(
        self, base_url: str, tls: Callable[[], ssl.SSLContext], connect_seconds: float, stall_seconds: float
    ) -> None:
        parts = urlsplit(base_url)
        self._host, default = parts.hostname or "", _DEFAULT_PORTS[parts.scheme]
        self._port = parts.port or default
        name = f"[{self._host}]" if ":" in self._host else self._host
        self._shown = name if self._port == default else f"{name}:{self._port}"
        self._make_tls = tls if parts.scheme == "https" else None
        self._tls: ssl.SSLContext | None = None
        self._seconds = connect_seconds, stall_seconds
        self._kept: list[_Connection] = []
        weakref.finalize(self, _close_all, self._kept)

    def get(self, url: str, headers: Mapping[str, str]) -> Answer:
        """Send the request, and read the answer's head."""
        parts = urlsplit(url)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        lines = [f"GET {target} HTTP/1.1", f"Host: {self._shown}", "Accept-Encoding: identity"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if any("\r" in line or "\n" in line for line in lines):
            raise ValueError("a line break in a request's head")
        connection = self._take()
        try:
            try:
                connection.socket.sendall("\r\n".join([*lines, "\r\n"]).encode("latin-1"))
            except BlockingIOError:
                raise TimeoutError("timed out") from None
            return Answer(connection, self)
        except BaseException:
            connection.close()
            raise

    def keep(self, connection: _Connection) -> None:
        """Of an answer that was read to its end."""
        self._kept.append(connection)

    def _take(self) -> _Connection:
        while True:
            try:
                connection = self._kept.pop()
            except IndexError:
                return self._connect()
            if connection.is_alive():
                return connection
            connection.close()

    def _connect(self) -> _Connection:
        connect_seconds, stall_seconds = self._seconds
        plain = socket.create_connection((self._host, self._port), connect_seconds)
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._make_tls is None:
                # By the kernel, as MSG_WAITALL is none of sockets with a timeout of Python's.
                plain.settimeout(None)
                span = struct.pack("ll", int(stall_seconds), max(1, int(stall_seconds % 1 * 1e6)))
                plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, span)
                plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, span)
                return _Connection(plain, socket.MSG_WAITALL)
            self._tls = self._tls or self._make_tls()
            secured = self._tls.wrap_socket(plain, server_hostname=self._host)
        except BaseException:
            plain.close()
            raise
        secured.settimeout(stall_seconds)
        return _Connection(secured, 0)


def _close_all(kept: list[_Connection]) -> None:
    while kept:
        kept.pop().close()


class _Connection:
    """flags: of reads of a body: that all of it is waited for, which is one wake-up instead of many."""

    def __init__(self, open_socket: socket.socket, flags: int) -> None:
        self.socket, self._flags = open_socket, flags
        self._ahead = b""  # bytes that came with the head

    def is_alive(self) -> bool:
        """Whether the server neither closed it nor said anything unasked."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return not poll.poll(0)

    def head(self) -> list[str]:
        """Lines of an answer's head."""
        data = self._ahead
        while (end := data.find(b"\r\n\r\n")) < 0:
            if len(data) > _MAX_HEAD_BYTES:
                raise ValueError("an answer's head has no end")
            data += self._some()
        self._ahead = data[end + 4 :]
        return data[:end].decode("latin-1").split("\r\n")

    def _some(self) -> bytes:
        try:
            data = self.socket.recv(_HEAD_BYTES)
        except BlockingIOError:
            raise TimeoutError("timed out") from None
        if not data:
            raise ConnectionResetError("the connection was closed")
        return data

    def readinto(self, view: memoryview) -> int:
        """Some bytes; 0 at their end."""
        if self._ahead:
            num_bytes = min(len(view), len(self._ahead))
            view[:num_bytes] = self._ahead[:num_bytes]
            self._ahead = self._ahead[num_bytes:]
            return num_bytes
        try:
            return self.socket.recv_into(view, min(len(view), _PIECE_BYTES), self._flags)
        except BlockingIOError:
            raise TimeoutError("timed out") from None

    def line(self) -> bytes:
        """Up to a line's end, which is not in it."""
        while (end := self._ahead.find(b"\r\n")) < 0:
            self._ahead += self._some()
            if len(self._ahead) > _MAX_HEAD_BYTES:
                raise ValueError("a line has no end")
        line, self._ahead = self._ahead[:end], self._ahead[end + 2 :]
        return line

    @property
    def is_at_end(self) -> bool:
        """Whether no more came than was asked for."""
        return not self._ahead

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.close()


class Answer:
    """status_code and headers; the body comes by `readinto` or `read`. Then `release_conn`, or `close` without it."""

    def __init__(self, connection: _Connection, owner: Connections) -> None:
        self._connection, self._owner = connection, owner
        lines = connection.head()
        while (status := _status(lines[0])) // 100 == 1:
            lines = connection.head()
        self.status_code, self.headers = status, Headers()
        for line in lines[1:]:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        self._is_chunked = self.headers.get("Transfer-Encoding").lower() == "chunked"
        length = self.headers.get("Content-Length")
        # Of a chunked body: of this chunk. None: until the connection ends.
        self._left: int | None = None
        if self._is_chunked or status in _NO_BODY:
            self._left = 0
        elif length.isdigit():
            self._left = int(length)
        said = self.headers.get("Connection").lower()
        self._may_keep = lines[0].startswith("HTTP/1.1") and said != "close" and not self._is_chunked

    @property
    def raw(self) -> Answer:
        """As of an answer of botocore's session, which has its body there; no attribute, which would be a circle."""
        return self

    def readinto(self, view: memoryview) -> int:
        """Some bytes of the body, 0 at its end; ConnectionResetError where the connection ends before it."""
        if self._is_chunked and not self._left:
            self._next_chunk()
        if self._left is not None:
            view = view[: self._left]
        if not len(view):
            return 0
        num_bytes = self._connection.readinto(view)
        if self._left is not None:
            if not num_bytes:
                raise ConnectionResetError("IncompleteRead: the connection was closed")
            self._left -= num_bytes
            if self._is_chunked and not self._left:
                self._connection.line()
        return num_bytes

    def read(self, num_bytes: int) -> bytes:
        """So many bytes, or all until the end."""
        data = bytearray(num_bytes)
        filled = 0
        while filled < num_bytes and (more := self.readinto(memoryview(data)[filled:])):
            filled += more
        return bytes(data[:filled])

    def _next_chunk(self) -> None:
        self._left = int(self._connection.line().partition(b";")[0], 16)
        if not self._left:  # fields that may follow are nobody's: such a connection is not kept
            self._is_chunked = False

    def release_conn(self) -> None:
        """The body was read: the connection may serve another request."""
        if self._may_keep and self._left == 0 and self._connection.is_at_end:
            self._owner.keep(self._connection)
        else:
            self._connection.close()

    def close(self) -> None:
        """Whatever else would come is not wanted."""
        self._connection.close()


def _status(line: str) -> int:
    parts = line.split(" ", 2)
    if not parts[0].startswith("HTTP/1.") or len(parts) < 2 or not (parts[1].isdigit() and len(parts[1]) == 3):
        raise ValueError("the answer is no HTTP")
    return int(parts[1])
