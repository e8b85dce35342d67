"""Journal file to which a run appends its findings, so that the next run after an interruption repeats no work."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from streamvid.host.findings import Findings, Key

FileState: TypeAlias = tuple[str, int, str]
"""(path, size in bytes, version) of a file. A finding is valid only while all three are unchanged."""

_DIGEST_LETTERS = 16


class Journal:
    """Journal of findings, each stored under a key. Thread-safe.

    Each line has a checksum; incomplete and damaged lines are ignored.

    A key consists of a file state and the other values that identify the finding.

    header: settings on which the findings depend. A file with a different header is overwritten.

    The constructor reads the findings in the file. New findings are written to the file only inside a `with` block, and
    only if `writable` is True. The file is not locked. Methods raise OSError if the file cannot be read or written.
    """

    def __init__(self, path: Path, header: Mapping[str, Any], writable: bool = True) -> None:
        self.findings = Findings()
        self._path = path
        self._writable = writable
        self._header = json.loads(json.dumps(header))
        self._lock = threading.Lock()
        self._num_valid_bytes = 0
        self._file: BinaryIO | None = None
        if path.exists():
            with path.open("rb") as file:
                self._num_valid_bytes = self.include(file)

    def include(self, lines: Iterable[bytes]) -> int:
        """Make the findings from another journal available to this run.

        Return the total size, in bytes, of the complete lines, or 0 if the two journals have different headers.

        lines: content of the other journal, whose last line may be incomplete.
        """
        lines = iter(lines)
        header = next(lines, b"")
        if not header.endswith(b"\n") or _json(_payload(header)) != self._header:
            return 0
        num_bytes = len(header)
        for line in lines:
            if line.endswith(b"\n"):
                num_bytes += len(line)
                for key, payload in _entry(line):
                    self.findings.put(key, payload)
        return num_bytes

    def __enter__(self) -> Journal:
        if self._writable:
            self._file = self._path.open("ab")
            self._file.truncate(self._num_valid_bytes)
            if not self._num_valid_bytes:
                self._append(json.dumps(self._header).encode())
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def add(self, key: Key, finding: Any, is_final: bool = True) -> None:
        """Store a finding (a JSON value) for this run and, if `is_final` is True, for later runs."""
        payload = json.dumps([*key, finding]).encode()
        self.findings.put(key, payload)
        if is_final:
            self._append(payload)

    def clear(self) -> None:
        """Delete all findings."""
        self.findings.clear()
        if self._file is not None:
            self._file.truncate(0)
            self._append(json.dumps(self._header).encode())

    def _append(self, payload: bytes) -> None:
        with self._lock:
            if self._file is not None:
                self._file.write(_digest(payload) + b" " + payload + b"\n")
                self._file.flush()


def include_any(findings: Findings, lines: Iterable[bytes]) -> None:
    """Add the findings from a journal, regardless of its header.

    lines: content of the journal; the last line may be incomplete.
    """
    for line in lines:
        for key, payload in _entry(line) if line.endswith(b"\n") else ():
            findings.put(key, payload)


def _entry(line: bytes) -> Iterator[tuple[Key, bytes]]:
    """Yield the key and the payload of a line, or nothing if the line is damaged or is a header."""
    payload = _payload(line)
    match _json(payload):
        case [*key, _] if all(isinstance(part, str | int) for part in key):
            yield tuple(key), payload


def _payload(line: bytes) -> bytes:
    """Return the part of a line that the checksum in the line covers, or b"" if the checksum is wrong."""
    digest, _, payload = line.removesuffix(b"\n").partition(b" ")
    return payload if digest == _digest(payload) else b""


def _json(payload: bytes) -> Any:
    with contextlib.suppress(ValueError, RecursionError):  # not written by a journal
        return json.loads(payload)


def _digest(payload: bytes) -> bytes:
    return hashlib.sha256(payload).hexdigest()[:_DIGEST_LETTERS].encode()
