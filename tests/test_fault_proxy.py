"""Tests of the fault proxy: it injects the chosen faults and changes nothing else."""

from __future__ import annotations

import hashlib
import http.client
import http.server
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.processes import serving
from tools.fault_proxy import FaultProxy
from tools.faults import BODY_FAULTS, FAULTS, OWN_ANSWERS, Settings, decide

BODY = hashlib.shake_256(b"body").digest(1_000_000)
ETAG = '"d41d8cd98f00b204e9800998ecf8427e"'


class Handler(http.server.BaseHTTPRequestHandler):
    """A server with GET /plain, /chunked, /empty and /until-close; PUT stores the body."""

    protocol_version = "HTTP/1.1"
    kept: dict[str, bytes]

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("ETag", ETAG)
        if self.path == "/chunked":
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for start in range(0, len(BODY), 300_000):
                part = BODY[start : start + 300_000]
                self.wfile.write(b"%x;name=value\r\n%s\r\n" % (len(part), part))
            self.wfile.write(b"0\r\nTrailer: yes\r\n\r\n")
            return
        body = b"" if self.path == "/empty" else BODY
        if self.path == "/until-close":
            self.close_connection = True
        else:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        length = int(self.headers["Content-Length"])
        got = self.rfile.read(length)
        if len(got) == length:
            self.kept[self.path] = got
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@dataclass
class Plain:
    """A server of the standard library, and the bodies that were uploaded to it."""

    url: str
    kept: dict[str, bytes]


@pytest.fixture
def plain() -> Iterator[Plain]:
    kept: dict[str, bytes] = {}
    handler = type("Bound", (Handler,), {"kept": kept})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.handle_error = lambda request, address: None  # type: ignore[method-assign]  # connection resets are intended
    with serving(server) as url:
        yield Plain(url, kept)


def connect(proxy: FaultProxy) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=60)


def ask(proxy: FaultProxy, path: str = "/plain", method: str = "GET", body: bytes | None = None) -> tuple[int, bytes]:
    """Send one request on a new connection; return its status and body."""
    connection = connect(proxy)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def differing(got: bytes) -> int:
    assert len(got) == len(BODY)
    return sum(a != b for a, b in zip(got, BODY, strict=True))


def test_everything_passes_unchanged(plain: Plain) -> None:
    with FaultProxy(plain.url) as proxy:
        connection = connect(proxy)
        for path, body in [("/plain", BODY), ("/chunked", BODY), ("/empty", b""), ("/plain", BODY)]:
            connection.request("GET", path)
            answer = connection.getresponse()
            assert (answer.status, answer.headers["ETag"], answer.read()) == (200, ETAG, body)
        connection.request("HEAD", "/plain")
        answer = connection.getresponse()
        assert (answer.headers["Content-Length"], answer.read()) == (str(len(BODY)), b"")
        connection.request("PUT", "/a?x=1", BODY)
        assert connection.getresponse().read() == b""
        connection.close()
        assert plain.kept == {"/a?x=1": BODY}
        assert ask(proxy, "/until-close") == (200, BODY)
        counts = proxy.counts()
    assert counts.requests["GET /plain"] == 2 and counts.requests["PUT /a"] == 1
    assert counts.connections == 2 and counts.faults == {} and counts.statuses == {"200": 7}
    assert counts.bytes_up == len(BODY) and counts.bytes_down >= 4 * len(BODY)


@pytest.mark.parametrize("kind", OWN_ANSWERS)
def test_own_answers_never_reach_the_server(plain: Plain, kind: str) -> None:
    status, code = OWN_ANSWERS[kind]
    with FaultProxy(plain.url, faults=(kind,), fault_rate=1) as proxy:
        connection = connect(proxy)
        for method, body in [("GET", None), ("PUT", BODY), ("HEAD", None), ("GET", None)]:
            connection.request(method, "/plain", body)
            answer = connection.getresponse()
            assert answer.status == int(status[:3])
            assert (f"<Code>{code}</Code>".encode() in answer.read()) == (method != "HEAD")
        connection.close()
        assert proxy.counts().faults == {kind: 4} and proxy.counts().connections == 1
    assert plain.kept == {}


