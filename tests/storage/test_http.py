"""Tests of HTTP connections: responses are complete, however they are split, and no request is sent twice."""

from __future__ import annotations

import datetime
import gc
import ipaddress
import socket
import ssl
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamvid.storage.s3.http import Connections, HttpResponse

BODY = bytes(range(256)) * 8


@contextmanager
def server(answers: Sequence[Sequence[bytes]], tls: ssl.SSLContext | None = None) -> Iterator[tuple[str, list[bytes]]]:
    """Run a server that sends one response per request, split as given; an empty response closes the connection.

    Yield its URL and the list of received requests, in order.
    """
    listener, asked, left = socket.create_server(("127.0.0.1", 0)), list[bytes](), list(answers)

    def serve() -> None:
        while left:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with suppress(OSError), connection if tls is None else tls.wrap_socket(connection, server_side=True) as one:
                while left and (request := _request(one)):
                    asked.append(request)
                    pieces = left.pop(0)
                    for piece in pieces:
                        one.sendall(piece)
                    if not pieces or b"onnection: close" in b"".join(pieces):
                        break
                else:
                    one.settimeout(0.5)
                    _request(one)  # until the client closes the connection or the timeout expires

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"{'http' if tls is None else 'https'}://127.0.0.1:{listener.getsockname()[1]}", asked
    finally:
        left.clear()
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def _request(connection: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\r\n\r\n"):
        more = connection.recv(65536)
        if not more:
            return b""
        data += more
    return data


def no_tls() -> ssl.SSLContext:
    raise AssertionError("plain connections need no TLS context")


def connections(url: str, tls: Callable[[], ssl.SSLContext] = no_tls, stall_seconds: float = 5.0) -> Connections:
    return Connections(url, tls, 5.0, stall_seconds)


def whole(answer: HttpResponse) -> bytes:
    try:
        return answer.read(10**6)
    finally:
        answer.release_conn()


def with_length(body: bytes, *fields: bytes) -> bytes:
    lines = [b"HTTP/1.1 206 Partial Content", b"Content-Length: %d" % len(body), b'ETag: "a"', *fields]
    return b"\r\n".join([*lines, b"", body])


def chunked(body: bytes, sizes: Sequence[int]) -> bytes:
    data, at = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", 0
    for size in [*sizes, len(body)]:
        piece = body[at : at + size]
        at += len(piece)
        data += b"%x;name=value\r\n%s\r\n" % (len(piece), piece) if piece else b""
    return data + b"0\r\n\r\n"


@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.integers(1, 2200), max_size=6), sizes=st.lists(st.integers(1, 900), max_size=4))
def test_a_body_is_the_same_however_it_is_split(cuts: list[int], sizes: list[int]) -> None:
    """FETCH-1: a body with a length, in chunks or until the end of the connection, split anywhere."""
    plain = b"HTTP/1.1 100 Go on\r\n\r\nHTTP/1.1 200 OK\r\nX-Any: thing\r\nConnection: close\r\n\r\n" + BODY
    answers = [with_length(BODY), chunked(BODY, sizes), with_length(b""), with_length(BODY, b"Connection: close")]
    edges = [0, *sorted(cuts)]
    pieces = [[data[a:b] for a, b in zip(edges, [*edges[1:], len(data)], strict=True)] for data in answers]
    with server(pieces) as (url, asked):
        client = connections(url)
        found = [whole(client.get(f"{url}/k", {"Range": "bytes=0-9"})) for _ in answers]
    assert found == [BODY, BODY, b"", BODY]
    assert len(asked) == len(answers)
    with server([[plain, b""]]) as (url, _):
        answer = connections(url).get(url, {})
        data = bytearray(len(BODY))
        left = memoryview(data)
        while left:
            left = left[answer.readinto(left) :]
        answer.close()
    assert (answer.status_code, answer.headers.get("x-aNY"), bytes(data)) == (200, "thing", BODY)


