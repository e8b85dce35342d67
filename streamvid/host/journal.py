"""Journal file to which a run appends its findings, so that the next run after an interruption repeats no work."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

FileState: TypeAlias = tuple[str, int, str]
"""(path, size in bytes, version) of a file. A finding is valid only while all three are unchanged."""

Key: TypeAlias = tuple[str | int, ...]
"""File state, followed by the other values that identify a finding."""

_DIGEST_LETTERS = 16


class Journal:
    """Journal of findings by key. Each line has a checksum; incomplete and damaged lines are ignored. Thread-safe.

    header: settings on which the findings depend; a file with a different header is overwritten. The constructor reads
    the findings in the file. New findings are written only inside a `with` block, unless `writable` is False. The file
    is not locked. Methods raise OSError if the file cannot be read or written.
    """

    def __init__(self, path: Path, header: Mapping[str, Any], writable: bool = True) -> None:
        self.findings: dict[Key, Any] = {}
        self._path = path
        self._writable = writable
        self._header = json.loads(json.dumps(header))
        self._lock = threading.Lock()
        self._num_valid_bytes = 0
        self._file: BinaryIO | None = None
        if path.exists():
            self._read(path.read_bytes())

    def _read(self, data: bytes) -> None:
        if self.include(data):
            self._num_valid_bytes = data.rfind(b"\n") + 1

    def include(self, data: bytes) -> bool:
        """Add the findings of another journal for this run. Return False if the headers differ."""
        lines = _lines(data)
        if not lines or _parse(lines[0]) != self._header:
            return False
        self.findings.update(_findings(lines))
        return True

    def __enter__(self) -> Journal:
        if self._writable:
            self._file = self._path.open("ab")
            self._file.truncate(self._num_valid_bytes)
            if not self._num_valid_bytes:
                self._append(self._header)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def add(self, key: Key, finding: Any, is_final: bool = True) -> None:
        """Store a finding (a JSON value) for this run and, with `is_final`, for later runs."""
        self.findings[key] = finding
        if is_final:
            self._append([*key, finding])

    def clear(self) -> None:
        """Delete all findings."""
        self.findings.clear()
        if self._file is not None:
            self._file.truncate(0)
            self._append(self._header)

    def _append(self, value: Any) -> None:
        payload = json.dumps(value).encode()
        with self._lock:
            if self._file is not None:
                self._file.write(_digest(payload) + b" " + payload + b"\n")
                self._file.flush()


def stored_findings(data: bytes) -> dict[Key, Any]:
    """Return the findings in a journal's content, whatever its header. The last line of `data` may be incomplete."""
    return _findings(_lines(data))


def _lines(data: bytes) -> list[bytes]:
    """Return the complete lines of a journal; the first one is its header."""
    return data[: data.rfind(b"\n") + 1].splitlines()


def _findings(lines: list[bytes]) -> dict[Key, Any]:
    found: dict[Key, Any] = {}
    for line in lines[1:]:
        match _parse(line):
            case [*key, finding] if all(isinstance(part, str | int) for part in key):
                found[tuple(key)] = finding
    return found


def _parse(line: bytes) -> Any:
    digest, _, payload = line.partition(b" ")
    with contextlib.suppress(ValueError, RecursionError):  # not written by a journal
        return json.loads(payload) if digest == _digest(payload) else None


def _digest(payload: bytes) -> bytes:
    return hashlib.sha256(payload).hexdigest()[:_DIGEST_LETTERS].encode()
