"""TCP proxy in front of an HTTP server that injects faults on request, for testing code that reads from S3.

All bytes are passed on unchanged, including the Host header, so signatures stay valid. In a test, the proxy runs in a
separate process:

    with FaultProxy("http://127.0.0.1:7480", fault_rate=0.2, seed=3) as proxy:
        ...  # requests to proxy.endpoint_url
        proxy.set(dead=True)
        print(proxy.counts().faults)

As a program, it runs until Ctrl-C:

    python -m tools.fault_proxy --upstream 127.0.0.1:7480 --port 8480 --fault-rate 0.2 --latency-ms 30

Each fault affects one request. A hash of the seed and the request's number selects the fault:

    status_500 slow_down too_many expired   the proxy answers with 500, 503 SlowDown, 429 or 403 ExpiredToken
    refused       the connection is reset before the server receives the request
    lost_answer   the server handles the request, but the connection is reset before the answer (not GET or HEAD)
    reset         the connection is reset in the middle of the body; for a write, of the request's body
    truncated     the connection is closed in the middle of the body (GET)
    stalled       nothing is sent for stall_s in the middle of the body, or before an answer without a body
    slow          the body arrives in 20 pieces over slow_s, or each 256 KiB of it if its length is unknown (GET)
    flipped       one bit of the body is inverted, a different one each time (GET)
    wrong_etag    the ETag header is wrong

unknown_header simulates a store that lacks a feature: each request with this header is answered with 501.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tools.faults import ANSWERS, BODY_FAULTS, UNKNOWN_HEADER, Counts, Settings, decide
from tools.http_stream import CHUNK, Gone, Head, Link, Stream, pieces

DRIPS = 20
ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Proxy:
    """Proxy server that runs in one event loop."""

    upstream: tuple[str, int]
    settings: Settings
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        self._number = self._num_flips = 0
        self._up, self._down = Link(), Link()
        self._open: set[asyncio.Task[None]] = set()

    def change(self, settings: Settings) -> None:
        self.settings, self._number = settings, 0
        if settings.dead:
            for task in self._open:
                task.cancel()

    async def accept(self, listener: socket.socket) -> None:
        while True:
            sock, _ = await asyncio.get_running_loop().sock_accept(listener)
            self.counts.connections += 1
            task = asyncio.create_task(self._connection(sock))
            self._open.add(task)
            task.add_done_callback(self._open.discard)

    async def _connection(self, sock: socket.socket) -> None:
        client = Stream(sock)
        server: Stream | None = None
        reset = True
        try:
            while not self.settings.dead:
                request = Head(await client.until(b"\r\n\r\n"))
                fault = self._fault(request)
                if fault in ANSWERS:
                    if not await self._own_answer(client, request, fault):
                        break
                    continue
                if fault == "refused":
                    raise ConnectionResetError
                if server is None or server.is_over():
                    server = await self._connect(server)
                if not await self._exchange(client, server, request, fault):
                    reset = False
                    break
        except Gone:
            reset = False
        except (OSError, ValueError, asyncio.CancelledError):
            pass  # the client sees a reset, which is what it is to see
        finally:
            client.close(reset=reset)
            if server is not None:
                server.close(reset=reset)

    async def _connect(self, old: Stream | None) -> Stream:
        if old is not None:
            old.close()
        sock = socket.socket()
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, self.upstream)
        except BaseException:
            sock.close()
            raise
        return Stream(sock)

    def _fault(self, request: Head) -> str | None:
        method, target = request.first[:2]
        self.counts.requests[f"{method} {target.partition('?')[0]}"] += 1
        now = self.settings
        if now.unknown_header and now.unknown_header in request.fields:
            self._note(UNKNOWN_HEADER)
            return UNKNOWN_HEADER
        if (now.methods and method not in now.methods) or not re.search(now.path, target):
            return None
        number, self._number = self._number, self._number + 1
        fault = decide(now, number, method)
        if fault in ANSWERS or fault == "refused":
            self._note(fault)
        return fault

    def _note(self, fault: str) -> None:
        self.counts.faults[fault] += 1

    async def _own_answer(self, client: Stream, request: Head, fault: str) -> bool:
        """Answer in place of the server. Return True if the connection can be used for another request."""
        waits = "expect" in request.fields  # for a word before it sends its body, and gets this answer instead
        if not waits:
            async for data, _ in pieces(client, request, CHUNK):
                self.counts.bytes_up += len(data)
        await asyncio.sleep(self.settings.latency_ms / 1000)
        status, code = ANSWERS[fault]
        text = f"<Message>{fault} by the fault proxy</Message><RequestId>0</RequestId>"
        body = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code>{text}</Error>'
        if request.first[0] == "HEAD":
            body = ""
        close = waits or request.last
        headers = f"Content-Type: application/xml\r\nContent-Length: {len(body)}\r\n"
        headers += "Connection: close\r\n" if close else ""
        self.counts.statuses[status[:3]] += 1
        await client.send(f"HTTP/1.1 {status}\r\n{headers}\r\n{body}".encode())
        return not close

    async def _exchange(self, client: Stream, server: Stream, request: Head, fault: str | None) -> bool:
        """Forward one request and its answer. Return True if both connections can be used for another request."""
        await server.send(request.raw)
        if request.has_body and fault == "reset":
            await self._break_upload(client, server, request)
        upload = asyncio.create_task(self._upload(client, server, request)) if request.has_body else None
        try:
            method = request.first[0]
            answer = Head(await server.until(b"\r\n\r\n"), to=method)
            while answer.first[1][0] == "1":
                await client.send(answer.raw)
                answer = Head(await server.until(b"\r\n\r\n"), to=method)
            await self._answer(client, server, answer, fault)
            return not (answer.last or request.last) and (upload is None or upload.done())
        finally:
            if upload is not None:
                upload.cancel()
                await asyncio.wait([upload])

    async def _upload(self, client: Stream, server: Stream, request: Head) -> None:
        try:
            async for data, _ in pieces(client, request, self._most()):
                await self._up.take(len(data), self.settings.megabytes_per_second)
                await server.send(data)
                self.counts.bytes_up += len(data)
        except (OSError, Gone, ValueError):
            with contextlib.suppress(OSError):  # wakes the one who waits for the answer
                server.sock.shutdown(socket.SHUT_RDWR)

    async def _break_upload(self, client: Stream, server: Stream, request: Head) -> None:
        if "expect" in request.fields:
            await client.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        left = (request.length or 2) // 2
        async for data, _ in pieces(client, request, max(1, min(left, CHUNK))):
            await server.send(data[:left])
            left -= len(data)
            if left <= 0:
                break
        self._note("reset")
        raise ConnectionResetError

    async def _answer(self, client: Stream, server: Stream, answer: Head, fault: str | None) -> None:
        now = self.settings
        if now.latency_ms:
            await asyncio.sleep(now.latency_ms / 1000)
        head = answer.raw
        if fault == "wrong_etag" and "etag" in answer.fields:
            self._note(fault)
            head = re.sub(rb"(?im)^(etag:)[^\r]*", rb'\1 "00000000000000000000000000000bad"', head)
        elif fault == "lost_answer" or (fault == "reset" and not answer.has_body):
            self._note(fault)
            raise ConnectionResetError
        elif fault == "stalled" and not answer.has_body:
            self._note(fault)
            await asyncio.sleep(now.stall_s)
        self.counts.statuses[answer.first[1]] += 1
        await client.send(head)
        if fault in ("reset", "stalled", *BODY_FAULTS) and answer.has_body:
            await self._broken_body(client, server, answer, fault)
        else:
            async for data, _ in pieces(server, answer, self._most()):
                await self._down_to(client, data)
                await asyncio.sleep(0)  # a pair that is always ready keeps nobody else waiting

    async def _broken_body(self, client: Stream, server: Stream, answer: Head, fault: str) -> None:
        """Send the body with a fault in the middle of its content, or in its first piece if its length is unknown."""
        self._note(fault)
        length, seen = 0 if answer.chunked else answer.length or 0, 0
        paced = length or CHUNK  # comes in slow_s
        most = max(1, paced // DRIPS) if fault == "slow" else self._most()
        async for data, is_content in pieces(server, answer, most):
            if not is_content:
                await client.send(data)
                continue
            length = length or len(data)
            half, seen = length // 2 - seen, seen + len(data)
            if fault == "slow":
                await asyncio.sleep(self.settings.slow_s * len(data) / paced)
            hit = fault != "slow" and 0 <= half < len(data)
            await self._down_to(client, await self._break(client, bytes(data), half, fault) if hit else data)

    async def _break(self, client: Stream, data: bytes, at: int, fault: str) -> bytes:
        """Apply the fault within `data`. Return the bytes that remain to be sent."""
        if fault == "flipped":
            # Another bit each time: to readers, the same wrong bytes twice are what the server has.
            self._num_flips += 1
            at = (at + self._num_flips * 7919) % len(data)
            return data[:at] + bytes([data[at] ^ 1 << self._num_flips % 8]) + data[at + 1 :]
        await self._down_to(client, data[:at])
        if fault == "stalled":
            await asyncio.sleep(self.settings.stall_s)
            return data[at:]
        raise Gone if fault == "truncated" else ConnectionResetError

    async def _down_to(self, client: Stream, data: bytes | memoryview) -> None:
        await self._down.take(len(data), self.settings.megabytes_per_second)
        await client.send(data)
        self.counts.bytes_down += len(data)

    def _most(self) -> int:
        return 65536 if self.settings.megabytes_per_second else CHUNK


class FaultProxy:
    """Fault proxy in a separate process, which ends with this object or with the process that created it."""

    def __init__(self, upstream: str, **settings: Any) -> None:
        self.settings = Settings(**settings)
        command = [sys.executable, "-m", "tools.fault_proxy", "--upstream", upstream, "--control"]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.port: int = self._hear()["port"]
        self.endpoint_url = f"http://127.0.0.1:{self.port}"
        self.set(**settings)

    def set(self, **changes: Any) -> None:
        """Change settings, starting with the next request. Other settings are kept. Request numbers restart at 0."""
        self.settings = dataclasses.replace(self.settings, **changes)
        self._ask({"set": dataclasses.asdict(self.settings)})

    def counts(self) -> Counts:
        return Counts(**self._ask({}))

    def reset_counts(self) -> Counts:
        """Return the counts so far, and reset them to zero."""
        return Counts(**self._ask({"reset_counts": True}))

    def close(self) -> None:
        with self._process as process:
            assert process.stdin is not None
            if process.poll() is None:  # told, as a forked child may hold its input open
                process.stdin.write('{"end": true}\n')
        if process.returncode:
            raise RuntimeError(f"the fault proxy ended with exit code {process.returncode}")

    def _ask(self, what: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return self._hear()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the fault proxy ended with exit code {self._process.wait()}")
        heard: dict[str, Any] = json.loads(line)
        return heard

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def settings_of(given: dict[str, Any]) -> Settings:
    """Build Settings from JSON values. Lists become tuples."""
    known: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return Settings(**known)


async def obey(proxy: Proxy) -> None:
    """Execute commands, one JSON object per line of stdin, and answer each with the counts.

    Returns at the command "end" or at the end of stdin.
    """
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        asked = json.loads(line)
        if "end" in asked:
            return
        if "set" in asked:
            proxy.change(settings_of(asked["set"]))
        print(json.dumps(vars(proxy.counts)), flush=True)
        if asked.get("reset_counts"):
            proxy.counts = Counts()


async def serve(upstream: str, port: int, settings: Settings, control: bool) -> None:
    host, _, upstream_port = upstream.removeprefix("http://").rstrip("/").rpartition(":")
    listener = socket.create_server(("127.0.0.1", port), backlog=1024)
    listener.setblocking(False)
    proxy = Proxy((host, int(upstream_port)), settings)
    print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
    accepting = asyncio.create_task(proxy.accept(listener))
    if control:
        await obey(proxy)
    else:
        end = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, end.set)
        await end.wait()
        print(json.dumps(vars(proxy.counts)), flush=True)
    accepting.cancel()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upstream", required=True, metavar="HOST:PORT")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0 chooses and prints a free port")
    parser.add_argument("--control", action="store_true", help="read settings from stdin, and stop when stdin ends")
    for option in dataclasses.fields(Settings):
        name = f"--{option.name.replace('_', '-')}"
        kind: Any = type(option.default)
        if kind is bool:
            parser.add_argument(name, action="store_true")
        elif kind is tuple:
            parser.add_argument(name, type=lambda text: tuple(text.split(",")), help="values separated by commas")
        else:
            parser.add_argument(name, type=kind, help=f"default {option.default!r}")
    given = vars(parser.parse_args(arguments))
    if given["faults"] == ("all",):
        given["faults"] = None
    upstream, port, control = (given.pop(name) for name in ("upstream", "port", "control"))
    settings = Settings(**{name: value for name, value in given.items() if value is not None})
    asyncio.run(serve(upstream, port, settings, control))


if __name__ == "__main__":
    main()