def test_refused_requests_and_lost_answers(plain: Plain) -> None:
    with FaultProxy(plain.url, faults=("refused",), fault_rate=1) as proxy:
        for method, body in [("GET", None), ("PUT", BODY)]:
            with pytest.raises(ConnectionError):
                ask(proxy, method=method, body=body)
        assert plain.kept == {}
        proxy.set(faults=("lost_answer",))
        with pytest.raises(ConnectionError):
            ask(proxy, "/a", "PUT", BODY)
        assert plain.kept == {"/a": BODY}
        assert ask(proxy) == (200, BODY)  # GET requests are exempt from this fault
        assert proxy.counts().faults == {"refused": 2, "lost_answer": 1}


@pytest.mark.parametrize("path", ["/plain", "/chunked", "/until-close"])
def test_bodies_end_early(plain: Plain, path: str) -> None:
    with FaultProxy(plain.url, faults=("truncated",), fault_rate=1) as proxy:
        if path == "/until-close":  # without a length, a client cannot detect truncation
            assert 0 < len(ask(proxy, path)[1]) < len(BODY)
        else:
            with pytest.raises(http.client.IncompleteRead) as cut:
                ask(proxy, path)
            assert len(cut.value.partial) < len(BODY) and BODY.startswith(cut.value.partial)
        proxy.set(faults=("reset",))
        with pytest.raises(ConnectionResetError):
            ask(proxy, path)
        assert proxy.counts().faults == {"truncated": 1, "reset": 1}
        assert proxy.counts().bytes_down < 2 * len(BODY)


def test_a_write_that_is_reset_did_not_happen(plain: Plain) -> None:
    with FaultProxy(plain.url, faults=("reset",), fault_rate=1) as proxy:
        with pytest.raises(ConnectionError):
            ask(proxy, "/a", "PUT", BODY)
        assert proxy.counts().faults == {"reset": 1}
    assert plain.kept == {}


def test_a_request_with_an_unknown_header_is_refused(plain: Plain) -> None:
    with FaultProxy(plain.url, unknown_header="content-length") as proxy:
        assert ask(proxy, "/a", "PUT", BODY)[0] == 501
        assert ask(proxy)[0] == 200
        assert proxy.counts().faults == {"unknown_header": 1}
    assert plain.kept == {}


@pytest.mark.parametrize("path", ["/plain", "/chunked", "/until-close"])
def test_exactly_one_bit_is_flipped(plain: Plain, path: str) -> None:
    with FaultProxy(plain.url, faults=("flipped",), fault_rate=1) as proxy:
        status, got = ask(proxy, path)
        assert status == 200 and differing(got) == 1
        assert ask(proxy, "/empty") == (200, b"")
        assert proxy.counts().faults == {"flipped": 1}  # an empty body has no bit to flip


@pytest.mark.parametrize("path", ["/plain", "/chunked", "/until-close"])
def test_slow_and_stalled_bodies_are_whole(plain: Plain, path: str) -> None:
    with FaultProxy(plain.url, faults=("slow",), fault_rate=1, slow_s=0.2, stall_s=0.2) as proxy:
        assert ask(proxy, path) == (200, BODY)
        proxy.set(faults=("stalled",))
        assert ask(proxy, path) == (200, BODY)
        assert ask(proxy, "/a", "PUT", BODY) == (200, b"")
        assert proxy.counts().faults == {"slow": 1, "stalled": 2}