def test_a_request_is_sent_as_given() -> None:
    """The Host field contains the port, as signed; the path and header fields are sent as given."""
    with server([[with_length(BODY)]]) as (url, asked):
        answer = connections(url).get(f"{url}/a%20b/c?x=%2F", {"If-Match": '"a"'})
        assert answer.headers.get("ETag") == '"a"'
        assert whole(answer) == BODY
        with pytest.raises(ValueError, match="line break"):
            connections(url).get(url, {"X": "a\r\nY: b"})
    first, *fields = asked[0].decode().split("\r\n")
    assert first == "GET /a%20b/c?x=%2F HTTP/1.1"
    assert {f"Host: {url.removeprefix('http://')}", 'If-Match: "a"'} <= set(fields)


def test_a_connection_is_reused_only_after_a_complete_body() -> None:
    """A reused connection with unread bytes would give them to the next request."""
    with server([[with_length(BODY)], [with_length(BODY)], [with_length(b"second")]]) as (url, asked):
        client = connections(url)
        assert whole(client.get(url, {})) == BODY
        half = client.get(url, {})
        assert half.read(100) == BODY[:100]
        half.release_conn()
        assert whole(client.get(url, {})) == b"second"
    assert len(asked) == 3


def test_a_connection_closed_by_the_server_is_not_reused() -> None:
    """The server closes the connection between two requests; the second request must not need a retry."""
    with server([[with_length(BODY, b"Keep-Alive: timeout=1")], [with_length(b"second")]]) as (url, asked):
        client = connections(url)
        assert whole(client.get(url, {})) == BODY
        client._kept[0].socket.shutdown(socket.SHUT_RD)  # looks to the client as if the server had closed it
        assert whole(client.get(url, {})) == b"second"
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ([], ConnectionResetError),
        ([b"HTTP/1.1 206 Partial Content\r\nContent-Le"], TimeoutError),
        ([b"HTTP/1.1 206 Partial Content\r\nContent-Length: 100\r\n\r\n" + b"x" * 99], TimeoutError),
        ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc"], TimeoutError),
        ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc"], ValueError),
        ([b"HTTP/1.1 206 OK\r\nConnection: close\r\nContent-Length: 9\r\n\r\nabc"], ConnectionResetError),
        ([b"SSH-2.0-OpenSSH\r\n\r\n"], ValueError),
        ([b"X" * 100_000], ValueError),
    ],
)
def test_an_incomplete_or_invalid_response_is_an_error(answer: list[bytes], error: type[Exception]) -> None:
    """FETCH-1: the client never returns too few bytes, never waits forever, and sends the request only once."""
    with server([answer]) as (url, asked):
        client = connections(url, stall_seconds=0.2)
        found: HttpResponse | None = None
        with pytest.raises(error):
            found = client.get(url, {})
            found.read(1000)
        if found is not None:
            found.close()
    assert len(asked) == 1
    assert not client._kept


def test_a_server_is_verified_by_its_certificate(tmp_path: Path) -> None:
    """HTTPS: only the trusted certificate is accepted."""
    context, trusted = certificate(tmp_path)
    with server([[with_length(BODY)], [with_length(BODY)]], context) as (url, asked):
        client = connections(url, lambda: ssl.create_default_context(cafile=trusted))
        assert whole(client.get(url, {})) == BODY
        assert whole(client.get(url, {})) == BODY
    assert len(asked) == 2
    with server([[with_length(BODY)]], context) as (url, asked), pytest.raises(ssl.SSLCertVerificationError):
        connections(url, ssl.create_default_context).get(url, {})
    assert not asked


def certificate(folder: Path) -> tuple[ssl.SSLContext, Path]:
    """Return a TLS server context for 127.0.0.1 and the path of the CA file that trusts it."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + datetime.timedelta(days=1))
    signed = made.add_extension(names, critical=False).sign(key, hashes.SHA256())
    trusted, secret = folder / "trusted.pem", folder / "key.pem"
    trusted.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    none = serialization.NoEncryption()
    secret.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, none)
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(trusted, secret)
    return context, trusted


def test_an_answer_leaves_nothing_for_the_garbage_collector() -> None:
    """Training loops disable garbage collection."""
    with server([[with_length(b"body")]]) as (url, _):
        kept = connections(url)
        answer = kept.get(f"{url}/a", {})
        assert whole(answer) == b"body" and answer.raw is answer
        answer.release_conn()
        gc.disable()
        try:
            died = weakref.ref(answer)
            del answer
            assert died() is None
        finally:
            gc.enable()
