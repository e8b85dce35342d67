"""What probing and encoding have found so far, kept beside the unfinished dataset so that no run does it twice."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, TypeAlias

FileState: TypeAlias = tuple[str, int, str]
"""(path, bytes, version): what must be equal for a finding to hold."""

Key: TypeAlias = tuple[str | int, ...]
"""A file state, and what else a finding is about."""


class Journal:
    """Findings by key: one line each, appended as they come. A torn or foreign line counts as not written.

    Not `writable`, it reads only. `header` names the rules that findings depend on; other rules start anew.
    """

    def __init__(self, path: Path, header: dict[str, Any], writable: bool = True) -> None:
        self.findings: dict[Key, dict[str, Any]] = {}
        self._path, self._writable, self._header = path, writable, json.loads(json.dumps(header))
        self._whole_bytes = 0
        self._file: BinaryIO | None = None
        if path.exists():
            self._read(path)

    def _read(self, path: Path) -> None:
        data = path.read_bytes()
        lines = data[: data.rfind(b"\n") + 1].splitlines()
        if not lines or _parse(lines[0]) != self._header:
            return
        self._whole_bytes = data.rfind(b"\n") + 1
        for line in lines[1:]:
            match _parse(line):
                case [*key, dict(finding)] if all(isinstance(part, str | int) for part in key):
                    self.findings[tuple(key)] = finding

    def __enter__(self) -> Journal:
        if self._writable:
            self._file = self._path.open("ab")
            self._file.truncate(self._whole_bytes)
            if not self._whole_bytes:
                self._append(self._header)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, key: Key, finding: dict[str, Any]) -> None:
        """Keep a finding, for this run and for the next."""
        self.findings[key] = finding
        self._append([*key, finding])

    def _append(self, value: Any) -> None:
        if self._file is not None:
            self._file.write(json.dumps(value).encode() + b"\n")
            self._file.flush()


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None