def test_a_stalled_body_stops_in_the_middle(plain: Plain) -> None:
    with FaultProxy(plain.url, faults=("stalled",), first_n=1, stall_s=600) as proxy:
        connection = connect(proxy)
        connection.request("GET", "/plain")
        answer = connection.getresponse()
        got = answer.read(len(BODY) // 2)
        connection.sock.settimeout(0.2)
        with pytest.raises(TimeoutError):
            answer.read(1)
        assert got == BODY[: len(BODY) // 2]
        assert ask(proxy) == (200, BODY)  # other requests are not delayed
        proxy.set(dead=True)  # ends the stalled connection
        connection.close()


def test_wrong_etag(plain: Plain) -> None:
    with FaultProxy(plain.url, faults=("wrong_etag",), first_n=1) as proxy:
        connection = connect(proxy)
        etags = []
        for _ in range(2):
            connection.request("GET", "/plain")
            answer = connection.getresponse()
            assert answer.read() == BODY
            etags.append(answer.headers["ETag"])
        connection.close()
    assert etags[0] != ETAG and etags[0].startswith('"') and etags[1] == ETAG


def test_a_dead_proxy_resets_all_connections_and_can_be_revived(plain: Plain) -> None:
    with FaultProxy(plain.url) as proxy:
        connection = connect(proxy)
        connection.request("GET", "/empty")
        connection.getresponse().read()
        proxy.set(dead=True)
        with pytest.raises((ConnectionError, http.client.RemoteDisconnected)):
            connection.request("GET", "/empty")
            connection.getresponse()
        connection.close()
        with pytest.raises((ConnectionError, http.client.RemoteDisconnected)):
            ask(proxy)
        proxy.set(dead=False)
        assert ask(proxy) == (200, BODY)


def test_a_shaped_link_changes_no_byte(plain: Plain) -> None:
    with FaultProxy(plain.url, latency_ms=10, megabytes_per_second=50) as proxy:
        assert ask(proxy) == ask(proxy, "/chunked") == (200, BODY)
        assert ask(proxy, "/a", "PUT", BODY) == (200, b"")
    assert plain.kept == {"/a": BODY}


def test_filters_and_the_first_n(plain: Plain) -> None:
    with FaultProxy(plain.url, faults=("status_500",), first_n=2, methods=("GET",), path=r"^/em") as proxy:
        statuses = [ask(proxy, path, method)[0] for path in ("/plain", "/empty") for method in ("HEAD", "GET") * 2]
        assert statuses == [200, 200, 200, 200, 200, 500, 200, 500]
        assert ask(proxy, "/empty")[0] == 200
        proxy.set()  # restarts the numbering at 0
        assert ask(proxy, "/empty")[0] == 500
        assert proxy.reset_counts().requests == {"GET /plain": 2, "HEAD /plain": 2, "GET /empty": 4, "HEAD /empty": 2}
        assert proxy.counts().requests == {}


@given(
    st.integers(0, 2**64), st.sampled_from(["GET", "HEAD", "PUT", "POST", "DELETE"]), st.sets(st.sampled_from(FAULTS))
)
def test_decisions_depend_on_seed_and_number_only(seed: int, method: str, faults: set[str]) -> None:
    chosen = tuple(sorted(faults))
    rare, often = (Settings(fault_rate=rate, seed=seed, faults=chosen) for rate in (0.2, 0.6))
    few, many = ([decide(settings, n, method) for n in range(50)] for settings in (rare, often))
    assert few == [decide(rare, n, method) for n in range(50)]
    assert all(b == a for a, b in zip(few, many, strict=True) if a)  # a higher rate adds faults and keeps the others
    assert {kind for kind in many if kind} <= faults
    assert method == "GET" or not {kind for kind in many if kind} & set(BODY_FAULTS)
    assert all(decide(Settings(first_n=3, faults=("reset",)), n, method) == "reset" for n in range(3))


def test_the_rate_and_the_kinds_are_as_configured() -> None:
    kinds = [decide(Settings(fault_rate=0.2, seed=3), n, "GET") for n in range(10_000)]
    met = [kind for kind in kinds if kind]
    assert 1900 < len(met) < 2100 and set(met) == set(FAULTS) - {"lost_answer"}
    assert kinds != [decide(Settings(fault_rate=0.2, seed=4), n, "GET") for n in range(10_000)]


def test_the_same_requests_meet_the_same_faults(plain: Plain) -> None:
    seen = []
    with FaultProxy(plain.url, faults=tuple(OWN_ANSWERS), fault_rate=0.5) as proxy:
        for seed in (1, 1, 2):
            proxy.set(seed=seed)
            seen.append([ask(proxy, "/empty")[0] for _ in range(20)])
    assert seen[0] == seen[1] != seen[2] and len(set(seen[0])) > 2


# Newer Pythons warn about forking with threads, but the child only waits.
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_the_proxy_closes_while_a_forked_child_lives(plain: Plain) -> None:
    proxy = FaultProxy(plain.url)
    child = os.fork()
    if not child:
        signal.pause()
    try:
        proxy.close()
        with pytest.raises(ConnectionRefusedError):
            ask(proxy)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_unknown_faults_are_named() -> None:
    with pytest.raises(ValueError, match=r"'rest'.*there are .*reset"):
        Settings(faults=("rest",))


def test_the_program_serves_until_interrupted(plain: Plain) -> None:
    command = [sys.executable, "-m", "tools.fault_proxy", "--upstream", plain.url.removeprefix("http://")]
    command += ["--port", "0", "--faults", "all", "--fault-rate", "0", "--latency-ms", "1", "--methods", "GET,PUT"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline().split(":")[1].strip(" }\n"))
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/plain")
        assert connection.getresponse().read() == BODY
        connection.close()
        process.send_signal(signal.SIGINT)
        assert '"GET /plain": 1' in process.stdout.read()
    assert process.returncode == 0
