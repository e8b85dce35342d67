"""The peers, seen from a benchmark: a decoder that is asked window by window, and runs of loaders.

Both run in the peers' environment (tools/peers/install.py makes it), which need not have streamvid.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.bench_memory import watching

ROOT = Path(__file__).resolve().parent.parent.parent
SAMPLE_SECONDS = 0.5  # often enough for peaks that last, and cheap beside what is measured
PYTHON = ROOT / ".peers" / "bin" / "python"
Answer = dict[str, Any]


class PeerFailure(Exception):
    """A peer's process said nothing, or ended with an error."""


@dataclass(frozen=True)
class DecodePeers:
    """A running tools.peers.decode; see there for requests and answers."""

    process: subprocess.Popen[str]

    def ask(self, **request: object) -> Answer:
        """The answer to one request; it has "error" where the peer cannot do it. PeerFailure if the process died."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        line = self.process.stdout.readline()
        if not line:
            raise PeerFailure(f"the peers' decoder ended with {self.process.wait()} at {request}")
        found: Answer = json.loads(line)
        return found


@contextmanager
def decode_peers(python: Path = PYTHON) -> Iterator[DecodePeers]:
    """Starts tools.peers.decode in the environment of `python`; it ends with the block."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [str(python), "-m", "tools.peers.decode"]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=_environment(scratch)
        )
        with _ended(process):
            yield DecodePeers(process)


@contextmanager
def decode_ours() -> Iterator[DecodePeers]:
    """Starts tools.decode_ours in this environment: streamvid, asked as the peers are."""
    command = [sys.executable, "-m", "tools.decode_ours"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    with _ended(process):
        yield DecodePeers(process)


@contextmanager
def _ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """Closes its input at the end, which ends it, and waits; one that is gone already never reads the rest."""
    try:
        yield
    finally:
        assert process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()
        process.wait()


def convert(dataset: Path, out: Path, *, bucket: str | None = None, python: Path = PYTHON) -> Answer:
    """Runs tools.peers.convert; what convert.json holds, "missing" with a reason for each format that failed."""
    command = [str(python), "-m", "tools.peers.convert", str(dataset), str(out)]
    return _run([*command, *(["--bucket", bucket] if bucket else [])], None)


def run_loader(python: Path = PYTHON, **request: object) -> Answer:
    """One run of tools.peers.loader, or its {"error"}.

    "peak_bytes" is added: the most that its processes held together, as tools/bench_memory.py counts it (anonymous
    pages and shared ones, each once).
    """
    return _run([str(python), "-m", "tools.peers.loader"], json.dumps(request) + "\n")


def run_s3(python: Path = PYTHON, **request: object) -> Answer:
    """One run of tools.peers.s3, or its {"error"}; "peak_bytes" as `run_loader` has it."""
    return _run([str(python), "-m", "tools.peers.s3"], json.dumps(request) + "\n")


def versions(python: Path = PYTHON) -> dict[str, str]:
    """What is installed there."""
    with decode_peers(python) as peers:
        found: dict[str, str] = peers.ask(method="versions")["versions"]
    return found | dict(run_loader(python, method="versions")["versions"])


def missing(python: Path = PYTHON) -> dict[str, str]:
    """Method → why it cannot run, of decoders and loaders."""
    with decode_peers(python) as peers:
        found: dict[str, str] = peers.ask(method="versions")["missing"]
    return found | dict(run_loader(python, method="versions")["missing"])


def _run(command: list[str], line: str | None) -> Answer:
    with tempfile.TemporaryDirectory() as scratch:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=_environment(scratch)
        )
        with process, watching(process.pid, SAMPLE_SECONDS) as watch:
            output, _ = process.communicate(line)
    if process.returncode != 0 or not output:
        raise PeerFailure(f"{' '.join(command)} ended with {process.returncode}")
    found: Answer = json.loads(output)
    if watch.samples:
        found["peak_bytes"] = watch.peak(lambda memory: memory.total)
    return found


def _environment(scratch: str) -> dict[str, str]:
    """Peers leave lock files and caches behind; they go where they are cleared away. Nothing asks a hub."""
    own = {"TMPDIR": scratch, "HF_HOME": f"{scratch}/hf", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    return {**os.environ, **own}
