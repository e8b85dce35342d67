"""Findings of an interrupted run: lines of a local file, appended as they arrive, so that no run repeats work."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

FileState: TypeAlias = tuple[str, int, str]
"""(path, bytes, version): values that must be equal for a finding to hold."""

Key: TypeAlias = tuple[str | int, ...]
"""A file state, and the rest of what a finding is about."""

_DIGEST_LETTERS = 16


class Journal:
    """Findings by key. Each line has a checksum; torn and damaged lines are ignored. Safe in several threads.

    header: the rules that findings depend on; a file with another header is started anew. Findings are read at once,
    and written inside `with`, unless `writable` is False. It takes no lock. Methods raise OSError.
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
        num_bytes = data.rfind(b"\n") + 1
        lines = data[:num_bytes].splitlines()
        if not lines or _parse(lines[0]) != self._header:
            return
        self._num_valid_bytes = num_bytes
        for line in lines[1:]:
            match _parse(line):
                case [*key, finding]:
                    self.findings[tuple(key)] = finding

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

    def add(self, key: Key, finding: Any) -> None:
        """Store a finding, a JSON value, for this run and the next."""
        self.findings[key] = finding
        self._append([*key, finding])

    def clear(self) -> None:
        """Forget all findings."""
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


def _parse(line: bytes) -> Any:
    digest, _, payload = line.partition(b" ")
    return json.loads(payload) if digest == _digest(payload) else None


def _digest(payload: bytes) -> bytes:
    return hashlib.sha256(payload).hexdigest()[:_DIGEST_LETTERS].encode()
