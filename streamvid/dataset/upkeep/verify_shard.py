"""One shard against what the dataset says of it: sizes, and for a deep check every byte."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from streamvid.dataset.integrity import until_right
from streamvid.dataset.manifest import FileInfo, ShardInfo
from streamvid.dataset.passes import read_blocks, shard_files
from streamvid.dataset.reader import Dataset
from streamvid.dataset.upkeep.verify_report import CHECKSUM, CONTENT, MAX_KEYS, MISSING, SIZE, UNREADABLE, Problem
from streamvid.errors import IntegrityError, StorageError, StreamvidError
from streamvid.storage import FileState, Store

_ATTEMPTS = 3  # at a file that is replaced while it is read, or whose version came wrong
_COLUMNS = ("key", "text", "text_sha256", "clip_offset", "clip_bytes", "clip_sha256")
_PACKETS = ("packets_offset", "packets_bytes", "packets_sha256")


@dataclass
class ShardFindings:
    """What is wrong with a shard; `states` of its files where both are there, `num_bytes_read` of them."""

    shard: ShardInfo
    problems: list[Problem] = field(default_factory=list)
    states: tuple[FileState, ...] = ()
    num_bytes_read: int = 0

    def add(self, path: str, what: str, expected: object, found: object, keys: Sequence[str] = ()) -> None:
        """A problem that hits these samples."""
        self._add(path, what, str(expected), str(found), keys, len(keys))

    def add_lost(self, path: str, what: str, expected: object, found: object, keys: Sequence[str]) -> None:
        """A problem that hits all samples, whether or not their keys can be told."""
        self._add(path, what, str(expected), str(found), keys, self.shard.num_samples)

    def _add(self, path: str, what: str, expected: str, found: str, keys: Sequence[str], num_keys: int) -> None:
        bucket_id, shard = self.shard.bucket_id, self.shard.path
        self.problems.append(Problem(path, what, expected, found, bucket_id, shard, tuple(keys[:MAX_KEYS]), num_keys))


def check_states(dataset: Dataset, shard: ShardInfo, is_index_right: bool) -> ShardFindings:
    """Whether the shard's files are there and as long as they should be."""
    findings = ShardFindings(shard)
    states = []
    for file in shard_files(shard):
        state = dataset.store.state(file.path)
        problem = problem_of_state(file, state)
        if state is not None and problem is None:
            states.append(state)
        elif problem is not None and file.path == shard.path:
            keys = _keys(dataset, shard) if is_index_right else ()
            findings.add_lost(file.path, problem.what, problem.expected, problem.found, keys)
        elif problem is not None:
            findings.add(file.path, problem.what, problem.expected, problem.found)
    findings.states = tuple(states) if len(states) == 2 else ()
    return findings


def check_bytes(dataset: Dataset, findings: ShardFindings, is_index_right: bool, stop: threading.Event) -> None:
    """Every byte of the shard, and what the index says of its samples; adds to the findings of `check_states`."""
    shard = findings.shard
    rows = _check_rows(dataset, findings) if is_index_right else []
    wrong = {problem.path for problem in findings.problems}
    known = {state.path: state for state in findings.states}
    for file in shard_files(shard):
        if file.path in wrong:
            continue
        clips = _Clips(rows, file.num_bytes) if file.path == shard.path else None
        problem = check_file(dataset.store, file, stop, clips, known.get(file.path))
        findings.num_bytes_read += file.num_bytes
        if problem is None:
            bad = clips.wrong() if clips else []
            if bad:
                findings.add(file.path, CONTENT, "clips as the index says", "others at their places", bad)
        elif problem.what == CHECKSUM and clips is not None and rows:
            findings.add(file.path, problem.what, problem.expected, problem.found, clips.wrong())
        elif file.path == shard.path:  # nobody can say which
            findings.add_lost(file.path, problem.what, problem.expected, problem.found, [row["key"] for row in rows])
        else:
            findings.add(file.path, problem.what, problem.expected, problem.found)


def check_file(
    store: Store,
    file: FileInfo,
    stop: threading.Event,
    clips: _Clips | None = None,
    known: FileState | None = None,
) -> Problem | None:
    """Whether a file's bytes are right; wrong ones are read again, as they may have gone wrong on their way.

    known: its state as it was just now, where somebody has looked.

    Raises StorageError where the store cannot even say whether the file is there.
    """
    state = known or store.state(file.path)
    for attempt in range(_ATTEMPTS):
        problem = problem_of_state(file, state)
        if state is None or problem is not None:
            return problem
        try:
            read = partial(_read, store, file, state.version, stop, clips)
            found = until_right(store, file.path, bytes.fromhex(file.sha256), read).hex()
            break
        except StorageError as error:
            # A store that is away is no finding about this file: then the next line raises.
            state = store.state(file.path)
            if attempt == _ATTEMPTS - 1:
                return problem_of_state(file, state) or unreadable(file.path, error)
    return None if found == file.sha256 else Problem(file.path, CHECKSUM, file.sha256, found)


def _read(store: Store, file: FileInfo, version: str, stop: threading.Event, clips: _Clips | None) -> bytes:
    """SHA-256 of a file."""
    digest, start = hashlib.sha256(), 0
    if clips is not None:
        clips.begin()
    for block in read_blocks(store, file.path, file.num_bytes, stop, version):
        digest.update(block)
        if clips is not None:
            clips.update(start, block)
        start += len(block)
    return digest.digest()


