"""HTTP client for GET requests over persistent connections, with only the features that fast ranged reads need.

urllib3 needs 2.8 to 4 times as much CPU time; storage/README.md contains the comparison.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import time
import weakref
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

_HEAD_BYTES, _MAX_HEAD_BYTES = 16 * 2**10, 64 * 2**10
_PIECE_BYTES = 2**20
_DEFAULT_PORTS = {"http": 80, "https": 443}
_NO_BODY = (204, 304)


class HttpHeaders(dict[str, str]):
    """Headers of a response. `get` ignores the case of names."""

    def get(self, name: str, default: str = "") -> str:  # type: ignore[override]
        return super().get(name.lower(), default)


class Connections:
    """Reusable connections to one server. A connection is reused once its response has been read in full. Thread-safe.

    Each request is sent once. Raises OSError if a connection fails, and ValueError if the response is not HTTP. The
    OSError is a TimeoutError if connecting takes longer than `connect_seconds`, if no bytes arrive for `stall_seconds`,
    or if the headers are still incomplete after `stall_seconds`. The actual wait may be up to twice as long.

    tls: function that creates the TLS context. It is called for the first https connection.
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

    def get(self, url: str, headers: Mapping[str, str]) -> HttpResponse:
        """Send a GET request. Return the response as soon as its status and headers have arrived."""
        parts = urlsplit(url)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        lines = [f"GET {target} HTTP/1.1", f"Host: {self._shown}", "Accept-Encoding: identity"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if any("\r" in line or "\n" in line for line in lines):
            raise ValueError("a request header contains a line break")
        connection = self._take()
        try:
            try:
                connection.socket.sendall("\r\n".join([*lines, "\r\n"]).encode("latin-1"))
            except BlockingIOError:
                raise TimeoutError("timed out") from None
            return HttpResponse(connection, self)
        except BaseException:
            connection.close()
            raise

    def keep(self, connection: _Connection) -> None:
        """Keep a connection for reuse. The last response on this connection must have been read completely."""
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
                # The kernel's timeouts are used, because Python's would make the socket non-blocking, and MSG_WAITALL
                # would have no effect.
                plain.settimeout(None)
                span = struct.pack("ll", int(stall_seconds), max(1, int(stall_seconds % 1 * 1e6)))
                plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, span)
                plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, span)
                return _Connection(plain, stall_seconds, socket.MSG_WAITALL)
            self._tls = self._tls or self._make_tls()
            secured = self._tls.wrap_socket(plain, server_hostname=self._host)
        except BaseException:
            plain.close()
            raise
        secured.settimeout(stall_seconds)
        return _Connection(secured, stall_seconds, 0)


def _close_all(kept: list[_Connection]) -> None:
    while kept:
        kept.pop().close()


