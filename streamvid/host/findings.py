"""Findings of a run, stored by key in a temporary file."""

from __future__ import annotations

import json
import tempfile
import threading
import weakref
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

Key: TypeAlias = tuple[str | int, ...]
"""Values that identify a finding, such as the state of a file."""

_MEMORY_BYTES = 1 << 24
_MOST_RECENT = 1 << 16


class Findings(Mapping[Key, Any]):
    """Mapping from keys to JSON values that uses about 40 bytes of memory per key. Thread-safe.

    Small data stays in memory. Larger data is written to a file in the system's temporary directory (TMPDIR). The file
    is unlinked, so it disappears when the process ends. Keys are looked up by hash. With n keys, the probability that
    two keys have the same hash is n**2 / 2**65; one of these two keys is then lost. Hashes differ between runs, so the
    next run will store both keys.

    Methods raise OSError if the file cannot be written or read.
    """

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(_MEMORY_BYTES)  # noqa: SIM115 — closed with this object
        weakref.finalize(self, self._file.close)
        self._lock = threading.RLock()
        self.clear()

    def clear(self) -> None:
        """Remove all findings."""
        with self._lock:
            self._file.truncate(0)
            self._num_bytes = self._num_keys = 0
            self._recent: dict[int, int] = {}  # hash → place in the file
            self._hashes, self._places = array("q"), array("q")  # of earlier findings, in the order of the hashes

    def put(self, key: Key, line: bytes) -> None:
        """Store a finding, given as the JSON text of the list `[*key, finding]` without line breaks."""
        with self._lock:
            self._num_keys += self._place(hash(key)) is None
            self._recent[hash(key)] = self._num_bytes
            self._file.seek(self._num_bytes)
            self._num_bytes += self._file.write(line + b"\n")
            if len(self._recent) >= max(_MOST_RECENT, len(self._hashes) // 8):
                self._sort()

    def _sort(self) -> None:
        import numpy as np

        hashes, places = np.fromiter(self._recent.keys(), np.int64), np.fromiter(self._recent.values(), np.int64)
        hashes = np.concatenate([np.array(self._hashes, np.int64), hashes])
        places = np.concatenate([np.array(self._places, np.int64), places])
        order = np.argsort(hashes, kind="stable")
        hashes, places = hashes[order], places[order]
        is_latest = np.append(hashes[1:] != hashes[:-1], True)
        self._hashes, self._places = array("q"), array("q")
        self._hashes.frombytes(hashes[is_latest].tobytes())
        self._places.frombytes(places[is_latest].tobytes())
        self._recent.clear()

    def _place(self, digest: int) -> int | None:
        if (place := self._recent.get(digest)) is not None:
            return place
        index = bisect_left(self._hashes, digest)
        return self._places[index] if index < len(self._hashes) and self._hashes[index] == digest else None

    def _read(self, place: int) -> tuple[Key, Any]:
        with self._lock:
            self._file.seek(place)
            line = self._file.readline()
        *key, finding = json.loads(line)
        return tuple(key), finding

    def __getitem__(self, key: Key) -> Any:
        with self._lock:
            place = self._place(hash(key))
            found, finding = (None, None) if place is None else self._read(place)
        if found != key:
            raise KeyError(key)
        return finding

    def __contains__(self, key: object) -> bool:
        """Return True if there is a finding for this key, without reading the finding."""
        with self._lock:
            return self._place(hash(key)) is not None

    def __len__(self) -> int:
        return self._num_keys

    def __iter__(self) -> Iterator[Key]:
        with self._lock:
            latest = {**dict(zip(self._hashes, self._places, strict=True)), **self._recent}
        return (self._read(place)[0] for place in sorted(latest.values()))