def problem_of_state(file: FileInfo, state: FileState | None) -> Problem | None:
    """Whether a file is there with its size."""
    if state is None:
        return Problem(file.path, MISSING, f"{file.num_bytes} bytes", "nothing")
    if state.num_bytes != file.num_bytes:
        return Problem(file.path, SIZE, f"{file.num_bytes} bytes", f"{state.num_bytes} bytes")
    return None


def unreadable(path: str, error: StreamvidError) -> Problem:
    return Problem(path, UNREADABLE, "bytes", f"an error ({error})")


class _Clips:
    """Checksums of all clips of a tar as its bytes pass once, from start to end."""

    def __init__(self, rows: list[dict[str, Any]], num_bytes: int) -> None:
        self._rows = sorted(rows, key=lambda row: int(row["clip_offset"]))
        self._num_bytes = num_bytes
        self.begin()

    def begin(self) -> None:
        """No byte has passed yet."""
        self._digests = [hashlib.sha256() for _ in self._rows]
        self._first = 0  # clips before this one have passed

    def update(self, start: int, block: memoryview) -> None:
        end = start + len(block)
        for number in range(self._first, len(self._rows)):
            row = self._rows[number]
            first, last = row["clip_offset"], row["clip_offset"] + row["clip_bytes"]
            if first >= end:
                return
            if last <= start:
                self._first = number + 1 if number == self._first else self._first
                continue
            self._digests[number].update(block[max(first, start) - start : min(last, end) - start])

    def wrong(self) -> list[str]:
        """Keys of clips that differ from the index."""
        pairs = zip(self._rows, self._digests, strict=True)
        return [row["key"] for row, digest in pairs if digest.digest() != row["clip_sha256"] or not self._fits(row)]

    def _fits(self, row: dict[str, Any]) -> bool:
        return 0 <= row["clip_offset"] <= self._num_bytes - row["clip_bytes"] and bool(row["clip_bytes"] >= 0)


def _check_rows(dataset: Dataset, findings: ShardFindings) -> list[dict[str, Any]]:
    """The rows of the index, and whether captions and packets are what it says; [] where they cannot be used."""
    shard = findings.shard
    try:
        rows: list[dict[str, Any]] = dataset.samples(shard, _COLUMNS + _PACKETS).to_pylist()
        if missing := [name for name in _COLUMNS if name != "text" and any(row.get(name) is None for row in rows)]:
            raise IntegrityError(f"its index has no value in {', '.join(missing)}")
    except StorageError:
        raise
    except StreamvidError as error:
        findings.add_lost(shard.index_path, CONTENT, f"{shard.num_samples} rows for {shard.path}", error, ())
        return []
    wrong = [row["key"] for row in rows if _text_sha256(row) != row["text_sha256"]]
    if wrong:
        findings.add(shard.index_path, CONTENT, "captions of the checksums beside them", "others", wrong)
    _check_columns(dataset, findings, [row["key"] for row in rows])
    if dataset.manifest.files.packets:
        _check_packets(dataset, findings, rows)
    return rows


def _check_columns(dataset: Dataset, findings: ShardFindings, keys: list[str]) -> None:
    """Whether columns that were put there later are of the same samples, row for row."""
    for path in dataset.column_paths(findings.shard):
        try:
            found = dataset.column_rows(findings.shard, path, ["key"]).column("key").to_pylist()
        except StorageError:
            continue  # the file is missing or short, which is a finding about the file
        except (StreamvidError, KeyError) as error:
            findings.add_lost(path, CONTENT, f"{len(keys)} rows for {findings.shard.path}", error, keys)
            continue
        wrong = [key for key, other in zip(keys, found, strict=True) if key != other]
        if wrong:
            findings.add(path, CONTENT, "the keys of the samples index", "others", wrong)


def _text_sha256(row: dict[str, Any]) -> bytes:
    return hashlib.sha256((row.get("text") or "").encode()).digest()


def _check_packets(dataset: Dataset, findings: ShardFindings, rows: list[dict[str, Any]]) -> None:
    shard, place = findings.shard, [rows[0].get(name) for name in _PACKETS]
    file = dataset.manifest.files.packets_of(shard.index_path)
    if file is None or place == [None, None, None]:
        return
    keys, problem = [], ""
    try:
        tables = dataset.packets(shard, *place)
    except StorageError:
        return  # the file is missing or short, which is a finding about the file
    except IntegrityError as error:
        findings.add_lost(file.path, CHECKSUM, "the packet table of its checksum", error, [row["key"] for row in rows])
        return
    for number, row in enumerate(rows):
        try:
            tables.clip(number)
        except IntegrityError as error:
            keys.append(row["key"])
            problem = problem or str(error)
    if keys:
        findings.add(file.path, CONTENT, "an index of each clip's packets", problem, keys)


def _keys(dataset: Dataset, shard: ShardInfo) -> list[str]:
    try:
        return [str(key) for key in dataset.samples(shard, ["key"]).column("key").to_pylist()]
    except StreamvidError:
        return []  # said of the index itself