class _Connection:
    """Connection to a server.

    flags: `recv` flags for reading bodies; MSG_WAITALL reduces the number of wake-ups.
    stall_seconds: time limit for headers and for the body of a short response, so that a slow server cannot occupy a
        thread indefinitely.
    """

    def __init__(self, open_socket: socket.socket, stall_seconds: float, flags: int) -> None:
        self.socket, self.stall_seconds, self._flags = open_socket, stall_seconds, flags
        self._ahead = b""  # bytes received along with the headers

    def is_alive(self) -> bool:
        """Return True if the server has neither closed the connection nor sent unrequested bytes."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return not poll.poll(0)

    def until(self, mark: bytes, deadline: float) -> bytes:
        """Read up to `mark`, and return the bytes before it.

        Raises TimeoutError after `deadline`, even if bytes keep arriving.
        """
        while (end := self._ahead.find(mark)) < 0:
            if len(self._ahead) > _MAX_HEAD_BYTES:
                raise ValueError("the headers of a response are too long")
            _check_time(deadline)
            self._ahead += self._some()
        found, self._ahead = self._ahead[:end], self._ahead[end + len(mark) :]
        return found

    def _some(self) -> bytes:
        try:
            data = self.socket.recv(_HEAD_BYTES)
        except BlockingIOError:
            raise TimeoutError("timed out") from None
        if not data:
            raise ConnectionResetError("the connection was closed")
        return data

    def readinto(self, view: memoryview) -> int:
        """Read some bytes into `view`. Return the number of bytes read, or 0 at the end."""
        if self._ahead:
            num_bytes = min(len(view), len(self._ahead))
            view[:num_bytes] = self._ahead[:num_bytes]
            self._ahead = self._ahead[num_bytes:]
            return num_bytes
        try:
            return self.socket.recv_into(view, min(len(view), _PIECE_BYTES), self._flags)
        except BlockingIOError:
            raise TimeoutError("timed out") from None

    @property
    def is_at_end(self) -> bool:
        """True if no bytes have been received beyond the end of the response."""
        return not self._ahead

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.close()


class HttpResponse:
    """HTTP response. Read the body with `readinto` or `read`, then call `release_conn` or `close`."""

    def __init__(self, connection: _Connection, owner: Connections) -> None:
        self._connection, self._owner = connection, owner
        deadline, status = self._deadline(), 100
        while status // 100 == 1:
            lines = connection.until(b"\r\n\r\n", deadline).decode("latin-1").split("\r\n")
            status = _status(lines[0])
        self.status_code, self.headers = status, HttpHeaders()
        for line in lines[1:]:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        self._is_chunked = self.headers.get("Transfer-Encoding").lower() == "chunked"
        length = self.headers.get("Content-Length")
        # Remaining bytes of the body or of this chunk; None if the body ends with the connection.
        self._left: int | None = None
        if self._is_chunked or status in _NO_BODY:
            self._left = 0
        elif length.isdigit():
            self._left = int(length)
        said = self.headers.get("Connection").lower()
        self._may_keep = lines[0].startswith("HTTP/1.1") and said != "close" and not self._is_chunked

    def _deadline(self) -> float:
        return time.monotonic() + self._connection.stall_seconds

    @property
    def raw(self) -> HttpResponse:
        """This response itself. Callers read the body from `raw`, as with botocore responses.

        This is a property, because an attribute would create a reference cycle.
        """
        return self

    def readinto(self, view: memoryview) -> int:
        """Read some bytes of the body into `view`. Return the number of bytes read, or 0 at the end of the body.

        Raises ConnectionResetError if the connection closes before the end of the body.
        """
        if self._is_chunked and not self._left:
            self._next_chunk()
        if self._left is not None:
            view = view[: self._left]
        if not len(view):
            return 0
        num_bytes = self._connection.readinto(view)
        if self._left is not None:
            if not num_bytes:
                raise ConnectionResetError("IncompleteRead: the connection was closed before the end of the response")
            self._left -= num_bytes
            if self._is_chunked and not self._left:
                self._connection.until(b"\r\n", self._deadline())
        return num_bytes

    def read(self, num_bytes: int) -> bytes:
        """Return the next `num_bytes` of the body, or fewer at the end of the body."""
        data = bytearray(num_bytes)
        filled, deadline = 0, self._deadline()
        while filled < num_bytes and (more := self.readinto(memoryview(data)[filled:])):
            filled += more
            _check_time(deadline)
        return bytes(data[:filled])

    def _next_chunk(self) -> None:
        self._left = int(self._connection.until(b"\r\n", self._deadline()).partition(b";")[0], 16)
        if not self._left:  # trailers are ignored: the connection is not reused
            self._is_chunked = False

    def release_conn(self) -> None:
        """Keep the connection for reuse if the body was read to its end; otherwise, close the connection."""
        if self._may_keep and self._left == 0 and self._connection.is_at_end:
            self._owner.keep(self._connection)
        else:
            self._connection.close()

    def close(self) -> None:
        """Close the connection and drop the remainder of the response."""
        self._connection.close()


def _check_time(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError("timed out")


def _status(line: str) -> int:
    parts = line.split(" ", 2)
    if not parts[0].startswith("HTTP/1.") or len(parts) < 2 or not (parts[1].isdigit() and len(parts[1]) == 3):
        raise ValueError("the response is not HTTP")
    return int(parts[1])
